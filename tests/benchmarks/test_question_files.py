"""Files of questions, of subtitles and of answers, as the benchmarks read and count them."""

import json
from pathlib import Path

import pytest
import questions
from longvideobench import read_subtitles
from videomme import read_srt, shown_at

from apbv_tests.asked import SRT
from support.evaluation.samples import Sample, Subtitle, by_files, digest_of
from support.evaluation.scoring import ALL, Run, markdown, score


def read(path: Path, rows: list[dict]) -> list[Sample]:
    path.write_text(json.dumps(rows), encoding="utf-8-sig")  # as some editors write it
    return questions.read(questions.parse_arguments(["--model", "demo", "--questions", str(path)]))


@pytest.mark.parametrize(
    ("options", "answers", "shown", "right"),
    [
        (["A. red", "B. blue"], ["B. blue"], ("red", "blue"), [1]),
        (["A. Lincoln", "G. Washington"], ["A. Lincoln"], ("A. Lincoln", "G. Washington"), [0]),
        (
            ["red", "blue", "7", "C"],
            ["B", "blue", 1, "7", 2, "B.", None],
            ("red", "blue", "7", "C"),
            [1, 1, 1, 2, 2, 1, None],
        ),
        ([0, 1, 2], [2], ("0", "1", "2"), [2]),
        (None, [7], (), ["7"]),
    ],
    ids=str,
)
def test_answers_may_be_letters_texts_and_numbers(tmp_path, options, answers, shown, right):
    of_choice = {"options": options} if options else {}
    samples = read(
        tmp_path / "q.json", [{"question": "q", "answer": each, **of_choice} for each in answers]
    )
    assert [sample.answer for sample in samples] == right
    assert {tuple(sample.options or ()) for sample in samples} == {shown}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q", "answer": "a"', "questions.jsonl:1: Expecting"),
        ('{"answer": "a"}', "question 1: needs the field 'question'"),
        ('{"question": "q", "option": ["a", "b"]}', "unknown fields option"),
        ('{"question": "q", "options": ["a", "a"], "answer": 0}', "needs 2 to 26 options"),
        (
            '{"question": "q", "options": ["B", "A"], "answer": "A"}',
            "the answer 'A' could be several",
        ),
        (
            '{"question": "q", "options": [1, 2, 3], "answer": 2}',
            "of one option and the text of another",
        ),
        ("", "there are no questions"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path, capsys, line, message):
    (tmp_path / "questions.jsonl").write_text(line)
    assert (
        questions.main(["--model", "demo", "--questions", str(tmp_path / "questions.jsonl")]) == 65
    )
    assert message in capsys.readouterr().err


def test_questions_about_the_same_files_stand_together():
    samples = [Sample(str(n), "q", "a", videos=(Path(f"{n * n % 7}"),)) for n in range(23)]
    groups = by_files(samples)
    assert sorted(s.key for group in groups for s in group) == sorted(s.key for s in samples)
    assert [group[0].videos[0].name for group in groups] == ["0", "1", "4", "2"]
    assert all(len({s.videos for s in group}) == 1 for group in groups)


def test_a_run_counts_units_of_several_tries():
    """A unit is right if all its tries are, and waits where one is missing."""
    units = {"a": ([True, True], 2), "b": ([True, False], 2), "c": ([True], 2), "d": ([None], 1)}
    run = Run({})
    for unit, (rights, size) in units.items():
        for number, right in enumerate(rights):
            record = {"unit": unit, "unit_size": size, "groups": {"g": unit}}
            said = {
                "text": "",
                "choice": None,
                "is_choice": number == 1,
                "right": right,
                "figures": {},
            }
            run.records[f"{unit}{number}"] = record | said
    found = score(run)
    assert found.groups == {ALL: [1, 2], ("g", "a"): [1, 1], ("g", "b"): [0, 1]}
    assert found.others == {"incomplete": 1, "unscored": 1, "unanswered": 2, "failed": 0}


def test_a_table_says_how_many_questions_each_run_has():
    record = {
        "unit_size": 1,
        "groups": {},
        "text": "",
        "choice": None,
        "is_choice": False,
        "figures": {},
    }

    def run(hosts: int, num_questions: int) -> Run:
        records = {}
        for number in range(num_questions):
            records[str(number)] = {**record, "unit": str(number), "right": number < 2}
        return Run({"hosts": hosts}, records)

    runs = [run(1, 4), run(2, 2)]
    row = next(line for line in markdown(runs).splitlines() if "| all |" in line)
    assert row == "| all | 50.0 (15-85) | 100.0 (34-100) | 4, 2 |"


def test_a_digest_covers_all_that_is_asked():
    base = {
        "key": "k",
        "question": "q",
        "answer": 0,
        "options": ("a", "b"),
        "videos": (Path("x/v.mp4"),),
    }
    other = [
        {"question": "r"},
        {"answer": 1},
        {"options": ("a", "c")},
        {"videos": (Path("x/w.mp4"),)},
    ]
    digests = [digest_of([Sample(**{**base, **change})]) for change in ({}, *other)]
    assert len(set(digests)) == 5
    # Moved, but the same.
    assert digest_of([Sample(**{**base, "videos": (Path("y/v.mp4"),)})]) == digests[0]


# ---- subtitles ----


def test_subrip_files(tmp_path):
    (tmp_path / "s.srt").write_text(
        SRT.replace("\n", "\r\n") + "\r\n4\r\nno time\r\nlost", encoding="utf-8"
    )
    assert read_srt(tmp_path / "s.srt") == [
        Subtitle(0.0, 1.0, "first line"),
        Subtitle(1.2, 1.3, "between frames"),
        Subtitle(2.0, 4.5, "last line"),
    ]
    (tmp_path / "other.srt").write_text("something else")
    for name in ("other.srt", "missing.srt"):
        with pytest.raises(ValueError, match=name):
            read_srt(tmp_path / name)


def test_an_end_is_no_longer_shown_and_equal_neighbours_are_one():
    spans = {(0, 1): "a", (1, 2): "b", (1.5, 3): "b", (5, 6): "c", (7, 8): "d"}
    lines = [Subtitle(*span, text) for span, text in spans.items()]
    assert shown_at(lines, [0.5, 1.0, 1.7, 6.0]) == ["a", "b"]
    assert shown_at(lines, [7.0, 0.0]) == ["a", "d"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"timestamp": [1.0], "text": "a"}, "question 1: not enough values"),
        ({"start": "1:2", "end": "0:0:1", "line": "a"}, "question 1: not enough values"),
        ({"line": "a"}, "needs the field 'start'"),
    ],
)
def test_a_wrong_subtitle_file_is_refused_with_the_place(tmp_path, row, message):
    (tmp_path / "s.json").write_text(json.dumps([row]))
    with pytest.raises(ValueError, match=message):
        read_subtitles(tmp_path / "s.json", 0.0, 1.0)
