"""Showing on a terminal what is being done, and how far it is, where it takes long."""

import sys
import threading

from tqdm import tqdm

from apbv import Engine

_SAID = {
    "preprocess": "preparing the prompt",
    "exchange": "exchanging embeddings",
    "handoff": "gathering the KV",
    "draft": "letting the draft read",
}
# What a bar says, and what it counts.
_COUNTED = {
    "decode_video": ("reading the video", "frame"),
    "encode": ("encoding", "patch"),
    "prefill": ("prefill", "layer"),
    "decode": ("answering", "token"),
}
# They take turns, chunk by chunk, or run at the same time.
_SIDE_BY_SIDE = ("decode_video", "preprocess", "encode", "exchange")


class ProgressLine:
    """Shows on stderr what takes longer than a moment: a bar where it can be counted, else a line.

    Args:
        enabled: whether it shows anything.
        delay: seconds that something has to take before it is shown.
        interval: seconds between two changes of a bar.
    """

    def __init__(self, enabled: bool, delay: float = 2.0, interval: float = 0.1):
        self._enabled, self._delay, self._interval = enabled, delay, interval
        self._bars: dict[str, tqdm] = {}
        self._lock = threading.Lock()  # the line appears in a thread of its own
        self._awaited: threading.Timer | None = None
        self._line: tqdm | None = None
        self._num_layers = self._max_new_tokens = 0
        self._begun = ""

    def watch(self, engine: Engine, max_new_tokens: int | None = None) -> None:
        """Count the decoder's layers in a prefill as they are done.

        Args:
            max_new_tokens: the largest number of tokens of the answer; None: the engine's own.
        """
        self._max_new_tokens = max_new_tokens or engine.max_new_tokens
        if self._enabled and engine.model is not None:
            layers = engine.model.get_decoder().layers
            self._num_layers = len(layers)
            for number, layer in enumerate(layers, start=1):
                layer.register_forward_hook(lambda *_, done=number: self._move("prefill", done))

    def say(self, what: str) -> None:
        """Show a line, in place of what was shown before."""
        self.close()
        if self._enabled:
            self._awaited = threading.Timer(self._delay, self._show, (what,))
            self._awaited.daemon = True
            self._awaited.start()

    def begin(self, stage: str) -> None:
        """Show that a stage of the request begins."""
        if not self._enabled or stage == self._begun or (stage in _SIDE_BY_SIDE and self._bars):
            return
        self._begun = stage
        if stage == "prefill":
            self.close()
            self._count(stage, 0, self._num_layers)
        elif stage == "decode":
            self.close()
            if not sys.stdout.isatty():  # there the answer can be seen
                self._count(stage, 0, self._max_new_tokens)
        else:
            self.say(_SAID.get(stage) or _COUNTED[stage][0])

    def advance(self, stage: str, done: int, total: int) -> None:
        """Show how much of a stage is done."""
        if not self._enabled:
            return
        if done >= total:
            if stage in self._bars:
                self._bars.pop(stage).close()
        elif stage in self._bars:
            self._move(stage, done)
        else:
            self._count(stage, done, total)

    def count_token(self) -> None:
        """Count a token of the answer."""
        if "decode" in self._bars:
            self._bars["decode"].update()

    def close(self) -> None:
        """Remove what is shown."""
        self._remove_line()
        while self._bars:
            self._bars.popitem()[1].close()

    def _count(self, stage: str, done: int, total: int) -> None:
        """Show a bar, in place of the line."""
        was_shown = self._remove_line()
        what, unit = _COUNTED[stage]
        self._bars[stage] = tqdm(
            desc=what,
            unit=unit,
            initial=done,
            total=total,
            leave=False,
            delay=0.0 if was_shown else self._delay,
            mininterval=self._interval,
            miniters=1,
        )

    def _move(self, stage: str, done: int) -> None:
        bar = self._bars.get(stage)
        if bar is not None:
            bar.update(done - bar.n)

    def _show(self, what: str) -> None:
        with self._lock:
            if threading.current_thread() is self._awaited:  # and not cancelled at the last moment
                self._line = tqdm(desc=f"{what} …", bar_format="{desc}", leave=False)

    def _remove_line(self) -> bool:
        """Remove the line, or see that it will not appear; return whether it was shown."""
        with self._lock:
            line, awaited = self._line, self._awaited
            self._line = self._awaited = None
        if awaited is not None:
            awaited.cancel()
        if line is not None:
            line.close()
        return line is not None
