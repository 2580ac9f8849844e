"""OpenAI's chat-completions objects, as far as they are served here.

A field that is not served is refused by name wherever ignoring it would change the answer.
"""

import re
from collections.abc import Mapping
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ..config import MAX_FPS

# Fields that change how a request is filed, paid for or scheduled, but not its answer.
_WITHOUT_EFFECT = {
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
# Values of other fields that are as good as not given; so are null and an empty list or object.
_NEUTRAL: Mapping[str, tuple] = {
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "logprobs": (False,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
}
# Steps of pydantic's path to an error that are no fields: "str", "constrained-str", "list[...]".
_NAMES_AN_ALTERNATIVE = re.compile(r"\[|(^|-)str$")
_MAX_STOP_LENGTH = 1000  # characters; what may become a stop string is looked at again with every token


class ApiError(Exception):
    """The request gets an error, in OpenAI's form.

    Args:
        status: HTTP's status code.
        message: tells the client what is wrong.
        param: the field of the request that is to blame.
        code: OpenAI's name of the error, where it has one.
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
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The response's JSON."""
        if self.status == 401:
            kind = "authentication_error"
        elif self.status == 429:
            kind = "rate_limit_error"
        else:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    """An object whose values must have the declared types, whose numbers are finite and whose fields are known."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> "_Strict":
        for name, value in (self.model_extra or {}).items():
            neutral = value is None or value in ([], {}) or value in _NEUTRAL.get(name, ())
            if not neutral and name not in _WITHOUT_EFFECT:
                raise _refused(name, f"{name} is not supported by this server")
        return self


def _refused(param: str, message: str) -> PydanticCustomError:
    """Make the error that a validator of a whole object raises about one of its fields."""
    return PydanticCustomError("refused", "{message}", {"message": message, "param": param})


class MediaUrl(_Strict):
    """A file's URL. OpenAI's ``detail``, a resolution, changes nothing: the model's processor has its own."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ImagePart(_Strict):
    type: Literal["image_url"]
    image_url: MediaUrl


class VideoPart(_Strict):
    type: Literal["video_url"]
    video_url: MediaUrl


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: (
        str
        | Annotated[
            list[Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]], Field(fail_fast=True)
        ]
    )


class StreamOptions(_Strict):
    include_usage: bool = False


class ChatRequest(_Strict):
    """The body of POST /v1/chat/completions; ``num_frames`` and ``fps`` are an extension.

    Lists fail fast, as an error takes several hundred times the memory of the byte that is wrong.
    """

    model: str
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: int | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    num_frames: Annotated[int, Field(ge=1, le=2**20)] | None = None
    fps: Annotated[float, Field(gt=0, le=MAX_FPS)] | None = None

    @model_validator(mode="after")
    def _check(self) -> "ChatRequest":
        if self.temperature is not None and 0 < self.temperature < 1e-6:
            raise _refused("temperature", "temperature must be 0 (greedy) or at least 1e-6")
        if self.n not in (None, 1):
            raise _refused("n", "n must be 1: this server gives one answer per request")
        if len(self.stop_strings) > 4:
            raise _refused("stop", "there may be at most 4 stop strings")
        if any(not 1 <= len(string) <= _MAX_STOP_LENGTH for string in self.stop_strings):
            raise _refused("stop", f"stop strings must have 1 to {_MAX_STOP_LENGTH} characters")
        if self.stream_options is not None and not self.stream:
            raise _refused("stream_options", "stream_options needs stream")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise _refused("max_tokens", "max_tokens and max_completion_tokens name one thing, but differ")
        return self

    @property
    def stop_strings(self) -> list[str]:
        """The strings that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def token_limit(self) -> int | None:
        """How many tokens the answer may have, where the request says so."""
        return self.max_completion_tokens or self.max_tokens

    @classmethod
    def parse(cls, body: bytes) -> "ChatRequest":
        """Read a request from its JSON.

        Raises:
            ApiError: with status 400, naming the field that is wrong.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            # Of the alternatives that a value fits none of, the one that it fits best.
            worst = max(error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"]))
            steps = [
                step for step in worst["loc"] if isinstance(step, int) or not _NAMES_AN_ALTERNATIVE.search(step)
            ]
            message = worst["msg"]
            if worst["type"] == "refused":
                steps.append(worst["ctx"]["param"])
            elif steps:
                message = f"{steps[-1]}: {message}"
            raise ApiError(
                400, message, param=".".join(str(step) for step, _ in groupby(steps)) or None
            ) from error


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int) -> "Usage":
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )


FinishReason = Literal["stop", "length"]


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(BaseModel):
    index: int = 0
    message: AnswerMessage
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    index: int = 0
    delta: Delta
    logprobs: None = None
    finish_reason: FinishReason | None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "apbv"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorObject
