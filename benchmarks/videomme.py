"""Measure accuracy on Video-MME: multiple choice about short and long videos, with or without subtitles.

    python benchmarks/videomme.py --model Qwen/Qwen2.5-VL-7B-Instruct --questions test.parquet --videos data
    torchrun --nproc-per-node 8 benchmarks/videomme.py --model ... --questions ... --subtitles subtitle

The questions (Fu et al., *Video-MME*) come as the Parquet file of the data set's page, which needs pyarrow (pip
install -e ".[eval]"), or as JSON of that form or of the form of the official scripts. A video is DIR/VIDEOID.mp4.
Of the subtitles, DIR/VIDEOID.srt, those that are shown with a sampled frame are part of the prompt. The overall
figure is the official one: answers without a letter are left out there, and are wrong everywhere else.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from apbv import Engine
from apbv.input.video import sample_fps, sample_uniform

from support.evaluation.answers import first_of_four
from support.evaluation.command import Benchmark
from support.evaluation.prompting import fill, request_of
from support.evaluation.samples import Row, Sample, read_json, rows_of
from support.evaluation.scoring import ALL, Score
from support.evaluation.subtitles import read_srt, shown_at

TEMPLATE = """{subtitles}Select the best answer to the following multiple-choice question based on the video. \
Respond with only the letter (A, B, C, or D) of the correct option.
{question}
{options}
The best answer is:"""
LISTED = "This video's subtitles are listed below:\n{}\n"
ENDINGS = (".mp4", ".MP4", ".mkv", ".webm")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--questions FILE``, ``--videos DIR`` and ``--subtitles DIR``."""
    parser.add_argument("--questions", type=Path, metavar="FILE", help="the questions: .parquet, .json or .jsonl")
    parser.add_argument(
        "--videos", type=Path, metavar="DIR", help="the videos (default: data beside the questions)"
    )
    parser.add_argument("--subtitles", type=Path, metavar="DIR", help="the subtitles (default: go without)")


def read(options: argparse.Namespace) -> list[Sample]:
    """Read Video-MME's questions: a row for each, or an object for each video with a list of them.

    Raises:
        ValueError: the file cannot be read, or has another form.
    """
    if options.questions is None:
        raise ValueError("--questions is required")
    if options.subtitles is not None and not options.subtitles.is_dir():
        raise ValueError(f"--subtitles {options.subtitles} is not a directory")
    path = options.questions
    entries = read_parquet(path) if path.suffix == ".parquet" else read_json(path)
    videos = options.videos or path.parent / "data"
    return [
        _sample(question, row, videos, options.subtitles)
        for row in rows_of(path, entries)
        for question in _questions_of(row)
    ]


def read_parquet(path: Path) -> list[dict]:
    """Read a Parquet file.

    Raises:
        ValueError: pyarrow is not installed, or the file cannot be read.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise ValueError(f'{path} needs pyarrow: pip install -e ".[eval]"') from error
    try:
        return read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def _questions_of(row: Row) -> list[Row]:
    if "questions" not in row:
        return [row]
    asked = row.values["questions"]
    if not isinstance(asked, list):
        raise row.error("'questions' must be a list")
    return [Row(f"{row.place}, part {number}", each) for number, each in enumerate(asked, start=1)]


def _sample(asked: Row, about: Row, videos: Path, subtitles: Path | None) -> Sample:
    """Make a sample.

    Args:
        asked: the fields of the question.
        about: those of its video, which may be the same.
    """
    url = about.values.get("url")
    from_url = parse_qs(urlsplit(str(url)).query).get("v", [None])[0] if url else None
    name = about.text("videoID", default=from_url or about.text("video_id"))
    choices = asked.options("options", "choices")
    places = [videos / f"{name}{ending}" for ending in ENDINGS]
    lines = None if subtitles is None else subtitles / f"{name}.srt"
    return Sample(
        key=asked.text("question_id"),
        question=asked.text("question"),
        answer=asked.letter("answer", choices) if "answer" in asked else None,
        options=choices,
        videos=(next((path for path in places if path.is_file()), places[0]),),
        groups={
            "duration": about.text("duration", "duration_category"),
            "domain": about.text("domain", "video_category"),
            "sub_category": about.text("sub_category", "video_sub_category", "video_subcategory"),
            "task_type": asked.text("task_type"),
        },
        subtitles=lines if lines is not None and lines.is_file() else None,  # a sixth of the videos have none
    )


def request(sample: Sample, template: str, options: argparse.Namespace, engine: Engine) -> Mapping[str, Any]:
    """Return the prompt, with the subtitles that are shown with the frames that the engine will sample."""
    listed = ""
    if sample.subtitles is not None:
        info = engine.videos.probe(sample.videos[0])
        most = options.frames or engine.num_frames
        frames = (
            sample_uniform(info, most) if options.fps is None else sample_fps(info, options.fps, max_frames=most)
        )
        lines = shown_at(read_srt(sample.subtitles), info.timestamps[frames].tolist())
        listed = LISTED.format("\n".join(lines)) if lines else ""
    return request_of(sample, fill(template, sample, listed))


def overall(score: Score) -> float | None:
    """Return the share of right answers among those that name an option, as the official script does."""
    right, total = score.groups[ALL]
    answered = total - score.unanswered
    return right / answered if answered else None


BENCHMARK = Benchmark(
    "videomme",
    __doc__.splitlines()[0],
    add_options,
    read,
    template=TEMPLATE,
    parse=first_of_four,
    max_new_tokens=16,
    request=request,
    overall=overall,
)
parse_arguments, main = BENCHMARK.parse_arguments, BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
