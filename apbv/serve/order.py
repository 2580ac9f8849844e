"""This module defines orders: requests as host 0 gives them to the other hosts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..config import SamplingConfig
from ..hosts import HostGroup
from ..input.request import Question, Request
from ..stats import StageTimer


@dataclass(frozen=True)
class Order:
    """An Order is a request to the engine, the same on every host.

    Attributes:
        messages: the chat; content parts refer to files by number, ``{"type": "video", "file": 0}``.
        files: paths in the allowed folder, or None for files whose bytes are sent.
        num_frames, fps, max_new_tokens, temperature, top_p, seed: as of :meth:`apbv.Engine.generate`.
        prompt_token_ids: the prompt's tokens, instead of a chat.
        ignore_eos: whether end tokens end nothing.
        min_tokens: the answer has no end token before so many.
        hands_over: whether another server continues from the prompt's KV.
        template, audio_in_video: as of :class:`apbv.input.request.Question`.
    """

    messages: list[dict[str, Any]]
    files: list[str | None]
    num_frames: int
    fps: float | None
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    prompt_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    hands_over: bool = False
    template: dict[str, Any] | None = None
    audio_in_video: bool | None = None

    @property
    def sampling_figures(self) -> dict[str, float]:
        """What may be told of how the answer's tokens are chosen."""
        return {"max_tokens": self.max_new_tokens, "temperature": self.temperature, "top_p": self.top_p}

    def to_json(self) -> bytes:
        """Encode the order for other hosts."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Order":
        """Decode what :meth:`to_json` encoded."""
        return cls(**json.loads(data))

    def question(self, files: Sequence[Any]) -> Question:
        """Return the question as the engine takes it.

        Args:
            files: paths on this host, or whatever else stands for the order's files.
        """
        if self.prompt_token_ids is not None:
            return Question(token_ids=self.prompt_token_ids)
        messages = [
            {
                "role": message["role"],
                "content": [
                    {"type": part["type"], part["type"]: files[part["file"]]} if "file" in part else part
                    for part in message["content"]
                ],
            }
            for message in self.messages
        ]
        return Question(
            messages=messages,
            num_frames=self.num_frames,
            fps=self.fps,
            template=self.template,
            audio_in_video=self.audio_in_video,
        )

    def request(self, hosts: HostGroup, files: Sequence[Any], stop: Callable[[Sequence[int]], bool]) -> Request:
        """Return the request as the engine takes it.

        Args:
            hosts: the hosts that answer it.
            files: as of :meth:`question`.
            stop: as of :meth:`apbv.Engine.generate`.
        """
        sampling = SamplingConfig(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            min_tokens=min(self.min_tokens, self.max_new_tokens),
        )
        return Request(
            self.question(files),
            StageTimer(hosts),
            positions="vllm" if self.hands_over else "transformers",
            sampling=sampling,
            num_wanted=self.max_new_tokens,
            stop=stop,
        )
