"""Progress bars on a terminal for long requests."""

from tqdm import tqdm

from apbv import Engine

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
