"""Request bodies and errors: OpenAI's objects, with some of vLLM's fields, as far as supported.

A known but unsupported field is rejected by name if ignoring it would change the answer; an unknown
field is ignored, with a warning in the log.
"""

import json
import logging
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ..config import MAX_FPS
from ..input.content import (
    OTHER_FILE_OPTIONS,
    VIDEO_OPTIONS,
    OptionError,
    in_openais_form,
    require_consistent,
)


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
_WITHOUT_EFFECT, _OF_THE_DECODER = (
    _names(_FIELDS[name]) for name in ("without_effect", "of_the_decoder")
)
# By value, the fields for which it is as good as none.
_NEUTRAL = [(value, _names(names)) for value, names in _FIELDS["neutral"]]
_REFUSED = _names(_FIELDS["refused"]).union(
    VIDEO_OPTIONS, OTHER_FILE_OPTIONS, *(names for _, names in _NEUTRAL)
)
# Steps of pydantic's path to an error that are not fields: "str", "constrained-str", "list[...]".
_NAMES_AN_ALTERNATIVE = re.compile(r"\[|(^|-)(str|int)$")
# What a client may use in place of a field that is not supported.
_INSTEAD: dict[str, str] = _FIELDS["instead"]
_MAX_STOP_LENGTH = (
    1000  # characters; what may become a stop string is looked at again with every token
)
_MAX_TOKENS = 2**20
_MAX_UNKNOWN = 256  # fields of an object that this server does not know, each of which is a warning
_MAX_TOOLS = 128  # OpenAI's limit
_MAX_PROMPTS = 1024  # of a request; each becomes one of its own, in the thread that speaks HTTP
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
FinishReason = Literal["stop", "length"]

_logger = logging.getLogger("apbv.serve.fields")


class ApiError(Exception):
    """Error reply to a request, in OpenAI's format.

    Args:
        status: HTTP status code.
        message: the error message for the client.
        param: the request field at fault.
        code: OpenAI's error code, if there is one.
        headers: the response's extra headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The response's JSON."""
        others = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, others)
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


class _Strict(BaseModel):
    """An object whose values must have the declared types, whose numbers are finite and whose
    fields are known."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> "_Strict":
        extra = self.model_extra or {}
        if len(extra) > _MAX_UNKNOWN:
            raise PydanticCustomError("too_many", f"more than {_MAX_UNKNOWN} unknown fields")
        refused = [
            name
            for name, value in extra.items()
            if name in _REFUSED and not _is_neutral(name, value)
        ]
        if refused:
            raise _refused(refused[0], self._why_refused(refused))
        warn_of_ignored("request", extra.keys() - _REFUSED - _WITHOUT_EFFECT)
        return self

    def _why_refused(self, names: list[str]) -> str:
        """Return why fields are not supported, naming all of them."""
        hints = [f"{name}: {_INSTEAD[name]}" for name in names if name in _INSTEAD]
        verb = "is" if len(names) == 1 else "are"
        return "; ".join([f"{', '.join(names)} {verb} not supported by this server", *hints])

    @classmethod
    def parse(cls: type[_Body], body: bytes | bytearray) -> _Body:
        """Read a request from its JSON.

        Raises:
            ApiError: with status 400, naming the field that is wrong.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            # Of the alternatives that a value fits none of, the one that it fits best.
            found = error.errors(include_url=False, include_input=False)
            worst = max(found, key=lambda each: (len(each["loc"]), each["type"] == "too_long"))
            steps = [
                step
                for step in worst["loc"]
                if isinstance(step, int) or not _NAMES_AN_ALTERNATIVE.search(step)
            ]
            message = worst["msg"]
            if worst["type"] == "refused":
                steps.append(worst["ctx"]["param"])
            elif steps:
                message = f"{steps[-1]}: {message}"
            raise ApiError(
                400, message, param=".".join(str(step) for step, _ in groupby(steps)) or None
            ) from error


def warn_of_ignored(where: str, names: Iterable[str]) -> None:
    """Name ignored fields in the log, each in a line of its own."""
    for name in sorted(names):
        _logger.warning("ignored an unknown %s field: %.100r", where, name)


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether a field's value has no effect; 0 is not False."""
    same = (neutral for neutral, names in _NEUTRAL if name in names and value == neutral)
    are_alike = (isinstance(each, bool) == isinstance(value, bool) for each in same)
    return value is None or value in ([], {}) or any(are_alike)


def _refused(param: str, message: str) -> PydanticCustomError:
    """Make the error that an object's validator raises about one of its fields."""
    return PydanticCustomError("refused", "{message}", {"message": message, "param": param})


# The fields of a part, by its type.
_CONTENTS = ("text", "image_url", "video_url", "audio_url", "input_audio")


class MediaUrl(_Strict):
    """A file's URL. OpenAI's ``detail``, a resolution, changes nothing: the model's processor has
    its own."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class InputAudio(_Strict):
    """Sound as OpenAI takes it: base64 of a file. What its format is, is seen from its content."""

    data: str
    format: Annotated[str, Field(pattern=r"^\w{1,16}$")]


class Part(_Strict):
    """A part of a message, with the field that its type names; a video or an image also with
    options of its own."""

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
        """The options of its file that are given."""
        return self.model_dump(include=set(VIDEO_OPTIONS), exclude_none=True)

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, part: Any) -> Any:
        return in_openais_form(part) if isinstance(part, dict | str) else part

    @model_validator(mode="after")
    def _check_content(self) -> "Part":
        if getattr(self, self.type) is None:
            raise _refused(self.type, f"a part of the type {self.type} needs a field {self.type}")
        for name in _CONTENTS:
            if name != self.type and getattr(self, name):
                raise _refused(
                    name,
                    f"a part of the type {self.type} has no {name}: send it in a part of its own",
                )
        try:
            require_consistent(self.type.removesuffix("_url").removeprefix("input_"), self.options)
        except OptionError as error:
            raise _refused(error.name, str(error)) from None
        return self

    def _why_refused(self, names: list[str]) -> str:
        given = [*self.options, *names]
        return (
            f"of {', '.join(given)} beside a file, {', '.join(names)} cannot be followed by this "
            "server"
        )


class CalledFunction(_Strict):
    name: str
    arguments: str | None = None


class ToolCall(_Strict):
    """A call of an earlier answer, with its arguments as JSON, or one that has to be made, by its
    name."""

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
        thought = self.role == "assistant" and (self.reasoning or self.reasoning_content)
        if self.content is None and not self.tool_calls and not thought:
            raise _refused("content", "a message needs a content, or tool_calls")
        return self

    @property
    def texts(self) -> list[str]:
        """The texts of its content."""
        if isinstance(self.content, str):
            return [self.content]
        return [part.text for part in self.content or () if part.type == "text"]

    @property
    def rest(self) -> dict[str, Any]:
        """The fields besides ``content`` that are given."""
        return self.model_dump(include=set(Message.model_fields) - {"content"}, exclude_none=True)


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
        unset = {"strict"} if self.function.strict is None else set()
        return {
            "type": self.type,
            "function": self.function.model_dump(include=set(Function.model_fields) - unset),
        }


_Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class KVTransferParams(BaseModel):
    """What a router asks of a prefill instance; its other fields are for other kinds of
    instances."""

    model_config = ConfigDict(strict=True)

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None


class GenerationRequest(_Strict):
    """Fields of both endpoints; lists fail fast, because an error takes much more memory than its
    cause.

    Attributes:
        default_limit: token limit of the answer if the request has none; None: the server's
            default.
        prompt_field: the field with the prompt.
        id_prefix: prefix of the answers' ids.
        may_call: whether calls of tools are looked for in the answer.
        makes_one_call: whether it has one call at most.
        functions: the functions that may be called.
        must_call: whether the answer has to consist of calls.
        continued_texts: the texts of the message that the answer continues, if it continues one.
        kv_transfer_params: with ``do_remote_decode`` the prompt's KV is exported for another
            server, and this one answers with a single token.
    """

    default_limit: ClassVar[int | None] = None
    prompt_field: ClassVar[str]
    id_prefix: ClassVar[str]
    may_call: ClassVar[bool] = False
    makes_one_call: ClassVar[bool] = False
    functions: ClassVar[list[dict[str, Any]]] = []
    must_call: ClassVar[bool] = False
    continued_texts: ClassVar[list[str]] = []

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
        kept = {name: value for name, value in body.items() if name not in _OF_THE_DECODER}
        return {
            **kept,
            "tool_choice": "none",
            "max_tokens": 1,
            "min_tokens": 1 if body.get("min_tokens") else 0,
        }

    @model_validator(mode="after")
    def _check(self) -> "GenerationRequest":
        self._check_answer()
        if self.stream_options is not None and not self.stream:
            raise _refused("stream_options", "stream_options needs stream")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise _refused(
                "max_tokens", "max_tokens and max_completion_tokens must be equal if both are given"
            )
        self._check_kv_transfer()
        limit = self.token_limit or self.default_limit
        if limit is not None and (self.min_tokens or 0) > limit:
            raise _refused(
                "min_tokens", f"min_tokens is {self.min_tokens}, but max_tokens is {limit}"
            )
        return self

    def _check_answer(self) -> None:
        if self.stop_token_ids and self.min_tokens:
            raise _refused(
                "stop_token_ids", "stop_token_ids are not supported together with min_tokens"
            )
        asked = self.response_format or {}
        if asked.get("type", "text") not in ("text", "json_object", "json_schema"):
            raise _refused(
                "response_format", "response_format: type must be text, json_object or json_schema"
            )
        if asked.get("type") == "json_schema":
            described = asked.get("json_schema")
            if not isinstance(described, dict) or not isinstance(
                described.get("schema"), dict | bool
            ):
                raise _refused(
                    "response_format", "response_format: json_schema.schema must be a JSON schema"
                )
        if self.json_schema is not None and (self.min_tokens or self.ignore_eos):
            message = (
                "a JSON response_format excludes min_tokens and ignore_eos: the schema ends the "
                "answer"
            )
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
        return self.kv_transfer_params is not None and bool(
            self.kv_transfer_params.do_remote_decode
        )

    @property
    def num_answers(self) -> int:
        """Number of answers requested from this server."""
        return self.n or 1

    def split(self) -> list["GenerationRequest"]:
        """Return a request for each prompt."""
        return [self]

    @property
    def json_schema(self) -> str | None:
        """The JSON schema that the answer is to follow."""
        asked = self.response_format or {}
        if asked.get("type") == "json_schema":
            return json.dumps(asked["json_schema"]["schema"])
        return _ANY_OBJECT if asked.get("type") == "json_object" else None

    @property
    def is_constrained(self) -> bool:
        """Whether a schema or a grammar says what the whole answer consists of."""
        return self.must_call or self.json_schema is not None

    @property
    def stop_strings(self) -> list[str]:
        """The strings that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def token_limit(self) -> int | None:
        """The request's token limit, if any."""
        return self.max_completion_tokens or self.max_tokens


class _ChatOptions(_Strict):
    """Options of the chat template (:func:`apbv.input.rendering.apply_template`) and of video
    reading."""

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
                raise _refused(
                    "chat_template_kwargs", f"chat_template_kwargs: {name} is a top-level field"
                )
        options = [
            name for name in variables if name in VIDEO_OPTIONS or name in OTHER_FILE_OPTIONS
        ]
        if options:
            message = (
                f"chat_template_kwargs: {', '.join(options)} cannot be followed: a chat template "
                "samples no files"
            )
            raise _refused("chat_template_kwargs", message)
        return self

    @property
    def template(self) -> dict[str, Any]:
        """The options of the chat template that are given."""
        given = self.model_dump(
            include={"add_generation_prompt", "continue_final_message"}, exclude_none=True
        )
        return {**(self.chat_template_kwargs or {}), **given}


class ChatRequest(_ChatOptions, GenerationRequest):
    """The body of POST /v1/chat/completions; ``num_frames``, ``fps``, ``audio_in_video`` are
    extensions."""

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
            raise _refused(
                "tool_choice",
                "a required call ends the answer: it excludes min_tokens and ignore_eos",
            )
        return self

    @property
    def may_call(self) -> bool:
        """As of every request."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        """Whether the answer has to call a tool."""
        return self.may_call and self.tool_choice not in (None, "auto")

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions that the answer may call, or must."""
        functions = [tool.described["function"] for tool in self.tools or ()]
        chosen = self.tool_choice.function.name if isinstance(self.tool_choice, ToolCall) else None
        return [function for function in functions if chosen in (None, function["name"])]

    @property
    def continued_texts(self) -> list[str]:
        """As of every request."""
        return self.messages[-1].texts if self.continue_final_message else []

    @property
    def makes_one_call(self) -> bool:
        """As of every request."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, ToolCall)

    @property
    def num_logprobs(self) -> int | None:
        """Number of most probable tokens to return with every token; None: no log probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None


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
        """As of a chat."""
        return None if self.logprobs is False else self.logprobs

    @model_validator(mode="after")
    def _check_prompt(self) -> "CompletionRequest":
        if not all(self.prompts):
            raise _refused("prompt", "the prompt is empty")
        if (number := len(self.prompts)) > _MAX_PROMPTS:
            raise _refused("prompt", f"at most {_MAX_PROMPTS} prompts are allowed, not {number}")
        if self.hands_over and number > 1:
            raise _refused("prompt", "do_remote_decode takes one prompt per request")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, also where there is only one."""
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt

    def split(self) -> list["CompletionRequest"]:
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
            raise _refused(
                "add_special_tokens", "does not apply to chats: their template adds them"
            )
        return self


class DetokenizeRequest(_Strict):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: _TokenIds
