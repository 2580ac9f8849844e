"""Records what happened when on each host, and writes it for ui.perfetto.dev and chrome://tracing."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Span:
    """A span is something that took time on one host.

    Attributes:
        name: what it was.
        track: the row of its host that shows it.
        begin: when it began, in seconds since the epoch; the clocks of several machines must agree.
        seconds: how long it took.
        details: JSON-ready figures about it.
    """

    name: str
    track: str
    begin: float
    seconds: float
    details: dict[str, Any]


def seconds_of(spans: Iterable[Span], *names: str) -> float:
    """Sum the seconds of all spans of some names."""
    return sum(span.seconds for span in spans if span.name in names)


def overlapping_seconds(spans: Iterable[Span]) -> float:
    """Compute by how much the sum of the spans' seconds exceeds the time in which any of them ran."""
    busy = covered = 0.0
    end = float("-inf")
    for span in sorted(spans, key=lambda span: span.begin):
        busy += span.seconds
        covered += max(0.0, span.begin + span.seconds - max(span.begin, end))
        end = max(end, span.begin + span.seconds)
    return busy - covered


class Recorder:
    """A recorder collects the spans of one host, in the order in which they ended; any thread may add some.

    Args:
        track: the track of spans that name none.
        clock: returns seconds since some fixed moment.
    """

    def __init__(self, track: str, clock: Callable[[], float] = time.perf_counter):
        self.spans: list[Span] = []
        self._totals: dict[str, float] = {}  # kept because every round of decoding reads it
        self._track, self._clock = track, clock
        self._epoch = time.time() - clock()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return what was recorded, for another process, which can read it and add nothing."""
        return {**self.__dict__, "_clock": None, "_lock": None}

    @contextmanager
    def span(self, name: str, **details: Any) -> Iterator[dict[str, Any]]:
        """Record what happens inside, even if it fails; yields the details, to which figures can be added."""
        began = self._clock()
        try:
            yield details
        finally:
            self.add(name, began, self._clock() - began, **details)

    def add(self, name: str, began: float, seconds: float, track: str | None = None, **details: Any) -> None:
        """Add a span that has ended.

        Args:
            name: what it was.
            began: when it began, by the recorder's clock.
            seconds: how long it took.
            track: the row that shows it, where no other span runs at that time; None: the recorder's own.
            details: figures about it.
        """
        self.keep(Span(name, track or self._track, self._epoch + began, seconds, details))

    def keep(self, span: Span) -> None:
        """Add a span of another recorder."""
        with self._lock:
            self.spans.append(span)
            self._totals[span.name] = self.seconds(span.name) + span.seconds

    def seconds(self, name: str) -> float:
        """Sum the seconds of all spans of a name."""
        return self._totals.get(name, 0.0)


def write_timeline(path: Path, hosts: Mapping[str, Sequence[Span]]) -> None:
    """Write spans as a JSON file in the Trace Event Format.

    Args:
        path: the file.
        hosts: every host's spans, under its displayed name.

    Raises:
        ValueError: the file cannot be written.
    """
    everything = [span for spans in hosts.values() for span in spans]
    start = min((span.begin for span in everything), default=0.0)
    events: list[dict[str, Any]] = []
    for process, (host, spans) in enumerate(hosts.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": host}})
        tracks = list(dict.fromkeys(span.track for span in spans))
        for thread, track in enumerate(tracks):
            named = {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": track}}
            events.append(named)
        for span in sorted(spans, key=lambda span: span.begin):
            microseconds = {"ts": (span.begin - start) * 1e6, "dur": span.seconds * 1e6}
            place = {"pid": process, "tid": tracks.index(span.track)}
            events.append({"ph": "X", "name": span.name, **place, **microseconds, "args": span.details})
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
    except OSError as error:
        raise ValueError(f"cannot write the timeline {path}: {error}") from error
