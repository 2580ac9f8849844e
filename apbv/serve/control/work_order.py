"""Orders: requests in the form that host 0 sends to the other hosts."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...hosts import HostGroup
from ...input.prompts.tokenized_prompt import TokenizedPrompt
from ...request.request import Question, Request, RequestSettings
from ...request.sink import StopFunction
from ...stats import StageTimer


@dataclass(frozen=True, kw_only=True)
class ReplyOptions:
    """What a client gets of the answers to its request.

    Attributes:
        num_answers: number of answers, with consecutive seeds.
        streams: whether every token is sent at once.
        stop_strings, stop_token_ids: strings and tokens that end the answer.
        shown_token_ids: special tokens that are part of the text all the same.
    """

    num_answers: int = 1
    streams: bool = False
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    shown_token_ids: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class WorkOrder:
    """Request to the engine, the same on every host.

    Attributes:
        question_fields: arguments of :func:`build_question`.
        files: paths in the allowed folder, or None for files whose bytes are sent.
        settings: how the request is answered.
        reply: what its client gets.
        hands_over: whether the prompt's KV is transferred to another server.
        request_id: the request's id in its reply and in the log.
        number: the request's number on the connection from its decode host to host 0; None: its
            decode host is host 0.
    """

    question_fields: dict[str, Any]
    files: list[str | None]
    settings: RequestSettings
    reply: ReplyOptions = ReplyOptions()
    hands_over: bool = False
    request_id: str = ""
    number: int | None = None

    @property
    def decode_host(self) -> int:
        """The host that decodes the answers, where one does alone."""
        return self.settings.decode_host

    def addressed(
        self, request_id: str, decode_host: int = 0, number: int | None = None
    ) -> "WorkOrder":
        """Return the order with the request's id and its decode host.

        Args:
            number: see :attr:`number`.
        """
        settings = replace(self.settings, decode_host=decode_host)
        return replace(self, request_id=request_id, settings=settings, number=number)

    def request(
        self, hosts: HostGroup, files: Sequence[Any], prompt: TokenizedPrompt | None = None
    ) -> Request:
        """Build the engine's request.

        Args:
            hosts: the hosts that answer it.
            files: paths on this host, or other stand-ins for the order's files.
            prompt: the part of the question that this host has already read.
        """
        settings = self.settings
        if hosts.size == 1:  # the decode host, which answers it alone
            settings = replace(settings, decode_host=0)
        return Request(
            build_question(self.question_fields, files),
            StageTimer(hosts),
            settings,
            sink=StopFunction(lambda _: False),  # host 0 replaces its own
            has_checked_grammar=True,  # host 0 reads no other requests
            prompt=prompt,
        )


def build_question(fields: dict[str, Any], files: Sequence[Any]) -> Question:
    """Build the engine's question.

    Args:
        fields: of :class:`apbv.request.request.Question`; content parts of its messages refer to
            files by number, ``{"type": "video", "file": 0}``.
        files: paths on this host, or other stand-ins for the files.
    """
    messages = []
    for message in fields.get("messages") or ():
        parts = []
        for part in message["content"]:
            parts.append(_with_file(part, files) if "file" in part else part)
        messages.append({**message, "content": parts})
    fields = {**fields, "messages": messages or None}
    return Question(**fields)


def _with_file(part: dict[str, Any], files: Sequence[Any]) -> dict[str, Any]:
    """Return a content part with its file in place of its number."""
    options = {name: value for name, value in part.items() if name != "file"}
    return {**options, part["type"]: files[part["file"]]}


def encode_order(order: WorkOrder) -> bytes:
    """Encode an order for other hosts, in one line."""
    return json.dumps(asdict(order)).encode()


def decode_order(data: bytes) -> WorkOrder:
    """Decode what :func:`encode_order` encoded."""
    record = json.loads(data)
    record["settings"] = RequestSettings.from_json(record["settings"])
    record["reply"] = ReplyOptions(**record["reply"])
    return WorkOrder(**record)
