"""The result of a request: an answer and its metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..input.prompts.tokenized_prompt import SampledVideo
from .logprobs import TokenLogprobs

FinishReason = Literal["stop", "length"]
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class GenerateResult:
    """Answer and metrics of a request; the same on every host.

    Attributes:
        text: the answer, without special tokens.
        reasoning: the thought with which it begins, as models that think write it between tags;
            None: it begins with none, or this is a draft host.
        content: what follows the thought; all of the text where there is none.
        token_ids: the generated tokens, the end token included.
        finish_reason: ``"length"`` where ``max_new_tokens`` cut it off, else ``"stop"``.
        stats: the request's metrics; the fields of ``launch/infer.py --json``.
        videos: the videos that were asked about, as they were probed, with the numbers of their
            sampled frames.
        logprobs: of each token, where ``sampling.logprobs`` asks for them; on host 0.
    """

    text: str
    token_ids: list[int]
    stats: dict[str, Any]
    finish_reason: FinishReason
    videos: tuple[SampledVideo, ...] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    reasoning: str | None = None
    content: str = ""

    def __repr__(self) -> str:
        text = (
            self.text
            if len(self.text) <= _SHOWN_CHARACTERS
            else f"{self.text[:_SHOWN_CHARACTERS]}…"
        )
        taken = f"ttft_ms={self.stats['ttft_ms']:.1f}, total_ms={self.stats['total_ms']:.1f}"
        return (
            f"GenerateResult({text!r}, {len(self.token_ids)} tokens, {self.finish_reason!r}, "
            f"{taken})"
        )
