"""Orders: requests in the form that host 0 sends to the other hosts."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..config import SamplingParams
from ..hosts import HostGroup
from ..input.request import Question, Request
from ..input.skeleton import Skeleton
from ..stats import StageTimer


@dataclass(frozen=True)
class WorkOrder:
    """Request to the engine, the same on every host.

    Attributes:
        asked: the fields of :class:`apbv.input.request.Question`; content parts of its messages
            refer to files by number, ``{"type": "video", "file": 0}``.
        files: paths in the allowed folder, or None for files whose bytes are sent.
        sampling: how the answer's tokens are chosen.
        hands_over: whether the prompt's KV is transferred to another server.
        num_answers: number of answers, with consecutive seeds.
        streams: whether every token is sent at once.
        stop_strings, stop_token_ids: see :class:`~.text.AnswerText`.
        shown_token_ids: special tokens that are part of the text all the same.
        home: the host that decodes the answers, where one does alone.
        number: the request's number on the connection from its home to host 0; see :mod:`.links`.
    """

    asked: dict[str, Any]
    files: list[str | None]
    sampling: SamplingParams
    hands_over: bool = False
    num_answers: int = 1
    streams: bool = False
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    shown_token_ids: Sequence[int] = ()
    home: int = 0
    number: int | None = None

    def question(self, files: Sequence[Any]) -> Question:
        """Build the engine's question.

        Args:
            files: paths on this host, or other stand-ins for the order's files.
        """
        messages = []
        for message in self.asked.get("messages") or ():
            parts = [
                _with_file(part, files) if "file" in part else part for part in message["content"]
            ]
            messages.append({**message, "content": parts})
        return Question(**{**self.asked, "messages": messages or None})

    def request(
        self, hosts: HostGroup, files: Sequence[Any], prompt: Skeleton | None = None
    ) -> Request:
        """Build the engine's request.

        Args:
            hosts: the hosts that answer it.
            files: as of :meth:`question`.
            prompt: the part of the question that this host has already read.
        """
        return Request(
            self.question(files),
            StageTimer(hosts),
            positions="vllm" if self.hands_over else "transformers",
            sampling=self.sampling,
            num_wanted=self.sampling.max_new_tokens,
            stop=lambda _: False,
            has_checked_grammar=True,  # host 0 reads no other requests
            prompt=prompt,
            home=self.home if hosts.size > 1 else 0,
        )


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
    sampling = record["sampling"]
    sampling["logit_bias"] = tuple((token, value) for token, value in sampling["logit_bias"])
    return WorkOrder(**{**record, "sampling": SamplingParams(**sampling)})
