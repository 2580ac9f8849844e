"""Measures time and memory of a request, and writes metrics."""

import json
import os
import platform
import resource
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from .errors import StorageError
from .hosts import HostGroup, Moment
from .reporting import raised_as

# Every stage of a request, in the order in which they first begin.
STAGES = (
    "decode_video",
    "preprocess",
    "encode",
    "exchange",
    "prefill",
    "handoff",
    "draft",
    "decode",
)
# The stage that leaves no work on a GPU, which may be busy with something else meanwhile.
_ON_HOST = ("decode_video",)


class StageTimer:
    """Times a request's stages on this host, and its first token; any thread may begin a stage.

    It causes no GPU synchronization while the request runs. A stage's work on the current stream is
    timed by CUDA events, which are read at the end of the request: the stage lasts from when the
    GPU could begin with its work until that work is done.

    Args:
        hosts: the hosts that run the request.
        on_stage: called with the name of each stage as it begins, in the thread that begins it.
        on_progress: called with what :meth:`progress` is told, in the thread that tells it. Of both
            only one call is under way at a time.

    Attributes:
        prefilled: when the prefill was done; its event is None if no prefill on a GPU was timed.
    """

    def __init__(
        self,
        hosts: HostGroup,
        on_stage: Callable[[str], None] | None = None,
        on_progress: Callable[[str, int, int], None] | None = None,
    ):
        self._hosts = hosts
        self._on_stage = on_stage
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._reporting = threading.Lock()
        self._runs: list[tuple[str, Moment, Moment]] = []  # a stage's name, begin and end
        self._began = self.prefilled = hosts.moment(on_device=False)
        self._bytes_before = hosts.bytes_received
        self._first_token: Moment | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body as a stage.

        It may run several times, and concurrently with others in other threads.

        torch's profiler shows it as ``apbv.NAME``.

        Args:
            name: one of :data:`STAGES`.
        """
        if self._on_stage is not None:
            with self._reporting:
                self._on_stage(name)
        began = self._hosts.moment(name not in _ON_HOST)
        try:
            with torch.profiler.record_function(f"apbv.{name}"):
                yield
        finally:
            ended = self._hosts.moment(name not in _ON_HOST)
            with self._lock:
                self._runs.append((name, began, ended))

    def progress(self, stage: str, done: int, total: int) -> None:
        """Report a stage's progress on this host.

        Args:
            stage: one of :data:`STAGES`, which may be between two of its runs.
            done, total: frames where a video is read, temporal patches where it is encoded.
        """
        if self._on_progress is not None:
            with self._reporting:
                self._on_progress(stage, done, total)

    def mark_prefilled(self) -> None:
        """End the TTFT, as long as no token is chosen: the KV is there, and handed over."""
        self.prefilled = self._hosts.moment()

    def mark_first_token(self) -> None:
        """End the TTFT: this process knows the token, and its caller is about to."""
        self._first_token = self._hosts.moment(on_device=False)

    def runs(self) -> list[tuple[str, float, float]]:
        """Return the name, begin and end of each run of a stage.

        Times are in seconds since the request began.

        This waits for what a GPU still works on of them.
        """
        return self._measured()[0]

    def _measured(self, *moments: Moment) -> tuple[list[tuple[str, float, float]], list[float]]:
        """Return :meth:`runs`, and the seconds from the request's beginning to some moments."""
        with self._lock:
            runs = list(self._runs)
        begins = [begin for _, begin, _ in runs]
        ends = [end for _, _, end in runs]
        # In one call, whose error, the delay until the host sees what its GPU has done, is the same
        # for all.
        seconds = self._hosts.seconds_at([self._began, *begins, *ends, *moments])
        since_began = [each - seconds[0] for each in seconds[1:]]
        timed_runs = []
        for row, (name, _, _) in enumerate(runs):
            timed_runs.append((name, since_began[row], since_began[len(runs) + row]))
        return timed_runs, since_began[2 * len(runs) :]

    def summary(self, num_new_tokens: int = 0) -> dict:
        """Return the request's metrics, equal on every host; collective.

        Times are the slowest host's, in milliseconds; ``comm_bytes``, received from other hosts,
        and ``peak_memory_bytes`` are lists with an entry per process. ``ttft_ms`` ends just before
        the caller gets the first token; without an answer, when the prefill is done. ``stages_ms``
        has each stage's time at work, all its runs together: where stages overlap, that is more
        than the time that has passed, by ``overlap_ms``.

        Args:
            num_new_tokens: tokens of the answer, for ``output_throughput``.
        """
        runs, (ttft, total) = self._measured(
            self._first_token or self.prefilled, self._hosts.moment()
        )
        figures = dict.fromkeys(STAGES, 0.0)
        for name, began, ended in runs:
            figures[name] += ended - began
        figures["overlap"] = overlapping_seconds(runs)
        figures["ttft"] = ttft
        figures["total"] = total
        figures["received"] = self._hosts.bytes_received - self._bytes_before
        figures["peak"] = peak_memory_bytes(self._hosts.device)

        # By name, of every process.
        of_processes = self._hosts.gather_floats(list(figures.values()))
        of_all = dict(zip(figures, zip(*of_processes, strict=True), strict=True))

        slowest_ms = {
            name: 1e3 * max(of_all[name]) for name in (*STAGES, "overlap", "ttft", "total")
        }
        ttft_ms = slowest_ms["ttft"]
        decode_ms = slowest_ms["decode"]
        output_throughput = None
        if num_new_tokens and decode_ms:
            output_throughput = num_new_tokens * 1e3 / decode_ms
        received = [int(num_bytes) for num_bytes in of_all["received"]]
        return {
            "ttft_ms": ttft_ms,
            "total_ms": slowest_ms["total"],
            "request_throughput": 1e3 / ttft_ms if ttft_ms else None,
            "output_throughput": output_throughput,
            "stages_ms": {name: slowest_ms[name] for name in STAGES},
            "overlap_ms": slowest_ms["overlap"],
            "comm_bytes": received,
            "comm_bytes_total": sum(received),
            "peak_memory_bytes": [int(num_bytes) for num_bytes in of_all["peak"]],
        }


class Recorder:
    """Sums the seconds that a thread spends in sections of its work.

    Args:
        clock: returns seconds since some fixed moment.

    Attributes:
        seconds: of each section, by name.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.seconds: dict[str, float] = defaultdict(float)
        self._clock = clock

    def __getstate__(self) -> dict[str, Any]:
        """Return the seconds for another process, which has another clock."""
        return {**self.__dict__, "_clock": None}

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time the body, even if it fails."""
        began = self._clock()
        try:
            yield
        finally:
            self.seconds[name] += self._clock() - began


def overlapping_seconds(runs: Iterable[tuple[str, float, float]]) -> float:
    """Compute by how much the sum of runs' seconds exceeds the time in which any went on.

    See StageTimer.runs.
    """
    busy = covered = 0.0
    end = float("-inf")
    for _, began, ended in sorted(runs, key=itemgetter(1)):
        busy += ended - began
        covered += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return busy - covered


def reset_peak_memory(device: torch.device) -> None:
    """Restart the measurement of peak memory, if the platform supports it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # on Linux this resets the highest resident set size


def peak_memory_bytes(device: torch.device) -> int:
    """Return the highest memory in use, in bytes.

    It is the GPU allocator's, or on a CPU the process's resident set.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    highest = kernels_figure("VmHWM", of="self/status")
    if highest is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return highest


def free_memory_bytes(device: torch.device, swaps: bool = False) -> int:
    """Return the bytes that can still be allocated on a device.

    What its allocator caches is included.

    Args:
        swaps: count what a machine's kernel can swap out, too; a GPU's cannot.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free, _ = torch.cuda.mem_get_info(device)
        return free + cached
    free = free_host_memory_bytes()
    if swaps:
        free += kernels_figure("SwapFree") or 0
    return free


def free_host_memory_bytes() -> int:
    """Return the bytes that the machine can still allocate without swapping.

    The kernel tells this number.
    """
    free = kernels_figure("MemAvailable")
    if free is None:
        # Another system: half of its memory.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return free


def kernels_figure(name: str, of: str = "meminfo") -> int | None:
    """Return a value from Linux' memory statistics, in bytes; None on other systems."""
    with suppress(OSError), open(f"/proc/{of}") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def provenance() -> dict:
    """Return the provenance of a measurement: UTC date, versions, and a checkout's commit."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), **_software()}


def device_name(device: torch.device) -> str:
    """Return a GPU's name, or ``"cpu"``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@cache
def _software() -> dict:
    """Return software versions, and the commit of the checkout; None for an installed package."""
    versions = {
        "apbv": version("apbv"),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }
    checkout = Path(__file__).parents[1]
    commit = None
    if (checkout / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError):
            output = subprocess.check_output(
                ["git", "rev-parse", "HEAD"],
                cwd=checkout,
                stderr=subprocess.DEVNULL,
                text=True,
                timeout=5,
            )
            commit = output.strip()
    return {"versions": versions, "git_sha": commit}


def append_json_lines(path: Path, records: Iterable[dict]) -> None:
    """Append records to a JSONL file.

    Raises:
        StorageError: the file cannot be written.
    """
    with (
        raised_as(StorageError, f"cannot write {path}", OSError),
        open(path, "a", encoding="utf-8") as file,
    ):
        file.writelines(json.dumps(record) + "\n" for record in records)
