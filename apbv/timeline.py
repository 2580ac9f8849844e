"""What happened when, on which host; and a file of it that ui.perfetto.dev and chrome://tracing open."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Span:
    """Something that took time on one host.

    Attributes:
        name, track: what it was, and which row of its host shows it.
        begin, seconds: by the wall clock, in seconds of the epoch; clocks of several machines must agree.
        details: JSON-ready figures of it.
    """

    name: str
    track: str
    begin: float
    seconds: float
    details: dict[str, Any]


def seconds_of(spans: Iterable[Span], *names: str) -> float:
    """The time of all spans of some names."""
    return sum(span.seconds for span in spans if span.name in names)


class Recorder:
    """Spans of one track, in the order in which they ended.

    Args:
        clock: seconds since some moment.
    """

    def __init__(self, track: str, clock: Callable[[], float] = time.perf_counter):
        self.spans: list[Span] = []
        self._totals: dict[str, float] = {}  # asked for in every round
        self._track, self._clock = track, clock
        self._epoch = time.time() - clock()

    def __getstate__(self) -> dict[str, Any]:
        """What was recorded, for another process; the clock is this host's."""
        return {**self.__dict__, "_clock": None}

    @contextmanager
    def span(self, name: str, **details: Any) -> Iterator[dict[str, Any]]:
        """Record what happens inside, also where it fails; yields the details, to be added to."""
        began = self._clock()
        try:
            yield details
        finally:
            seconds = self._clock() - began
            self.spans.append(Span(name, self._track, self._epoch + began, seconds, details))
            self._totals[name] = self.seconds(name) + seconds

    def seconds(self, name: str) -> float:
        """The time of all spans of a name."""
        return self._totals.get(name, 0.0)


def write_timeline(path: Path, hosts: Mapping[str, Sequence[Span]]) -> None:
    """Write spans as a JSON file in the Trace Event Format.

    Args:
        hosts: every host's spans, under the name that it is shown by.

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
