"""The cost model's figures: what is known of them, what they must keep to, and the times that they predict."""

from dataclasses import replace

import pytest
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st

from apbv import PrefillConfig
from apbv.layout import ContextLayout, single_host_layout
from apbv.prefilling import methods

from support.cost_model.costs import (
    ATTENTION,
    METHODS,
    PARTS,
    HostCost,
    Shape,
    Video,
    cost,
    flop_ratio,
    paper_attention_flops,
    share_beyond_paper,
    work_ratio,
)
from support.cost_model.times import Machine, explain, predict


def planned(method: str, num_hosts: int, num_tokens: int, query: int = 32, **options) -> ContextLayout:
    return methods.METHODS[method].plan(num_hosts, num_tokens, 0, num_tokens - query, PrefillConfig(**options))


# The small model of benchmarks/support/workloads.py.
SMALL = Shape(
    layers=4,
    hidden=512,
    intermediate=1536,
    heads=8,
    kv_heads=2,
    head_dim=64,
    vocab=32000,
    bytes_per_number=4,
)


@pytest.mark.parametrize(
    ("num_tokens", "same_cores", "own_cores"), [(32768, 2.45, 4.90), (131072, 3.05, 6.10), (10**12, 3.37, 6.74)]
)
def test_known_ratios_on_two_hosts(num_tokens, same_cores, own_cores):
    """The first is what two hosts of one thread gain over one of two threads; the last is the limit."""
    full = cost(SMALL, "full", single_host_layout(2, num_tokens))
    costs = cost(SMALL, "apbv", planned("apbv", 2, num_tokens))
    assert work_ratio(full, costs) == pytest.approx(same_cores, abs=0.005)
    assert flop_ratio(full, costs) == pytest.approx(own_cores, abs=0.005)
    # On two hosts, both of which have as much to do but for the query's own square.
    assert flop_ratio(full, costs) == pytest.approx(2 * work_ratio(full, costs), rel=1e-3)


def host_with(**flops: int) -> HostCost:
    return HostCost(
        flops=dict.fromkeys(PARTS, 0) | flops, memory={}, received={}, exchanges={}, kv_bytes=0, weight_bytes=0
    )


def test_ratios_of_hosts_that_are_not_alike():
    costs, others = [host_with(mlp=8), host_with(mlp=4, query=20)], [host_with(mlp=2), host_with(mlp=3, anchor=3)]
    assert flop_ratio(costs, others) == 24 / 6
    assert work_ratio(costs, others) == 32 / 8


def test_share_beyond_paper_counts_the_terms_that_it_lacks():
    attention = dict(anchor=1, block_to_anchor=2, block_to_passing=4, block_to_self=8, query=16, scoring=32)
    assert share_beyond_paper(host_with(mlp=100, lm_head=100, **attention)) == (2 + 16 + 32) / 63
    (host, _) = cost(SMALL, "apbv", planned("apbv", 2, 32768))
    assert share_beyond_paper(host) == pytest.approx(0.111, abs=5e-4)


@pytest.mark.parametrize("num_hosts", [1, 2, 8, 64])
def test_paper_equation_is_what_it_says_it_counts(num_hosts):
    """Anchor, passing blocks and blocks themselves, as half squares; per host, all hosts alike."""
    layout, width = planned("apbv", num_hosts, 2**20), SMALL.heads * SMALL.head_dim
    for host in cost(SMALL, "apbv", layout):
        counted = sum(host.flops[part] for part in ("anchor", "block_to_passing", "block_to_self"))
        in_paper = SMALL.layers * paper_attention_flops(layout, width)
        assert in_paper == pytest.approx(counted, rel=1e-3)
        assert 1 - in_paper / host.attention_flops == pytest.approx(share_beyond_paper(host), abs=1e-3)


def test_paper_equation_by_hand():
    layout = ContextLayout(2, range(10), tuple(range(a, a + 20) for a in (10, 30, 50, 70)), range(90, 95), 3)
    assert paper_attention_flops(layout, 7) == 2 * 10 * 10 * 7 + 4 * 20 * 20 * 7 + 4 * 3 * 3 * 20 * 7
    assert paper_attention_flops(replace(layout, passing_len=99), 7) == 7 * (200 + 1600 + 4 * 3 * 20 * 20)
    with pytest.raises(ValueError, match="two blocks"):
        paper_attention_flops(planned("apb", 2, 1000), 7)


prompts = {"num_hosts": st.integers(1, 9), "num_tokens": st.integers(2, 3000), "heads": st.sampled_from([1, 4, 6])}


@given(method=st.sampled_from(["full", "zigzag_ring", "ulysses"]), **prompts)
def test_exact_methods_compute_every_pair_once(method, num_hosts, num_tokens, heads):
    shape = replace(SMALL, heads=heads, kv_heads=1 if heads == 1 else 2)
    costs = cost(shape, method, planned(method, num_hosts, num_tokens, query=1))
    pairs = num_tokens * (num_tokens + 1) // 2
    assert sum(host.attention_flops for host in costs) == 4 * shape.layers * heads * shape.head_dim * pairs
    assert sum(host.kv_bytes for host in costs) == shape.kv_bytes * num_tokens
    assert sum(host.flops["mlp"] for host in costs) == 2 * 3 * 512 * 1536 * shape.layers * num_tokens


@given(zigzag=st.booleans(), anchor_len=st.sampled_from([None, 0, 100]), **prompts)
def test_uncompressed_apbv_computes_every_pair_once_but_the_anchors(zigzag, anchor_len, heads, **sizes):
    """With all KV passed on it is full attention, in which every host repeats the anchor's."""
    if anchor_len == 100 and sizes["num_tokens"] <= 101:
        anchor_len = None
    layout = planned("apbv", **sizes, query=1, anchor_len=anchor_len, passing_len=9999, zigzag=zigzag)
    costs = cost(replace(SMALL, heads=heads, kv_heads=1), "apbv", layout)
    n, l_a = layout.num_tokens, len(layout.anchor)
    pairs = n * (n + 1) // 2 + (layout.num_hosts - 1) * l_a * (l_a + 1) // 2
    assert sum(host.attention_flops for host in costs) == 4 * SMALL.layers * heads * SMALL.head_dim * pairs


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="unknown method 'ring'"):
        cost(SMALL, "ring", planned("apbv", 2, 1000))
    for method in METHODS:
        for other in METHODS:
            fits = method == other or {method, other} in ({"apb", "apbv"}, {"apb", "star"})
            fits = fits or (method, other) == ("apbv", "star") or other == "full"
            if not fits:
                with pytest.raises(ValueError, match="not a layout of"):
                    cost(SMALL, method, planned(other, 2, 1000))
    with pytest.raises(ValueError, match="no vision tower"):
        cost(SMALL, "full", single_host_layout(1, 100), video=Video(range(10, 50), 4))


# Rates at which one thing alone takes time.
IDEAL = Machine(matmul_flops=1e30, attention_flops=1e30, memory_bytes=1e30, link_bytes=1e30)


def test_a_part_takes_its_arithmetic_or_its_memory_traffic():
    costs = cost(SMALL, "apbv", planned("apbv", 2, 32768), fused_query=False)
    attention = max(sum(host.flops[part] for part in ATTENTION) for host in costs)
    assert predict(costs, replace(IDEAL, attention_flops=1e9)).compute_seconds == pytest.approx(attention / 1e9)
    matmul = max(sum(host.flops[part] for part in PARTS if part not in ATTENTION) for host in costs)
    assert predict(costs, replace(IDEAL, matmul_flops=1e9)).compute_seconds == pytest.approx(matmul / 1e9)
    # 32 rows are too few to keep arithmetic busy: the query's pass reads all layers' weights once more (B.1).
    gpu = replace(IDEAL, matmul_flops=1e15, memory_bytes=4e12)
    layer = 2 * 512 * (8 + 2) * 64 + 3 * 512 * 1536
    seconds = predict(costs, gpu).parts[0]["query_pass"]
    assert seconds == pytest.approx(4 * layer * 4 / 4e12) and seconds > costs[0].flops["query_pass"] / 1e15
    fused = cost(SMALL, "apbv", planned("apbv", 2, 32768))
    assert predict(fused, gpu).parts[0]["query_pass"] == 0


def test_scores_and_the_query_are_bound_by_memory():
    layout = planned("apbv", 2, 32768)
    costs = cost(SMALL, "apbv", layout)
    times = predict(costs, replace(IDEAL, memory_bytes=1e9))
    ranked = [8 * 32 * (len(layout.blocks[0])), 8 * 32 * (len(layout.blocks[1]) + len(layout.blocks[2]))]
    assert times.parts[1]["scoring"] == pytest.approx(4 * ranked[1] * 16 / 1e9)
    assert times.parts[0]["scoring"] == pytest.approx(4 * ranked[0] * 16 / 1e9)  # the last block ranks nothing
    assert times.parts[0]["query"] == pytest.approx(costs[0].kv_bytes / 1e9)


@pytest.mark.parametrize("method", ["zigzag_ring", "apbv"])
def test_links_within_and_between_groups(method):
    """Four hosts in groups of two: a ring crosses at hosts 0 and 2 only, a gather brings two of three parts."""
    costs = cost(SMALL, method, planned(method, 4, 32768))
    kinds = {"zigzag_ring": ["ring"], "apbv": ["passing", "query_merge"]}[method]
    near = replace(IDEAL, link_bytes=1e9, link_latency=1e-3)
    far = replace(near, group_size=2, group_link_bytes=1e8, group_link_latency=5e-3)
    for host in range(4):
        count = sum(costs[host].received[kind] for kind in kinds)
        exchanges = sum(costs[host].exchanges[kind] for kind in kinds)

        def seconds(machine, host=host):
            return sum(predict(costs, machine).links[host][kind] for kind in kinds)

        assert seconds(near) == pytest.approx(count / 1e9 + exchanges * 1e-3)
        share = 2 / 3 if method == "apbv" else (1, 0, 1, 0)[host]
        expected = count * ((1 - share) / 1e9 + share / 1e8) + exchanges * (5e-3 if share else 1e-3)
        assert seconds(far) == pytest.approx(expected)
    assert predict(costs, replace(near, group_size=2)) == predict(costs, near)


@pytest.mark.parametrize("link_bytes", [1e6, 1e12])
@pytest.mark.parametrize("method", METHODS)
def test_overlap_hides_at_most_what_it_can(method, link_bytes):
    machine = Machine(60e9, 40e9, 10e9, link_bytes)
    times = predict(cost(SMALL, method, planned(method, 3, 8192)), machine)
    computing = [sum(parts.values()) for parts in times.parts]
    receiving = [sum(links.values()) for links in times.links]
    assert times.slowest == computing.index(max(computing))
    assert (times.compute_seconds, times.communication_seconds) == (max(computing), max(receiving))
    assert times.total_seconds == max(a + b for a, b in zip(computing, receiving, strict=True))
    assert max(*computing, *receiving) <= times.floor_seconds <= times.total_seconds
    assert times.exposed_seconds == times.floor_seconds - times.compute_seconds


def test_exchanges_before_and_after_the_decoder_are_never_hidden():
    shape = Shape.from_config(tf.Qwen2VLConfig())
    layout = planned("zigzag_ring", 2, 8192)
    costs = cost(shape, "zigzag_ring", layout, video=Video(range(20, 8000), 95))
    machine = Machine(1e15, 1e15, 1e12, 1e9)
    times = predict(costs, machine)
    links, parts = times.links[1], times.parts[1]
    assert links["embeddings"] > 0 and links["ring"] > 0 and parts["vision"] > 0
    decoder = max(sum(parts.values()) - parts["vision"], links["ring"])
    assert times.floor_seconds == pytest.approx(parts["vision"] + links["embeddings"] + links["logits"] + decoder)


def test_explanation_names_what_it_found():
    layout = planned("apbv", 2, 32768)
    usual = Machine(60e9, 40e9, 10e9, 1e9)
    costs, full = cost(SMALL, "apbv", layout), cost(SMALL, "full", single_host_layout(1, 32768))
    text = explain("apbv", layout, usual, costs, full)
    assert "apbv, 2 hosts, 32768 tokens: anchor 512, 4 blocks, passing 256, query 32" in text
    assert "busiest host 4.90, all hosts together 2.45" in text
    times = predict(costs, usual)
    share = times.parts[1]["block_to_self"] / times.compute_seconds
    (row,) = (line for line in text.splitlines() if "block_to_self" in line)
    assert f"{share:.1%}" in row and row.endswith("attention")
    assert f"{times.floor_seconds * 1e3:.2f} ms with perfect overlap" in text
    assert "passing 2.10 MB" in text and "KV: 67.2, 67.0 MB" in text
    for machine, bound in (
        (usual, "attention"),
        (replace(usual, matmul_flops=1e9), "matrix products"),
        (replace(usual, memory_bytes=1e6), "memory"),
        (replace(usual, link_bytes=1e3), "links"),
    ):
        assert explain("apbv", layout, machine, costs, full).endswith(f"bound by {bound}")
