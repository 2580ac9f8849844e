"""VNBench, Video-MME and LongVideoBench, from folders in their official layouts, about demo
clips."""

import json
import statistics
from collections import defaultdict
from pathlib import Path

import longvideobench
import numpy as np
import pytest
import videomme
import vnbench

from apbv.input.media.video import probe, read_frames, sample_uniform
from apbv.testing import clips

from apbv_tests.asked import OPEN, SRT, answered, run_in
from support.evaluation.scoring import ALL, Score, score


def groups_of(score: Score, dimension: str) -> dict[str, list[int]]:
    """Right answers and questions by a dimension's values."""
    return {value: count for (name, value), count in score.groups.items() if name == dimension}


def clip_of(seed: int, needles: str, path: Path) -> clips.ClipSpec:
    """A short clip, which is written to a file."""
    clip = clips.make_clip(seed, 12, "test", needles=[needles])
    clips.write_mp4(clips.render(clip), path)
    return clip


def wrong_answers(task: str, answer: str, number: int = 0) -> list[str]:
    """Three further options."""
    if task == "counting":
        return [str(int(answer) + step) for step in (1, 2, 3)]
    letters = [letter for letter in clips.LETTERS if letter not in answer.split()]
    size = len(answer.split())
    return [
        " ".join(letters[start : start + size])
        for start in (number % 3, number % 3 + 1, number % 3 + 2)
    ]


# ---- VNBench ----

TYPES = {
    "ret_edit1": "edited",
    "ret_insert1": "inserted",
    "ord_insert1": "inserted",
    "cnt_edit1": "edited",
}
TASKS = {"ret": "retrieval", "ord": "ordering", "cnt": "counting"}


@pytest.fixture(scope="module")
def vnbench_file(tmp_path_factory) -> Path:
    """VNBench's file beside VNBench_new, which has a video for each question; each is asked four
    times."""
    folder = tmp_path_factory.mktemp("vnbench")
    (folder / "VNBench_new").mkdir()
    rows = []
    for seed, (kind, needles) in enumerate(TYPES.items()):
        name = f"./VNBench_new/{seed:03}_{kind}.mp4"
        clip = clip_of(seed, needles, folder / name)
        task = TASKS[kind[:3]]
        _, question, answer = next(item for item in clips.questions(clip) if item[0] == task)
        options = [answer, *wrong_answers(task, answer, seed)]
        if (
            kind == "cnt_edit1"
        ):  # one of the four tries has another right answer, so that the question is wrong
            options = [*options[1:], answer]
        for number in range(4):
            turned = options[number:] + options[:number]
            right = (
                turned[(turned.index(answer) + 1) % 4]
                if (kind, number) == ("cnt_edit1", 2)
                else answer
            )
            row = {
                "video": name,
                "question": question,
                "options": turned,
                "gt": right,
                "type": kind,
            }
            row |= {
                "gt_option": "ABCD"[turned.index(right)],
                "try": number,
                "length": 10 + 40 * (seed % 4),
            }
            rows.append({**row, "needle_time": [1.5]})
    path = folder / "VNBench-main-4try.json"
    path.write_text(json.dumps(rows))
    return path


def test_vnbench_counts_what_is_right_in_all_four_tries(vnbench_file, engine, tmp_path, capsys):
    given = ["--questions", vnbench_file, *OPEN]
    records = answered(vnbench, tmp_path / "r.jsonl", *given)
    rows = json.loads(vnbench_file.read_text())
    assert len(records) == len(rows) == 16
    # By itself: the questions whose answer is the right one in every try, by type, as the official
    # script counts.
    tries = defaultdict(list)
    for row in rows:
        text = engine.generate(
            row["question"], video=vnbench_file.parent / row["video"], max_new_tokens=16
        ).text
        tries[row["type"]].append(text == row["gt"])
    right = {kind: all(of_kind) for kind, of_kind in tries.items()}
    assert not right["cnt_edit1"] and sum(right.values()) >= 2
    share_of_tasks = []
    for task in TASKS:
        of_task = [value for kind, value in right.items() if kind.startswith(task)]
        share_of_tasks.append(statistics.fmean(of_task))
    found = score(run_in(tmp_path / "r.jsonl"))
    overall = statistics.fmean(share_of_tasks)
    assert (
        vnbench.overall(found) == pytest.approx(overall) != pytest.approx(sum(right.values()) / 4)
    )
    assert found.groups[ALL] == [sum(right.values()), 4]
    assert {kind: number for kind, (number, _) in groups_of(found, "type").items()} == right
    assert found.groups["needle", "insert"][1] == 2
    by_length = {name: total for name, (_, total) in groups_of(found, "length").items()}
    assert by_length == {"to  60 s": 2, "to 120 s": 1, "to 180 s": 1}
    assert "overall, by the benchmark's rule" in capsys.readouterr().out


def test_vnbench_asks_as_its_authors_do(vnbench_file, prompts, tmp_path, capsys):
    records = answered(vnbench, tmp_path / "r.jsonl", "--questions", vnbench_file, "--limit", 3)
    row = json.loads(vnbench_file.read_text())[0]
    lines = [f"{letter}. {option}" for letter, option in zip("ABCD", row["options"], strict=True)]
    instruction = "Answer with the option's letter from the given choices directly."
    assert prompts[0]["prompt"] == "\n".join([row["question"], *lines, instruction])
    assert len(records) == 3 and "| (incomplete) | 1 |" in capsys.readouterr().out  # of four tries


# ---- Video-MME ----


@pytest.fixture(scope="module")
def videomme_rows(tmp_path_factory) -> tuple[Path, list[dict]]:
    """The file t.json beside data/ and subtitle/, and its rows."""
    folder = tmp_path_factory.mktemp("videomme")
    for name in ("data", "subtitle"):
        (folder / name).mkdir()
    rows = []
    for seed, duration in enumerate(("short", "long")):
        clip = clip_of(seed, "inserted", folder / "data" / f"yt_{seed}.mp4")
        for number, (task, question, answer) in enumerate(clips.questions(clip)[-3:-1]):
            options = [*wrong_answers(task, answer), answer]
            row = {
                "video_id": f"{seed:03}",
                "videoID": f"yt_{seed}",
                "question_id": f"{seed:03}-{number}",
            }
            row |= {"url": f"https://www.youtube.com/watch?v=yt_{seed}", "duration": duration}
            row |= {
                "domain": "Knowledge",
                "sub_category": "Law",
                "task_type": task,
                "question": question,
            }
            lettered = [
                f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True)
            ]
            rows.append({**row, "options": lettered, "answer": "D"})
    (folder / "subtitle" / "yt_0.srt").write_text(SRT, encoding="utf-8-sig")
    (folder / "t.json").write_text(json.dumps(rows))
    return folder, rows


def test_videomme_is_the_same_in_all_its_layouts(videomme_rows, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    folder, rows = videomme_rows
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def read(questions: Path) -> list:
        words = ["--model", "demo", "--questions", questions, "--videos", folder / "data"]
        return videomme.read(videomme.parse_arguments([str(word) for word in words]))

    first = read(folder / "t.json")
    assert len(first) == 4
    assert read(tmp_path / "t.parquet") == first
    assert read(tmp_path / "t.jsonl") == first
    assert first[0].options[3] == rows[0]["options"][3].removeprefix("D. ")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"cannot read .*broken.parquet"):
        videomme.read_parquet(tmp_path / "broken.parquet")


def test_videomme_is_scored_by_duration(videomme_rows, engine, tmp_path):
    folder, rows = videomme_rows
    given = ["--questions", folder / "t.json", *OPEN]
    records = answered(videomme, tmp_path / "r.jsonl", *given)
    found = score(run_in(tmp_path / "r.jsonl"))
    right = defaultdict(int)
    for row in rows:
        said = engine.generate(
            row["question"], video=folder / "data" / f"{row['videoID']}.mp4"
        ).text
        assert records[row["question_id"]]["text"] == said
        right[row["duration"]] += said == row["options"][3].removeprefix("D. ")
    assert {name: number for name, (number, _) in groups_of(found, "duration").items()} == right
    assert sum(right.values()) >= 3
    # An answer that names no option is wrong, but the official figure leaves it out.
    assert videomme.overall(found) == pytest.approx(
        found.groups[ALL][0] / (4 - found.others["unanswered"])
    )


def test_videomme_shows_the_subtitles_of_the_sampled_frames(videomme_rows, prompts, tmp_path):
    folder, rows = videomme_rows
    given = ["--questions", folder / "t.json", "--subtitles", folder / "subtitle", "--limit", 3]
    answered(videomme, tmp_path / "r.jsonl", *given, "--frames", 4)
    info = probe(folder / "data" / "yt_0.mp4")
    times = info.timestamps[sample_uniform(info, 4)]
    assert not any(1.2 <= time < 1.3 for time in times) and 1.25 in info.timestamps
    asked = "\n".join([rows[0]["question"], *rows[0]["options"]])
    instruction = (
        "Select the best answer to the following multiple-choice question based on the video. "
        "Respond with only the letter (A, B, C, or D) of the correct option."
    )
    listed = "This video's subtitles are listed below:\nfirst line\nlast line\n"
    assert prompts[0]["prompt"] == f"{listed}{instruction}\n{asked}\nThe best answer is:"
    assert prompts[2]["prompt"].startswith(instruction)  # a video without subtitles


# ---- LongVideoBench ----


@pytest.fixture(scope="module")
def longvideobench_folder(tmp_path_factory) -> Path:
    """A folder in LongVideoBench's layout, whose two videos have subtitles of the two forms."""
    folder = tmp_path_factory.mktemp("longvideobench")
    for name in ("videos", "subtitles"):
        (folder / name).mkdir()
    spans = {
        "said first": [99.8, 101.0],
        "said soon": [102.2, 102.3],
        "said to the end": [104.0, None],
    }
    lines = [{"timestamp": span, "text": text} for text, span in spans.items()]
    (folder / "subtitles" / "v0.json").write_text(json.dumps(lines))
    lines = [{"start": "0:00:01.5", "end": "0:00:02.5", "line": "spoken"}]
    (folder / "subtitles" / "v1_en.json").write_text(json.dumps(lines))
    rows = []
    for seed, subtitles in enumerate(("v0.json", "v1_en.json")):
        clip = clip_of(seed, "inserted", folder / "videos" / f"v{seed}.mp4")
        for number, (task, question, answer) in enumerate(clips.questions(clip)[-3:-1]):
            row = {
                "video_id": f"v{seed}",
                "id": f"v{seed}_{number}",
                "question": question,
                "level": "L1",
            }
            row |= {
                "candidates": [*wrong_answers(task, answer), answer, "none of these"],
                "correct_choice": 3,
            }
            row |= {
                "topic_category": "KS",
                "question_category": "TOS" if task == "ordering" else "SSS",
            }
            row |= {
                "video_path": f"v{seed}.mp4",
                "subtitle_path": subtitles,
                "duration": 6.0,
                "view_count": 7,
            }
            row |= {
                "duration_group": 15 if seed else 60,
                "starting_timestamp_for_subtitles": 100 * (1 - seed),
            }
            rows.append({**row, "question_wo_referring_query": question})
    (folder / "lvb_val.json").write_text(json.dumps(rows))
    return folder


def test_longvideobench_interleaves_subtitles_and_scores_by_group(
    longvideobench_folder, prompts, tmp_path
):
    given = ["--data", longvideobench_folder, "--frames", 6, "--hosts", 2]
    records = answered(longvideobench, tmp_path / "r.jsonl", *given)
    content = prompts[0]["messages"][0]["content"]
    # Frames stand at whole seconds; the second subtitle is shorter than a second, so that it
    # reaches frame 2.
    said = ["image" if part["type"] == "image" else part["text"].strip() for part in content]
    question = said.pop()
    assert said == [
        "image",
        "said first",
        *["image"] * 2,
        "said soon",
        *["image"] * 3,
        "said to the end",
    ]
    assert (
        question.startswith("Question: ")
        and question.count("\n") == 6
        and "\nE. none of these\n" in question
    )
    info = probe(longvideobench_folder / "videos" / "v0.mp4")
    shown = [np.asarray(part["image"]) for part in content if part["type"] == "image"]
    assert np.array_equal(np.stack(shown), read_frames(info, [0, 4, 8, 12, 16, 20]))
    assert len(records) == 4 and not any("error" in record for record in records.values())
    found = score(run_in(tmp_path / "r.jsonl"))
    assert found.groups[ALL][0] == sum(record["right"] for record in records.values())
    assert {name: total for name, (_, total) in groups_of(found, "duration").items()} == {
        "15": 2,
        "60": 2,
    }
    assert {name: total for name, (_, total) in groups_of(found, "question").items()} == {
        "TOS": 2,
        "SSS": 2,
    }
