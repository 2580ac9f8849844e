"""The accuracy benchmark, run as a user runs it, at toy size."""

from pathlib import Path

import pytest

from apbv.prefilling.methods import METHODS

from scripts import figures_of, run_benchmark


def measured(folder: Path, *options, hosts: int = 1) -> list[dict]:
    shared = ["--split", "validation", "--folder", folder]
    return figures_of("accuracy", folder / "figures.jsonl", *shared, *options, hosts=hosts)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("clips")


def right(records: list[dict], label: str, hosts: int) -> int:
    chosen = [r for r in records if (r["label"], r["hosts"]) == (label, hosts) and r["task"] != "retrieval"]
    assert sum(r["total"] for r in chosen) == 4  # 2 clips, ordering and counting
    return sum(r["right"] for r in chosen)


@pytest.mark.thorough
def test_methods_differ_where_they_should(folder):
    records = measured(folder, "--preset", "methods", "--clips", 2, "--shots", 64, "--hosts", 1, 8)
    labels = {r["label"] for r in records}
    assert labels == {*METHODS, "apbv, default lengths"}
    assert {r["needles"] for r in records} == {"edited", "inserted"}
    full = right(records, "full", 1)
    assert full >= 3
    # Exact methods answer as full attention does; without passing blocks these tasks cannot be solved.
    assert right(records, "zigzag_ring", 8) == right(records, "ulysses", 8) == right(records, "full", 8) == full
    assert right(records, "apbv", 8) >= full - 1
    assert right(records, "star", 8) <= full - 2
    table = run_benchmark("accuracy", "--table", folder / "figures.jsonl").stdout.splitlines()
    assert len(table) == 2 + 1 + len(labels)


@pytest.mark.thorough
def test_simulated_hosts_answer_as_real_ones(folder):
    options = ["--preset", "table8", "--clips", 2, "--shots", 64, "--labels", "l_p = 0", "l_p = 8"]
    real = measured(folder, *options, hosts=3)
    simulated = measured(folder, *options, "--hosts", 3)
    assert {r["label"] for r in real} == {"l_p = 0", "l_p = 8"}
    for ours, theirs in zip(simulated, real, strict=True):
        assert ours["simulated"] and not theirs["simulated"]
        same = ("label", "task", "needles", "right", "total", "hosts", "anchor_len", "passing_len")
        assert [ours[name] for name in same] == [theirs[name] for name in same]
