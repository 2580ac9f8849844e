"""Measure how long a video takes from its file to the first token, beside what others use.

    python benchmarks/video.py --preset readers --json video.jsonl
    python benchmarks/video.py --preset road --video film.mp4 --hosts 1 2 --plot video.png

The stages are its sampled frames in memory, the pixels made of them, the vision tower's embeddings, and the
logits of the first token; each is timed from the opening of the file. `apbv` goes the road of an engine's
requests, on one or several real hosts. `transformers` runs processor and model on the whole video at once. OpenCV,
decord2 and torchcodec, where they are installed, and PyAV's plain decoding read the frames only.

Every measurement has processes of its own, in which libraries are imported, the model is loaded and a tiny video
is read before the clock starts. Every round runs all ways in turn. The model has random weights and Qwen2.5-VL's
layout, with a vision tower of full depth but narrow. In the first round, what each way makes is compared with what
transformers makes of plainly decoded frames; where that of `apbv` differs, there are no figures.
"""

import argparse
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import numpy as np
import torch
from tqdm import tqdm

from apbv.hosts import HostError, HostGroup
from apbv.planning import parse_resolution
from apbv.stats import device_name

from support.arguments import DEFAULT_DTYPES, DTYPES, add_json_option, add_plot_option
from support.plots import import_pyplot, save
from support.records import made_by, write
from support.tables import markdown_table
from support.videos.clips import READERS, ClipSpec, make_clip
from support.videos.worker import ROADS, Job, Measured, find_version, in_processes_of_their_own, measure

STAGES = ("frames", "pixels", "embeddings", "first_token")
WAYS = (*ROADS, *READERS)
# The most that apbv's results may differ from the reference: levels of a frame's 0 .. 255, else a share of the
# largest value. The vision tower rounds differently where its windows are attended to together.
TOLERANCES = {
    "float32": {"frames": 0, "pixels": 1e-6, "embeddings": 1e-4, "first_token": 1e-3},
    "float16": {"frames": 0, "pixels": 1e-2, "embeddings": 0.02, "first_token": 0.05},
    "bfloat16": {"frames": 0, "pixels": 1e-2, "embeddings": 0.1, "first_token": 0.2},
}
_FILM = {"gop": [250], "max_pixels": 360 * 640}
PRESETS = {
    "readers": {"stages": ["frames"], "gop": [250], "sampling": ["sparse", "dense"]},
    "hosts": _FILM | {"stages": ["embeddings"], "ways": ["apbv"], "hosts": [1, 2], "pinned": True},
    "memory": _FILM | {"stages": ["embeddings"], "ways": list(ROADS), "frames": [32, 256], "rounds": 1},
    "road": _FILM | {"stages": list(STAGES)},
    "quick": {"stages": ["frames", "embeddings"], "resolution": ["96x192"], "gop": [12], "seconds": 4}
    | {"fps": 12, "frames": [8], "rounds": 1, "vision_depth": 2},
}
_BLOCK_BYTES = 2**24  # that are compared at a time


@dataclass(frozen=True)
class Run:
    """One way through one stage: what the clip is like, and what is measured."""

    spec: ClipSpec
    job: Job


def plan_cases(options: argparse.Namespace, reader: str, folder: Path) -> Iterator[Run]:
    """Make the clips, and yield for all that is to be read of each a run that stands for the others.

    Args:
        reader: the library that decodes for ``"transformers"``.

    Raises:
        ValueError: a resolution has no meaning, or a clip cannot be made.
    """
    warm_up = make_clip(ClipSpec(64, 128, 8, 16, 25), folder)
    for name in options.resolution:
        for gop in options.gop:
            length = round(options.seconds * options.fps)
            spec = ClipSpec(*parse_resolution(name), gop, length, options.fps, options.b_frames, options.video)
            clips = {"clip": make_clip(spec, folder), "warm_up": warm_up, "reader": reader}
            names = ("threads", "pinned", "vision_depth", "vision_hidden", "dtype")
            sizes = {name: getattr(options, name) for name in names}
            sizes["max_pixels"] = options.max_pixels or spec.height * spec.width
            job = Job("frames", "apbv", num_frames=1, sampling="sparse", hosts=1, **clips, **sizes)
            for count in options.frames:
                for sampling in options.sampling:
                    yield Run(spec, replace(job, num_frames=count, sampling=sampling))


def plan_runs(case: Run, options: argparse.Namespace, ways: list[str]) -> Iterator[Run]:
    """Yield the ways through every stage; of dense frames only the first, as questions are about spread ones.

    Args:
        ways: those that can be used here.
    """
    for stage in options.stages:
        if stage != "frames" and case.job.sampling == "dense":
            continue
        for way in ways:
            reads_only = way in READERS
            if (stage == "frames") != reads_only and way != "apbv":
                continue
            shares = way == "apbv" and stage in ("embeddings", "first_token")
            for hosts in options.hosts if shares else [1]:
                yield replace(case, job=replace(case.job, stage=stage, way=way, hosts=hosts))


def find_ways(wanted: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the ways that can be used here, and the versions of their libraries; says why others cannot.

    Raises:
        ValueError: none can.
    """
    versions, needed = {"av": version("av")}, ["opencv"] if "transformers" in wanted else []
    for library in dict.fromkeys([*needed, *(way for way in wanted if way in READERS)]):
        module, package = READERS[library].module, READERS[library].package
        try:
            [versions[package]] = in_processes_of_their_own(1, find_version, module, package)
        except Exception as error:  # importing a library that does not fit raises nearly anything
            leave_out(library, error)
    ways = [way for way in wanted if way in ROADS or READERS[way].package in versions]
    if not ways:
        raise ValueError("none of these ways can be used here")
    return ways, versions


def leave_out(way: str, error: Exception) -> None:
    """Say that a library is not measured, and why."""
    reason = str(error).strip().partition("\n")[0]
    tqdm.write(f"note: {way} cannot be used here, and is left out: {reason}", file=sys.stderr)


def perform(run: Run, folder: Path, kept: Path | None = None) -> list[Measured]:
    """Measure a run once, on all its hosts.

    Args:
        folder: for files that are not needed for longer.
        kept: a folder for what the run makes; None: it is not kept.
    """
    with TemporaryDirectory(dir=folder) as meeting:
        if kept is not None:
            kept.mkdir()
        rendezvous = f"{meeting}/rendezvous"
        return in_processes_of_their_own(run.job.hosts, measure, run.job, rendezvous, kept)


def reference_of(run: Run) -> Run:
    """Return the run that makes what this one should."""
    way = "pyav" if run.job.stage == "frames" else "transformers"
    return replace(run, job=replace(run.job, way=way, hosts=1, reader="pyav"))


def max_difference(run: Run, made: Path, reference: Path) -> float | None:
    """Compare what a run made with the reference; None where they are not meant to be equal.

    Returns:
        The largest difference: of frames in levels, else as a share of the reference's largest value.

    Raises:
        AssertionError: apbv's differ by more than rounding, or are not as many.
    """
    job = run.job
    if job.stage == "first_token" and job.hosts > 1:
        return None  # the method is approximate
    expected = np.load(reference / "0.npy", mmap_mode="r")
    scale = 1.0 if job.stage == "frames" else max(float(np.abs(rows).max()) for _, rows in _blocks(expected))
    difference, seen = 0.0, np.zeros(len(expected), bool)
    for rank in range(job.hosts):
        values = np.load(made / f"{rank}.npy", mmap_mode="r")
        places = np.load(made / f"{rank}.places.npy")
        seen[places] = True
        for start, rows in _blocks(values):
            wanted = expected[places[start : start + len(rows)]]
            if wanted.shape != rows.shape:
                raise AssertionError(f"{job.way} makes {job.stage} of other shapes: {rows.shape}, {wanted.shape}")
            largest = np.abs(rows.astype(np.float64) - wanted).max() / scale
            difference = float(np.maximum(difference, largest))  # which keeps a NaN
    if not seen.all():
        raise AssertionError(f"{job.way} makes {seen.sum()} rows of {job.stage} where there are {len(seen)}")
    allowed = TOLERANCES[job.dtype][job.stage]
    if job.way == "apbv" and not difference <= allowed:
        raise AssertionError(f"{job.stage} of apbv on {job.hosts} hosts differ by {difference:.3g}, not {allowed}")
    return difference


def _blocks(rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    step = max(1, _BLOCK_BYTES * len(rows) // max(rows.nbytes, 1))
    for start in range(0, len(rows), step):
        yield start, np.asarray(rows[start : start + step])


def measure_case(runs: list[Run], rounds: int, folder: Path, bar: tqdm) -> Iterator[dict]:
    """Compare all runs of a case with what they should make, time them in turn, and yield their figures."""
    samples: dict[Run, list[list[Measured]]] = defaultdict(list)
    differences: dict[Run, float | None] = {}
    with TemporaryDirectory(dir=folder) as scratch:
        references: dict[Run, Path] = {}
        for number, run in enumerate(runs):
            reference = reference_of(run)
            if reference not in references:
                references[reference] = Path(scratch, f"reference-{len(references)}")
                perform(reference, folder, references[reference])
            with TemporaryDirectory(dir=scratch) as made:
                try:
                    samples[run].append(perform(run, folder, Path(made, str(number))))
                    differences[run] = max_difference(run, Path(made, str(number)), references[reference])
                except Exception as error:
                    if run.job.way not in READERS:
                        raise
                    samples.pop(run, None)
                    leave_out(run.job.way, error)
            bar.update()
    for _ in range(rounds - 1):
        for run, measured in samples.items():
            measured.append(perform(run, folder))
            bar.update()
    for run, measured in samples.items():
        yield figures_of(run, measured) | {"max_difference": differences[run]}


def figures_of(run: Run, samples: list[list[Measured]]) -> dict:
    """Summarise what was measured of one way.

    Args:
        samples: what each host measured, for each round.
    """
    job, spec = run.job, run.spec
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
        "stage": job.stage,
        "way": job.way,
        "reader": job.reader if job.way == "transformers" else None,
        "hosts": job.hosts,
        "simulated": False,
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
        "b_frames": spec.b_frames,
        "clip_frames": spec.num_frames,
        "clip_bytes": job.clip.stat().st_size,
        "fps": spec.fps,
        "num_frames": min(job.num_frames, spec.num_frames),
        "sampling": job.sampling,
        "threads": job.threads,
        "pinned": job.pinned,
        "max_pixels": job.max_pixels,
        "num_visual_tokens": slowest[0].num_visual_tokens,
        "vision_tower": {"depth": job.vision_depth, "hidden": job.vision_hidden},
        "dtype": job.dtype,
    }


def run(options: argparse.Namespace) -> None:
    """Measure, and print and write the figures."""
    with TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        ways, versions = find_ways(options.ways)
        reader = "opencv" if READERS["opencv"].package in versions else "pyav"
        plans = [list(plan_runs(case, options, ways)) for case in plan_cases(options, reader, folder)]
        records = []
        with tqdm(total=options.rounds * sum(map(len, plans)), unit="run", disable=None) as bar:
            for runs in plans:
                records += measure_case(runs, options.rounds, Path(temporary), bar)
    if not records:
        raise ValueError("none of these ways goes through these stages")
    made = made_by("video.py")
    made["versions"] |= versions
    device = device_name(HostGroup.single().device)
    write(options, [r | {"device": device, **made} for r in records], table, plot)


def name_of(record: dict) -> str:
    """Return what a record's way is called."""
    return f"{record['way']}, {record['hosts']} hosts" if record["hosts"] > 1 else record["way"]


def clip_of(record: dict) -> str:
    """Return what was read of which clip."""
    height, width = record["resolution"]
    frames = f"{record['num_frames']} {record['sampling']} of {record['clip_frames']}"
    return f"{height}x{width}, gop {record['gop']}, {frames}"


def table(records: list[dict]) -> str:
    """Format records as a Markdown table."""
    header = ["frames", "stage", "way", "s", "CPU s", "peak MiB", "before MiB", "overlap", "difference"]
    rows = [
        [
            clip_of(record),
            record["stage"],
            name_of(record),
            f"{record['seconds']:.2f}",
            f"{record['cpu_seconds']:.2f}",
            record["peak_memory_bytes"] >> 20,
            record["memory_before_bytes"] >> 20,
            "" if record["overlap"] is None else f"{record['overlap']:.2f}",
            "" if record["max_difference"] is None else f"{record['max_difference']:.2g}",
        ]
        for record in records
    ]
    return markdown_table(header, rows)


def plot(records: list[dict], path: Path) -> None:
    """Draw a row of axes for each clip and a column for each stage, with a bar for each way."""
    clips, stages = ([*dict.fromkeys(map(key, records))] for key in (clip_of, lambda record: record["stage"]))
    size = (4 * len(stages), 1 + 1.5 * len(clips))
    figure, axes = import_pyplot().subplots(len(clips), len(stages), figsize=size, squeeze=False)
    for row, clip in zip(axes, clips, strict=True):
        for axis, stage in zip(row, stages, strict=True):
            shown = [record for record in records if (clip_of(record), record["stage"]) == (clip, stage)]
            axis.barh([name_of(record) for record in shown], [record["seconds"] for record in shown])
            axis.invert_yaxis()
            axis.set(title=f"{stage}\n{clip}", xlabel="seconds")
            axis.title.set_fontsize(8)
    figure.tight_layout()
    save(figure, path)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), help="other options override it")
    clip = parser.add_argument_group("clips")
    clip.add_argument("--video", type=Path, metavar="FILE", help="scaled and repeated; default: a drawn one")
    clip.add_argument("--resolution", nargs="+", default=["720p"], help="HxW, or such as 720p")
    clip.add_argument("--gop", type=int, nargs="+", default=[30, 250], help="frames from keyframe to keyframe")
    clip.add_argument("--b-frames", type=int, default=3, help="in a row, at most")
    clip.add_argument("--seconds", type=float, default=180)
    clip.add_argument("--fps", type=int, default=25)
    clip.add_argument("--folder", type=Path, help="where clips are kept (default: a temporary folder)")
    what = parser.add_argument_group("what is measured")
    what.add_argument("--frames", type=int, nargs="+", default=[64], help="read of a clip")
    what.add_argument("--sampling", nargs="+", choices=("sparse", "dense"), default=["sparse"])
    what.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    what.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    what.add_argument("--hosts", type=int, nargs="+", default=[1], help="processes that share the work, for apbv")
    what.add_argument("--threads", type=int, default=1, help="of each host")
    what.add_argument(
        "--pinned", action=argparse.BooleanOptionalAction, default=False, help="give each host so many cores"
    )
    what.add_argument("--max-pixels", type=int, help="of a frame that the tower sees (default: all)")
    what.add_argument("--vision-depth", type=int, default=32)
    what.add_argument("--vision-hidden", type=int, default=64)
    what.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU")
    what.add_argument("--rounds", type=int, default=3)
    add_json_option(parser)
    add_plot_option(parser)
    preset = parser.parse_known_args(arguments)[0].preset
    parser.set_defaults(**PRESETS.get(preset, {}))
    options = parser.parse_args(arguments)
    counts = [*options.frames, *options.hosts, options.threads, options.rounds, options.vision_depth]
    if min(counts) < 1:
        parser.error("--frames, --hosts, --threads, --rounds and --vision-depth must be at least 1")
    if options.pinned and not hasattr(os, "sched_setaffinity"):
        parser.error("--pinned: this system does not let a process choose its cores")
    options.dtype = options.dtype or DEFAULT_DTYPES["cuda" if torch.cuda.is_available() else "cpu"]
    return options


def main(arguments: list[str] | None = None) -> int:
    try:
        run(parse_arguments(arguments))
    except (ValueError, AssertionError, HostError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
