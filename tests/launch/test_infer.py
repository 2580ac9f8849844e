"""launch/infer.py: what it refuses before the work is done, and what it says of it."""

import importlib
import json
import os
import re
import runpy
import shutil
import signal
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from apbv import demo
from apbv.launch.answer import streamed
from apbv.launch.options import threads_wanted

from apbv_tests import families
from apbv_tests.patience import wait_for
from apbv_tests.pool import exit_statuses
from apbv_tests.scripts import INFER, run_script, started_hosts


@pytest.fixture(scope="module")
def weightless(tmp_path_factory) -> Path:
    """A checkpoint without its weights: whoever begins to load them fails, and says so."""
    path = tmp_path_factory.mktemp("checkpoints") / "weightless"
    shutil.copytree(families.save_checkpoint("qwen2_5_vl", path.with_name("whole")), path)
    (path / "model.safetensors").unlink()
    return path


@pytest.fixture
def infer(capsys):
    """Runs the script in this process, on one host; returns its status and what it wrote to
    stderr."""
    main = runpy.run_path(str(INFER))["main"]

    def run(*options) -> tuple[int, list[str]]:
        try:
            status = main([str(option) for option in options])
        except SystemExit as end:  # the options themselves were refused
            status = end.code
        return status, capsys.readouterr().err.splitlines()

    return run


def test_the_weights_are_looked_for_where_all_else_is_right_and_by_the_threads_asked_for(
    infer, weightless
):
    before = torch.get_num_threads()
    try:
        status, lines = infer("--model", weightless, "--prompt", "Why?", "--threads", 3)
        assert status == 79 and f"cannot load the model {weightless}: " in lines[-1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_torchruns_single_thread_becomes_a_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    for given, device, processes, threads, wanted in (
        (None, "cpu", "2", "1", 4),
        (3, "cpu", "2", "1", 3),
        (None, "cuda", "2", "1", None),
        (None, "cpu", "2", "2", None),
        (None, "cpu", "1", "1", None),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert threads_wanted(given, device) == wanted


REFUSED = {
    "--video missing.mp4": "missing.mp4",
    "--image text.png": "cannot read the image text.png: ",
    "--speculate vanilla --draft-model ./no": "cannot load the model ./no: there is no such "
    "directory",
}


def test_what_cannot_work_is_refused_before_weights_are_loaded(
    infer, weightless, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("text.png").write_text("This is no picture.")
    for options, message in REFUSED.items():
        video = (
            [] if "--video" in options or "--image" in options else ["--video", demo.video_path()]
        )
        status, lines = infer("--model", weightless, "--prompt", "Why?", *options.split(), *video)
        assert status in (65, 78, 79) and len(lines) == 1, options
        assert lines[0].startswith("error (host 0): ") and message in lines[0]
        assert os.listdir() == ["text.png"], "nothing is left behind"


WITHOUT_EFFECT = {
    "--frames 8": "--frames needs a --video",
    "--sparse-threshold 0.5": "--sparse-threshold needs --sparse, or a sparse --method",
    "--method xattention --sparse-similarity 0": "--sparse-similarity needs --sparse or --method "
    "spargeattn",
    "--method ulysses --sparse xattention": "sparse attention needs full, apbv, apb or star: "
    "ulysses",
    "--method xattention --sparse spargeattn": "xattention cannot select blocks as",
}


def test_options_without_effect_are_refused(infer):
    for options, message in WITHOUT_EFFECT.items():
        status, (line,) = infer("--model", "some/model", "--prompt", "Why?", *options.split())
        assert status == 2 and line.startswith(f"error: {message}"), options


GIVEN_TWICE = [
    ("infer", "--model demo --prompt a --prompt b", "--prompt"),
    ("infer", "--model demo --frames 4 --num-frames 8", "--num-frames"),
    ("infer", "--model demo --method star --method apb", "--method"),
    (
        "infer",
        "--model demo --audio-in-video --video demo --no-audio-in-video",
        "--no-audio-in-video",
    ),
    ("infer", "--model demo --tensor-parallel 2 --tensor-parallel=2", "--tensor-parallel"),
    ("batch", "requests.jsonl --out a --model demo --out b", "--out"),
    ("serve", "demo --port 1 --port 2", "--port"),
    ("plan", "--model demo --tokens 2 --tokens 3", "--tokens"),
    ("doctor", "--json a --json b", "--json"),
]


@pytest.mark.parametrize(("command", "options", "twice"), GIVEN_TWICE)
def test_an_option_with_one_value_is_given_once(capsys, command, options, twice):
    module = "apbv.doctor.__main__" if command == "doctor" else f"apbv.launch.{command}"
    with pytest.raises(SystemExit) as end:
        importlib.import_module(module).parse_arguments(options.split())
    said = f"error: {twice} was given twice; give it once (--help lists the options)"
    assert end.value.code == 2 and capsys.readouterr().err.splitlines() == [said]


def test_options_that_can_be_repeated_and_defaults_are_not_given_twice():
    videos = ["--video", "a.mp4", "--video", "b.mp4", "--keep-losing-draft", "--keep-losing-draft"]
    parse = importlib.import_module("apbv.launch.infer").parse_arguments
    for _ in range(2):
        options = parse(["--model", "demo", "--speculate", "vanilla", *videos])
        assert options.video == ["a.mp4", "b.mp4"] and options.method == "apbv"


def rows(lines: list[str]) -> dict[str, str]:
    """The table at the end, by its first column; without the rows that have none, such as of a
    draft that lost."""
    return dict(
        re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines if re.match(r"  \S", line)
    )


def test_the_table_says_what_there_is_with_a_line_for_each_video(infer, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        status, lines = infer(
            "--model", "demo", "--prompt", "name the letters in order", "--frames", 100
        )
    said = rows(lines)
    assert status == 0 and said["method"] == "full on 1 host, cpu, float32"
    assert said["video"] == "100 of 128 frames, 32.0 s" and said["decoding"].endswith(" tokens/s")
    assert not {"drafting", "accepted", "anchor / passing", "communication", "draft"} & set(said)
    families.synthetic_image(56, 56).save(tmp_path / "a.png")
    shown = [
        "--video",
        "demo",
        "--image",
        tmp_path / "a.png",
        "--video",
        demo.video_path(),
        "--frames",
        8,
    ]
    with pytest.warns(UserWarning, match="the demo model understands"):
        status, lines = infer(
            "--model", "demo", "--prompt", "What happens?", *shown, "--max-new-tokens", 1
        )
    assert status == 0
    said = rows(lines)
    assert said["video 1"] == said["video 2"] == "8 of 128 frames, 32.0 s" and "video" not in said
    assert "of them visual" in said["prompt"] and "decoding" not in said, (
        "a single token has no rate"
    )


DRAFTED = [("std --keep-ratio 0.9", "std, on host 0"), ("vanilla", "vanilla, on host 0")]


@pytest.mark.parametrize(("options", "drafting"), DRAFTED)
def test_the_table_says_where_was_drafted_and_how_well(infer, tmp_path, options, drafting):
    asked = [
        "--model",
        "demo",
        "--prompt",
        "describe the clip shot by shot",
        "--max-new-tokens",
        20,
    ]
    status, lines = infer(
        *asked, "--speculate", *options.split(), "--json", tmp_path / "figures.jsonl"
    )
    assert status == 0
    said = rows(lines)
    figures = json.loads((tmp_path / "figures.jsonl").read_text())["speculation"]
    assert said["drafting"] == drafting
    accepted = figures["num_accepted"]
    drafted = figures["num_drafted"]
    assert said["accepted"] == f"{accepted / drafted:.0%}, {accepted} of {drafted} drafted tokens"
    assert said["tokens per pass"] == f"{figures['tokens_per_target_forward']:.2f}"


def test_an_error_comes_below_what_was_shown_of_the_answer(capsys):
    tokenizer = AutoTokenizer.from_pretrained(demo.model_path())
    with pytest.raises(ValueError), streamed(tokenizer, enabled=True) as show:
        for token in tokenizer.encode("moving disc, moving"):
            show(token)
        raise ValueError
    assert capsys.readouterr().out == "moving disc, moving\n"


def test_a_warning_is_one_line_of_one_host_and_a_draft_host_is_counted_as_one(tmp_path):
    (tmp_path / "context.txt").write_text("A")
    asked = [
        "--model",
        "demo",
        "--prompt",
        demo.DEMO_QUESTION,
        "--context",
        tmp_path / "context.txt",
    ]
    result = run_script(
        INFER, *asked, "--max-new-tokens", 2, "--speculate", "vanilla", "--draft-host", hosts=3
    )
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "too short to be split" in line]
    assert line.startswith("warning: a prompt of ") and line.endswith(
        "host 0 computes it alone, exactly"
    )
    said = rows(result.stderr.splitlines())
    assert " on 2 hosts and a draft host, " in said["method"]
    assert said["drafting"] == "vanilla, on the draft host"


def hold(fifo: Path, reader: int) -> int:
    """The writing end of a FIFO, once a process has begun to read it.

    Python would notice a signal that comes after the opening and before the reading only when the
    reading ends.
    """
    end = os.open(fifo, os.O_WRONLY)
    sleeps_in = Path(f"/proc/{reader}/wchan")  # the kernel's function; not every kernel tells
    with suppress(AssertionError):
        wait_for(lambda: "pipe_read" in sleeps_in.read_text(), 2.0)
    return end


def test_ctrl_c_is_one_line_and_130(tmp_path, hosts=2):
    """While the last host reads a file that does not end, and the others wait for it."""
    folders = [tmp_path / f"host{rank}" for rank in range(hosts)]
    for folder in folders:
        folder.mkdir()
        (folder / "context.txt").write_text("A long text.")
    (folders[-1] / "context.txt").unlink()
    os.mkfifo(folders[-1] / "context.txt")
    options = ["--model", "demo", "--prompt", demo.DEMO_QUESTION, "--context", "context.txt"]
    with started_hosts(INFER, options, hosts, tmp_path, folders) as processes:
        held = hold(folders[-1] / "context.txt", processes[-1].pid)
        for process in processes:
            os.kill(process.pid, signal.SIGINT)
        assert exit_statuses(processes) == [130] * hosts
        os.close(held)
    for rank in range(hosts):
        assert (tmp_path / f"{rank}.stderr").read_text() == ("interrupted\n" if rank == 0 else "")
