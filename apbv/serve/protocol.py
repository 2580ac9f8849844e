"""What the server replies: OpenAI's objects, with some of vLLM's fields, and errors."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel


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

# Fields of replies that are there only where they were asked for, or have something to say.
_OPTIONAL = {"kv_transfer_params", "prompt_token_ids", "token_ids", "token_strs"}


class Reply(BaseModel):
    """A reply, or an event of a stream."""

    def to_dict(self) -> dict[str, Any]:
        """Return the reply as JSON has it, without the optional fields that say nothing."""
        return _without_empty(self.model_dump())


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: each if name == "kv_transfer_params" else _without_empty(each)
            for name, each in value.items()
            if each is not None or name not in _OPTIONAL
        }
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_empty(each) for each in value]
    return value


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(BaseModel):
    index: int = 0
    message: AnswerMessage
    logprobs: None = None
    finish_reason: FinishReason
    token_ids: list[int] | None = None


class ChatCompletion(Reply):
    """The answer to a chat; what it has beyond OpenAI's is vLLM's."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ChunkChoice(BaseModel):
    index: int = 0
    delta: dict[Literal["role", "content"], str]
    logprobs: None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | None = None


class ChatChunk(Reply):
    """An event of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    prompt_token_ids: list[int] | None = None


class TextChoice(BaseModel):
    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(Reply):
    """The answer to a raw prompt; what it has beyond OpenAI's is vLLM's."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    kv_transfer_params: dict[str, Any] | None = None


class CompletionChunk(Reply):
    """An event of a streamed answer to a raw prompt."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]


class ModelPermission(BaseModel):
    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = False
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "apbv"
    root: str
    parent: None = None
    max_model_len: int
    permission: list[ModelPermission]


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


class Tokens(Reply):
    """What /tokenize replies, as vLLM has it."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    """What /detokenize replies, as vLLM has it."""

    prompt: str


class Load(BaseModel):
    """What /load replies, as vLLM has it: how many answers are asked for now."""

    server_load: int
