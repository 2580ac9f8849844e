"""Shows on a terminal how far a request is, where it takes long."""

import sys

from tqdm import tqdm

from apbv import Engine

# What a bar says of a stage, and what it counts.
_COUNTED = {
    "decode_video": ("reading the video", "frame"),
    "encode": ("encoding", "patch"),
    "prefill": ("prefill", "layer"),
    "decode": ("answering", "token"),
}


class ProgressBars:
    """Shows on stderr a bar for each stage that takes longer than a moment, and removes it behind the stage.

    Args:
        enabled: whether it shows anything.
        delay: seconds that a stage has to take before it is shown.
        interval: seconds between two changes of a bar.
    """

    def __init__(self, enabled: bool, delay: float = 2.0, interval: float = 0.1):
        self._enabled, self._delay, self._interval = enabled, delay, interval
        self._bars: dict[str, tqdm] = {}
        self._totals: dict[str, int] = {}  # of the stages that only tell when they begin

    def watch(self, engine: Engine, max_new_tokens: int | None = None) -> None:
        """Count the decoder's layers in a prefill as they are done.

        Args:
            max_new_tokens: the largest number of tokens of the answer; None: the engine's own.
        """
        if not self._enabled or engine.model is None:
            return
        layers = engine.model.get_decoder().layers
        self._totals = {"prefill": len(layers)}
        if not sys.stdout.isatty():  # there the answer can be seen
            self._totals["decode"] = max_new_tokens or engine.max_new_tokens
        for number, layer in enumerate(layers, start=1):
            layer.register_forward_hook(lambda *_, done=number: self._move("prefill", done))

    def begin(self, stage: str) -> None:
        """Show that the language model begins with a stage, in place of what was shown before."""
        if stage in ("prefill", "decode") and stage not in self._bars:
            self.close()
            if stage in self._totals:
                self.advance(stage, 0, self._totals[stage])

    def advance(self, stage: str, done: int, total: int) -> None:
        """Show how much of a stage is done."""
        if done >= total:
            if stage in self._bars:
                self._bars.pop(stage).close()
        elif stage in self._bars:
            self._move(stage, done)
        elif self._enabled:
            what, unit = _COUNTED[stage]
            pace = {"delay": self._delay, "mininterval": self._interval, "miniters": 1}
            self._bars[stage] = tqdm(desc=what, unit=unit, initial=done, total=total, leave=False, **pace)

    def count_token(self) -> None:
        """Count a token of the answer."""
        if "decode" in self._bars:
            self._bars["decode"].update()

    def close(self) -> None:
        """Remove what is shown."""
        while self._bars:
            self._bars.popitem()[1].close()

    def _move(self, stage: str, done: int) -> None:
        if stage in self._bars:
            self._bars[stage].update(done - self._bars[stage].n)
