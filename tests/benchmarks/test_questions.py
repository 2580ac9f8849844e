"""A user's questions, asked as a user asks them: clips and a file of benchmarks/render.py, the demo
model."""

import json
import shutil
from pathlib import Path

import pytest
import questions
import render
from PIL import Image

from apbv import Engine

from apbv_tests.asked import run_in
from apbv_tests.documents import commands_in, marked, output_of, read_command
from apbv_tests.scripts import ROOT, run_benchmark, run_hosts
from apbv_tests.video_files import decode_all
from support.evaluation.scoring import ALL, score

FILE = "questions.jsonl"


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "clips"
    render.main(["--questions", "8", "--shots", "16", "--out", str(folder)])
    return folder


@pytest.fixture(scope="module")
def said(clips) -> dict[str, str]:
    """What the engine says by itself to each question."""
    engine = Engine.from_pretrained("demo")
    return {
        asked["id"]: engine.generate(asked["question"], video=clips / asked["video"]).text
        for asked in read(clips)
    }


def read(clips: Path) -> list[dict]:
    return [json.loads(line) for line in (clips / FILE).read_text().splitlines()]


def run(clips: Path, *options) -> int:
    return questions.main(
        [str(each) for each in ("--model", "demo", "--questions", clips / FILE, *options)]
    )


def ask(clips: Path, results: Path, *options, status: int = 0) -> dict[str, dict]:
    """The records of a run in this process."""
    assert run(clips, "--json", results, *options) == status
    return run_in(results).records


def texts(records: dict[str, dict]) -> dict[str, str]:
    return {key: record["text"] for key, record in records.items()}


def test_answers_are_the_engines_and_scored(clips, said, tmp_path, capsys):
    asked = read(clips)
    assert {each["groups"]["task"] for each in asked} == {"retrieval", "ordering", "counting"}
    assert {each["video"] for each in asked} == {path.name for path in clips.glob("*.mp4")}
    records = ask(clips, tmp_path / "r.jsonl")
    assert texts(records) == said
    right = [each["id"] for each in asked if said[each["id"]] == each["answer"]]
    assert {key for key, record in records.items() if record["right"]} == set(right) and len(
        right
    ) >= 6
    found = score(run_in(tmp_path / "r.jsonl"))
    assert found.groups[ALL] == [len(right), 8] and not any(found.others.values())
    ordering = [key.endswith("ordering") for key in right]
    assert found.groups["task", "ordering"] == [sum(ordering), 3]
    table = capsys.readouterr().out
    assert "| all | " in table and "| task: ordering | " in table and "needles: inserted" in table


def test_only_what_is_missing_or_has_changed_is_asked(clips, said, prompts, tmp_path):
    folder = shutil.copytree(clips, tmp_path / "clips")
    results = tmp_path / "r.jsonl"
    ask(folder, results)
    kept = b"".join(results.read_bytes().splitlines(keepends=True)[:3])
    results.write_bytes(kept + b'{"key": "' + b"x" * 20_000)  # killed while it wrote
    prompts.clear()
    assert texts(ask(folder, results)) == said
    assert results.read_bytes().startswith(kept) and len(prompts) == 5
    shutil.copy(folder / "clip-1.mp4", folder / "clip-0.mp4")
    about = [question["id"] for question in read(folder) if question["video"] == "clip-0.mp4"]
    before = len(results.read_text().splitlines())
    for _ in range(2):  # the second time without any change
        prompts.clear()
        ask(folder, results)
        added = results.read_text().splitlines()[before:]
        assert sorted(json.loads(line)["key"] for line in added) == sorted(about)
    assert not prompts


def test_real_hosts_answer_as_simulated_ones(clips, tmp_path):
    options = ["--method", "apbv", "--passing-len", 4, "--anchor-len", 4]
    simulated = ask(clips, tmp_path / "s.jsonl", *options, "--hosts", 2)
    arguments = [
        "--model",
        "demo",
        "--questions",
        clips / FILE,
        "--json",
        tmp_path / "r.jsonl",
        *options,
    ]
    result = run_benchmark("questions", *arguments, hosts=2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("| all |") == 1
    real = run_in(tmp_path / "r.jsonl")
    assert texts(real.records) == texts(simulated)
    for record in [*real.records.values(), *simulated.values()]:
        assert (record["figures"]["method"], record["figures"]["hosts"]) == ("apbv", 2)
    assert (real.settings["hosts"], real.settings["simulated"]) == (2, False)


@pytest.mark.parametrize(
    ("options", "figure"),
    [
        (["--reduce", "dycoke", "--reduce-ratio", "0.5"], "reduction"),
        (["--sparse", "xattention"], "attention_density"),
        (["--speculate", "hippo"], "tokens_per_target_forward"),
    ],
)
def test_every_way_to_answer_can_be_asked(clips, said, tmp_path, options, figure):
    records = ask(
        clips, tmp_path / "r.jsonl", "--hosts", 2, "--method", "full", "--limit", 4, *options
    )
    assert len(records) == 4 and all(figure in record["figures"] for record in records.values())
    assert run_in(tmp_path / "r.jsonl").settings[options[0].removeprefix("--")] == options[1]
    if figure == "tokens_per_target_forward":  # a draft changes no answer
        assert texts(records) == {key: said[key] for key in records}


def test_what_cannot_be_asked_fails_alone_and_is_asked_again(clips, tmp_path, capsys):
    folder = shutil.copytree(clips, tmp_path / "clips")
    results = tmp_path / "r.jsonl"
    (folder / "clip-0.mp4").write_bytes(b"no video")
    (folder / "clip-1.mp4").unlink()
    assert run(folder, "--json", results) == 65
    assert "1 files are missing" in capsys.readouterr().err and not results.exists()
    records = ask(folder, results, "--allow-missing", "--hosts", 2, status=65)
    assert (
        "6 of 8 questions failed" in (shown := capsys.readouterr()).err
        and "| (failed) | 6 |" in shown.out
    )
    assert [key for key, record in records.items() if "error" in record] == list(records)[:6]
    assert "clip-0.mp4" in records["clip-0 ordering"]["error"]
    for name in ("clip-0.mp4", "clip-1.mp4"):
        shutil.copy(clips / name, folder / name)
    records = ask(folder, results, "--hosts", 2)
    assert all("error" not in record for record in records.values()) and len(records) == 8
    assert results.read_bytes().count(b'"error"') == 6  # nothing that was found is lost


def test_answers_with_other_settings_are_kept_apart(clips, tmp_path, capsys, monkeypatch, prompts):
    monkeypatch.chdir(tmp_path)
    for method in ("full", "apbv", "full"):
        assert run(clips, "--limit", 1, "--method", method) == 0
    (file,) = (tmp_path / "results").iterdir()
    assert len(prompts) == 2  # as the third run's answer is known
    capsys.readouterr()
    assert questions.main(["--table", str(file)]) == 0
    header = capsys.readouterr().out.splitlines()[0]
    assert "method full" in header and "method apbv" in header


def test_shards_share_no_video(clips, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shards = []
    for number in (1, 2):
        assert run(clips, "--shard", f"{number}/2") == 0
        shards.append(run_in(Path("results", f"questions-{number}-of-2.jsonl")).records)
    assert sum(map(len, shards)) == 8
    first, second = ({key.split()[0] for key in shard} for shard in shards)
    assert first and second and not first & second


def test_files_of_others_are_not_written_to(clips, tmp_path, capsys):
    for text in ('{"some": "json"}\n', "notes", "no\ntes\n"):
        (tmp_path / "r.jsonl").write_text(text)
        assert run(clips, "--json", tmp_path / "r.jsonl") == 65
        assert "r.jsonl" in capsys.readouterr().err and (tmp_path / "r.jsonl").read_text() == text
    assert questions.main(["--table", str(tmp_path / "nowhere")]) == 65
    assert "cannot read the records" in capsys.readouterr().err


def test_a_question_may_be_about_several_files(clips, prompts, tmp_path):
    picture = tmp_path / "still.png"
    Image.fromarray(decode_all(clips / "clip-0.mp4")[0]).save(picture)
    files = {"video": [str(clips / "clip-0.mp4"), str(clips / "clip-1.mp4")], "image": str(picture)}
    (tmp_path / FILE).write_text(
        json.dumps({**files, "question": "how many letters are shown", "answer": 7})
    )
    (record,) = ask(tmp_path, tmp_path / "r.jsonl", "--hosts", 2, "--method", "apbv").values()
    # Of each shot, and of the picture.
    assert record["figures"]["num_video_tokens"] == 4 * (16 + 16 + 1)
    assert [Path(name).name for name in prompts[0]["video"]] == ["clip-0.mp4", "clip-1.mp4"]


def test_the_pages_first_commands_ask_twenty_questions(tmp_path):
    (block,) = marked("bash ask")
    for command in commands_in(block.code):
        job = read_command(command)
        (result,) = run_hosts(ROOT / job.script, *job.options, folders=[tmp_path])
        assert result.returncode == 0, result.stderr
    shown = output_of(block).splitlines()
    assert shown[-1] == "…" and len(shown) > 6  # then come times
    assert result.stdout.splitlines()[: len(shown) - 1] == shown[:-1]
    assert "| 20 |" in shown[2]
