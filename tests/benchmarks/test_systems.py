"""The comparison of all systems at toy size: its records, how it goes on, and what is made of them."""

import json

import pytest
import systems as script

from apbv.config import METHOD_NAMES, REDUCER_NAMES

from scripts import figures_of, run_benchmark
from support.systems import report
from support.systems.ways import systems

LABELS = ["full", "star", "apbv", "full, draft by hippo, 0.1"]


def test_a_run_goes_on_where_its_file_ends(tmp_path):
    path, plot = tmp_path / "figures.jsonl", tmp_path / "figures.png"
    options = ["--shots", 16, "--hosts", 2, "--folder", tmp_path / "clips", "--labels", *LABELS]
    records, _ = figures_of("systems", path, "--clips", 1, *options)
    assert sorted(record["label"] for record in records) == sorted(LABELS)
    for record in records:
        assert (record["hosts"] == 2) == record["simulated"] == (record["kind"] == "hosts")
        assert record["right"]["retrieval"][1] == 2 and record["right"]["ordering"][1] == 1
        assert len(record["ttft_ms"]) == len(record["num_visual_kept"]) == 4  # questions
        assert set(record["num_visual_kept"]) == {record["num_visual_tokens"]} == {64}
        assert min(record["ttft_ms"]) > record["reading_ms"]
    by_label = {record["label"]: record for record in records}
    # Speculation is lossless, whatever its draft sees.
    assert by_label["full"]["right"] == by_label[LABELS[-1]]["right"]
    before = path.read_text()
    result = run_benchmark("systems", "--clips", 2, *options, "--json", path, "--plot", plot)
    assert result.returncode == 0, result.stderr
    after = path.read_text()
    assert after.startswith(before)
    added = [json.loads(line) for line in after[len(before) :].splitlines()]
    assert sorted((record["label"], record["seed"]) for record in added) == sorted((label, 1) for label in LABELS)
    assert len(result.stdout.strip().splitlines()) == 2 + len(LABELS)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_label_that_no_system_has_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        script.parse_arguments(["--labels", "full", "fastvid"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "no way 'fastvid'; there are: full; " in error and "fastvid, 0.5" in error


def test_every_system_is_there_once():
    compared = systems(1024, hosts=8)
    labels = [system.label for system in compared]
    assert len(set(labels)) == len(labels)
    assert {*METHOD_NAMES} - {"zigzag_ring", "ulysses"} <= {label.split(",")[0] for label in labels}
    for name in REDUCER_NAMES:
        kept = [s.config.reduce.ratio for s in compared if s.config.reduce and s.config.reduce.method == name]
        assert sorted(kept) == [0.25, 0.5]
    by_label = {system.label: system for system in compared}
    assert by_label["apbv"].config.anchor_len == 16 and by_label["apbv"].config.passing_len == 8
    assert by_label["apb"].config.passing_len == 16
    settings = [json.dumps([system.settings, system.hosts], sort_keys=True) for system in compared]
    assert len(set(settings)) == len(settings)


def record(label: str, seed: int, right: dict, ttft_ms: list, kept: list, hosts: int = 1, kind: str = "exact"):
    return {
        "label": label,
        "kind": kind,
        "hosts": hosts,
        "shots": 4,
        "grid": 2,
        "seed": seed,
        "right": right,
        "ttft_ms": ttft_ms,
        "prefill_ms": [ms - 10 for ms in ttft_ms],
        "num_visual_tokens": 100,
        "num_visual_kept": kept,
    }


def test_clips_are_summed_and_times_are_medians():
    right = {"ordering": [1, 1], "counting": [0, 2]}
    records = [
        record("full", 0, right, [100, 120], [100]),
        record("full", 1, {"ordering": [0, 1], "counting": [2, 2]}, [140, 900], [100]),
        record("half", 0, right, [65, 65], [40, 60], hosts=8, kind="fewer tokens"),
    ]
    full, half = report.summarise(records)
    assert full.right == {"ordering": (1, 2), "counting": (2, 4)} and full.clips == 2
    assert (full.ttft_ms, full.prefill_ms, full.kept, full.accuracy) == (130, 120, 1.0, 50.0)
    assert (half.kept, half.hosts, half.accuracy) == (0.5, 8, 50.0)
    lines = report.table(records).splitlines()
    assert len(lines) == 4 and "2.00 ×" in lines[3] and "8 (simulated)" in lines[3] and "50 %" in lines[3]
