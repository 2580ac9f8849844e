"""Reads subtitles, and finds which of them go with a video's sampled frames."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .samples import read_json, rows_of

_TIMES = re.compile(r"(\d+):(\d\d):(\d\d)[,.](\d{1,3})\s*-->\s*(\d+):(\d\d):(\d\d)[,.](\d{1,3})")
_TAG = re.compile(r"</?[a-zA-Z][^>]*>|\{\\[^}]*\}")


@dataclass(frozen=True)
class Subtitle:
    """A text that is shown from one second of a video to another."""

    start: float
    end: float
    text: str


def read_srt(path: Path) -> list[Subtitle]:
    """Read a SubRip file, without its markup; in the order of the file.

    Raises:
        ValueError: the file cannot be read, or has text but no times.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the subtitles {path}: {error}") from error
    found = []
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n").strip()):
        lines = block.split("\n")
        place = next((number for number, line in enumerate(lines[:2]) if _TIMES.match(line.strip())), None)
        if place is None:
            continue
        times = [int(number) for number in _TIMES.match(lines[place].strip()).groups()]
        said = " ".join(_TAG.sub("", " ".join(lines[place + 1 :])).split())
        if said:
            found.append(Subtitle(_seconds(*times[:4]), _seconds(*times[4:]), said))
    if text.strip() and not found:
        raise ValueError(f"{path} holds no subtitles")
    return found


def _seconds(hours: int, minutes: int, seconds: int, milliseconds: int) -> float:
    return hours * 3600 + minutes * 60 + seconds + milliseconds / 1000


def read_longvideobench(path: Path, offset: float, duration: float) -> list[Subtitle]:
    """Read a file of LongVideoBench, which has one of two forms, by what the video was transcribed with.

    Args:
        offset: the video's begin in the subtitles' time, in seconds.
        duration: of the video in seconds; the end of a subtitle that has none.

    Raises:
        ValueError: the file cannot be read, or has neither form.
    """
    found = []
    for row in rows_of(path, read_json(path)):
        if "timestamp" in row:
            start, end = row.pair("timestamp")
            text = row.values.get("text")
            end = offset + duration if end is None else end
        else:
            start, end = (_clock(row.text(name), row) for name in ("start", "end"))
            text = row.values.get("line")
        found.append(Subtitle(start - offset, end - offset, str(text or "").strip()))
    return found


def _clock(text: str, row) -> float:
    """Read a time of the form 0:01:02.345 in seconds."""
    try:
        hours, minutes, seconds = text.split(":")
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    except ValueError:
        raise row.error(f"expected a time as in 0:01:02.345, got {text!r}") from None


def shown_at(subtitles: Sequence[Subtitle], times: Sequence[float]) -> list[str]:
    """Return the texts that are shown at any of the times, each once, in order."""
    times = sorted(times)
    found = []
    for subtitle in subtitles:
        first = bisect_right(times, subtitle.start - 1e-9)
        is_shown = first < len(times) and times[first] < subtitle.end
        if is_shown and (not found or found[-1] != subtitle.text):
            found.append(subtitle.text)
    return found


def interleaved(times: Sequence[float], subtitles: Sequence[Subtitle]) -> list[int | str]:
    """Put subtitles between frames as LongVideoBench's loader does.

    A subtitle stands after the frames up to the middle of its time. One during which no frame was sampled is left
    out; a time of less than a second counts as a second around its middle.

    Args:
        times: of the sampled frames, ascending, in seconds.
        subtitles: in order.

    Returns:
        The frames' numbers and the subtitles' texts, in order.
    """
    found: list[int | str] = []
    placed = 0
    for subtitle in subtitles:
        middle = (subtitle.start + subtitle.end) / 2
        reached = max(placed, bisect_right(times, middle))
        found += range(placed, reached)
        placed = reached
        half = max(subtitle.end - subtitle.start, 1.0) / 2
        if subtitle.text and any(middle - half < time < middle + half for time in times):
            found.append(subtitle.text)
    return [*found, *range(placed, len(times))]
