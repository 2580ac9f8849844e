"""Video-MME, from files in its layouts, about clips that the demo model knows."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
import videomme

from apbv.demo import clips
from apbv.input.video import probe, sample_uniform

from asked import OPEN, answered, clip_of, summary_of, wrong_answers

SRT = """1
00:00:00,000 --> 00:00:01,000
<font color="white" size=".72c">first line</font>

2
00:00:01,200 --> 00:00:01,300
between frames

3
00:00:02,000 --> 00:00:04,500
last
line

"""


@pytest.fixture(scope="module")
def videomme_rows(tmp_path_factory) -> tuple[Path, list[dict]]:
    """A folder with data/ and subtitle/, and the rows of the data set's table."""
    folder = tmp_path_factory.mktemp("videomme")
    for name in ("data", "subtitle"):
        (folder / name).mkdir()
    rows = []
    for seed, duration in enumerate(("short", "short", "long")):
        clip = clip_of(seed, "inserted", folder / "data" / f"yt_{seed}.mp4")
        for number, (task, question, answer) in enumerate(clips.questions(clip)[-3:-1]):
            options = [*wrong_answers(task, answer), answer]
            rows.append(
                {
                    "video_id": f"{seed:03}",
                    "duration": duration,
                    "domain": "Knowledge",
                    "sub_category": "Law",
                    "url": f"https://www.youtube.com/watch?v=yt_{seed}",
                    "videoID": f"yt_{seed}",
                    "question_id": f"{seed:03}-{number}",
                    "task_type": task,
                    "question": question,
                    "options": [f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True)],
                    "answer": "D",
                }
            )
    (folder / "subtitle" / "yt_0.srt").write_text(SRT, encoding="utf-8-sig")
    return folder, rows


def nested(rows: list[dict]) -> list[dict]:
    """The rows in the form of the official scripts, which name a video by its address."""
    found: dict[str, dict] = {}
    for row in rows:
        about = {
            "video_id": row["video_id"],
            "duration_category": row["duration"],
            "video_category": row["domain"],
            "video_sub_category": row["sub_category"],
            "url": row["url"],
            "questions": [],
        }
        names = {
            "question_id": "question_id",
            "task_type": "task_type",
            "question": "question",
            "answer": "answer",
        }
        asked = {name: row[old] for name, old in names.items()}
        found.setdefault(row["video_id"], about)["questions"].append({**asked, "choices": row["options"]})
    return list(found.values())


def test_videomme_is_the_same_in_all_its_layouts(videomme_rows, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    folder, rows = videomme_rows
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    (tmp_path / "t.json").write_text(json.dumps(rows))
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "nested.json").write_text(json.dumps(nested(rows)))
    read = []
    for name in ("t.parquet", "t.json", "t.jsonl", "nested.json"):
        given = ["--model", "demo", "--questions", str(tmp_path / name), "--videos", str(folder / "data")]
        read.append(videomme.read(videomme.parse_arguments(given)))
    assert read[0] == read[1] == read[2] == read[3] and len(read[0]) == 6
    assert read[0][0].options[3] == rows[0]["options"][3].removeprefix("D. ")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"cannot read .*broken.parquet"):
        videomme.read_parquet(tmp_path / "broken.parquet")


def test_videomme_is_scored_by_duration(videomme_rows, engine, tmp_path):
    folder, rows = videomme_rows
    (folder / "t.json").write_text(json.dumps(rows))
    given = ["--questions", folder / "t.json", *OPEN, "--json", tmp_path / "s.jsonl"]
    records = answered(videomme, tmp_path / "r.jsonl", *given)
    summary = summary_of(tmp_path / "s.jsonl")
    right = defaultdict(int)
    for row in rows:
        said = engine.generate(row["question"], video=folder / "data" / f"{row['videoID']}.mp4").text
        assert records[row["question_id"]]["text"] == said
        right[row["duration"]] += said == row["options"][3].removeprefix("D. ")
    assert {name: each["right"] for name, each in summary["groups"]["duration"].items()} == right
    assert sum(right.values()) >= 4
    # An answer that names no option is wrong, but the official figure leaves it out.
    assert summary["overall"] == pytest.approx(summary["right"] / (6 - summary["unanswered"]))


def test_videomme_shows_the_subtitles_of_the_sampled_frames(videomme_rows, prompts, tmp_path):
    folder, rows = videomme_rows
    (folder / "t.json").write_text(json.dumps(rows))
    given = ["--questions", folder / "t.json", "--subtitles", folder / "subtitle", "--limit", 3]
    answered(videomme, tmp_path / "r.jsonl", *given, "--frames", 4)
    info = probe(folder / "data" / "yt_0.mp4")
    times = info.timestamps[sample_uniform(info, 4)]
    assert not any(1.2 <= time < 1.3 for time in times) and 1.25 in info.timestamps
    assert any(2.0 <= time < 4.5 for time in times)
    asked = "\n".join([rows[0]["question"], *rows[0]["options"]])
    instruction = (
        "Select the best answer to the following multiple-choice question based on the video. "
        "Respond with only the letter (A, B, C, or D) of the correct option."
    )
    listed = "This video's subtitles are listed below:\nfirst line\nlast line\n"
    assert prompts[0]["prompt"] == f"{listed}{instruction}\n{asked}\nThe best answer is:"
    assert prompts[2]["prompt"].startswith(instruction)  # a video without subtitles
