"""The throughput benchmark, run as a user runs it, at toy size: its figures have the documented form."""

from itertools import pairwise

import pytest

from apbv import PrefillConfig, demo
from apbv.hosts.simulated import Link

from scripts import assert_one_line_error, figures_of
from support.prefills.presets import PRESETS

SPLIT_METHODS = ["zigzag_ring", "ulysses", "star", "apb", "apbv"]


def measured(tmp_path, *options, hosts: int = 1) -> list[dict]:
    rows, output = figures_of(
        "throughput", tmp_path / "f.jsonl", "--rounds", 1, "--warmup", 0, *options, hosts=hosts
    )
    assert len(output.strip().splitlines()) == 2 + len(rows)
    return rows


def test_real_hosts(tmp_path):
    rows = measured(tmp_path, "--tokens", 300, 401, "--query-len", 9, "--passing-len", 5, hosts=2)
    assert [row["label"] for row in rows] == ["full", *SPLIT_METHODS] * 2
    for row in rows:
        assert row["label"] == row["method"] and not row["simulated"]
        assert row["hosts"] == len(row["comm_bytes"]) == len(row["peak_memory_bytes"])
        assert row["threads_per_host"] == (2 if row["method"] == "full" else 1)
        assert sum(row["comm_bytes"]) > 0 or row["method"] == "full"
        same_prompt = [other for other in rows if other["num_input_tokens"] == row["num_input_tokens"]]
        full, ring = same_prompt[:2]
        assert row["speedup_vs_full"] == pytest.approx(full["ttft_ms"]["p50"] / row["ttft_ms"]["p50"])
        if row is not full:
            assert row["speedup_vs_zigzag_ring"] == pytest.approx(ring["ttft_ms"]["p50"] / row["ttft_ms"]["p50"])
    # Rings carry every key and value to every host; APB-V five per block and layer.
    received = {row["method"]: sum(row["comm_bytes"]) for row in rows}
    assert received["apbv"] < received["zigzag_ring"] / 2


def test_simulated_hosts_a_file_and_a_plot(tmp_path):
    options = ["--model", "demo", "--video", demo.video_path(), "--frames", 48, "--hosts", 2, 3]
    plot = tmp_path / "speed.png"
    rows = measured(tmp_path, *options, "--methods", "full", "apbv", "--passing-len", 0, 8, "--plot", plot)
    assert [(row["label"], row["hosts"], row["passing_len"]) for row in rows] == [
        ("full", 1, 0),
        *[("apbv", hosts, length) for hosts in (2, 3) for length in (0, 8)],
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")
    for row in rows[1:]:
        assert row["simulated"] and row["peak_memory_bytes"] is None and row["num_video_tokens"] == 96
        assert row["stages_ms"]["decode_video"] > 0
    # All that is more with l_p = 8 than with 0: two buffers of 8 keys and values from every other host.
    for none, some in (rows[1:3], rows[3:5]):
        assert all(more > less for more, less in zip(some["comm_bytes"], none["comm_bytes"], strict=True))


def test_baselines_on_one_host_beside_all_methods(tmp_path):
    rows = measured(tmp_path, "--preset", "fig6_baselines", "--frames", 8, "--resolutions", "56x84", "--hosts", 2)
    alone = ["full", "xattention", "spargeattn", "flexprefill"]
    assert [row["label"] for row in rows] == [*alone, *SPLIT_METHODS, "slowfast, 0.5"]
    assert [row["hosts"] for row in rows] == [1] * 4 + [2] * 5 + [1]
    whole, reduced = rows[0], rows[-1]
    assert whole["num_video_tokens"] == 4 * 6  # four temporal patches of 2 x 3 tokens
    assert reduced["method"] == "full" and reduced["num_video_tokens"] <= 12


def test_taking_away_the_optimisations(tmp_path):
    rows = measured(tmp_path, "--preset", "table4", "--frames", 6, "--resolutions", "56x84", "--hosts", 2)
    assert [row["label"] for row in rows] == [
        "full",
        "apbv",
        "apbv -O",
        "apbv -O -F",
        "apbv -O -F -Z",
        "apbv -O -F -Z -V",
    ]
    switches = ("overlap", "fused_query", "zigzag", "frame_parallel")
    for before, after in pairwise(rows[1:]):
        assert sum(before[name] != after[name] for name in switches) == 1
    assert not any(rows[-1][name] for name in switches)
    assert {row["num_video_tokens"] for row in rows} == {3 * 2 * 3}


def test_a_slower_tier_costs_time(tmp_path):
    options = ["--preset", "table7", "--frames", 8, "--resolutions", "56x56", "--hosts", 4]
    rows = measured(tmp_path, *options)
    assert [row["network"]["group_size"] for row in rows] == [None, 2] * 5
    assert [row["label"] for row in rows[:2]] == ["zigzag_ring (4)", "zigzag_ring (2, 2)"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resolutions", "big"], "'big' is no resolution"),
        (["--hosts", "1"], "2 hosts at least"),
        (["--tokens", "100", "--model", "no-such-model"], "cannot load the model no-such-model"),
    ],
)
def test_bad_options_are_one_line(options, message, capsys):
    assert_one_line_error("throughput", options, message, capsys)


def test_presets_cover_the_papers_sweeps():
    assert set(PRESETS) == {"table4", "table5", "table7", "table8", "table9", "fig6", "fig6_baselines", "fig7"}
    for build in PRESETS.values():
        for device in ("cpu", "cuda"):
            preset = build(device)
            for hosts in preset.hosts:
                labels = [case.label for case in preset.cases(hosts, Link(), PrefillConfig())]
                assert len(labels) == len(set(labels)) >= 5
