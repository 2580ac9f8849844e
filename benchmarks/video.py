"""Measure the time from a video file to the first token, compared with other libraries.

    python benchmarks/video.py --preset readers --json video.jsonl
    python benchmarks/video.py --preset road --video film.mp4 --hosts 1 2

The stages are its sampled frames in memory, the vision tower's embeddings, and the logits of the first token; each
is timed from the opening of the file. `apbv` runs an engine's request pipeline on one or several real hosts.
`transformers` runs processor and model on the whole video at once. OpenCV, decord2 and torchcodec, if installed,
and PyAV's plain decoding read only the frames.

Every measurement has its own processes, in which libraries are imported, the model is loaded and a tiny video is
read before the clock starts. Every round interleaves all variants. The model has random weights and Qwen2.5-VL's
layout, with a vision tower of full depth but narrow. In the first round, each variant's output is compared with
that of transformers on plainly decoded frames; if `apbv`'s differs, no results are reported.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from tqdm import tqdm

from apbv.hosts import HostError
from apbv.planning import parse_resolution

from support.arguments import COUNT, DEFAULT_DTYPES, add_shared
from support.records import report
from support.videos.clips import PACKAGES, READERS, ClipSpec, make_clip
from support.videos.comparing import measure_jobs
from support.videos.worker import ROADS, STAGES, Job

WAYS = (*ROADS, *READERS)
_FILM = {"max_pixels": 360 * 640}
PRESETS = {
    "readers": {"stages": ["frames"], "sampling": ["sparse", "dense"]},
    "hosts": _FILM | {"stages": ["embeddings"], "ways": ["apbv"], "hosts": [1, 2], "pinned": True},
    "memory": _FILM | {"stages": ["embeddings"], "ways": list(ROADS), "frames": [32, 256], "rounds": 1},
    "road": _FILM | {"stages": list(STAGES)},
    "quick": {"stages": ["frames", "embeddings"], "resolution": "96x192", "gop": 12, "seconds": 4}
    | {"fps": 12, "frames": [8], "rounds": 1, "vision_depth": 2},
}


def plan_jobs(options: argparse.Namespace, ways: list[str], **same) -> Iterator[list[Job]]:
    """Yield the ways through every stage, for every choice of frames; of dense ones only through the first stage.

    Questions are about spread frames.

    Args:
        same: settings that all jobs have.
    """
    for num_frames, sampling in itertools.product(options.frames, options.sampling):
        jobs = []
        for stage, way in itertools.product(options.stages, ways):
            is_read = (stage == "frames") == (way in READERS) or way == "apbv"
            if is_read and (stage == "frames" or sampling == "sparse"):
                shares = way == "apbv" and stage in ("embeddings", "first_token")
                chosen = {"stage": stage, "way": way, "num_frames": num_frames, "sampling": sampling, **same}
                jobs += [Job(hosts=hosts, **chosen) for hosts in (options.hosts if shares else [1])]
        yield jobs


def records(options: argparse.Namespace) -> Iterator[dict]:
    """Make the clip, and yield the figures of all ways that can be used here."""
    packages = {way: PACKAGES.get(way, way) for way in options.ways if way in READERS}
    versions = {each.name: each.version for each in distributions() if each.name in packages.values()}
    ways = [way for way in options.ways if packages.get(way, "") in ("", *versions)]
    if missing := set(packages.values()) - versions.keys():
        tqdm.write(f"note: not installed and skipped: {', '.join(sorted(missing))}", file=sys.stderr)
    with TemporaryDirectory() as temporary:
        folder, length = options.folder or Path(temporary), round(options.seconds * options.fps)
        spec = ClipSpec(*parse_resolution(options.resolution), options.gop, length, options.fps, options.video)
        names = ("threads", "pinned", "vision_depth", "vision_hidden", "dtype")
        same = {name: getattr(options, name) for name in names}
        same |= {"clip": make_clip(spec, folder), "warm_up": make_clip(ClipSpec(64, 128, 8, 16, 25), folder)}
        same["reader"] = "opencv" if "opencv" in ways else "pyav"
        same["max_pixels"] = options.max_pixels or spec.height * spec.width
        plans = list(plan_jobs(options, ways, **same))
        with tqdm(total=options.rounds * sum(map(len, plans)), unit="run", disable=None) as bar:
            for jobs in plans:
                for record in measure_jobs(jobs, spec, options.rounds, Path(temporary), bar):
                    yield {**record, "libraries": versions}


COLUMNS = {
    "frames": "{resolution[0]}x{resolution[1]}, gop {gop}, {num_frames} {sampling} of {clip_frames}",
    "stage": "{stage}",
    "way": lambda record: f"{record['way']}, {record['hosts']} hosts" if record["hosts"] > 1 else record["way"],
    "s": "{seconds:.2f}",
    "CPU s": "{cpu_seconds:.2f}",
    "peak MiB": lambda record: record["peak_memory_bytes"] >> 20,
    "before MiB": lambda record: record["memory_before_bytes"] >> 20,
    "overlap": "{overlap:.2f}",
    "difference": "{max_difference:.2g}",
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, help="set of options; other options override it")
    clip = parser.add_argument_group("the clip")
    clip.add_argument("--video", type=Path, metavar="FILE", help="clip to scale and repeat (default: generated)")
    clip.add_argument("--resolution", default="720p", help="HxW, or such as 720p (default)")
    clip.add_argument("--gop", type=COUNT, default=250, help="keyframe interval in frames (default 250)")
    clip.add_argument("--seconds", type=float, default=180)
    clip.add_argument("--fps", type=COUNT, default=25)
    clip.add_argument("--folder", type=Path, help="directory for the clip (default: temporary)")
    what = parser.add_argument_group("measurements")
    what.add_argument("--frames", type=COUNT, nargs="+", default=[64], help="frames to sample (default 64)")
    what.add_argument("--sampling", nargs="+", choices=("sparse", "dense"), default=["sparse"])
    what.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    what.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    what.add_argument("--hosts", type=COUNT, nargs="+", default=[1], help="number of hosts (default 1)")
    what.add_argument("--threads", type=COUNT, default=1, help="threads per host (default 1)")
    what.add_argument("--max-pixels", type=COUNT, help="per frame, for the vision tower (default: all)")
    what.add_argument("--vision-depth", type=COUNT, default=32)
    what.add_argument("--vision-hidden", type=COUNT, default=64)
    add_shared(what, "pinned", "dtype", "json", rounds=3)
    parser.set_defaults(**PRESETS.get(parser.parse_known_args(arguments)[0].preset, {}))
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or DEFAULT_DTYPES["cuda" if torch.cuda.is_available() else "cpu"]
    return options


def main(arguments: list[str] | None = None) -> int:
    try:
        options = parse_arguments(arguments)
        rows = report(options, records(options), COLUMNS)
    except (ValueError, AssertionError, HostError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(not rows)


if __name__ == "__main__":
    sys.exit(main())
