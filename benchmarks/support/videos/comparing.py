"""Compares what ways to read a video make with what they should, and times them in turn."""

import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tqdm import tqdm

from .clips import READERS, ClipSpec
from .worker import Job, Measured, in_processes_of_their_own, measure

# The most that apbv's results may differ from the reference: levels of a frame's 0 .. 255, else a share of the
# largest value. The vision tower rounds differently where its windows are attended to together.
TOLERANCES = {
    "float32": {"frames": 0, "embeddings": 1e-4, "first_token": 1e-3},
    "float16": {"frames": 0, "embeddings": 0.02, "first_token": 0.05},
    "bfloat16": {"frames": 0, "embeddings": 0.1, "first_token": 0.2},
}
_ROWS_AT_ONCE = 64  # that are compared


def perform(job: Job, folder: Path, kept: Path | None = None) -> list[Measured]:
    """Do a job once, on all its hosts.

    Args:
        folder: for files that are not needed for longer.
        kept: a folder for what it makes; None: it is not kept.
    """
    with TemporaryDirectory(dir=folder) as meeting:
        if kept is not None:
            kept.mkdir()
        return in_processes_of_their_own(job.hosts, measure, job, f"{meeting}/rendezvous", kept)


def max_difference(job: Job, made: Path, reference: Path) -> float | None:
    """Compare what a job made with the reference; None if they are not meant to be equal.

    Returns:
        The largest difference: of frames in levels, else as a share of the reference's largest value.

    Raises:
        AssertionError: apbv's differ by more than rounding, or are not as many.
    """
    if job.stage == "first_token" and job.hosts > 1:
        return None  # the method is approximate
    expected = np.load(reference / "0.npy", mmap_mode="r")
    scale = 1.0 if job.stage == "frames" else float(np.abs(expected).max())
    difference, seen = 0.0, np.zeros(len(expected), bool)
    for rank in range(job.hosts):
        values = np.load(made / f"{rank}.npy", mmap_mode="r")
        places = np.load(made / f"{rank}.places.npy")
        seen[places] = True
        if values.shape[1:] != expected.shape[1:]:
            raise AssertionError(f"{job.way} makes {job.stage} of other shapes: {values.shape}, {expected.shape}")
        for start in range(0, len(values), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            largest = np.abs(values[rows].astype(np.float64) - expected[places[rows]]).max() / scale
            difference = float(np.maximum(difference, largest))  # which keeps a NaN
    if not seen.all():
        raise AssertionError(f"{job.way} makes {seen.sum()} rows of {job.stage} where there are {len(seen)}")
    allowed = TOLERANCES[job.dtype][job.stage]
    if job.way == "apbv" and not difference <= allowed:
        raise AssertionError(f"{job.stage} of apbv on {job.hosts} hosts differ by {difference:.3g}, not {allowed}")
    return difference


def measure_jobs(jobs: list[Job], spec: ClipSpec, rounds: int, folder: Path, bar: tqdm) -> Iterator[dict]:
    """Compare all jobs with what they should make, time them in turn, and yield their figures."""
    samples: dict[Job, list[list[Measured]]] = {}
    differences: dict[Job, float | None] = {}
    with TemporaryDirectory(dir=folder) as scratch:
        for number, job in enumerate(jobs):
            reference = Path(scratch, f"reference-{job.stage}")
            if not reference.exists():
                way = "pyav" if job.stage == "frames" else "transformers"
                perform(replace(job, way=way, hosts=1, reader="pyav"), folder, reference)
            made = Path(scratch, str(number))
            try:
                samples[job] = [perform(job, folder, made)]
                differences[job] = max_difference(job, made, reference)
            except Exception as error:  # a library that does not fit raises nearly anything
                if job.way not in READERS:
                    raise
                samples.pop(job, None)
                reason = str(error).strip().partition("\n")[0]
                tqdm.write(f"note: {job.way} cannot be used here, and is left out: {reason}", file=sys.stderr)
            bar.update()
    for _ in range(rounds - 1):
        for job, measured in samples.items():
            measured.append(perform(job, folder))
            bar.update()
    for job, measured in samples.items():
        yield figures_of(job, spec, measured) | {"max_difference": differences[job]}


def figures_of(job: Job, spec: ClipSpec, samples: list[list[Measured]]) -> dict:
    """Summarise what each host measured, for each round."""
    slowest = [max(hosts, key=lambda host: host.seconds) for hosts in samples]
    seconds = [host.seconds for host in slowest]
    stages = {
        name: statistics.median(host.stage_seconds.get(name, 0.0) for host in slowest)
        for name in slowest[0].stage_seconds
    }
    cpu_seconds = [sum(host.cpu_seconds for host in hosts) for hosts in samples]
    peaks = [max(host.peak_memory_bytes for host in hosts) for hosts in samples]
    median = statistics.median(seconds)
    return {
        "benchmark": "video",
        **{name: getattr(job, name) for name in ("stage", "way", "hosts", "sampling", "pinned", "dtype")},
        "threads_per_host": job.threads,
        "reader": job.reader if job.way == "transformers" else None,
        "seconds": median,
        "cpu_seconds": statistics.median(cpu_seconds),
        "peak_memory_bytes": max(peaks),
        "memory_before_bytes": max(host.memory_before_bytes for hosts in samples for host in hosts),
        "stages_ms": {name: taken * 1e3 for name, taken in stages.items()},
        "overlap": median / max(stages.values()) if stages else None,
        "samples": {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_memory_bytes": peaks},
        "video": "generated" if spec.source is None else spec.source.name,
        "resolution": [spec.height, spec.width],
        "gop": spec.gop,
        "fps": spec.fps,
        "clip_frames": spec.num_frames,
        "clip_bytes": job.clip.stat().st_size,
        "num_frames": min(job.num_frames, spec.num_frames),
        "max_pixels": job.max_pixels,
        "num_visual_tokens": slowest[0].num_visual_tokens,
        "vision_tower": {"depth": job.vision_depth, "hidden": job.vision_hidden},
    }
