"""Messages between host 0 and the hosts that decode answers, as lines of JSON.

To host 0: what happens to a request's answers, several messages a line. From host 0: orders to
prefill a prompt, and the numbers of requests that are not wanted any more.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from .job import Piece
from .work_order import WorkOrder, decode_order, encode_order


@dataclass(frozen=True)
class TokensMessage:
    """New tokens of an answer; see :meth:`~.output.JobOutput.add_tokens`.

    Attributes:
        number: the request's number on host 0.
        choice: the index of the request's answer.
        num_tokens: the answer's tokens so far.
        piece: its next piece of text; None: there is none yet.
    """

    number: int
    choice: int
    num_tokens: int
    piece: Piece | None


@dataclass(frozen=True)
class DraftMessage:
    """Metrics of a request's draft, by their names."""

    number: int
    metrics: dict[str, Any]


@dataclass(frozen=True)
class FailedMessage:
    """An error of a request; see :class:`~.output.Failure`.

    Attributes:
        number: the request's number on host 0.
        status: the HTTP status.
        message: the error's message for the client.
    """

    number: int
    status: int
    message: str


@dataclass(frozen=True)
class ReleasedMessage:
    """A request's KV is free."""

    number: int


AnswerMessage = TokensMessage | DraftMessage | FailedMessage | ReleasedMessage


@dataclass(frozen=True)
class PrefillMessage:
    """An order that its decode host prefills alone.

    Attributes:
        order: the order.
        file_sizes: the bytes of its files, which follow the message.
    """

    order: WorkOrder
    file_sizes: list[int]


@dataclass(frozen=True)
class UnwantedMessage:
    """The numbers of requests that are not wanted any more."""

    numbers: list[int]


HostMessage = PrefillMessage | UnwantedMessage

_ANSWER_MESSAGES: dict[str, type[AnswerMessage]] = {
    "tokens": TokensMessage,
    "draft": DraftMessage,
    "failed": FailedMessage,
    "released": ReleasedMessage,
}
_KINDS = {message: kind for kind, message in _ANSWER_MESSAGES.items()}


def encode_answers(messages: list[AnswerMessage]) -> bytes:
    """Encode messages to host 0, in one line."""
    records = [{"kind": _KINDS[type(message)], **asdict(message)} for message in messages]
    return _line(records)


def decode_answers(line: bytes) -> list[AnswerMessage]:
    """Decode what :func:`encode_answers` encoded."""
    messages = []
    for record in json.loads(line):
        kind = record.pop("kind")
        if record.get("piece") is not None:
            record["piece"] = Piece(**record["piece"])
        messages.append(_ANSWER_MESSAGES[kind](**record))
    return messages


def encode_for_host(message: HostMessage) -> bytes:
    """Encode a message from host 0, in one line."""
    if isinstance(message, UnwantedMessage):
        return _line({"unwanted": message.numbers})
    order = encode_order(message.order).decode()
    return _line({"order": order, "file_sizes": message.file_sizes})


def decode_for_host(line: bytes) -> HostMessage:
    """Decode what :func:`encode_for_host` encoded."""
    record = json.loads(line)
    if "unwanted" in record:
        return UnwantedMessage(record["unwanted"])
    return PrefillMessage(decode_order(record["order"]), record["file_sizes"])


def _line(record: Any) -> bytes:
    return json.dumps(record).encode() + b"\n"
