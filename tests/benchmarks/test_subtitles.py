"""Subtitle files, and which of their lines go with a video's sampled frames."""

import json

import numpy as np
import pytest

from support.evaluation.subtitles import Subtitle, interleaved, read_longvideobench, read_srt, shown_at

SRT = """1
00:00:00,000 --> 00:00:01,000
<font color="white" size=".72c">first line</font>

2
00:00:01,100 --> 00:00:01,150
between frames

3
00:00:02,000 --> 00:00:04,500
last
line

"""


def test_subrip_files(tmp_path):
    (tmp_path / "s.srt").write_text(SRT.replace("\n", "\r\n") + "4\r\nno time\r\nlost", encoding="utf-8")
    assert read_srt(tmp_path / "s.srt") == [
        Subtitle(0.0, 1.0, "first line"),
        Subtitle(1.1, 1.15, "between frames"),
        Subtitle(2.0, 4.5, "last line"),
    ]
    (tmp_path / "other.srt").write_text("something else")
    for name in ("other.srt", "missing.srt"):
        with pytest.raises(ValueError, match=name):
            read_srt(tmp_path / name)
    (tmp_path / "empty.srt").write_text("")
    assert read_srt(tmp_path / "empty.srt") == []


def test_what_is_shown_at_some_times():
    lines = [
        Subtitle(0, 1, "a"),
        Subtitle(1, 2, "b"),
        Subtitle(1.5, 3, "b"),
        Subtitle(5, 6, "c"),
        Subtitle(7, 8, "d"),
    ]
    assert shown_at(lines, [0.5, 1.0, 1.7, 6.0]) == [
        "a",
        "b",
    ]  # an end is no longer shown; equal neighbours are one
    assert shown_at(lines, [7.0, 0.0]) == ["a", "d"]
    assert shown_at(lines, []) == []


def test_a_frame_at_a_subtitles_begin_or_end_does_not_count():
    assert interleaved([0.0, 2.0, 4.0], [Subtitle(0.0, 2.0, "a"), Subtitle(2.0, 4.0, "b")]) == [0, 1, 2]
    assert interleaved([0.0, 2.0, 4.0], [Subtitle(1.9, 4.0, "a")]) == [0, 1, "a", 2]


def test_interleaving_agrees_with_its_definition():
    """Each subtitle behind the frames up to its middle, where the order of subtitles allows."""
    generator = np.random.default_rng(3)
    for _ in range(200):
        times = np.unique(generator.integers(0, 30, size=8)).astype(float).tolist()
        starts = np.sort(generator.uniform(0, 30, size=6))
        lines = [
            Subtitle(start, start + generator.choice([0.1, 0.8, 3.0]), f"s{n}") for n, start in enumerate(starts)
        ]
        found = interleaved(times, lines)
        assert [item for item in found if isinstance(item, int)] == list(range(len(times)))
        middle = 0.0
        kept = []
        for line in lines:
            middle = (line.start + line.end) / 2
            reach = 0.5 if line.end - line.start < 1 else (line.end - line.start) / 2
            if any(abs(time - middle) < reach for time in times):
                kept.append(line.text)
                before = found[: found.index(line.text)]
                reached = max((each.start + each.end) / 2 for each in lines[: lines.index(line) + 1])
                assert [item for item in before if isinstance(item, int)] == [
                    n for n, time in enumerate(times) if time <= reached
                ]
        assert [item for item in found if isinstance(item, str)] == kept


def test_a_wrong_subtitle_file_is_refused_with_the_place(tmp_path):
    for row, message in (
        ({"timestamp": [1.0], "text": "a"}, "'timestamp' must hold two numbers"),
        ({"start": "1:2", "end": "0:0:1", "line": "a"}, "expected a time as in"),
        ({"line": "a"}, "needs the text 'start'"),
    ):
        (tmp_path / "s.json").write_text(json.dumps([row]))
        with pytest.raises(ValueError, match=message):
            read_longvideobench(tmp_path / "s.json", 0.0, 1.0)
