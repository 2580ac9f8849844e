"""This module counts what speculation did to one request."""

import warnings
from dataclasses import dataclass, field, fields

from ..timeline import Recorder

LOSING = "with it the answer takes longer than without"


@dataclass
class SpeculationStats:
    """A SpeculationStats counts what speculation did in one request, on host 0.

    Attributes:
        rounds: forward passes of the target while the draft was not switched off.
        num_target_forwards: forward passes of the target after the prefill.
        num_drafted, num_accepted: drafted and accepted tokens.
        num_rejections: windows of which a token was rejected.
        switched_off: why the rest of the answer was decoded without the draft; None if it was not.
        switched_off_after: after how many tokens.
        record: the spans of drafting and verifying.
    """

    rounds: int = 0
    num_target_forwards: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rejections: int = 0
    switched_off: str | None = None
    switched_off_after: int | None = None
    record: Recorder = field(default_factory=lambda: Recorder("decoding"), repr=False)
    _seconds: tuple[float, float] = field(default=(0.0, 0.0), repr=False)

    @property
    def draft_seconds(self) -> float | None:
        """The seconds of drafting."""
        return self.record.seconds("draft")

    @property
    def verify_seconds(self) -> float:
        """The seconds of the target's forward passes."""
        return self.record.seconds("verify")

    @property
    def target_idle_seconds(self) -> float:
        """The seconds in which the target had nothing to do: in turn, those of drafting."""
        return self.draft_seconds

    @property
    def draft_idle_seconds(self) -> float | None:
        """The seconds in which the draft had nothing to do: in turn, those of verifying."""
        return self.verify_seconds

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count a window, or a part of it that is verified separately."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_rejections += num_accepted < num_drafted

    def seconds_of_round(self) -> tuple[float, float]:
        """Return the seconds of drafting and of verifying since the last call."""
        before, self._seconds = self._seconds, (self.record.seconds("draft"), self.record.seconds("verify"))
        return self._seconds[0] - before[0], self._seconds[1] - before[1]

    def switch_off(self, why: str, num_tokens: int) -> None:
        """Note that the target goes on without the draft, and warn."""
        self.switched_off, self.switched_off_after = why, num_tokens
        warnings.warn(f"decoding goes on without the draft: {why}", stacklevel=3)

    def summary(self, num_new_tokens: int) -> dict:
        """Return the figures for JSON; the first token comes from the prefill, and does not count.

        ``mean_accepted_tokens`` is the papers' MAT or M of drafting in turn, TABED's block efficiency: tokens per
        round, the target's own included. ``accepted_in_a_row`` is the mean number of tokens accepted between two
        rejections, over any number of rounds: PEARL's figure, and HIPPO's MAT of drafting beside the target.
        """
        forwards, drafted = self.num_target_forwards, self.num_drafted
        in_rounds = (
            num_new_tokens - 1 - (forwards - self.rounds)
        )  # the other tokens come from passes without a draft
        in_a_row = self.num_accepted / (self.num_rejections + 1) if drafted else None
        counted = [counter.name for counter in fields(self) if counter.repr]  # fields without repr are not figures
        times = ("draft_seconds", "verify_seconds", "target_idle_seconds", "draft_idle_seconds")
        return {
            **{name: getattr(self, name) for name in (*counted, *times)},
            "tokens_per_target_forward": (num_new_tokens - 1) / forwards if forwards else None,
            "acceptance_rate": self.num_accepted / drafted if drafted else None,
            "mean_accepted_tokens": in_rounds / self.rounds if self.rounds else None,
            "accepted_in_a_row": in_a_row,
        }
