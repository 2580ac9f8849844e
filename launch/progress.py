"""Progress bars on a terminal for long requests, and the progress of a batch."""

import sys
import time

from tqdm import tqdm

from apbv import Engine
from apbv.serve.batch import Batch

_LINE_SECONDS = 30.0  # between lines where there is no terminal

# A stage's label on a bar, and the unit that it counts.
_COUNTED = {
    "decode_video": ("reading the video", "frame"),
    "encode": ("encoding", "patch"),
    "prefill": ("prefill", "layer"),
}


class ProgressBars:
    """Shows a progress bar on stderr for each long stage, and removes it after the stage.

    Args:
        enabled: whether bars are shown.
        delay: seconds before a stage's bar is shown.
        interval: seconds between updates of a bar.
    """

    def __init__(self, enabled: bool, delay: float = 2.0, interval: float = 0.1):
        self._enabled, self._delay, self._interval = enabled, delay, interval
        self._bars: dict[str, tqdm] = {}
        self._num_layers = 0

    def watch(self, engine: Engine) -> None:
        """Count completed decoder layers during a prefill."""
        if not self._enabled or engine.model is None:
            return
        layers = engine.model.get_decoder().layers
        self._num_layers = len(layers)
        for number, layer in enumerate(layers, start=1):
            layer.register_forward_hook(lambda *_, done=number: self._move("prefill", done))

    def begin(self, stage: str) -> None:
        """Show that the language model begins a stage, replacing the previous bar."""
        if stage in ("prefill", "decode") and stage not in self._bars:
            self.close()
            if stage == "prefill":
                self.advance(stage, 0, self._num_layers)

    def advance(self, stage: str, done: int, total: int) -> None:
        """Show a stage's progress."""
        if done >= total:
            if stage in self._bars:
                self._bars.pop(stage).close()
        elif stage in self._bars:
            self._move(stage, done)
        elif self._enabled:
            what, unit = _COUNTED[stage]
            pace = {"delay": self._delay, "mininterval": self._interval, "miniters": 1}
            self._bars[stage] = tqdm(desc=what, unit=unit, initial=done, total=total, leave=False, **pace)

    def close(self) -> None:
        """Remove all bars."""
        while self._bars:
            self._bars.popitem()[1].close()

    def _move(self, stage: str, done: int) -> None:
        if stage in self._bars:
            self._bars[stage].update(done - self._bars[stage].n)


class BatchProgress:
    """Shows a batch's progress on stderr: a bar on a terminal, elsewhere a line every half minute."""

    def __init__(self):
        look = {"desc": "batch", "unit": "request", "leave": False, "dynamic_ncols": True}
        self._bar, self._told_at = tqdm(**look) if sys.stderr.isatty() else None, time.monotonic()

    def show(self, batch: Batch) -> None:
        """Show how far a batch is."""
        how = f"running={batch.num_running}, failed={batch.num_failed}"
        if self._bar is not None:
            self._bar.total = batch.total
            self._bar.set_postfix_str(how, refresh=False)
            self._bar.update(batch.num_answered - self._bar.n)
            self._bar.refresh()
        elif time.monotonic() - self._told_at >= _LINE_SECONDS:
            self._told_at = time.monotonic()
            told = tqdm.format_meter(
                batch.num_answered, batch.total, batch.seconds, prefix="batch", unit="request", postfix=how
            )
            print(told, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
