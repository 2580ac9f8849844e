"""Measure accuracy on Video-MME: multiple choice about videos, with or without subtitles.

    python benchmarks/videomme.py --model Qwen/Qwen2.5-VL-7B-Instruct --questions test.parquet \
        --videos data
    torchrun --nproc-per-node 8 benchmarks/videomme.py --model ... --questions ... \
        --subtitles subtitle

The questions (Fu et al., *Video-MME*) come as the Parquet file of the data set's page, which needs
pyarrow (pip install -e ".[eval]"), or as JSON of that form. A video is DIR/VIDEOID.mp4. The prompt
has those subtitles (DIR/VIDEOID.srt) that are shown with a sampled frame. The overall score is the
official one, which excludes answers without a letter; everywhere else they count as wrong.
"""

import argparse
import re
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)
from apbv.errors import InvalidRequestError

# isort: split
from apbv import Engine
from apbv.compat.versions import how_to_install
from apbv.input.media.video import sample_fps, sample_uniform

from support.evaluation.answers import first_of_four
from support.evaluation.command import Benchmark
from support.evaluation.samples import (
    Sample,
    Subtitle,
    fill,
    made_of,
    option_lettered,
    options_of,
    read_json,
    request_of,
    text_of,
)
from support.evaluation.scoring import ALL, Score

TEMPLATE = """{subtitles}Select the best answer to the following multiple-choice question based on \
the video. \
Respond with only the letter (A, B, C, or D) of the correct option.
{question}
{options}
The best answer is:"""
LISTED = "This video's subtitles are listed below:\n{}\n"
ENDINGS = (".mp4", ".MP4", ".mkv", ".webm")
_TIMES = re.compile(r"(\d+):(\d\d):(\d\d)[,.](\d{1,3})\s*-->\s*(\d+):(\d\d):(\d\d)[,.](\d{1,3})")
_TAG = re.compile(r"</?[a-zA-Z][^>]*>|\{\\[^}]*\}")


def read(options: argparse.Namespace) -> list[Sample]:
    """Read Video-MME's questions.

    Raises:
        InvalidRequestError: the file cannot be read, or has another form.
    """
    if options.subtitles is not None and not options.subtitles.is_dir():
        raise InvalidRequestError(f"--subtitles {options.subtitles} is not a directory")
    path = options.questions
    entries = read_parquet(path) if path.suffix == ".parquet" else read_json(path)
    videos = options.videos or path.parent / "data"
    return made_of(path, entries, partial(_sample, videos, options.subtitles))


def read_parquet(path: Path) -> list[dict]:
    """Read a Parquet file.

    Raises:
        InvalidRequestError: pyarrow is not installed, or the file cannot be read.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise InvalidRequestError(f"{path} needs pyarrow: {how_to_install('eval')}") from error
    try:
        return read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise InvalidRequestError(f"cannot read {path}: {error}") from error


def _sample(videos: Path, subtitles: Path | None, _, row: dict) -> Sample:
    name = row["videoID"]
    choices = options_of(row["options"])
    right = row.get("answer")
    places = [videos / f"{name}{ending}" for ending in ENDINGS]
    video = next((path for path in places if path.is_file()), places[0])
    # A sixth of the videos have no subtitles.
    subtitle_file = None
    if subtitles is not None and (subtitles / f"{name}.srt").is_file():
        subtitle_file = subtitles / f"{name}.srt"
    return Sample(
        key=text_of(row["question_id"]),
        question=text_of(row["question"]),
        answer=None if right is None else option_lettered(choices, right),
        options=choices,
        videos=(video,),
        groups={
            "duration": text_of(row["duration"]),
            "domain": text_of(row["domain"]),
            "sub_category": text_of(row["sub_category"]),
            "task_type": text_of(row["task_type"]),
        },
        subtitles=subtitle_file,
    )


def read_srt(path: Path) -> list[Subtitle]:
    """Read a SubRip file, without its markup; in the order of the file.

    Raises:
        InvalidRequestError: the file cannot be read, or has text but no times.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"cannot read the subtitles {path}: {error}") from error
    subtitles = []
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n").strip()):
        subtitle = _parsed(block.split("\n"))
        if subtitle is not None and subtitle.text:
            subtitles.append(subtitle)
    if text.strip() and not subtitles:
        raise InvalidRequestError(f"{path} holds no subtitles")
    return subtitles


def _parsed(lines: list[str]) -> Subtitle | None:
    """Parse the lines of a subtitle: a number, which may be missing, times, and the text.

    None: there are no times.
    """
    for place, line in enumerate(lines[:2]):
        match = _TIMES.match(line.strip())
        if match:
            times = [int(number) for number in match.groups()]
            start = _seconds(*times[:4])
            end = _seconds(*times[4:])
            text = _TAG.sub("", " ".join(lines[place + 1 :]))
            return Subtitle(start, end, " ".join(text.split()))
    return None


def _seconds(hours: int, minutes: int, seconds: int, milliseconds: int) -> float:
    return hours * 3600 + minutes * 60 + seconds + milliseconds / 1000


def shown_at(subtitles: Sequence[Subtitle], times: Sequence[float]) -> list[str]:
    """Return the texts that are shown at any of the times, each once, in order."""
    times = sorted(times)
    texts = []
    for subtitle in subtitles:
        # The first time that is not before the subtitle.
        first = bisect_right(times, subtitle.start - 1e-9)
        is_shown = first < len(times) and times[first] < subtitle.end
        is_repeated = bool(texts) and texts[-1] == subtitle.text
        if is_shown and not is_repeated:
            texts.append(subtitle.text)
    return texts


def request(
    sample: Sample, template: str, options: argparse.Namespace, engine: Engine
) -> Mapping[str, Any]:
    """Return the prompt, with the subtitles of the frames that the engine will sample."""
    listed = ""
    if sample.subtitles is not None:
        info = engine.videos.probe(sample.videos[0])
        most = options.frames or engine.num_frames
        if options.fps:
            frames = sample_fps(info, options.fps, max_frames=most)
        else:
            frames = sample_uniform(info, most)
        texts = shown_at(read_srt(sample.subtitles), info.timestamps[frames].tolist())
        if texts:
            listed = LISTED.format("\n".join(texts))
    return request_of(sample, fill(template, sample, listed))


def overall(score: Score) -> float | None:
    """Return the share of right answers of all that name an option, as the official script does."""
    right, total = score.groups[ALL]
    answered = total - score.others["unanswered"]
    return right / answered if answered else None


BENCHMARK = Benchmark(
    "videomme",
    __doc__,
    read,
    template=TEMPLATE,
    parse=first_of_four,
    request=request,
    overall=overall,
)
parse_arguments = BENCHMARK.parse_arguments
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
