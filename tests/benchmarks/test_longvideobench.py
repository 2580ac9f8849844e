"""LongVideoBench, from a folder in its official layout, about clips that the demo model knows."""

import json
from pathlib import Path

import longvideobench
import numpy as np
import pytest

from apbv.demo import clips
from apbv.input.video import probe, read_frames

from asked import OPEN, answered, clip_of, summary_of, wrong_answers
from scripts import run_benchmark
from support.evaluation.results import read_runs


@pytest.fixture(scope="module")
def longvideobench_data(tmp_path_factory) -> Path:
    """A folder in LongVideoBench's layout, whose two videos have subtitles of the two forms."""
    folder = tmp_path_factory.mktemp("longvideobench")
    for name in ("videos", "subtitles"):
        (folder / name).mkdir()
    lines = [
        {"timestamp": [99.8, 101.0], "text": "said first"},
        {"timestamp": [102.2, 102.3], "text": "said soon"},
        {"timestamp": [104.0, None], "text": "said to the end"},
    ]
    (folder / "subtitles" / "v0.json").write_text(json.dumps(lines))
    lines = [{"start": "0:00:01.5", "end": "0:00:02.5", "line": "spoken"}]
    (folder / "subtitles" / "v1_en.json").write_text(json.dumps(lines))
    rows = []
    for seed, subtitles in enumerate(("v0.json", "v1_en.json")):
        clip = clip_of(seed, "inserted", folder / "videos" / f"v{seed}.mp4")
        for number, (task, question, answer) in enumerate(clips.questions(clip)[-3:-1]):
            rows.append(
                {
                    "video_id": f"v{seed}",
                    "question": question,
                    "question_wo_referring_query": question,
                    "candidates": [*wrong_answers(task, answer), answer, "none of these"],
                    "correct_choice": 3,
                    "topic_category": "KS-Knowledge-STEM",
                    "question_category": "TOS" if task == "ordering" else "SSS",
                    "level": "L1-Perception",
                    "id": f"v{seed}_{number}",
                    "video_path": f"v{seed}.mp4",
                    "subtitle_path": subtitles,
                    "duration_group": 15 if seed else 60,
                    "starting_timestamp_for_subtitles": 0 if seed else 100,
                    "duration": 6.0,
                    "view_count": 7,
                }
            )
    (folder / "lvb_val.json").write_text(json.dumps(rows))
    return folder


def test_longvideobench_without_subtitles_asks_about_the_video(longvideobench_data, engine, tmp_path):
    given = ["--data", longvideobench_data, "--subtitles", "none", *OPEN, "--json", tmp_path / "s.jsonl"]
    records = answered(longvideobench, tmp_path / "r.jsonl", *given)
    rows = json.loads((longvideobench_data / "lvb_val.json").read_text())
    right = 0
    for row in rows:
        said = engine.generate(row["question"], video=longvideobench_data / "videos" / row["video_path"]).text
        assert records[row["id"]]["text"] == said
        right += said == row["candidates"][3]
    summary = summary_of(tmp_path / "s.jsonl")
    assert summary["right"] >= right >= 3  # what names no option is drawn
    assert {name: each["total"] for name, each in summary["groups"]["duration"].items()} == {"15": 2, "60": 2}
    assert {name: each["total"] for name, each in summary["groups"]["question"].items()} == {"TOS": 2, "SSS": 2}


def test_longvideobench_puts_subtitles_between_frames(longvideobench_data, prompts, tmp_path):
    answered(longvideobench, tmp_path / "r.jsonl", "--data", longvideobench_data, "--frames", 6, "--hosts", 2)
    content = prompts[0]["messages"][0]["content"]
    # Frames stand at whole seconds; the second subtitle is shorter than a second, so that it reaches frame 2.
    said = ["image" if part["type"] == "image" else part["text"].strip() for part in content]
    question = said.pop()
    assert said == ["image", "said first", *["image"] * 2, "said soon", *["image"] * 3, "said to the end"]
    assert question.startswith("Question: ") and question.count("\n") == 6 and "\nE. none of these\n" in question
    info = probe(longvideobench_data / "videos" / "v0.mp4")
    shown = [np.asarray(part["image"]) for part in content if part["type"] == "image"]
    assert np.array_equal(np.stack(shown), read_frames(info, [0, 4, 8, 12, 16, 20]))
    (run,) = read_runs([tmp_path / "r.jsonl"])
    assert len(run.records) == 4 and not any("error" in record for record in run.records.values())


def test_longvideobench_draws_for_what_names_no_option(longvideobench_data, tmp_path):
    rows = json.loads((longvideobench_data / "lvb_val.json").read_text())
    rows = [{**rows[0], "id": f"q{number}", "candidates": [f"{n} dogs" for n in "12345"]} for number in range(12)]
    (tmp_path / "q.json").write_text(json.dumps(rows))
    given = ["--data", longvideobench_data, "--subtitles", "none", *OPEN, "--questions", tmp_path / "q.json"]
    records = answered(longvideobench, tmp_path / "r.jsonl", *given)
    assert all(record["choice"] is None for record in records.values())
    guesses = [record["guess"] for record in records.values()]
    assert len(set(guesses)) >= 3
    assert [record["right"] for record in records.values()] == [guess == "D" for guess in guesses]
    again = answered(longvideobench, tmp_path / "again.jsonl", *given)
    assert [record["guess"] for record in again.values()] == guesses


def test_longvideobench_test_questions_are_recorded_and_not_scored(longvideobench_data, tmp_path, capsys):
    rows = json.loads((longvideobench_data / "lvb_val.json").read_text())
    for row in rows:
        del row["correct_choice"]
    (tmp_path / "lvb_test_wo_gt.json").write_text(json.dumps(rows))
    given = ["--data", longvideobench_data, "--subtitles", "none", "--questions", tmp_path / "lvb_test_wo_gt.json"]
    records = answered(longvideobench, tmp_path / "r.jsonl", *given, *OPEN)
    assert [record["right"] for record in records.values()] == [None] * 4
    assert "| (unscored) | 4 |" in capsys.readouterr().out


@pytest.mark.thorough
def test_real_hosts_read_interleaved_prompts(longvideobench_data, tmp_path):
    given = ["--model", "demo", "--data", longvideobench_data, "--frames", 4, "--results", tmp_path / "r.jsonl"]
    result = run_benchmark("longvideobench", *given, "--limit", 2, hosts=2)
    assert result.returncode == 0, result.stderr
    real = read_runs([tmp_path / "r.jsonl"])[0].records
    one = answered(longvideobench, tmp_path / "one.jsonl", *given[2:6], "--limit", 2, "--method", "full")
    assert {key: record["figures"]["num_input_tokens"] for key, record in real.items()} == {
        key: record["figures"]["num_input_tokens"] for key, record in one.items()
    }
