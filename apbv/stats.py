"""This module measures the time and the memory of a request, and writes figures."""

import json
import platform
import resource
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from .hosts import HostGroup
from .timeline import Recorder, Span

STAGES = ("decode_video", "preprocess", "encode", "exchange", "prefill", "handoff", "draft", "decode")


class StageTimer:
    """A timer of a request's stages on this host, by the wall clock.

    On CUDA a stage ends when its kernels have ended.

    Args:
        hosts: the hosts that run the request.
        on_stage: called with the name of each stage as it begins.

    Attributes:
        stages: a span for each time that a stage ran.
    """

    def __init__(self, hosts: HostGroup, on_stage: Callable[[str], None] | None = None):
        self._hosts, self._on_stage = hosts, on_stage
        self.stages = Recorder("stages", hosts.clock)
        self._began = self._hosts.clock()
        self._first_token = 0.0
        self._bytes_before = hosts.bytes_received

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens inside as a stage."""
        if self._on_stage is not None:
            self._on_stage(name)
        with self.stages.span(name):
            try:
                yield
            finally:
                synchronize(self._hosts.device)

    def mark_first_token(self) -> None:
        """End the time to first token: the logits of the first new token exist."""
        synchronize(self._hosts.device)
        self._first_token = self._hosts.clock() - self._began

    @property
    def comm_bytes(self) -> int:
        """Count the payload bytes received from other hosts since the request began."""
        return self._hosts.bytes_received - self._bytes_before

    def summary(self, num_new_tokens: int = 0) -> dict:
        """Return the request's figures, equal on every host; collective.

        Times are the slowest host's, in milliseconds; ``comm_bytes``, received from other hosts, and
        ``peak_memory_bytes`` are lists with an entry per process.

        Args:
            num_new_tokens: tokens of the answer, for ``output_throughput``.
        """
        mine = [*map(self.stages.seconds, STAGES), self._first_token, self._hosts.clock() - self._began]
        everybody = self._hosts.gather_floats([*mine, self.comm_bytes, peak_memory_bytes(self._hosts.device)])
        slowest = [max(column) for column in zip(*everybody, strict=True)]
        ttft, total = slowest[len(STAGES)], slowest[len(STAGES) + 1]
        decode = slowest[STAGES.index("decode")]
        return {
            "ttft_ms": ttft * 1e3,
            "total_ms": total * 1e3,
            "request_throughput": 1.0 / ttft if ttft else None,
            "output_throughput": num_new_tokens / decode if num_new_tokens and decode else None,
            "stages_ms": {name: slowest[i] * 1e3 for i, name in enumerate(STAGES)},
            "comm_bytes": [int(row[-2]) for row in everybody],
            "comm_bytes_total": int(sum(row[-2] for row in everybody)),
            "peak_memory_bytes": [int(row[-1]) for row in everybody],
        }


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
    try:
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def provenance() -> dict:
    """Return when and with what figures are made: UTC date, versions, and a checkout's commit."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "apbv": version("apbv"),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
        "git_sha": _git_sha(),
    }


def device_name(device: torch.device) -> str:
    """Return a GPU's name, or ``"cpu"``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@cache
def _git_sha() -> str | None:
    """Return the commit of the checkout that this runs from; None for an installed package."""
    checkout = Path(__file__).parents[1]
    if not (checkout / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=checkout,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


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


def markdown_table(header: Sequence, rows: Iterable[Sequence], align: str = "---:") -> str:
    """Format rows of cells under a header as a Markdown table."""
    lines = [header, [align] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
