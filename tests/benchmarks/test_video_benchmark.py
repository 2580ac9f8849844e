"""The benchmark of a video's road: its form, its clips, and that what is wrong has no figures."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import video

from scripts import BENCHMARKS
from support.videos.worker import cores_of
from video_files import decode_all, encode, packets_of

STAGES = ("frames", "pixels", "embeddings", "first_token")


@pytest.fixture
def run(tmp_path):
    """Runs the quick preset: the exit status and the records.

    In this process, because those that scripts run in for tests may have none of their own.
    """
    schema = json.loads((BENCHMARKS / "schemas" / "video.json").read_text())

    def run(*options):
        path = tmp_path / "figures.jsonl"
        arguments = ["--preset", "quick", "--folder", tmp_path / "clips", "--json", path, *options]
        status = video.main([str(argument) for argument in arguments])
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for record in records:
            jsonschema.validate(record, schema)
        return status, records

    return run


def check(record):
    """What is so for every way through every stage of the quick preset."""
    assert record["seconds"] == statistics.median(record["samples"]["seconds"])
    assert record["peak_memory_bytes"] >= record["memory_before_bytes"] > 0
    assert record["clip_frames"] == 48 and record["num_frames"] == 8
    # Of 96 x 192 pixels the processor makes 3 x 7 tokens for each two frames.
    assert record["num_visual_tokens"] == (None if record["stage"] == "frames" else 4 * 3 * 7)
    if record["way"] == "pyav":
        assert record["stages_ms"] == {} and record["overlap"] is None
    else:
        longest = max(record["stages_ms"].values()) / 1e3
        assert record["stages_ms"]["decode_video"] > 0 and longest <= record["seconds"]
        assert record["overlap"] == pytest.approx(record["seconds"] / longest)
    is_approximate = record["stage"] == "first_token" and record["hosts"] == 2
    assert (record["max_difference"] is None) == is_approximate


def test_frames_and_embeddings_by_one_host_and_by_two(run, tmp_path, capsys):
    plot = tmp_path / "video.png"
    status, records = run("--ways", "apbv", "pyav", "--hosts", 1, 2, "--plot", plot)
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert [(r["stage"], r["way"], r["hosts"]) for r in records] == [
        ("frames", "apbv", 1),
        ("frames", "pyav", 1),
        ("embeddings", "apbv", 1),
        ("embeddings", "apbv", 2),
    ]
    for record in records:
        check(record)
    assert records[0]["max_difference"] == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sum(line.startswith("|") for line in printed.out.splitlines()) == 2 + len(records)


@pytest.mark.thorough
def test_every_stage_in_several_rounds(run, capsys):
    options = ["--ways", "apbv", "transformers", "--pinned", "--hosts", 1, 2, "--rounds", 2]
    status, records = run(*options, "--stages", *STAGES)
    assert status == 0, capsys.readouterr().err
    ways = [("apbv", 1), ("apbv", 2), ("transformers", 1)]
    assert [(r["stage"], r["way"], r["hosts"]) for r in records] == [
        ("frames", "apbv", 1),
        *[("pixels", *way) for way in ways if way[1] == 1],
        *[(stage, *way) for stage in ("embeddings", "first_token") for way in ways],
    ]
    for record in records:
        check(record)
        assert len(record["samples"]["seconds"]) == 2 and record["pinned"]


def test_what_differs_has_no_figures(run, monkeypatch, capsys):
    monkeypatch.setitem(video.TOLERANCES["float32"], "frames", -1)
    assert run("--stages", "frames", "--ways", "apbv") == (1, [])
    assert "error: frames of apbv on 1 hosts differ by 0" in capsys.readouterr().err


def test_a_library_that_is_not_there_is_left_out(monkeypatch, capsys):
    monkeypatch.setitem(video.READERS, "opencv", replace(video.READERS["opencv"], module="no_such_module"))
    assert video.find_ways(["opencv", "pyav"])[0] == ["pyav"]
    assert "note: opencv cannot be used here, and is left out: No module named 'no_such" in capsys.readouterr().err


def job_of(**settings):
    clips = {"clip": Path("a"), "warm_up": Path("b"), "reader": "pyav"}
    sizes = {"max_pixels": 1, "vision_depth": 1, "vision_hidden": 1, "dtype": "float32"}
    clips |= {"threads": 1, "pinned": False}
    job = video.Job("frames", "apbv", num_frames=4, sampling="sparse", hosts=2, **clips, **sizes)
    return video.Run(video.ClipSpec(4, 4, 1, 1, 1), replace(job, **settings))


def save(folder, *of_hosts):
    """What every host made: (values, places)."""
    folder.mkdir()
    for rank, (values, places) in enumerate(of_hosts):
        np.save(folder / f"{rank}.npy", values)
        np.save(folder / f"{rank}.places.npy", np.array(places))
    return folder


def test_every_row_is_compared(tmp_path, monkeypatch):
    """Both hosts made some of 100 rows, of which 7 are compared at a time."""
    monkeypatch.setattr(video, "_BLOCK_BYTES", 14)
    rows = np.arange(200, dtype=np.uint8).reshape(100, 2)
    reference = save(tmp_path / "reference", (rows, range(100)))
    right = [(rows[:70], range(70)), (rows[60:], range(60, 100))]
    frames = job_of()
    assert video.max_difference(frames, save(tmp_path / "right", *right), reference) == 0
    wrong = rows.copy()
    wrong[99, 1] += 3
    made = save(tmp_path / "wrong", right[0], (wrong[60:], range(60, 100)))
    with pytest.raises(AssertionError, match="differ by 3"):
        video.max_difference(frames, made, reference)
    assert video.max_difference(job_of(way="opencv"), made, reference) == 3
    of_tower = job_of(stage="embeddings", way="transformers")
    assert video.max_difference(of_tower, made, reference) == pytest.approx(3 / 199)
    assert video.max_difference(job_of(stage="first_token"), made, reference) is None
    with pytest.raises(AssertionError, match="differ by nan"):
        nothing = save(tmp_path / "nothing", (rows * np.nan, range(100)), right[1])
        video.max_difference(job_of(stage="embeddings"), nothing, reference)
    with pytest.raises(AssertionError, match="makes 99 rows"):
        missing = save(tmp_path / "missing", right[0], (rows[60:99], range(60, 99)))
        video.max_difference(frames, missing, reference)
    with pytest.raises(AssertionError, match="other shapes"):
        narrow = save(tmp_path / "narrow", (rows[:, :1], range(100)), right[1])
        video.max_difference(frames, narrow, reference)


def test_every_host_has_cores_of_its_own_while_there_are_some():
    assert [cores_of(rank, 2, [0, 1, 4, 5]) for rank in range(3)] == [[0, 1], [4, 5], [0, 1]]


def test_dense_frames_adjoin_in_the_middle():
    assert job_of(sampling="dense").job.choose(11) == [3, 4, 5, 6]
    assert job_of(sampling="dense").job.choose(3) == [0, 1, 2]
    assert job_of().job.choose(10) == [0, 3, 6, 9]


@pytest.mark.parametrize("from_file", [False, True], ids=["drawn", "of a file"])
def test_clips_are_as_asked_for(tmp_path, from_file):
    source = Path(encode(tmp_path / "source.mp4", n=10)) if from_file else None
    spec = video.ClipSpec(32, 48, gop=7, num_frames=25, fps=25, source=source)
    path = video.make_clip(spec, tmp_path / "clips")
    packets, frames = packets_of(str(path)), decode_all(str(path))
    assert [number for number, packet in enumerate(packets) if packet[3]] == [0, 7, 14, 21]
    times = [packet[2] for packet in packets]
    assert times != sorted(times)  # so there are B-frames
    assert len(frames) == 25 and frames[0].shape == (32, 48, 3)
    assert any((frames[0] != frame).any() for frame in frames[1:])
    if from_file:  # its ten frames, and again the first
        assert (
            np.abs(frames[10].astype(int) - frames[0]).mean()
            < np.abs(frames[5].astype(int) - frames[0]).mean() / 2
        )
    written = path.stat().st_mtime_ns
    assert video.make_clip(spec, tmp_path / "clips") == path and path.stat().st_mtime_ns == written
    assert video.make_clip(replace(spec, gop=8), tmp_path / "clips") != path
