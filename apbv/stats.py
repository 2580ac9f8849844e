"""Measures the time and the memory of a request, and writes figures."""

import json
import os
import platform
import resource
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from .hosts import HostGroup
from .timeline import Recorder, Span, overlapping_seconds

# Every stage of a request, in the order in which they first begin.
STAGES = ("decode_video", "preprocess", "encode", "exchange", "prefill", "handoff", "draft", "decode")
# Those that work on one part of a video while another works on the next.
_SIDE_BY_SIDE = ("decode_video", "preprocess", "encode", "exchange")
# The one that leaves nothing to be done on a GPU, where something else may be under way meanwhile.
_ON_HOST = ("decode_video",)


# When this host came to a place in the code, by the hosts' clock, and what the GPU reaches when it comes to the
# work queued there; None where the host's own time counts.
_Moment = tuple[float, torch.cuda.Event | None]


class StageTimer:
    """Times a request's stages on this host, and its first token; any thread may begin a stage.

    It makes nobody wait for a GPU while the request runs. What a stage does there, on the stream that is current
    around it, is timed by CUDA events, which are read at the end of the request: the stage lasts from when the GPU
    could begin with its work until that work is done.

    Args:
        hosts: the hosts that run the request.
        on_stage: called with the name of each stage as it begins, in the thread that begins it.
        on_progress: called with what :meth:`progress` is told, in the thread that tells it. Of both only one call
            is under way at a time.
    """

    def __init__(
        self,
        hosts: HostGroup,
        on_stage: Callable[[str], None] | None = None,
        on_progress: Callable[[str, int, int], None] | None = None,
    ):
        self._hosts, self._on_stage, self._on_progress = hosts, on_stage, on_progress
        self._recorder = Recorder("stages", hosts.clock)
        self._unread: list[tuple[str, str | None, _Moment, _Moment]] = []  # a stage's name, track, begin and end
        self._lock, self._reporting = threading.Lock(), threading.Lock()
        self._began = self._hosts.clock()
        self._prefilled: _Moment | None = None
        self._first_token: _Moment | None = None
        self._bytes_before = hosts.bytes_received
        self._bytes_of_prefill = 0

    @contextmanager
    def stage(self, name: str, track: str | None = None) -> Iterator[None]:
        """Time what happens inside as a stage, which may run several times, and beside others in other threads.

        Args:
            name: one of :data:`STAGES`.
            track: the row of the timeline that shows it. None: a row of its own for each of the stages that may
                run beside one another, and one row for all others. Threads that run the same stage at once have to
                name different rows.
        """
        if self._on_stage is not None:
            with self._reporting:
                self._on_stage(name)
        if track is None and name in _SIDE_BY_SIDE:
            track = name
        began = self._now(name)
        try:
            yield
        finally:
            ended = self._now(name)
            with self._lock:
                self._unread.append((name, track, began, ended))

    def progress(self, stage: str, done: int, total: int) -> None:
        """Tell how far a stage is on this host.

        Args:
            stage: one of :data:`STAGES`, which may be between two of its runs.
            done, total: frames where a video is read, temporal patches where it is encoded.
        """
        if self._on_progress is not None:
            with self._reporting:
                self._on_progress(stage, done, total)

    def mark_prefilled(self) -> None:
        """End the time to first token, as long as no token is chosen: the KV is there, and handed over."""
        self._prefilled = self._now("handoff")
        self._bytes_of_prefill = self.comm_bytes

    @property
    def prefilled_on_gpu(self) -> torch.cuda.Event | None:
        """What the GPU comes to when the prefill is done; None where no prefill on a GPU was timed."""
        return None if self._prefilled is None else self._prefilled[1]

    def mark_first_token(self) -> None:
        """End the time to first token: this process knows the token, and its caller is about to."""
        self._first_token = self._hosts.clock(), None

    def resumed(self) -> "StageTimer":
        """Return a timer that goes on where the prefill ended, as if no time had passed since then."""
        timer = StageTimer(self._hosts)
        for span in self.spans:
            timer._recorder.keep(span)
        timer._began -= self._seconds_to_first(self._prefilled)
        timer._bytes_before -= self._bytes_of_prefill
        return timer

    @property
    def spans(self) -> list[Span]:
        """A span for each time that a stage has run; waits for what a GPU still works on of them."""
        with self._lock:
            stages, self._unread = self._unread, []
            moments = self._read([moment for stage in stages for moment in stage[2:]])
            for (name, track, *_), began, ended in zip(stages, moments[::2], moments[1::2], strict=True):
                self._recorder.add(name, began, ended - began, track)
        return list(self._recorder.spans)

    @property
    def comm_bytes(self) -> int:
        """Count the payload bytes received from other hosts since the request began."""
        return self._hosts.bytes_received - self._bytes_before

    def summary(self, num_new_tokens: int = 0) -> dict:
        """Return the request's figures, equal on every host; collective.

        Times are the slowest host's, in milliseconds; ``comm_bytes``, received from other hosts, and
        ``peak_memory_bytes`` are lists with an entry per process. ``ttft_ms`` ends just before the caller gets the
        first token; without an answer, when the prefill is done. ``stages_ms`` has each stage's time at work, all
        its runs together: where stages overlap, that is more than the time that has passed, by ``overlap_ms``.

        Args:
            num_new_tokens: tokens of the answer, for ``output_throughput``.
        """
        overlap = overlapping_seconds(self.spans)
        first = self._seconds_to_first(self._first_token or self._prefilled)
        mine = [*map(self._recorder.seconds, STAGES), overlap, first, self._hosts.clock() - self._began]
        everybody = self._hosts.gather_floats([*mine, self.comm_bytes, peak_memory_bytes(self._hosts.device)])
        slowest = [max(column) for column in zip(*everybody, strict=True)]
        overlap, ttft, total = slowest[len(STAGES) : len(mine)]
        decode = slowest[STAGES.index("decode")]
        return {
            "ttft_ms": ttft * 1e3,
            "total_ms": total * 1e3,
            "request_throughput": 1.0 / ttft if ttft else None,
            "output_throughput": num_new_tokens / decode if num_new_tokens and decode else None,
            "stages_ms": {name: slowest[i] * 1e3 for i, name in enumerate(STAGES)},
            "overlap_ms": overlap * 1e3,
            "comm_bytes": [int(row[-2]) for row in everybody],
            "comm_bytes_total": int(sum(row[-2] for row in everybody)),
            "peak_memory_bytes": [int(row[-1]) for row in everybody],
        }

    def _now(self, stage: str) -> _Moment:
        """Return the moment for a stage's begin or end: the host's, or for work on a GPU the GPU's."""
        hosts, event = self._hosts, None
        # Simulated hosts share a GPU, and their clocks wait for it.
        if hosts.device.type == "cuda" and hosts.has_own_process and stage not in _ON_HOST:
            event = _record_event(hosts.device)
        return hosts.clock(), event

    def _read(self, moments: Sequence[_Moment]) -> list[float]:
        """Return when moments were, by the hosts' clock; waits until the GPU has come to all of them."""
        events = [event for _, event in moments if event is not None]
        if not events:
            return [seconds for seconds, _ in moments]
        for event in events:  # and for no more: another stream may have work for minutes
            self._hosts.wait_for_device(event)
        latest = _record_event(self._hosts.device)
        self._hosts.wait_for_device(latest)
        now = self._hosts.clock()
        return [seconds if event is None else now - event.elapsed_time(latest) / 1e3 for seconds, event in moments]

    def _seconds_to_first(self, moment: _Moment | None) -> float:
        """Return the seconds from the request's begin; 0 if the moment has not come."""
        return 0.0 if moment is None else self._read([moment])[0] - self._began


def _record_event(device: torch.device) -> torch.cuda.Event:
    """Return an event that the GPU reaches when it has done what this thread has queued so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all its work; a CPU has no work left behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gather_spans(spans: Sequence[Span], hosts: HostGroup) -> list[list[Span]]:
    """Return every process's spans on every process; collective."""
    return [[Span(**fields) for fields in theirs] for theirs in hosts.gather_json([asdict(s) for s in spans])]


def reset_peak_memory(device: torch.device) -> None:
    """Restart the measurement of peak memory, if the platform can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # on Linux this resets the highest resident set size
    except OSError:
        pass


def peak_memory_bytes(device: torch.device) -> int:
    """Return the highest memory in use, in bytes: the GPU allocator's, or on a CPU the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    highest = _kernels_figure("VmHWM", of="self/status")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if highest is None else highest


def free_memory_bytes(device: torch.device) -> int:
    """Return how many bytes can still be allocated on a device: what its allocator keeps for reuse counts, too."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return free_host_memory_bytes()


def free_host_memory_bytes() -> int:
    """Return how many bytes the host can still allocate, by its kernel, without swapping."""
    free = _kernels_figure("MemAvailable")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if free is None else free


def unused_swap_bytes() -> int:
    """Return how many bytes the host's kernel could swap out."""
    return _kernels_figure("SwapFree") or 0


def _kernels_figure(name: str, of: str = "meminfo") -> int | None:
    """Return a figure of Linux' memory, in bytes; None on other systems."""
    try:
        with open(f"/proc/{of}") as file:
            line = next(line for line in file if line.startswith(f"{name}:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return None


def provenance() -> dict:
    """Return when and with what figures are made: UTC date, versions, and a checkout's commit."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"date": date, "versions": dict(_versions()), "git_sha": _git_sha()}


def device_name(device: torch.device) -> str:
    """Return a GPU's name, or ``"cpu"``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@cache
def _versions() -> Mapping[str, str]:
    """Return the versions of what computes; finding a package's reads a file."""
    return {
        "apbv": version("apbv"),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


@cache
def _git_sha() -> str | None:
    """Return the commit of the checkout that this runs from; None for an installed package."""
    checkout = Path(__file__).parents[1]
    if not (checkout / ".git").exists():
        return None
    try:
        quietly = {"stderr": subprocess.DEVNULL, "text": True, "timeout": 5}
        return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=checkout, **quietly).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def append_json_lines(path: Path, records: Iterable[dict]) -> None:
    """Add records to a file of JSON lines.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error}") from error
