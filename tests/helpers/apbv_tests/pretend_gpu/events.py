"""What the host asked of a pretended machine, in the order in which it did."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parents[4]
_OURS = tuple(str(_ROOT / folder) + "/" for folder in ("apbv", "kernels", "launch"))


class Event(NamedTuple):
    """An event is one thing that the host asked of the machine.

    Attributes:
        kind: ``"kernel"``, ``"triton"`` or ``"replay"`` (of a graph): a launch; ``"in_graph"``: a
            kernel that a replay runs; ``"wait"``: the host waits for the GPU; ``"to_gpu"`` and
            ``"to_host"``: a copy; ``"collective"``: an exchange of GPU memory is begun;
                ``"host_collective"``: one of host memory;
            ``"await"``: an exchange of GPU memory is waited for; ``"lent"``: the allocator is told
                of another
            stream that uses some memory; ``"mark"``: a test's own.
        name: of the operator, the kernel, the mark, or what is waited for.
        nbytes: what a copy or an exchange moves.
        place: ``file:function`` in the project that asked for a wait, a copy or an exchange; the
            module of one of Triton's kernels.
        detail: an exchange's number, by which it is awaited; a mark's value; a launch's grid.
        group: which process group exchanges.
    """

    kind: str
    name: str
    nbytes: int = 0
    place: str = ""
    detail: object = None
    group: str = ""


class Events(list):
    """Events in order, with ways to count them."""

    def of(self, *kinds: str) -> "Events":
        return Events(event for event in self if event.kind in kinds)

    def names(self, *kinds: str) -> Counter:
        """Count events of these kinds by name."""
        return Counter(event.name for event in self if event.kind in kinds)

    @property
    def num_launches(self) -> int:
        return len(self.of("kernel", "triton", "replay"))

    @property
    def waits(self) -> Counter:
        """Count what the host waits for, by ``(what, place)``."""
        return Counter((event.name, event.place) for event in self if event.kind == "wait")

    def nbytes(self, *kinds: str) -> int:
        return sum(event.nbytes for event in self if event.kind in kinds)

    def between(self, mark: str) -> Iterator["Events"]:
        """Yield the events from each mark of this name to the next one, or to the end."""
        starts = [i for i, event in enumerate(self) if event.kind == "mark" and event.name == mark]
        for start, stop in zip(starts, [*starts[1:], len(self)], strict=True):
            yield Events(self[start:stop])


def place_in_project() -> str:
    """Return ``file:function`` of the innermost frame that lies in the project's own code."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename.startswith(_OURS):
            return f"{filename[len(str(_ROOT)) + 1 :]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""
