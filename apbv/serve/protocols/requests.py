"""Request bodies and errors: OpenAI's objects, with some of vLLM's fields, as far as supported.

A known but unsupported field is rejected by name if ignoring it would change the answer; an unknown
field is ignored, with a warning in the log.
"""

import json
import logging
import math
import re
import tomllib
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from typing_extensions import TypeIs

from ...config import MAX_FPS
from ...input.prompts.content import (
    OTHER_FILE_OPTIONS,
    VIDEO_OPTIONS,
    OptionError,
    in_openais_form,
    require_consistent,
)
from ..api_error import ApiError


def _require_finite(value: Any) -> Any:
    """Return an object of JSON; reject NaN and Infinity, which parsers of JSON let through."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, float) and not math.isfinite(part):
            raise PydanticCustomError("finite", "NaN and Infinity are not JSON")
        if isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return value


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FIELDS = tomllib.loads(Path(__file__).with_name("fields.toml").read_text(encoding="utf-8"))
_WITHOUT_EFFECT = _names(_FIELDS["without_effect"])
_OF_THE_DECODER = _names(_FIELDS["of_the_decoder"])
# By value, the fields for which it is as good as none.
_NEUTRAL = [(value, _names(names)) for value, names in _FIELDS["neutral"]]
_ACCEPTED_IF_NEUTRAL = frozenset().union(*(names for _, names in _NEUTRAL))
_REFUSED = _names(_FIELDS["refused"]) | _ACCEPTED_IF_NEUTRAL | {*VIDEO_OPTIONS, *OTHER_FILE_OPTIONS}
# Steps of pydantic's path to an error that are not fields: "str", "constrained-str", "list[...]".
_NAMES_AN_ALTERNATIVE = re.compile(r"\[|(^|-)(str|int)$")
# What a client may use in place of a field that is not supported.
_INSTEAD: dict[str, str] = _FIELDS["instead"]
# Characters. Text that may become a stop string is looked at again with every token.
_MAX_STOP_LENGTH = 1000
_MAX_TOKENS = 2**20
_MAX_UNKNOWN = 256  # fields of an object that this server does not know, each of which is a warning
_MAX_TOOLS = 128  # OpenAI's limit
# Prompts of a request. Each becomes a request of its own, in the thread that speaks HTTP.
_MAX_PROMPTS = 1024
_ANY_OBJECT = '{"type": "object"}'  # the schema of OpenAI's json_object

_Object = Annotated[dict[str, Any], AfterValidator(_require_finite)]
_Count = Annotated[int, Field(ge=1, le=_MAX_TOKENS)]
_NumPixels = Annotated[int, Field(ge=1, lt=2**40)]
_Seconds = Annotated[float, Field(ge=0)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(fail_fast=True)]
_TokenId = Annotated[int, Field(ge=0, lt=2**63, strict=False)]  # as a key of JSON it is a text
_StopString = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_LENGTH)]
_LogitBias = Annotated[
    dict[_TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)
]
_NumLogprobs = Annotated[int, Field(ge=0, le=20)]
_Body = TypeVar("_Body", bound="_Strict")

_logger = logging.getLogger("apbv.serve.fields")


class _Strict(BaseModel):
    """An object with values of the declared types, finite numbers and known fields."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> "_Strict":
        extra = self.model_extra or {}
        if len(extra) > _MAX_UNKNOWN:
            raise PydanticCustomError("too_many", f"more than {_MAX_UNKNOWN} unknown fields")
        refused_names = []
        for name, value in extra.items():
            if name in _REFUSED and not _is_neutral(name, value):
                refused_names.append(name)
        if refused_names:
            raise _refused(refused_names[0], self._why_refused(refused_names))
        warn_of_ignored("request", extra.keys() - _REFUSED - _WITHOUT_EFFECT)
        return self

    def _why_refused(self, names: list[str]) -> str:
        """Return why fields are not supported, naming all of them."""
        verb = "is" if len(names) == 1 else "are"
        reason = f"{', '.join(names)} {verb} not supported by this server"
        hints = [f"{name}: {_INSTEAD[name]}" for name in names if name in _INSTEAD]
        return "; ".join([reason, *hints])

    @classmethod
    def parse(cls: type[_Body], body: bytes | bytearray) -> _Body:
        """Read a request from its JSON.

        Raises:
            ApiError: with status 400, naming the field that is wrong.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise _validation_error(error) from error


def _validation_error(error: ValidationError) -> ApiError:
    """Return the reply to a body that does not fit its model, about one of its fields."""
    details = error.errors(include_url=False, include_input=False)

    def depth(detail: ErrorDetails) -> tuple[int, bool]:
        return len(detail["loc"]), detail["type"] == "too_long"

    # Of the alternatives that a value fits none of, the one that it fits best.
    deepest = max(details, key=depth)
    path = []
    for step in deepest["loc"]:
        if isinstance(step, int) or not _NAMES_AN_ALTERNATIVE.search(step):
            path.append(step)
    message = deepest["msg"]
    if deepest["type"] == "refused":
        path.append(deepest["ctx"]["param"])
    elif path:
        message = f"{path[-1]}: {message}"
    # A validator of an object names a field that may be in the path already.
    param = ".".join(str(step) for step, _ in groupby(path))
    return ApiError(400, message, param=param or None)


def warn_of_ignored(where: str, names: Iterable[str]) -> None:
    """Name ignored fields in the log, each in a line of its own."""
    for name in sorted(names):
        _logger.warning("ignored an unknown %s field: %.100r", where, name)


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether a field's value has no effect; 0 is not False."""
    if value is None or value in ([], {}):
        return True
    for neutral, names in _NEUTRAL:
        are_both_bool_or_neither = isinstance(neutral, bool) == isinstance(value, bool)
        if name in names and value == neutral and are_both_bool_or_neither:
            return True
    return False


def _refused(param: str, message: str) -> PydanticCustomError:
    """Make the error that an object's validator raises about one of its fields."""
    return PydanticCustomError("refused", "{message}", {"message": message, "param": param})


# The fields of a part, by its type.
_CONTENTS = ("text", "image_url", "video_url", "audio_url", "input_audio")


class MediaUrl(_Strict):
    """A file's URL.

    OpenAI's ``detail``, a resolution, changes nothing: the model's processor has its own.
    """

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class InputAudio(_Strict):
    """Sound as OpenAI takes it: base64 of a file, whose content tells its format."""

    data: str
    format: Annotated[str, Field(pattern=r"^\w{1,16}$")]


class Part(_Strict):
    """A part of a message, with the field that its type names, and a file's own options."""

    type: Literal["text", "image_url", "video_url", "audio_url", "input_audio"]
    text: str | None = None
    image_url: MediaUrl | None = None
    video_url: MediaUrl | None = None
    audio_url: MediaUrl | None = None
    input_audio: InputAudio | None = None
    fps: Annotated[float, Field(gt=0, le=MAX_FPS)] | None = None
    nframes: _Count | None = None
    num_frames: _Count | None = None
    min_frames: _Count | None = None
    max_frames: _Count | None = None
    video_start: _Seconds | None = None
    video_end: _Seconds | None = None
    min_pixels: _NumPixels | None = None
    max_pixels: _NumPixels | None = None
    total_pixels: _NumPixels | None = None
    resized_height: _Count | None = None
    resized_width: _Count | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options of its file that the request sets."""
        return self.model_dump(include=set(VIDEO_OPTIONS), exclude_none=True)

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, part: Any) -> Any:
        if isinstance(part, dict | str):
            return in_openais_form(part)
        return part

    @model_validator(mode="after")
    def _check_content(self) -> "Part":
        if getattr(self, self.type) is None:
            raise _refused(self.type, f"a part of the type {self.type} needs a field {self.type}")
        for name in _CONTENTS:
            if name != self.type and getattr(self, name):
                message = (
                    f"a part of the type {self.type} has no {name}: send it in a part of its own"
                )
                raise _refused(name, message)
        try:
            require_consistent(self.kind, self.options)
        except OptionError as error:
            raise _refused(error.name, str(error)) from None
        return self

    @property
    def kind(self) -> str:
        """The kind of its content: ``text``, ``image``, ``video`` or ``audio``."""
        return self.type.removesuffix("_url").removeprefix("input_")

    def _why_refused(self, names: list[str]) -> str:
        all_options = ", ".join([*self.options, *names])
        unsupported = ", ".join(names)
        return f"of {all_options} beside a file, {unsupported} cannot be followed by this server"


class CalledFunction(_Strict):
    name: str
    arguments: str | None = None


class ToolCall(_Strict):
    """A call in an earlier answer, with its arguments as JSON; or one to make, with its name."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _check_calls(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise _refused("tool_calls", "only the assistant calls tools")
        is_thought = self.role == "assistant" and bool(self.reasoning or self.reasoning_content)
        if self.content is None and not self.tool_calls and not is_thought:
            raise _refused("content", "a message needs a content, or tool_calls")
        return self

    @property
    def texts(self) -> list[str]:
        """The texts of its content."""
        if isinstance(self.content, str):
            return [self.content]
        if self.content is None:
            return []
        return [part.text or "" for part in self.content if part.type == "text"]

    @property
    def rest(self) -> dict[str, Any]:
        """The message's fields besides ``content`` that the request sets."""
        names = set(Message.model_fields) - {"content"}
        return self.model_dump(include=names, exclude_none=True)


class Function(_Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]  # as OpenAI's
    description: str | None = None
    parameters: _Object | None = None
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: Function

    @property
    def described(self) -> dict[str, Any]:
        """The tool as a chat template gets it from vLLM."""
        names = set(Function.model_fields)
        if self.function.strict is None:
            names.remove("strict")
        return {"type": self.type, "function": self.function.model_dump(include=names)}


_Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class KVTransferParams(BaseModel):
    """What a router asks of a prefill instance; other fields are for other kinds of instances."""

    model_config = ConfigDict(strict=True)

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None


class GenerationRequest(_Strict):
    """Fields of both completion endpoints.

    Lists fail fast, because an error takes much more memory than its cause.

    Attributes:
        default_limit: token limit of the answer if the request has none; None: the server's
            default.
        prompt_field: the field with the prompt.
        id_prefix: prefix of the answers' ids.
        kv_transfer_params: with ``do_remote_decode`` the prompt's KV is exported for another
            server, and this one answers with a single token.
    """

    default_limit: ClassVar[int | None] = None
    prompt_field: ClassVar[str]
    id_prefix: ClassVar[str]

    model: str | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_TOKENS)] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: _LogitBias | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    response_format: _Object | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: _StopString | Annotated[list[_StopString], Field(max_length=4, fail_fast=True)] | None = (
        None
    )
    stop_token_ids: _TokenIds | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: KVTransferParams | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_the_answer_to_the_decoder(cls, body: Any) -> Any:
        params = body.get("kv_transfer_params") if isinstance(body, dict) else None
        if not isinstance(params, dict) or params.get("do_remote_decode") is not True:
            return body
        fields = {name: value for name, value in body.items() if name not in _OF_THE_DECODER}
        fields["tool_choice"] = "none"
        fields["max_tokens"] = 1
        fields["min_tokens"] = 1 if body.get("min_tokens") else 0
        return fields

    @model_validator(mode="after")
    def _check(self) -> "GenerationRequest":
        self._check_answer()
        if self.stream_options is not None and not self.stream:
            raise _refused("stream_options", "stream_options needs stream")
        has_both_limits = self.max_tokens is not None and self.max_completion_tokens is not None
        if has_both_limits and self.max_tokens != self.max_completion_tokens:
            message = "max_tokens and max_completion_tokens must be equal if both are given"
            raise _refused("max_tokens", message)
        self._check_kv_transfer()
        limit = self.token_limit or self.default_limit
        if limit is not None and (self.min_tokens or 0) > limit:
            message = f"min_tokens is {self.min_tokens}, but max_tokens is {limit}"
            raise _refused("min_tokens", message)
        return self

    def _check_answer(self) -> None:
        if self.stop_token_ids and self.min_tokens:
            message = "stop_token_ids are not supported together with min_tokens"
            raise _refused("stop_token_ids", message)
        self._check_response_format()
        if self.json_schema is not None and (self.min_tokens or self.ignore_eos):
            message = (
                "a JSON response_format excludes min_tokens and ignore_eos: the schema ends the "
                "answer"
            )
            raise _refused("response_format", message)

    def _check_response_format(self) -> None:
        response_format = self.response_format or {}
        kind = response_format.get("type", "text")
        if kind not in ("text", "json_object", "json_schema"):
            message = "response_format: type must be text, json_object or json_schema"
            raise _refused("response_format", message)
        if kind != "json_schema":
            return
        description = response_format.get("json_schema")
        has_schema = isinstance(description, dict) and isinstance(
            description.get("schema"), dict | bool
        )
        if not has_schema:
            message = "response_format: json_schema.schema must be a JSON schema"
            raise _refused("response_format", message)

    def _check_kv_transfer(self) -> None:
        if self.kv_transfer_params is not None and self.kv_transfer_params.do_remote_prefill:
            message = (
                "this server is a prefill instance and cannot load KV: send do_remote_prefill to "
                "the decode instance"
            )
            raise _refused("kv_transfer_params", message)
        if self.hands_over and self.stream:
            message = "do_remote_decode returns a single token: stream must be false"
            raise _refused("stream", message)

    @property
    def hands_over(self) -> bool:
        """Whether the prompt's KV is transferred to another server."""
        if self.kv_transfer_params is None:
            return False
        return bool(self.kv_transfer_params.do_remote_decode)

    @property
    def num_answers(self) -> int:
        """Number of answers requested from this server."""
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """Number of most probable tokens to return with every token; None: no log probabilities."""
        return None

    @property
    def may_call(self) -> bool:
        """Whether calls of tools are looked for in the answer."""
        return False

    @property
    def must_call(self) -> bool:
        """Whether the answer has to consist of calls."""
        return False

    @property
    def makes_one_call(self) -> bool:
        """Whether the answer has one call at most."""
        return False

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions that the answer may call."""
        return []

    @property
    def continued_texts(self) -> list[str]:
        """The texts of the message that the answer continues, if it continues one."""
        return []

    def split(self) -> list[Self]:
        """Return a request for each prompt."""
        return [self]

    @property
    def json_schema(self) -> str | None:
        """The JSON schema that the answer is to follow; None: there is none."""
        response_format = self.response_format or {}
        kind = response_format.get("type")
        if kind == "json_schema":
            return json.dumps(response_format["json_schema"]["schema"])
        if kind == "json_object":
            return _ANY_OBJECT
        return None

    @property
    def is_constrained(self) -> bool:
        """Whether a schema or a grammar says what the whole answer consists of."""
        return self.must_call or self.json_schema is not None

    @property
    def stop_strings(self) -> list[str]:
        """The strings that end the answer."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def token_limit(self) -> int | None:
        """The request's token limit, if any."""
        return self.max_completion_tokens or self.max_tokens


class _ChatOptions(_Strict):
    """Options of the chat template and of video reading.

    The former are arguments of :func:`apbv.input.prompts.rendering.apply_template`.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: _Object | None = None
    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS, fail_fast=True)] | None = None
    num_frames: _Count | None = None
    fps: Annotated[float, Field(gt=0, le=MAX_FPS)] | None = None
    audio_in_video: bool | None = None

    @model_validator(mode="after")
    def _check_template(self) -> "_ChatOptions":
        variables = self.chat_template_kwargs or {}
        for name in ("add_generation_prompt", "continue_final_message"):
            if name in variables:
                message = f"chat_template_kwargs: {name} is a top-level field"
                raise _refused("chat_template_kwargs", message)
        file_options = {*VIDEO_OPTIONS, *OTHER_FILE_OPTIONS}
        misplaced = [name for name in variables if name in file_options]
        if misplaced:
            message = (
                f"chat_template_kwargs: {', '.join(misplaced)} cannot be followed: a chat template "
                "samples no files"
            )
            raise _refused("chat_template_kwargs", message)
        return self

    @property
    def template(self) -> dict[str, Any]:
        """The options of the chat template that the request sets."""
        options = dict(self.chat_template_kwargs or {})
        if self.add_generation_prompt is not None:
            options["add_generation_prompt"] = self.add_generation_prompt
        if self.continue_final_message is not None:
            options["continue_final_message"] = self.continue_final_message
        return options


class ChatRequest(_ChatOptions, GenerationRequest):
    """The body of POST /v1/chat/completions.

    ``num_frames``, ``fps`` and ``audio_in_video`` are extensions of OpenAI's API.
    """

    prompt_field = "messages"
    id_prefix = "chatcmpl"

    messages: _Messages
    tool_choice: Literal["none", "auto", "required"] | ToolCall | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: _NumLogprobs | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise _refused("top_logprobs", "top_logprobs needs logprobs")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> "ChatRequest":
        if self.tool_choice not in (None, "none", "auto") and not self.functions:
            raise _refused("tool_choice", "tool_choice needs tools, and names one of them")
        if self.must_call and (self.min_tokens or self.ignore_eos):
            message = "a required call ends the answer: it excludes min_tokens and ignore_eos"
            raise _refused("tool_choice", message)
        return self

    @property
    def may_call(self) -> bool:
        """Whether calls of tools are looked for in the answer."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        """Whether the answer has to call a tool."""
        return self.may_call and self.tool_choice not in (None, "auto")

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions that the answer may call, or must."""
        functions = [tool.described["function"] for tool in self.tools or ()]
        if isinstance(self.tool_choice, ToolCall):
            chosen_name = self.tool_choice.function.name
            return [function for function in functions if function["name"] == chosen_name]
        return functions

    @property
    def continued_texts(self) -> list[str]:
        """The texts of the message that the answer continues, if it continues one."""
        return self.messages[-1].texts if self.continue_final_message else []

    @property
    def makes_one_call(self) -> bool:
        """Whether the answer has one call at most."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, ToolCall)

    @property
    def num_logprobs(self) -> int | None:
        """Number of most probable tokens to return with every token; None: no log probabilities."""
        if not self.logprobs:
            return None
        return self.top_logprobs or 0


def _are_token_ids(prompt: list[int] | list[str] | list[list[int]]) -> TypeIs[list[int]]:
    """Return whether a list is one prompt, and not several."""
    return not prompt or isinstance(prompt[0], int)


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions, about text only.

    Attributes:
        prompt: a prompt as it is, or its token ids; or several, each with its own answers.
    """

    default_limit = 16  # OpenAI's and vLLM's
    prompt_field = "prompt"
    id_prefix = "cmpl"

    prompt: (
        str
        | _TokenIds
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[_TokenIds], Field(fail_fast=True)]
    )
    add_special_tokens: bool = True
    logprobs: _NumLogprobs | Literal[False] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of most probable tokens to return with every token; None: no log probabilities."""
        return None if self.logprobs is False else self.logprobs

    @model_validator(mode="after")
    def _check_prompt(self) -> "CompletionRequest":
        if not all(self.prompts):
            raise _refused("prompt", "the prompt is empty")
        num_prompts = len(self.prompts)
        if num_prompts > _MAX_PROMPTS:
            message = f"at most {_MAX_PROMPTS} prompts are allowed, not {num_prompts}"
            raise _refused("prompt", message)
        if self.hands_over and num_prompts > 1:
            raise _refused("prompt", "do_remote_decode takes one prompt per request")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, also where there is only one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if _are_token_ids(self.prompt):
            return [self.prompt]
        return self.prompt

    def split(self) -> list[Self]:
        """Return a request for each prompt."""
        return [self.model_copy(update={"prompt": prompt}) for prompt in self.prompts]


class TokenizeRequest(_ChatOptions):
    """The body of POST /tokenize: a prompt as it is, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @property
    def prompt_field(self) -> str:
        """The field with the prompt."""
        return "messages" if self.prompt is None else "prompt"

    @model_validator(mode="after")
    def _check_prompt(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise _refused("prompt", "either prompt or messages must be given")
        if self.messages is not None and self.add_special_tokens:
            message = "does not apply to chats: their template adds them"
            raise _refused("add_special_tokens", message)
        return self


class DetokenizeRequest(_Strict):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: _TokenIds
