"""The output of a model's last norm for new tokens, which some drafts read."""

import torch
from torch import Tensor

from ..model.forward import LayerStep


class LatestOutput(LayerStep):
    """Keeps the output of the latest pass.

    Attributes:
        rows: ``[S, d]``; None before the first pass.
    """

    def __init__(self):
        self.rows: Tensor | None = None

    def on_output(self, hidden: Tensor) -> None:
        self.rows = hidden[0]


class TokenOutputs:
    """The output for the newest tokens of one answer."""

    def __init__(self):
        self._first = 0  # the number of the first token whose output is kept
        self._rows: Tensor | None = None

    def write(self, place: int, rows: Tensor) -> None:
        """Keep the output ``[S, d]`` for tokens from number ``place`` on, in place of earlier."""
        if self._rows is not None:
            rows = torch.cat([self._rows[: place - self._first], rows])
        self._rows = rows

    def between(self, start: int, stop: int) -> Tensor:
        """Return the output for these tokens, and keep that before them no longer."""
        assert self._rows is not None, "the tokens were run"
        self._rows = self._rows[start - self._first :]
        self._first = start
        return self._rows[: stop - start]
