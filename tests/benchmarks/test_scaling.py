"""The scaling benchmark, run as a user runs it, at toy size."""

import statistics

import pytest

from apbv import demo

from scripts import assert_one_line_error, figures_of
from support.cost_model.costs import METHODS


def measured(tmp_path, kind: str, *options) -> tuple[list[dict], str]:
    records, output = figures_of("scaling", tmp_path / "figures.jsonl", kind, *options)
    assert {record["kind"] for record in records} == {kind}
    return records, output


def test_a_plan_of_a_long_video_on_eight_gpus(tmp_path):
    plot = tmp_path / "plan.png"
    options = ["--frames", 64, "--resolution", "1440p", "--hosts", 4, 8, "--explain", "--plot", plot]
    records, output = measured(tmp_path, "plan", *options)
    split = [method for method in METHODS if method != "full"]
    assert [(r["hosts"], r["method"]) for r in records] == [(1, "full"), *((h, m) for h in (4, 8) for m in split)]
    assert records[0]["flop_ratio"] == 1
    by_method = {r["method"]: r for r in records if r["hosts"] == 8}
    # Exact methods divide the work (the zigzag evenly), the approximate ones also save some of it.
    assert by_method["zigzag_ring"]["flop_ratio"] == pytest.approx(8, rel=1e-3)
    assert by_method["ulysses"]["flop_ratio"] <= 8 < by_method["apb"]["flop_ratio"]
    assert by_method["apb"]["flop_ratio"] < by_method["apbv"]["flop_ratio"]
    assert output.count("bound by ") >= len(records)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_plan_grows_with_hosts_and_tokens(tmp_path):
    records, _ = measured(tmp_path, "plan", "--tokens", 2**15, 2**20, "--hosts", 8, 64, "--methods", "apbv")
    ratio = {(r["num_input_tokens"], r["hosts"]): r["flop_ratio"] for r in records}
    assert ratio[2**20, 64] > ratio[2**20, 8] > ratio[2**15, 8] > 8
    kv = {(r["num_input_tokens"], r["hosts"]): r["kv_bytes"] for r in records}
    assert kv[2**20, 8] / kv[2**20, 64] == pytest.approx(8, rel=0.01)


def test_a_plan_of_a_checkpoint(tmp_path):
    records, _ = measured(tmp_path, "plan", "--model", demo.model_path(), "--tokens", 4096, "--methods", "star")
    assert records[0]["flop_ratio"] > 4


def test_a_plan_of_fewer_tokens_and_blocks(tmp_path):
    """Before the language model a reduction saves work in all layers, and encodes as much as without."""

    def ratio(method: str, *options) -> float:
        (record,), _ = measured(tmp_path, "plan", "--resolution", "1080p", "--methods", method, *options)
        return record["flop_ratio"]

    whole = ratio("apbv")
    between, before = (ratio("apbv", "--reduce", name, "--reduce-ratio", 0.25) for name in ("fastv", "slowfast"))
    assert whole < between < before
    assert ratio("full", "--density", 0.25) > 1.2


def test_simulated_hosts_beside_the_model(tmp_path):
    options = ["--tokens", 512, "--hosts", 2, 3, "--rounds", 2, "--full-rounds", 3]
    records, output = measured(tmp_path, "simulate", *options)
    assert [r["hosts"] for r in records] == [2, 3]
    for record in records:
        assert record["simulated"] and len(record["full_ms"]) == 3 and len(record["noisy_critical_path_ms"]) == 2
        full = statistics.mean(record["full_ms"])
        assert record["speedup_vs_full"] == pytest.approx(full / record["critical_path_ms"])
        # At its mean pace no host is slower than where the slowest one sets the pace of every run.
        assert record["critical_path_ms"] <= 1.01 * statistics.mean(record["noisy_critical_path_ms"])
        assert record["share_of_flop_ratio"] == record["speedup_vs_full"] / record["flop_ratio"]
        assert record["rate_ratio"] > 0 and all(rate > 0 for rate in record["gflops"].values())
    assert len(output.strip().splitlines()) == 2 + len(records)


@pytest.mark.thorough
def test_the_check_runs_both_kinds_of_hosts(tmp_path):
    records, _ = measured(tmp_path, "check", "--tokens", 256, "--rounds", 1, "--methods", "apbv", "zigzag_ring")
    assert [r["method"] for r in records] == ["apbv", "zigzag_ring"]
    for record in records:
        assert record["error"] == pytest.approx(record["simulated_ms"][0] / record["real_ms"][0] - 1)


def test_an_unknown_model_is_one_line(capsys):
    options = ["plan", "--model", "no-such-model"]
    assert_one_line_error("scaling", options, "cannot load the configuration of no-such-model", capsys)
