"""Milliseconds per call on a device, and what the device can do at most."""

import statistics
import time
from collections.abc import Callable

import torch

_ROUND_SECONDS = 0.02  # a round repeats a call until it takes about so long
_MOST_AHEAD = 200


class Stopwatch:
    """A Stopwatch takes medians over rounds, behind calls that warm up.

    On a GPU it times the device alone: copies are queued ahead of the calls, so that the device still works on
    them while Python launches the calls.

    Args:
        device: where the calls compute.
        rounds: how many are measured.
    """

    def __init__(self, device: torch.device, rounds: int):
        self.device, self._rounds = device, rounds
        size = _copy_bytes(device)
        self._source = torch.ones(size, dtype=torch.uint8, device=device)
        self._target = torch.empty_like(self._source)
        self._copy_seconds = 0.0
        self._copy_seconds = self(self._copy) / 1e3

    @property
    def bandwidth(self) -> float:
        """What a large copy reads and writes, in bytes per second."""
        return 2 * self._source.nbytes / self._copy_seconds

    def flops(self, dtype: torch.dtype) -> float:
        """Measure a square matrix product, in operations per second."""
        side = 8192 if self.device.type == "cuda" else 1024
        a, b = torch.randn(2, side, side, device=self.device, dtype=dtype)
        return 2 * side**3 / self(lambda: torch.mm(a, b)) * 1e3

    def __call__(self, call: Callable[[], object]) -> float:
        """Return the milliseconds that a call takes."""
        call()  # compiles, and plans
        seconds = self._launching(call, 1)
        count = max(1, min(100, int(_ROUND_SECONDS / max(seconds, 1e-9))))
        launching = self._launching(call, count)
        return statistics.median(self._round(call, count, launching) for _ in range(self._rounds)) / count

    def _launching(self, call: Callable[[], object], count: int) -> float:
        """Return the seconds until some calls are done on a CPU, or on a GPU in its queue."""
        self._synchronize()
        began = time.perf_counter()
        for _ in range(count):
            call()
        seconds = time.perf_counter() - began
        self._synchronize()
        return seconds

    def _round(self, call: Callable[[], object], count: int, launching: float) -> float:
        """Return the milliseconds that all calls of a round take."""
        if self.device.type != "cuda":
            return self._launching(call, count) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self._copy_seconds:
            for _ in range(min(_MOST_AHEAD, int(1.5 * launching / self._copy_seconds) + 1)):
                self._copy()
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def _copy(self) -> None:
        self._target.copy_(self._source)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _copy_bytes(device: torch.device) -> int:
    """Return a size that no cache holds, and that leaves room for everything else."""
    if device.type != "cuda":
        return 2**27
    return min(2**29, torch.cuda.mem_get_info(device)[0] // 8)
