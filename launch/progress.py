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
    """Shows a progress bar for each long stage if stderr is a terminal.

    The bar is removed after the stage.

    Args:
        enabled: whether bars are shown at all.
        delay: seconds before a stage's bar is shown.
        interval: seconds between updates of a bar.
    """

    def __init__(self, enabled: bool, delay: float = 2.0, interval: float = 0.1):
        self._enabled = enabled
        self._delay = delay
        self._interval = interval
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
            label, unit = _COUNTED[stage]
            self._bars[stage] = tqdm(
                desc=label,
                unit=unit,
                initial=done,
                total=total,
                leave=False,
                # None: without a terminal.
                disable=None if self._enabled else True,
                delay=self._delay,
                mininterval=self._interval,
                miniters=1,
            )
        bar = self._bars[stage]
        bar.update(done - bar.n)
        if done >= total:
            self._bars.pop(stage).close()

    def close(self) -> None:
        """Remove all bars."""
        while self._bars:
            _, bar = self._bars.popitem()
            bar.close()
