"""Orders: requests as host 0 gives them to the other hosts."""

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
class Order:
    """A request to the engine, the same on every host.

    Attributes:
        asked: the fields of :class:`apbv.input.request.Question`; content parts of its messages refer to files by
            number, ``{"type": "video", "file": 0}``.
        files: paths in the allowed folder, or None for files whose bytes are sent.
        sampling: how the answer's tokens are chosen.
        hands_over: whether another server continues from the prompt's KV.
        num_answers: how many answers are drawn, with seeds one after the other.
    """

    asked: dict[str, Any]
    files: list[str | None]
    sampling: SamplingParams
    hands_over: bool = False
    num_answers: int = 1

    def to_json(self) -> bytes:
        """Encode the order for other hosts."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Order":
        """Decode what :meth:`to_json` encoded."""
        record = json.loads(data)
        sampling = record["sampling"]
        sampling["logit_bias"] = tuple((token, value) for token, value in sampling["logit_bias"])
        return cls(**{**record, "sampling": SamplingParams(**sampling)})

    def question(self, files: Sequence[Any]) -> Question:
        """Return the question as the engine takes it.

        Args:
            files: paths on this host, or whatever else stands for the order's files.
        """
        messages = [
            {
                "role": message["role"],
                "content": [
                    {"type": part["type"], part["type"]: files[part["file"]]} if "file" in part else part
                    for part in message["content"]
                ],
            }
            for message in self.asked.get("messages") or ()
        ]
        return Question(**{**self.asked, "messages": messages or None})

    def request(self, hosts: HostGroup, files: Sequence[Any], prompt: Skeleton | None = None) -> Request:
        """Return the request as the engine takes it.

        Args:
            hosts: the hosts that answer it.
            files: as of :meth:`question`.
            prompt: what this host has read of the question already.
        """
        return Request(
            self.question(files),
            StageTimer(hosts),
            positions="vllm" if self.hands_over else "transformers",
            sampling=self.sampling,
            num_wanted=self.sampling.max_new_tokens,
            stop=lambda _: False,
            prompt=prompt,
        )
