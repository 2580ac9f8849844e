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
    """Shows a progress bar for each long stage if stderr is a terminal, and removes it after the
    stage.

    Args:
        enabled: whether bars are shown at all.
        delay: seconds before a stage's bar is shown.
        interval: seconds between updates of a bar.
    """

    def __init__(self, enabled: bool, delay: float = 2.0, interval: float = 0.1):
        pace = {"delay": delay, "mininterval": interval, "miniters": 1}
        self._looks = {"leave": False, "disable": None if enabled else True, **pace}
        self._bars: dict[str, tqdm] = {}
        self._stage = ""

    def watch(self, engine: Engine) -> None:
        """Count completed decoder layers during a prefill."""
        layers = [] if engine.model is None else engine.model.get_decoder().layers

        def count(done: int) -> None:
            if self._stage == "prefill":
                self.advance("prefill", done, len(layers))

        for number, layer in enumerate(layers, start=1):
            layer.register_forward_hook(lambda *_, done=number: count(done))

    def begin(self, stage: str) -> None:
        """Show that the language model begins a stage, replacing the bars of earlier ones."""
        if stage in ("prefill", "decode"):
            self._stage = stage
            self.close()

    def advance(self, stage: str, done: int, total: int) -> None:
        """Show a stage's progress."""
        if stage not in self._bars:
            what, unit = _COUNTED[stage]
            self._bars[stage] = tqdm(desc=what, unit=unit, initial=done, total=total, **self._looks)
        self._bars[stage].update(done - self._bars[stage].n)
        if done >= total:
            self._bars.pop(stage).close()

    def close(self) -> None:
        """Remove all bars."""
        while self._bars:
            self._bars.popitem()[1].close()
