"""The benchmark of speculative decoding at toy size, and the theory it compares with."""

import pytest

from apbv import HostGroup, PrefillConfig
from apbv.speculate import STRATEGIES, theory
from apbv.speculate.settings import require_consistent

from scripts import assert_one_line_error, figures_of
from support.speculation.presets import PRESETS


@pytest.mark.thorough
def test_every_way_beside_autoregressive_decoding(tmp_path):
    plot = tmp_path / "speed.png"
    options = ["--scale", 2, "--clips", 1, "--shots", 16, "--max-new-tokens", 15, "--folder", tmp_path]
    options += ["--keep", "attention", "full", "--num-draft-tokens", 2, 4, "--plot", plot]
    records, output = figures_of("speculative", tmp_path / "figures.jsonl", *options)
    labels = [record["label"] for record in records]
    assert labels[:3] == ["autoregressive", "vanilla, γ = 2", "vanilla, γ = 4"]
    assert labels[5:9:2] == ["specvlm, attention, 0.1, γ = 2", "specvlm, full, γ = 2"]
    assert labels[9] == "hippo, 0.1, γ = 2"
    assert len(output.strip().splitlines()) == 2 + len(records) and plot.read_bytes().startswith(b"\x89PNG")
    alone = records[0]
    assert alone["speculation"] is None and alone["new_tokens"] == 15
    for record in records:
        assert record["identical"]
        if record["speculation"]:  # what "uv_prune" looks at: layer 20 of a target whose layers are repeated
            assert record["speculation"]["config"]["uv_layer"] == 40
        assert record["decode_speedup"] == pytest.approx(alone["decode_ms"][0] / record["decode_ms"][0])
        assert record["end_to_end_speedup"] == pytest.approx(alone["total_ms"][0] / record["total_ms"][0])
    for record in records[1:]:
        figures = record["speculation"]
        assert figures["tokens_per_target_forward"] <= figures["config"]["num_draft_tokens"] + 1
        # The papers' figure of drafting in turn is that of a round, and all rounds count.
        assert figures["mean_accepted_tokens"] == figures["tokens_per_target_forward"]
        assert figures["accepted_in_a_row"] >= 0 and figures["config"]["keep_losing_draft"] is True


@pytest.mark.thorough
def test_several_hosts_and_sharded_kv(tmp_path):
    options = ["--clips", 1, "--shots", 16, "--max-new-tokens", 12, "--folder", tmp_path, "--kv", "sharded"]
    records, _ = figures_of("speculative", tmp_path / "figures.jsonl", *options, hosts=2)
    assert [record["label"].split(",")[0] for record in records[1:]] == list(STRATEGIES)
    assert all(record["identical"] and record["hosts"] == 2 for record in records)


def test_a_draft_host_beside_the_targets(tmp_path):
    options = ["--clips", 1, "--shots", 16, "--max-new-tokens", 12, "--folder", tmp_path, "--draft-host"]
    options += ["--strategies", "vanilla", "ngram"]
    records, _ = figures_of("speculative", tmp_path / "figures.jsonl", *options, hosts=2)
    labels = ["autoregressive", "vanilla, γ = 5", "ngram, γ = 5", "vanilla, γ = 5, draft host"]
    assert [record["label"] for record in records] == labels
    assert all(record["identical"] and record["hosts"] == 1 for record in records)
    for record in (records[1], records[-1]):
        figures = record["speculation"]
        assert figures["draft_ms_per_token"] > 0 and figures["target_idle_ms"] > 0 and figures["draft_idle_ms"] > 0
        assert 0 < record["breakdown_ms"]["draft prefill"] < record["total_ms"][0]


def test_every_preset_is_a_table_of_ways():
    amounts = {label: (config.keep_tokens, config.num_draft_tokens) for label, config in PRESETS["std1"](0.3)}
    assert amounts["STD"] == amounts["Streaming"] == (1024, 9)  # Section 4 of the paper
    for name, ways in PRESETS.items():
        labels, configs = zip(*ways(0.3), strict=True)
        assert len(set(labels)) == len(labels) > 1, name
        for config in configs:
            require_consistent(config, PrefillConfig(on_single_host=True), HostGroup.single(), has_captioner=True)


def test_tabeds_text_only_context_has_line_breaks():
    """Appendix I.2; ParallelVLM's OnSD leaves the visual tokens out instead."""
    for name in ("tabed1", "tabed2"):
        config = dict(PRESETS[name](0.3))["T"]
        assert config.strategy == "tabed" and config.ensemble == "T"
    assert dict(PRESETS["parallelvlm1"](0.3))["OnSD"].strategy == "text_only"


@pytest.mark.thorough
def test_a_caption_is_what_the_draft_says(tmp_path):
    options = ["--clips", 1, "--shots", 16, "--max-new-tokens", 12, "--folder", tmp_path, "--preset", "tabed2"]
    records, _ = figures_of("speculative", tmp_path / "figures.jsonl", *options)
    assert [r["label"] for r in records] == ["autoregressive", "M", "T", "P", "C", "MTCP", "MTCP*"]
    assert all(record["identical"] for record in records)


def test_a_papers_table(tmp_path):
    options = ["--clips", 1, "--shots", 16, "--max-new-tokens", 12, "--folder", tmp_path, "--preset", "hippo2"]
    records, output = figures_of(
        "speculative", tmp_path / "figures.jsonl", *options, "--tasks", "describe", "counting", hosts=2
    )
    assert [record["task"] for record in records] == ["describe"] * 3 + ["counting"] * 3
    assert all(record["identical"] and record["preset"] == "hippo2" for record in records)
    assert "| pruning |" in output
    pruning = [record["breakdown_ms"]["pruning"] for record in records]
    assert pruning[0] is None and all(ms > 0 for ms in pruning[1:3])


def test_a_missing_draft_is_one_line(capsys):
    options = ["--draft-model", "no-such-model", "--clips", 1]
    assert_one_line_error("speculative", options, "cannot load the model no-such-model", capsys)


def test_the_theorems():
    assert theory.serial(5, 5) == 5 * 6 / 10
    assert theory.serial(5, 5, 0.4) == 5 * 3 / 10
    assert theory.by_block_efficiency(3, 5, 5) == pytest.approx(theory.serial(5, 5, 0.4))
    assert theory.parallel(8, 8) == 8 and theory.parallel(4, 8) == 4 and theory.parallel(16, 8, 0.5) == 4
    # With the window as long as the cost ratio, Theorem 6 is half the sum of τ^k over 2c tokens.
    c, tau = 6, 0.7
    assert theory.parallel_with_rollback(c, c, tau) == pytest.approx(sum(tau**k for k in range(1, 2 * c + 1)) / 2)
    assert theory.parallel_with_rollback(c, c) == theory.parallel(c, c)
    # Accepting independently: the mean over all outcomes of a window.
    chances = [tau**k * (1 - tau) for k in range(c)] + [tau**c]
    assert theory.expected_accepted(c, tau) == pytest.approx(sum(k * p for k, p in enumerate(chances)))
