"""Measure the time from a video file to the first token, compared with other libraries.

    python benchmarks/video.py --preset readers --json video.jsonl
    python benchmarks/video.py --preset road --video film.mp4 --hosts 1 2

The stages are its sampled frames in memory, the vision tower's embeddings, and the logits of the
first token; each is timed from the opening of the file. `apbv` runs an engine's request pipeline on
one or several real hosts. `transformers` runs processor and model on the whole video at once.
OpenCV, decord2 and torchcodec, if installed, and PyAV's plain decoding read only the frames.

Every measurement has its own processes, in which libraries are imported, the model is loaded and a
tiny video is read before the clock starts. Every round interleaves all variants. The model has
random weights and Qwen2.5-VL's layout, with a vision tower of full depth but narrow. In the first
round, each variant's output is compared with that of transformers on plainly decoded frames, if one
host made it; if `apbv`'s differs, no results are reported.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import distributions
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)
from apbv.errors import HostError

# isort: split
import numpy as np
import torch
from tqdm import tqdm

from apbv.planning import parse_resolution

from support.arguments import DEFAULT_DTYPES, parser_of, presets_of
from support.records import columns_of, fields_of, report
from support.videos.clips import PACKAGES, READERS, ClipSpec, write_clip
from support.videos.worker import ROADS, STAGES, Job, Measured, in_processes_of_their_own, measure

WAYS = (*ROADS, *READERS)
PRESETS = presets_of("video")


def perform(job: Job, folder: Path, kept: Path | None = None) -> list[Measured]:
    """Do a job once, on all its hosts.

    Args:
        folder: for files that are not needed for longer.
        kept: the file for what it makes; None: it is not kept.
    """
    with TemporaryDirectory(dir=folder) as meeting:
        return in_processes_of_their_own(job.hosts, measure, job, f"{meeting}/rendezvous", kept)


def max_difference(job: Job, made: Path, reference: Path) -> float:
    """Compare what a job made with the reference.

    Returns:
        The largest difference: of frames in levels, else as a share of the reference's largest
        value.

    Raises:
        AssertionError: apbv's differ by more than rounding, or are not as many.
    """
    values = np.load(made, mmap_mode="r")
    expected = np.load(reference, mmap_mode="r")
    if values.shape != expected.shape:
        raise AssertionError(
            f"{job.way} makes {job.stage} of other shapes: {values.shape}, {expected.shape}"
        )
    scale = 1.0 if job.stage == "frames" else float(np.abs(expected).max())
    # Row by row, because all of them in fp64 would take too much memory.
    differences = []
    for row, expected_row in zip(values, expected, strict=True):
        differences.append(np.abs(row.astype(np.float64) - expected_row).max())
    # NumPy's maximum is NaN, if one of them is.
    difference = float(np.max(differences)) / scale
    allowed = presets_of("video_tolerances")[job.settings.dtype][job.stage]
    if job.way == "apbv" and not difference <= allowed:
        raise AssertionError(f"{job.stage} of apbv differ by {difference:.3g}, not {allowed}")
    return difference


def measure_jobs(
    jobs: list[Job], spec: ClipSpec, rounds: int, folder: Path, bar: tqdm
) -> Iterator[dict]:
    """Compare all jobs with what they should make, time them in turn, and yield their figures."""
    samples: dict[Job, list[list[Measured]]] = {}
    differences: dict[Job, float | None] = {}
    # The first round, whose outputs are compared.
    with TemporaryDirectory(dir=folder) as scratch:
        for number, job in enumerate(jobs):
            reference = Path(scratch, f"reference-{job.stage}.npy")
            if not reference.exists():
                way = "pyav" if job.stage == "frames" else "transformers"
                perform(replace(job, way=way, hosts=1, reader="pyav"), folder, reference)
            made = Path(scratch, f"{number}.npy") if job.hosts == 1 else None
            try:
                samples[job] = [perform(job, folder, made)]
                differences[job] = None
                if made is not None:
                    differences[job] = max_difference(job, made, reference)
            except Exception as error:
                # A library that does not fit raises nearly anything.
                if job.way not in READERS:
                    raise
                samples.pop(job, None)
                reason = str(error).strip().partition("\n")[0]
                tqdm.write(
                    f"note: {job.way} cannot be used here, and is left out: {reason}",
                    file=sys.stderr,
                )
            bar.update()
    # The other rounds.
    for _ in range(rounds - 1):
        for job, measured in samples.items():
            measured.append(perform(job, folder))
            bar.update()
    for job, measured in samples.items():
        yield {**figures_of(job, spec, measured), "max_difference": differences[job]}


def figures_of(job: Job, spec: ClipSpec, samples: list[list[Measured]]) -> dict:
    """Summarise what was measured.

    Args:
        samples: the measurements, by round and by host.
    """
    # By round: the slowest host's times, all hosts' CPU time, and the largest memory of a host.
    slowest = []
    cpu_seconds = []
    peaks = []
    for hosts in samples:
        slowest.append(max(hosts, key=attrgetter("seconds")))
        cpu_seconds.append(sum(host.cpu_seconds for host in hosts))
        peaks.append(max(host.peak_memory_bytes for host in hosts))
    seconds = [host.seconds for host in slowest]
    stages_ms = {}
    for name in slowest[0].stage_seconds:
        stage_seconds = [host.stage_seconds.get(name, 0.0) for host in slowest]
        stages_ms[name] = statistics.median(stage_seconds) * 1e3
    return {
        "benchmark": "video",
        **fields_of(job, "stage", "way", "hosts", "sampling"),
        **fields_of(job.settings, "pinned", "dtype", "gop", "fps", "max_pixels"),
        "threads_per_host": job.settings.threads,
        "reader": job.reader if job.way == "transformers" else None,
        "seconds": statistics.median(seconds),
        "cpu_seconds": statistics.median(cpu_seconds),
        "peak_memory_bytes": max(peaks),
        "stages_ms": stages_ms,
        "samples": {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_memory_bytes": peaks},
        "video": "generated" if spec.source is None else spec.source.name,
        "resolution": [spec.height, spec.width],
        "clip_frames": spec.num_frames,
        "clip_bytes": job.settings.clip.stat().st_size,
        "num_frames": min(job.num_frames, spec.num_frames),
        "num_visual_tokens": slowest[0].num_visual_tokens,
        "vision_tower": {"depth": job.settings.vision_depth, "hidden": job.settings.vision_hidden},
    }


def plan_jobs(options: argparse.Namespace, ways: list[str]) -> Iterator[list[Job]]:
    """Yield the jobs of every choice of frames: all ways through all stages.

    Dense frames go through the first stage only, because questions are about spread ones.
    """
    reader = "opencv" if "opencv" in ways else "pyav"
    for num_frames, sampling in itertools.product(options.frames, options.sampling):
        jobs = []
        for stage, way in itertools.product(options.stages, ways):
            is_reading = stage == "frames"
            if not is_reading and sampling != "sparse":
                continue
            # Other libraries read frames, and transformers does what follows.
            if way != "apbv" and (way in READERS) != is_reading:
                continue
            # Hosts share what follows the reading.
            numbers_of_hosts = [1] if is_reading or way != "apbv" else options.hosts
            for num_hosts in numbers_of_hosts:
                jobs.append(Job(stage, way, num_hosts, num_frames, sampling, reader, options))
        yield jobs


def records(options: argparse.Namespace) -> Iterator[dict]:
    """Make the clip, and yield the figures of all ways that can be used here."""
    # The ways whose packages are installed.
    packages = {way: PACKAGES.get(way, way) for way in options.ways if way in READERS}
    versions = {}
    for package in distributions():
        if package.name in packages.values():
            versions[package.name] = package.version
    ways = []
    for way in options.ways:
        if way not in packages or packages[way] in versions:
            ways.append(way)
    missing = set(packages.values()) - versions.keys()
    if missing:
        names = ", ".join(sorted(missing))
        tqdm.write(f"note: not installed and skipped: {names}", file=sys.stderr)

    with TemporaryDirectory() as temporary:
        # The clips.
        folder = Path(temporary)
        height, width = parse_resolution(options.resolution)
        num_frames = round(options.seconds * options.fps)
        spec = ClipSpec(height, width, options.gop, num_frames, options.fps, options.video)
        options.clip = write_clip(spec, folder / "clip.mp4")
        options.warm_up = write_clip(ClipSpec(64, 128, 8, 16, 25), folder / "warm-up.mp4")
        options.max_pixels = options.max_pixels or spec.height * spec.width
        # The measurements.
        plans = list(plan_jobs(options, ways))
        num_jobs = sum(len(jobs) for jobs in plans)
        with tqdm(total=options.rounds * num_jobs, unit="run", disable=None) as bar:
            for jobs in plans:
                for record in measure_jobs(jobs, spec, options.rounds, folder, bar):
                    yield {**record, "libraries": versions}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("video", __doc__, {"preset": PRESETS, "stages": STAGES, "ways": WAYS})
    # A preset's values are defaults, which other options change.
    known_options, _ = parser.parse_known_args(arguments)
    parser.set_defaults(**PRESETS.get(known_options.preset, {}))
    options = parser.parse_args(arguments)
    if options.dtype is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        options.dtype = DEFAULT_DTYPES[device]
    return options


def main(arguments: list[str] | None = None) -> int:
    try:
        options = parse_arguments(arguments)
        rows = report(options, records(options), columns_of("video"))
    except (ValueError, AssertionError, HostError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
