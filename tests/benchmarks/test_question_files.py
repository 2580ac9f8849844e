"""Files of questions and of answers, as the benchmarks read and count them."""

import argparse
import json
from pathlib import Path

import pytest
import questions

from support.evaluation.results import ResultsFile, Run, read_runs
from support.evaluation.samples import Sample, digest_of
from support.evaluation.scoring import ALL, markdown, score


@pytest.mark.parametrize(
    ("options", "answer", "shown", "right"),
    [
        (["A. red", "B. blue"], "B. blue", ("red", "blue"), 1),
        (["(A) red", "(B) blue"], "blue", ("red", "blue"), 1),
        (["A) red", "B) blue"], "A", ("red", "blue"), 0),
        (["A. Lincoln", "G. Washington"], "A. Lincoln", ("A. Lincoln", "G. Washington"), 0),
    ],
)
def test_options_lose_letters_of_their_own(options, answer, shown, right, tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"question": "q", "options": options, "answer": answer}))
    (sample,) = questions.read(argparse.Namespace(questions=file))
    assert (sample.options, sample.answer) == (shown, right)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q", "answer": "a"', "questions.jsonl:1: Expecting"),
        ('["question"]', "question 1: expected an object"),
        ('{"answer": "a"}', "needs the text 'question'"),
        ('{"question": "q", "option": ["a", "b"]}', "unknown fields option"),
        ('{"question": "q", "options": ["a"], "answer": "a"}', "needs 2 to 26 different options, got 1"),
        ('{"question": "q", "options": ["a", "a"], "answer": 0}', "needs 2 to 26 different options"),
        ('{"question": "q", "options": ["a", "b"], "answer": "c"}', "the answer 'c' is none of the 2 options"),
        ('{"question": "q", "options": ["a", "b"], "answer": 2}', "the answer 2 is none"),
        ('{"question": "q", "options": ["B", "A"], "answer": "A"}', "the answer 'A' could be several"),
        ('{"question": "q", "options": [1, 2, 3], "answer": 2}', "of one option and the text of another"),
        ('{"question": "q", "options": ["a", "b"], "answer": true}', "the answer True is none"),
        ('{"question": "q", "video": {"a": 1}, "answer": "b"}', "'video' must hold texts"),
        ('{"question": "q", "groups": ["x"], "answer": "b"}', "'groups' must be an object"),
        ("", "there are no questions"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path, capsys, line, message):
    (tmp_path / "questions.jsonl").write_text(line)
    assert questions.main(["--model", "demo", "--questions", str(tmp_path / "questions.jsonl")]) == 1
    assert message in capsys.readouterr().err


def test_answers_may_be_letters_texts_and_numbers(tmp_path):
    options = ["red", "blue", "7", "C"]
    lines = [
        {"question": "q", "options": options, "answer": answer} for answer in ("B", "blue", 1, "7", 2, "B.", None)
    ]
    lines.append({"question": "q", "answer": 7})
    lines.append({"question": "q", "options": [1, 2, 3], "answer": "2"})
    lines.append({"question": "q", "options": [0, 1, 2], "answer": 2})
    (tmp_path / "q.json").write_text(json.dumps(lines), encoding="utf-8-sig")  # as some editors write it
    samples = questions.read(
        questions.parse_arguments(["--model", "demo", "--questions", str(tmp_path / "q.json")])
    )
    assert [sample.answer for sample in samples] == [1, 1, 1, 2, 2, 1, None, "7", 1, 2]


@pytest.mark.parametrize(
    "options", [["--shard", "3/2"], ["--shard", "0/2"], ["--template", "no"], ["--hosts", "0"]]
)
def test_wrong_options_are_refused(options):
    with pytest.raises(SystemExit) as exit:
        questions.parse_arguments(["--model", "demo", "--questions", "q", *options])
    assert exit.value.code == 2


def test_a_run_counts_units_of_several_tries(tmp_path):
    """A unit is right if all its tries are, and waits where one is missing."""
    file = ResultsFile(tmp_path / "r.jsonl", {"benchmark": "x"})
    for unit, rights, size in (
        ("a", [True, True], 2),
        ("b", [True, False], 2),
        ("c", [True], 2),
        ("d", [None], 1),
    ):
        for number, right in enumerate(rights):
            record = {"key": f"{unit}{number}", "unit": unit, "unit_size": size, "groups": {"g": unit}}
            file.add(
                {**record, "text": "", "choice": None, "is_choice": number == 1, "right": right, "figures": {}}
            )
    file.close()
    (run,) = read_runs([tmp_path / "r.jsonl"])
    found = score(run)
    assert found.groups == {ALL: [1, 2], ("g", "a"): [1, 1], ("g", "b"): [0, 1]}
    assert (found.incomplete, found.unscored, found.unanswered) == (1, 1, 2)


def test_a_table_says_how_many_questions_each_run_has(tmp_path):
    record = {"unit_size": 1, "groups": {}, "text": "", "choice": None, "is_choice": False, "figures": {}}
    runs = [
        Run({"hosts": hosts}, {str(n): {**record, "unit": str(n), "right": n < 2} for n in range(number)})
        for hosts, number in ((1, 4), (2, 2))
    ]
    row = next(line for line in markdown(runs, [score(run) for run in runs]).splitlines() if "| all |" in line)
    assert row == "| all | 50.0 (15-85) | 100.0 (34-100) | 4, 2 |"


def test_a_digest_covers_all_that_is_asked():
    base = {"key": "k", "question": "q", "answer": 0, "options": ("a", "b"), "videos": (Path("x/v.mp4"),)}
    other = [{"question": "r"}, {"answer": 1}, {"options": ("a", "c")}, {"videos": (Path("x/w.mp4"),)}]
    digests = [digest_of([Sample(**{**base, **change})]) for change in ({}, *other)]
    assert len(set(digests)) == 5
    assert digest_of([Sample(**{**base, "videos": (Path("y/v.mp4"),)})]) == digests[0]  # moved, but the same
