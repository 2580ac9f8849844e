"""The benchmark of a video's way to the first token: form, clips, and that wrong results get no
figures."""

import json
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import video
import video_kinds

from apbv_tests.scripts import validator_of
from support.videos.worker import STAGES, Job


@pytest.fixture
def run(tmp_path):
    """Runs the quick preset: the exit status and the records.

    In this process, because those that scripts run in for tests may have none of their own.
    """
    validator = validator_of("video")

    def run(*options):
        path = tmp_path / "figures.jsonl"
        arguments = ["--preset", "quick", "--json", path, *options]
        status = video.main([str(argument) for argument in arguments])
        records = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        for record in records:
            validator.validate(record)
        return status, records

    return run


def test_every_way_through_the_stages(run, capsys):
    options = ["--ways", "apbv", "transformers", "--pinned", "--hosts", 1, 2, "--stages", *STAGES]
    status, records = run(*options)
    printed = capsys.readouterr()
    assert status == 0, printed.err
    alone = [("frames", "apbv", 1)]
    ways = [("apbv", 1), ("apbv", 2), ("transformers", 1)]
    later = [(stage, *way) for stage in ("embeddings", "first_token") for way in ways]
    assert [(r["stage"], r["way"], r["hosts"]) for r in records] == alone + later
    assert sum(line.startswith("|") for line in printed.out.splitlines()) == 2 + len(records)
    for record in records:
        assert record["seconds"] == statistics.median(record["samples"]["seconds"])
        assert record["peak_memory_bytes"] > 0
        assert record["clip_frames"] == 48 and record["num_frames"] == 8
        # Of 96 x 192 pixels the processor makes 3 x 7 tokens for each two frames.
        assert record["num_visual_tokens"] == (None if record["stage"] == "frames" else 4 * 3 * 7)
        if record["way"] == "apbv":
            longest = max(record["stages_ms"].values()) / 1e3
            assert record["stages_ms"]["decode_video"] > 0 and longest <= record["seconds"]
        assert (record["max_difference"] is None) == (record["hosts"] == 2)


def job_of(stage: str = "frames", way: str = "apbv") -> Job:
    return Job(stage, way, 1, 4, "sparse", "pyav", SimpleNamespace(dtype="float32"))


def test_every_row_is_compared(tmp_path):
    rows = np.arange(200, dtype=np.uint8).reshape(100, 2)

    def difference(values: np.ndarray, **settings) -> float:
        np.save(tmp_path / "made.npy", values)
        return video.max_difference(
            job_of(**settings), tmp_path / "made.npy", tmp_path / "reference.npy"
        )

    np.save(tmp_path / "reference.npy", rows)
    assert difference(rows) == 0
    wrong = rows.copy()
    wrong[99, 1] += 3
    assert difference(wrong, way="opencv") == 3
    assert difference(wrong, stage="embeddings", way="transformers") == pytest.approx(3 / 199)
    for values, message, stage in (
        (wrong, "differ by 3", "frames"),
        (rows * np.nan, "differ by nan", "embeddings"),
        (rows[:99], "other shapes", "frames"),
    ):
        with pytest.raises(AssertionError, match=message):
            difference(values, stage=stage)


def test_readers_that_are_not_installed_are_left_out(capsys, monkeypatch):
    monkeypatch.setattr(
        video_kinds, "MODULES", {"torchcodec": "no_such_module", "decord2": "no_such_module_either"}
    )
    monkeypatch.setattr(
        video_kinds, "rows", lambda kinds, readers: [[kind, *readers] for kind in kinds]
    )
    kind = next(iter(video_kinds.KINDS))
    video_kinds.main(["--readers", "torchcodec", "apbv", "decord2", "--kinds", kind])
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "| file | apbv |"
    assert said.err == "note: not installed and skipped: torchcodec, decord2\n"
    assert video_kinds.main(["--readers", "decord2"]) == 1
    assert capsys.readouterr().err.endswith("error: no reader is installed\n")


@pytest.mark.thorough
def test_kinds_of_files(capsys):
    assert video_kinds.main(["--readers", "apbv", "--kinds", *list(video_kinds.KINDS)[:1]]) == 0
    assert capsys.readouterr().out.endswith(" | right |\n")
