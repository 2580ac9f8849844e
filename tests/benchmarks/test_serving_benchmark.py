"""The benchmark of the server: its form, and that the server answers as the engine does."""

import pytest

from scripts import figures_of


def test_the_server_beside_the_engine(tmp_path):
    options = ["--requests", 4, "--concurrency", 1, 3, "--frames", 16, "--max-new-tokens", 4]
    records, output = figures_of("serving", tmp_path / "figures.jsonl", *options, hosts=2)
    assert [(r["way"], r["concurrency"]) for r in records] == [("engine", 1), ("server", 1), ("server", 3)]
    for record in records:
        assert len(record["samples"]["ttft_ms"]) == record["num_requests"] == 4 and record["hosts"] == 2
        assert record["ttft_ms"]["p50"] <= record["latency_ms"]["p50"]
    assert sum(line.startswith("|") for line in output.splitlines()) == 2 + len(records)


def test_one_answer_at_a_time_beside_several(tmp_path):
    options = ["--requests", 3, "--concurrency", 3, "--frames", 16, "--max-new-tokens", 12, "--ignore-eos"]
    options += ["--max-running", 1, "all", "--rounds", 2]
    records, _ = figures_of("serving", tmp_path / "figures.jsonl", *options, hosts=2)
    servers = [record for record in records if record["way"] == "server"]
    assert [record["max_running"] for record in servers] == [1, None]
    for record in servers:
        assert record["num_requests"] == len(record["samples"]["tpot_ms"]) == 6
        assert record["output_throughput"] == pytest.approx(12 * record["request_throughput"])
        assert record["tpot_ms"]["p50"] * 11 + record["ttft_ms"]["p50"] > 0
