"""A user's questions, asked as a user asks them: clips and a file from apbv.demo.render, and the demo model."""

import json
import shutil
import time
from pathlib import Path

import jsonschema
import pytest
import questions
from PIL import Image

from apbv import Engine
from apbv.demo import render
from apbv.demo.clips import read_mp4

from documents import commands_in, marked, output_of, read_command
from scripts import BENCHMARKS, ROOT, run_benchmark, run_hosts, started_hosts
from support.evaluation.prompting import LETTERED, fill
from support.evaluation.results import ResultsFile, read_runs
from support.evaluation.samples import Sample, in_order_of_files, shard

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
        asked["id"]: engine.generate(asked["question"], video=clips / asked["video"]).text for asked in read(clips)
    }


def read(clips: Path) -> list[dict]:
    return [json.loads(line) for line in (clips / FILE).read_text().splitlines()]


def ask(clips: Path, results: Path, *options, status: int = 0) -> dict[str, dict]:
    """The records of a run in this process."""
    arguments = ["--model", "demo", "--questions", clips / FILE, "--results", results, *options]
    assert questions.main([str(each) for each in arguments]) == status
    (run,) = read_runs([results])
    return run.records


def test_twenty_questions_are_written_as_they_are_asked_for(tmp_path):
    render.main(["--questions", "20", "--shots", "8", "--seed", "3", "--out", str(tmp_path / "clips")])
    asked = read(tmp_path / "clips")
    assert len(asked) == 20 == len({each["id"] for each in asked})
    assert {each["groups"]["task"] for each in asked} == {"retrieval", "ordering", "counting"}
    assert {each["groups"]["needles"] for each in asked} == {"edited", "inserted"}
    videos = {each["video"] for each in asked}
    assert videos == {path.name for path in (tmp_path / "clips").glob("*.mp4")} and len(videos) == 7


def test_answers_are_the_engines_and_scored(clips, said, tmp_path, capsys):
    records = ask(clips, tmp_path / "r.jsonl", "--json", tmp_path / "s.jsonl", "--plot", tmp_path / "plot.png")
    assert {key: record["text"] for key, record in records.items()} == said
    right = [asked["id"] for asked in read(clips) if said[asked["id"]] == asked["answer"]]
    assert [key for key, record in records.items() if record["right"]] == right and len(right) >= 6
    (summary,) = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    jsonschema.validate(summary, json.loads((BENCHMARKS / "support" / "evaluation" / "schema.json").read_text()))
    assert (summary["right"], summary["total"], summary["failed"]) == (len(right), 8, 0)
    ordering = [key for key in right if key.endswith("ordering")]
    assert summary["groups"]["task"]["ordering"]["right"] == len(ordering)
    assert summary["groups"]["task"]["ordering"]["total"] == 3
    table = capsys.readouterr().out
    assert "| all | " in table and "| task: ordering | " in table and "needles: inserted" in table
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_an_interrupted_run_goes_on(clips, said, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    ask(clips, whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 8
    kept = b"".join(lines[:4])
    cut.write_bytes(kept + b'{"key": "' + b"x" * 20_000)  # killed while it wrote
    asked = []
    generate = Engine.generate
    monkeypatch.setattr(Engine, "generate", lambda *args, **kwargs: asked.append(1) or generate(*args, **kwargs))
    assert {key: record["text"] for key, record in ask(clips, cut).items()} == said
    assert cut.read_bytes().startswith(kept) and len(asked) == 5
    ask(clips, cut)
    assert len(asked) == 5 and len(cut.read_bytes().splitlines()) == 9


def test_questions_about_a_file_that_became_another_are_asked_again(clips, prompts, tmp_path):
    folder, results = shutil.copytree(clips, tmp_path / "clips"), tmp_path / "r.jsonl"
    ask(folder, results)
    shutil.copy(folder / "clip-1.mp4", folder / "clip-0.mp4")
    prompts.clear()
    about = [question["id"] for question in read(folder) if question["video"] == "clip-0.mp4"]
    before = results.read_text().splitlines()
    ask(folder, results)
    assert {Path(prompt["video"][0]).name for prompt in prompts} == {"clip-0.mp4"} and len(prompts) == len(about)
    assert [json.loads(line)["key"] for line in results.read_text().splitlines()[len(before) :]] == about
    # Without any change nothing is asked.
    prompts.clear()
    ask(folder, results)
    assert not prompts


def test_a_killed_process_leaves_all_answers_that_it_had_got(clips, said, tmp_path):
    results = tmp_path / "r.jsonl"
    options = ["--model", "demo", "--questions", str(clips / FILE), "--results", str(results)]
    with started_hosts(BENCHMARKS / "questions.py", options, 1, tmp_path) as (process,):
        while process.is_alive() and not (results.exists() and results.read_bytes().count(b"\n") >= 3):
            time.sleep(0.005)
        process.kill()
        process.join()
    kept = results.read_bytes()
    assert kept.count(b"\n") >= 3
    assert {key: record["text"] for key, record in ask(clips, results).items()} == said
    assert results.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])


def test_shards_together_are_the_whole(clips, said, tmp_path, capsys):
    parts = [tmp_path / f"{number}.jsonl" for number in (1, 2)]
    sizes = [len(ask(clips, part, "--shard", f"{number}/2")) for number, part in enumerate(parts, start=1)]
    assert sizes == [5, 3]  # of three clips, on which three, three and two questions are asked
    ask(clips, tmp_path / "whole.jsonl")
    capsys.readouterr()
    tables = []
    for files in (parts, parts[::-1], [tmp_path / "whole.jsonl"]):
        assert questions.main(["--table", *map(str, files)]) == 0
        tables.append([line for line in capsys.readouterr().out.splitlines() if " ms" not in line])
    assert tables[0] == tables[1] == tables[2]
    (run,) = read_runs(parts)
    assert {key: record["text"] for key, record in run.records.items()} == said


@pytest.mark.parametrize("of", [1, 2, 3, 5])
def test_no_shard_shares_a_file_with_another(of):
    samples = [Sample(str(n), "q", "a", videos=(Path(f"{n * n % 7}"),)) for n in range(23)]
    ordered = in_order_of_files(samples)
    parts = [shard(ordered, number, of) for number in range(1, of + 1)]
    assert sorted(s.key for part in parts for s in part) == sorted(s.key for s in samples)
    files = [{s.videos for s in part} for part in parts]
    assert sum(map(len, files)) == len(set().union(*files))


def test_real_hosts_answer_as_simulated_ones(clips, tmp_path):
    options = ["--method", "apbv", "--passing-len", 4, "--anchor-len", 4]
    simulated = ask(clips, tmp_path / "s.jsonl", *options, "--hosts", 2)
    real = tmp_path / "r.jsonl"
    arguments = ["--model", "demo", "--questions", clips / FILE, "--results", real, *options]
    result = run_benchmark("questions", *arguments, hosts=2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("| all |") == 1
    (run,) = read_runs([real])
    assert {k: r["text"] for k, r in run.records.items()} == {k: r["text"] for k, r in simulated.items()}
    assert {record["figures"]["method"] for record in simulated.values()} == {"apbv"}
    assert {record["figures"]["hosts"] for record in [*run.records.values(), *simulated.values()]} == {2}
    assert (run.settings["hosts"], run.settings["simulated"]) == (2, False)


def test_a_draft_changes_no_answer(clips, said, tmp_path):
    records = ask(
        clips, tmp_path / "r.jsonl", "--speculate", "hippo", "--hosts", 2, "--method", "full", "--limit", 4
    )
    assert {key: record["text"] for key, record in records.items()} == {key: said[key] for key in records}
    assert len(records) == 4
    assert all(record["figures"]["tokens_per_target_forward"] for record in records.values())


def test_what_cannot_be_asked_fails_alone_and_is_asked_again(clips, said, tmp_path, capsys):
    folder = shutil.copytree(clips, tmp_path / "clips")
    (folder / "clip-0.mp4").write_bytes(b"no video")
    (folder / "clip-1.mp4").unlink()
    results = tmp_path / "r.jsonl"
    assert questions.main(["--model", "demo", "--questions", str(folder / FILE), "--results", str(results)]) == 1
    assert "1 files are missing" in capsys.readouterr().err and not results.exists()
    records = ask(folder, results, "--allow-missing", "--hosts", 2, status=1)
    assert "6 of 8 questions failed" in (shown := capsys.readouterr()).err and "| (failed) | 6 |" in shown.out
    assert [key for key, record in records.items() if "error" in record] == list(records)[:6]
    assert "clip-0.mp4" in records["clip-0 ordering"]["error"]
    for name in ("clip-0.mp4", "clip-1.mp4"):
        shutil.copy(clips / name, folder / name)
    records = ask(folder, results, "--hosts", 2)
    assert all("error" not in record for record in records.values()) and len(records) == 8
    assert results.read_bytes().count(b'"error"') == 6  # nothing that was found is lost
    assert [record["key"] for record in records.values() if record["right"]]


def test_answers_with_other_settings_are_kept_apart(clips, tmp_path, capsys, monkeypatch):
    results = tmp_path / "r.jsonl"
    ask(clips, results, "--limit", 1)
    before = results.read_bytes()
    for options, named in ((["--method", "full"], "method 'apbv'"), (["--frames", "8"], "frames None and not 8")):
        arguments = [
            "--model",
            "demo",
            "--questions",
            clips / FILE,
            "--results",
            results,
            "--limit",
            "1",
            *options,
        ]
        assert questions.main([str(each) for each in arguments]) == 1
        assert named in capsys.readouterr().err
    assert results.read_bytes() == before
    monkeypatch.chdir(tmp_path)
    for method in ("full", "apbv", "full"):
        arguments = ["--model", "demo", "--questions", str(clips / FILE), "--limit", "1", "--method", method]
        assert questions.main(arguments) == 0
    files = sorted((tmp_path / "results").iterdir())
    assert len(files) == 2
    capsys.readouterr()
    assert questions.main(["--table", *map(str, files), "--plot", str(tmp_path / "plot.png")]) == 0
    header = capsys.readouterr().out.splitlines()[0]
    assert "method full" in header and "method apbv" in header


def test_files_of_others_are_not_written_to(clips, tmp_path, capsys):
    for text in ("notes\n", '{"some": "json"}\n', "notes"):
        (tmp_path / "r.jsonl").write_text(text)
        arguments = ["--model", "demo", "--questions", clips / FILE, "--results", tmp_path / "r.jsonl"]
        assert questions.main([str(each) for each in arguments]) == 1
        assert "r.jsonl" in capsys.readouterr().err and (tmp_path / "r.jsonl").read_text() == text
    assert questions.main(["--table", str(tmp_path / "nowhere")]) == 1
    assert "cannot read the results" in capsys.readouterr().err


def test_two_runs_do_not_write_to_one_file(tmp_path):
    path, settings = tmp_path / "r.jsonl", {"benchmark": "x"}
    first = ResultsFile(path, settings)
    with pytest.raises(ValueError, match="another process is writing to"):
        ResultsFile(path, settings)
    first.add({"key": "k", "text": "kept"})
    first.close()
    again = ResultsFile(path, settings)
    assert list(again.answered) == ["k"]
    again.close()


def test_a_question_may_be_about_several_files(clips, prompts, tmp_path):
    picture = tmp_path / "still.png"
    Image.fromarray(read_mp4(clips / "clip-0.mp4")[0]).save(picture)
    files = {"video": [str(clips / "clip-0.mp4"), str(clips / "clip-1.mp4")], "image": str(picture)}
    (tmp_path / FILE).write_text(json.dumps({**files, "question": "how many letters are shown", "answer": 7}))
    (record,) = ask(tmp_path, tmp_path / "r.jsonl", "--hosts", 2, "--method", "apbv").values()
    assert record["figures"]["num_video_tokens"] == 4 * (16 + 16 + 1)  # of each shot, and of the picture
    assert [Path(name).name for name in prompts[0]["video"]] == ["clip-0.mp4", "clip-1.mp4"]


@pytest.mark.parametrize("options", [["--reduce", "dycoke", "--reduce-ratio", "0.5"], ["--sparse", "xattention"]])
def test_every_way_to_prefill_can_be_asked(clips, tmp_path, options):
    records = ask(clips, tmp_path / "r.jsonl", "--hosts", 2, "--method", "apbv", "--limit", 2, *options)
    for record in records.values():
        figures = record["figures"]
        assert ("reduction" in figures) == ("--reduce" in options)
        assert ("attention_density" in figures) == ("--sparse" in options)
    (run,) = read_runs([tmp_path / "r.jsonl"])
    assert run.settings[options[0].removeprefix("--")] == options[1]


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


def test_a_choice_can_be_asked_for_without_letters(clips, said, tmp_path):
    """As the demo model has to be, which does not know them."""
    folder = tmp_path / "clips"
    shutil.copytree(clips, folder)
    asked = read(clips)
    for each in asked:
        each["options"] = ["none", said[each["id"]], "A Z"]
        each["answer"] = 1 if each["answer"] == said[each["id"]] else "none"
    (folder / FILE).write_text("".join(json.dumps(each) + "\n" for each in asked))
    records = ask(folder, tmp_path / "r.jsonl", "--template", "{question}")
    assert {record["choice"] for record in records.values()} == {"B"}
    assert [r["right"] for r in records.values()] == [each["answer"] == 1 for each in asked]


def test_the_prompt_of_a_choice():
    sample = Sample("1", "What is {options}?", 0, ("a", "b {question}"))
    assert fill(LETTERED, sample) == (
        "What is {options}?\nA. a\nB. b {question}\n"
        "Answer with the option's letter from the given choices directly."
    )
