"""Measure accuracy on LongVideoBench: multiple choice about videos with interleaved subtitles.

    python benchmarks/longvideobench.py --model Qwen/Qwen2.5-VL-7B-Instruct \
        --data LongVideoBench --frames 64
    torchrun --nproc-per-node 8 benchmarks/longvideobench.py --model ... --data LongVideoBench \
        --subtitles none

DIR is the official data set (Wu et al., *LongVideoBench*): lvb_val.json, and the folders videos and
subtitles. As in the official loader, frames are images with the subtitles between them by time;
with ``--subtitles none`` a prompt has only the video. Answers without a letter get a random option,
seeded by the question's name.
"""

import argparse
import random
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)
from apbv.errors import InvalidRequestError

# isort: split
from PIL import Image

from apbv import Engine
from apbv.input.media.video import VideoInfo, read_frames

from support.evaluation.answers import first_of_five
from support.evaluation.command import Benchmark
from support.evaluation.samples import (
    LETTERED,
    Sample,
    Subtitle,
    fill,
    made_of,
    read_json,
    request_of,
    text_of,
    texts_of,
)


def read(options: argparse.Namespace) -> list[Sample]:
    """Read LongVideoBench's questions.

    The test split's have no right answers, and are recorded only.

    Raises:
        InvalidRequestError: the file cannot be read, or has another form.
    """
    if options.fps is not None and options.subtitles == "interleaved":
        raise InvalidRequestError(
            "frames between subtitles are chosen by --frames; --fps needs --subtitles none"
        )
    path = options.questions or options.data / "lvb_val.json"
    return made_of(path, read_json(path), partial(_sample, options.data, options.subtitles))


def _sample(folder: Path, subtitles: str, _, row: dict) -> Sample:
    choices = texts_of(row["candidates"])
    answer = row.get("correct_choice", -1)
    if answer >= len(choices):
        raise InvalidRequestError(f"the answer {answer} is none of the {len(choices)} options")
    groups = {
        "duration": text_of(row["duration_group"]),
        "question": text_of(row["question_category"]),
        "topic": text_of(row["topic_category"]),
    }
    if row.get("level") is not None:
        groups["level"] = text_of(row["level"])
    subtitle_file = None
    if subtitles == "interleaved":
        subtitle_file = folder / "subtitles" / row["subtitle_path"]
    return Sample(
        key=text_of(row["id"]),
        question=text_of(row["question"]),
        answer=None if answer < 0 else answer,
        options=choices,
        videos=(folder / "videos" / row["video_path"],),
        groups=groups,
        subtitles=subtitle_file,
        extra={"offset": row["starting_timestamp_for_subtitles"], "duration": row["duration"]},
    )


def read_subtitles(path: Path, offset: float, duration: float) -> list[Subtitle]:
    """Read a file of LongVideoBench's subtitles.

    It has one of two forms, by what the video was transcribed with.

    Args:
        offset: the video's begin in the subtitles' time, in seconds.
        duration: of the video in seconds; the end of a subtitle that has none.

    Raises:
        InvalidRequestError: the file cannot be read, or has neither form.
    """

    def subtitle(_, row: dict) -> Subtitle:
        if "timestamp" in row:
            start, end = row["timestamp"]
            if end is None:
                end = offset + duration
            text = row.get("text")
        else:
            start = _clock(row["start"])
            end = _clock(row["end"])
            text = row.get("line")
        return Subtitle(start - offset, end - offset, str(text or "").strip())

    return made_of(path, read_json(path), subtitle)


def _clock(text: str) -> float:
    """Read a time of the form 0:01:02.345 in seconds."""
    hours, minutes, seconds = text.split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def interleaved(times: Sequence[float], subtitles: Sequence[Subtitle]) -> list[int | str]:
    """Put subtitles between frames as LongVideoBench's loader does.

    A subtitle stands after the frames up to the middle of its time. One during which no frame was
    sampled is left out; a time of less than a second counts as a second around its middle.

    Args:
        times: of the sampled frames, ascending, in seconds.
        subtitles: in order.

    Returns:
        The frames' numbers and the subtitles' texts, in order.
    """
    content: list[int | str] = []
    num_placed = 0
    for subtitle in subtitles:
        # The frames up to the middle.
        middle = (subtitle.start + subtitle.end) / 2
        num_before = max(num_placed, bisect_right(times, middle))
        content += range(num_placed, num_before)
        num_placed = num_before
        # The subtitle.
        half = max(subtitle.end - subtitle.start, 1.0) / 2
        is_sampled = any(middle - half < time < middle + half for time in times)
        if subtitle.text and is_sampled:
            content.append(subtitle.text)
    content += range(num_placed, len(times))
    return content


def request(
    sample: Sample, template: str, options: argparse.Namespace, engine: Engine
) -> Mapping[str, Any]:
    """Return the prompt: frames and subtitles in turn, and the question.

    Without subtitles it is the video and the question.
    """
    prompt = fill(template, sample)
    if sample.subtitles is None:
        return request_of(sample, prompt)

    # Read the frames and the subtitles.
    info = engine.videos.probe(sample.videos[0])
    duration = sample.extra["duration"]
    frames = sampled_frames(info, duration, options.frames or engine.num_frames)
    subtitles = read_subtitles(sample.subtitles, sample.extra["offset"], duration)
    pictures = read_frames(info, frames)

    # Put them into one message.
    content = []
    for part in interleaved(info.timestamps[frames].tolist(), subtitles):
        if isinstance(part, int):
            content.append({"type": "image", "image": Image.fromarray(pictures[part])})
        else:
            content.append({"type": "text", "text": f"\n{part}\n"})
    content.append({"type": "text", "text": f"\n{prompt}"})
    return {"messages": [{"role": "user", "content": content}]}


def sampled_frames(info: VideoInfo, duration: float, most: int) -> list[int]:
    """Choose frames as the official loader does: at equal steps, at most one a second.

    Args:
        duration: in seconds, as the data set has it.
        most: how many frames at most.
    """
    rate = info.num_frames / info.duration if info.duration else 1.0
    num_valid = max(1, min(info.num_frames, int(duration * rate)))
    num_sampled = max(1, min(most, int(duration), num_valid))
    step = num_valid // num_sampled
    return [step * index for index in range(num_sampled)]


def guess(sample: Sample) -> int:
    """Draw an option for an answer that names none; always the same of a question."""
    return random.Random(sample.key).randrange(len(sample.options))


BENCHMARK = Benchmark(
    "longvideobench",
    __doc__,
    read,
    needs="data",
    template=f"Question: {LETTERED}",
    parse=first_of_five,
    request=request,
    guess=guess,
)
parse_arguments = BENCHMARK.parse_arguments
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
