"""The benchmark of a video's way to the first token: form, clips, and that wrong results get no figures."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import video

from scripts import schema_of
from support.videos import comparing
from support.videos.worker import STAGES, Job


@pytest.fixture
def run(tmp_path):
    """Runs the quick preset: the exit status and the records.

    In this process, because those that scripts run in for tests may have none of their own.
    """
    schema = schema_of("video")

    def run(*options):
        path = tmp_path / "figures.jsonl"
        arguments = ["--preset", "quick", "--folder", tmp_path / "clips", "--json", path, *options]
        status = video.main([str(argument) for argument in arguments])
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for record in records:
            jsonschema.validate(record, schema)
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
        assert record["peak_memory_bytes"] >= record["memory_before_bytes"] > 0
        assert record["clip_frames"] == 48 and record["num_frames"] == 8
        # Of 96 x 192 pixels the processor makes 3 x 7 tokens for each two frames.
        assert record["num_visual_tokens"] == (None if record["stage"] == "frames" else 4 * 3 * 7)
        if record["way"] == "apbv":
            longest = max(record["stages_ms"].values()) / 1e3
            assert record["stages_ms"]["decode_video"] > 0 and longest <= record["seconds"]
            assert record["overlap"] == pytest.approx(record["seconds"] / longest)
        is_approximate = record["stage"] == "first_token" and record["hosts"] == 2
        assert (record["max_difference"] is None) == is_approximate


def job_of(**settings):
    job = Job(
        "frames", "apbv", clip=Path("a"), warm_up=Path("b"), reader="pyav", num_frames=4, sampling="sparse",
        hosts=2, max_pixels=1, vision_depth=1, vision_hidden=1, dtype="float32", threads=1, pinned=False,
    )  # fmt: skip
    return replace(job, **settings)


def test_every_row_is_compared(tmp_path, monkeypatch):
    """Both hosts made some of 100 rows, of which 7 are compared at a time."""
    monkeypatch.setattr(comparing, "_ROWS_AT_ONCE", 7)
    rows = np.arange(200, dtype=np.uint8).reshape(100, 2)

    def made(name: str, *of_hosts):
        (tmp_path / name).mkdir(exist_ok=True)
        for rank, (values, places) in enumerate(of_hosts):
            np.save(tmp_path / name / f"{rank}.npy", values)
            np.save(tmp_path / name / f"{rank}.places.npy", np.array(places))
        return tmp_path / name

    reference = made("reference", (rows, range(100)))
    first, last = (rows[:70], range(70)), (rows[60:], range(60, 100))
    assert comparing.max_difference(job_of(), made("right", first, last), reference) == 0
    wrong = rows.copy()
    wrong[99, 1] += 3
    off = made("off", first, (wrong[60:], range(60, 100)))
    assert comparing.max_difference(job_of(way="opencv"), off, reference) == 3
    of_tower = job_of(stage="embeddings", way="transformers")
    assert comparing.max_difference(of_tower, off, reference) == pytest.approx(3 / 199)
    assert comparing.max_difference(job_of(stage="first_token"), off, reference) is None
    for of_hosts, message, stage in (
        ([first, (wrong[60:], range(60, 100))], "differ by 3", "frames"),
        ([(rows * np.nan, range(100)), last], "differ by nan", "embeddings"),
        ([first, (rows[60:99], range(60, 99))], "makes 99 rows", "frames"),
        ([(rows[:, :1], range(100)), last], "other shapes", "frames"),
    ):
        with pytest.raises(AssertionError, match=message):
            comparing.max_difference(job_of(stage=stage), made("wrong", *of_hosts), reference)
