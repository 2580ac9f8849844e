"""Where the time and the memory of a request go."""

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
    """Wall-clock seconds per stage on this host, and since the request began.

    On CUDA a stage ends when its kernels have.

    Args:
        on_stage: told the name of each stage as it begins.

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
        if self._on_stage is not None:
            self._on_stage(name)
        with self.stages.span(name):
            try:
                yield
            finally:
                self._synchronize()

    def mark_first_token(self) -> None:
        """The logits of the first new token exist: TTFT ends here."""
        self._synchronize()
        self._first_token = self._hosts.clock() - self._began

    @property
    def comm_bytes(self) -> int:
        """Payload received from other hosts since the request began."""
        return self._hosts.bytes_received - self._bytes_before

    def summary(self, num_new_tokens: int = 0) -> dict:
        """The request's figures, equal on every host; collective.

        Times are the slowest host's, in milliseconds; ``comm_bytes``, received from other hosts, and
        ``peak_memory_bytes`` are per process.
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

    def _synchronize(self) -> None:
        if self._hosts.device.type == "cuda":
            torch.cuda.synchronize(self._hosts.device)


def gather_spans(spans: Sequence[Span], hosts: HostGroup) -> list[list[Span]]:
    """Every process's spans, on every process; collective."""
    return [[Span(**fields) for fields in theirs] for theirs in hosts.gather_json([asdict(s) for s in spans])]


def reset_peak_memory(device: torch.device) -> None:
    """Start measuring the peak anew, where the platform can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # Linux: forget the highest resident set size so far
    except OSError:
        pass


def peak_memory_bytes(device: torch.device) -> int:
    """Highest memory in use: of the GPU's allocator, or the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def provenance() -> dict:
    """When and with what figures are made: UTC date, versions, and the commit of a checkout."""
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
    """What figures were taken on: a GPU's name, or ``"cpu"``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@cache
def _git_sha() -> str | None:
    """The commit of the checkout this runs from; None for an installed package. Asked for once a process."""
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
    """Rows of cells under a header, in Markdown."""
    lines = [header, [align] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
