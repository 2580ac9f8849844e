"""VNBench, from a file in its official layout, about clips that the demo model knows."""

import json
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
import vnbench

from apbv.demo import clips

from asked import OPEN, answered, clip_of, summary_of, wrong_answers

TYPES = {
    "ret_edit1": ("retrieval", "edited"),
    "ret_insert1": ("retrieval", "inserted"),
    "ret_insert2": ("retrieval", "inserted"),
    "ord_edit1": ("ordering", "edited"),
    "ord_insert1": ("ordering", "inserted"),
    "cnt_edit1": ("counting", "edited"),
}


@pytest.fixture(scope="module")
def vnbench_data(tmp_path_factory) -> Path:
    """A folder in VNBench's layout: its file, and VNBench_new with a video for each question."""
    folder = tmp_path_factory.mktemp("vnbench")
    videos = folder / "VNBench_new"
    videos.mkdir()
    rows = []
    for seed, (kind, (task, needles)) in enumerate(TYPES.items()):
        name = f"{seed:03}_{kind}.mp4"
        clip = clip_of(seed, needles, videos / name)
        _, question, answer = next(item for item in clips.questions(clip) if item[0] == task)
        if kind == "cnt_edit1":  # one of the four tries has another right answer, so that the question is wrong
            options = [*wrong_answers(task, answer, seed), answer]
        else:
            options = [answer, *wrong_answers(task, answer, seed)]
        for number in range(4):
            turned = options[number:] + options[:number]
            right = turned[(turned.index(answer) + 1) % 4] if (kind, number) == ("cnt_edit1", 2) else answer
            rows.append(
                {
                    "video": f"./VNBench_new/{name}",
                    "question": question,
                    "options": turned,
                    "gt": right,
                    "gt_option": "ABCD"[turned.index(right)],
                    "type": kind,
                    "try": number,
                    "length": 10 + 40 * (seed % 4),
                    "needle_time": [1.5],
                }
            )
    (folder / "VNBench-main-4try.json").write_text(json.dumps(rows))
    return folder


def test_vnbench_counts_what_is_right_in_all_four_tries(vnbench_data, engine, tmp_path, capsys):
    questions = vnbench_data / "VNBench-main-4try.json"
    records = answered(
        vnbench, tmp_path / "r.jsonl", "--questions", questions, *OPEN, "--json", tmp_path / "s.jsonl"
    )
    rows = json.loads(questions.read_text())
    assert len(records) == len(rows) == 24
    # By itself: the questions whose answer is the right one in every try, by type, as the official script counts.
    tries = defaultdict(list)
    for row in rows:
        said = engine.generate(row["question"], video=vnbench_data / row["video"], max_new_tokens=16).text
        tries[row["video"], row["type"]].append(said == row["gt"])
    by_type = defaultdict(list)
    for (_, kind), right in tries.items():
        by_type[kind].append(sum(right) == 4)
    assert not any(by_type["cnt_edit1"]) and sum(map(sum, by_type.values())) >= 3
    by_task = defaultdict(list)
    for kind, right in by_type.items():
        by_task[kind[:3]].append(sum(right) / len(right))
    expected = statistics.fmean(statistics.fmean(shares) for shares in by_task.values())
    summary = summary_of(tmp_path / "s.jsonl")
    assert summary["overall"] == pytest.approx(expected) != pytest.approx(summary["share"])
    assert (summary["right"], summary["total"]) == (sum(map(sum, by_type.values())), 6)
    assert {kind: each["right"] for kind, each in summary["groups"]["type"].items()} == {
        kind: sum(right) for kind, right in by_type.items()
    }
    assert summary["groups"]["needle"]["insert"]["total"] == 3
    assert {name: each["total"] for name, each in summary["groups"]["length"].items()} == {
        "to  60 s": 4,
        "to 120 s": 1,
        "to 180 s": 1,
    }
    assert "overall, by the benchmark's rule" in capsys.readouterr().out
    assert all(records[f"00{seed}_{kind} {kind} 0"]["choice"] for seed, kind in enumerate(list(TYPES)[:5]))


def test_vnbench_asks_as_its_authors_do(vnbench_data, prompts, tmp_path, capsys):
    questions = vnbench_data / "VNBench-main-4try.json"
    records = answered(vnbench, tmp_path / "r.jsonl", "--questions", questions, "--limit", 3)
    row = json.loads(questions.read_text())[0]
    lines = [f"{letter}. {option}" for letter, option in zip("ABCD", row["options"], strict=True)]
    assert prompts[0]["prompt"] == "\n".join(
        [row["question"], *lines, "Answer with the option's letter from the given choices directly."]
    )
    assert len(records) == 3 and "| (incomplete) | 1 |" in capsys.readouterr().out  # of four tries


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "see_edit1"}, "the type 'see_edit1' begins with none of ret, ord, cnt"),
        ({"gt_option": "B"}, "needs one right answer"),
        ({"gt": "nothing", "gt_option": None}, "needs one right answer"),
        ({"gt_option": "E"}, "'gt_option' must be the letter of one of the 4 options"),
        ({"try": None}, "needs the text 'try'"),
    ],
)
def test_vnbench_refuses_a_wrong_file(tmp_path, capsys, change, message):
    row = {
        "video": "v.mp4",
        "question": "q",
        "options": list("wxyz"),
        "gt": "w",
        "gt_option": "A",
        "type": "ret_edit1",
    }
    (tmp_path / "q.json").write_text(json.dumps([{**row, "try": 0, **change}]))
    assert vnbench.main(["--model", "demo", "--questions", str(tmp_path / "q.json")]) == 1
    assert f"question 1: {message}" in capsys.readouterr().err
