"""Sparse attention: which blocks are chosen, and what the methods make of them, against loops in
fp64."""

import statistics

import pytest
import torch

from apbv import HostGroup, PrefillConfig, SparseConfig, prefill
from apbv.config import SPARSE_NAMES
from apbv.kernels import ListedBlocks, block_sparse_attention
from apbv.prefilling.methods import block_attention, flexprefill
from apbv.prefilling.methods.block_attention import BlockAttention
from apbv.prefilling.methods.block_selection import BLOCK_SELECTION

from apbv_tests.oracle import DenseOracle, as_double, oracle_of, run_oracle
from apbv_tests.pairs import each_choice
from apbv_tests.prompts import (
    as_inputs,
    build,
    check_prefill,
    hugging_face,
    kv_of,
    prefill_job,
    relative_error,
    reset_rope,
    text_batch,
    video_batch,
)
from apbv_tests.sparse_oracle import chosen_pairs

ALONE = HostGroup.single("cpu")


def drifting_states(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q ``[1, 4, l, 16]`` and k ``[1, 2, l, 16]``: stretches of rows that are alike, and others
    that are not."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    states = []
    for heads in (4, 2):
        topics = 2 * randn(heads, -(-tokens // 20), 16).repeat_interleave(20, dim=1)[:, :tokens]
        noise = torch.rand(heads, -(-tokens // 33), 1, generator=generator).repeat_interleave(
            33, dim=1
        )
        states.append((topics + 4 * noise[:, :tokens] ** 2 * randn(heads, tokens, 16))[None])
    return tuple(states)


def test_the_second_stage_of_spargeattn_is_the_operators():
    """What each layer computes leaves out values as the operator does with the same lists."""
    q, k = drifting_states(300, 0)
    v = k.roll(1, dims=-1)
    config = SparseConfig(method="spargeattn", block_size=64, skip_below=-3.0)
    attention = BlockAttention(config, "torch")
    out, lse = attention(q, k, v, 0.25)
    blocks = attention.list_blocks(q, k, 0.25)
    expected, expected_lse = block_sparse_attention(q, k, v, blocks, 0.25, skip_below=-3.0)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    whole, _ = block_sparse_attention(q, k, v, blocks, 0.25)
    assert 0 < relative_error(out, whole) < 0.2


def pairs_of(kept: torch.Tensor, sparse: SparseConfig, tokens: int) -> torch.Tensor:
    """Which key each query sees, bool ``[Hq, l, l]``."""
    kept = ListedBlocks.of(kept, sparse.block_size, sparse.key_block).kept[0]
    own = torch.arange(tokens) // sparse.block_size
    pairs = kept.repeat_interleave(sparse.block_size, dim=1).repeat_interleave(
        sparse.key_block, dim=2
    )
    return (pairs[:, :tokens, :tokens] | (own[:, None] == own)).tril()


@pytest.mark.parametrize(
    "sparse",
    [
        SparseConfig(block_size=32, stride=16, threshold=0.5),
        SparseConfig(method="spargeattn", block_size=32, threshold=0.5, similarity=0.5),
        SparseConfig(method="spargeattn", block_size=64, threshold=0.01, similarity=-1),
        SparseConfig(method="flexprefill", block_size=32, min_blocks=1, divergence=0.6),
        SparseConfig(
            method="flexprefill", block_size=32, min_blocks=2, divergence=0, threshold=0.6
        ),
        SparseConfig(
            method="flexprefill", block_size=32, min_blocks=1, divergence=1, threshold=0.6
        ),
    ],
    ids=str,
)
def test_the_chosen_blocks_are_those_of_the_papers(sparse):
    shares = []
    for tokens, seed in ((1, 0), (64, 0), (201, 0), (201, 1)):
        q, k = drifting_states(tokens, seed)
        pairs = pairs_of(
            BLOCK_SELECTION[sparse.method](q, k, 0.25, sparse, "torch"), sparse, tokens
        )
        assert torch.equal(pairs, chosen_pairs(q[0], k[0], 0.25, sparse))
        if tokens == 201:
            shares.append(float(pairs.sum()) / (4 * tokens * (tokens + 1) / 2))
    # What is chosen is neither everything nor only what is chosen always.
    assert 0.25 < statistics.mean(shares) < 1


def test_of_equal_scores_the_earlier_block_is_taken():
    q = torch.zeros(1, 1, 320, 16)
    k = torch.zeros(1, 1, 320, 16)
    kept = BLOCK_SELECTION["xattention"](
        q, k, 1.0, SparseConfig(block_size=32, threshold=0.5), "torch"
    )
    assert kept[0, 0, 9].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 9]
    # Three of four equal blocks hold the threshold exactly.
    sparse = SparseConfig(block_size=32, stride=32, threshold=0.75)
    assert (
        BLOCK_SELECTION["xattention"](q, k, 1.0, sparse, "torch")[0, 0, 3].tolist()
        == [1, 1, 0, 1] + [0] * 6
    )
    q[..., 0] = 1
    k[..., 0] = 1
    k[:, :, 160:, 1] = 1e-3  # the mean key is subtracted first: what is left is alike within blocks
    k[:, :, :160, 1] = -1e-3
    # Of 20, and of 16: exactly the threshold.
    for threshold, row, count in ((0.52, 9, 10), (0.5, 7, 8)):
        sparse = SparseConfig(method="spargeattn", block_size=32, threshold=threshold)
        kept = BLOCK_SELECTION["spargeattn"](q, k, 1.0, sparse, "torch")
        assert kept[0, 0, row].nonzero().flatten().tolist() == list(range(count))


def test_flexprefill_takes_the_earlier_pair_and_the_nearer_diagonal():
    zeros = torch.zeros(1, 1, 320, 16, dtype=torch.float64)
    sparse = SparseConfig(
        method="flexprefill", block_size=32, threshold=0.54, divergence=1, min_blocks=1
    )
    kept = BLOCK_SELECTION["flexprefill"](zeros, zeros, 1.0, sparse, "torch").tril()
    # Every block of queries shares out one tenth of all, evenly: the first five, and two of the
    # sixth's six.
    assert kept[0, 0].sum(dim=1).tolist()[:5] == [1, 2, 3, 4, 5]
    assert kept[0, 0, 5].nonzero().flatten().tolist() == [0, 1, 5]
    assert kept[0, 0, 9].nonzero().flatten().tolist() == [0, 9]
    # The last queries attend to the first keys of blocks 2, 4, 6, and 8, a quarter each.
    q = zeros.clone()
    k = zeros.clone()
    q[..., 0] = 1
    k[..., 0] = -1000
    k[:, :, 64:257:64, 0] = 0
    sparse = SparseConfig(
        method="flexprefill", block_size=32, threshold=0.3, divergence=0, min_blocks=3
    )
    kept = BLOCK_SELECTION["flexprefill"](q, k, 1.0, sparse, "torch").tril()
    assert torch.equal(pairs_of(kept, sparse, 320), chosen_pairs(q[0], k[0], 1.0, sparse))
    assert kept[0, 0, 9].nonzero().flatten().tolist() == [0, 2, 4, 6, 8, 9]


@pytest.mark.parametrize("tokens", [160, 175])
def test_flexprefill_finds_a_pattern_for_each_head(monkeypatch, tokens):
    monkeypatch.setattr(flexprefill, "MOST_SCORES_ON_CPU", 1 if tokens == 175 else 2**30)
    q, k = drifting_states(tokens, 0)
    k[:, :, 0] += q[:, ::2, -32:].mean(dim=2) / 2  # the first key is attended to from afar
    chosen = {}
    for divergence in (0, 0.41, 0.5, 0.65, 1):
        lines = {"min_blocks": 2, "divergence": divergence, "threshold": 0.8}
        sparse = SparseConfig(method="flexprefill", block_size=32, **lines)
        pairs = pairs_of(
            BLOCK_SELECTION["flexprefill"](q, k, 0.25, sparse, "torch"), sparse, tokens
        )
        assert torch.equal(pairs, chosen_pairs(q[0], k[0], 0.25, sparse))
        chosen[divergence] = pairs.flatten(1)
    is_aware = (chosen[0.5] == chosen[1]).all(dim=1)
    is_lines = (chosen[0.5] == chosen[0]).all(dim=1)
    assert (is_aware & ~is_lines).any()
    assert (is_lines & ~is_aware).any()
    assert (is_lines | is_aware).all()


# ---- some heads at a time ----


@each_choice(heads_at_once=[1, 2, 3, 6, 9], method=SPARSE_NAMES)
def test_heads_choose_the_same_however_many_at_a_time(monkeypatch, method, heads_at_once):
    """Of nine heads in three groups: one or two of a group, a group, two of the three, all."""
    own = {"divergence": 0.5, "min_blocks": 1} if method == "flexprefill" else {}
    sparse = SparseConfig(method=method, block_size=32, threshold=0.5, **own)
    states = [drifting_states(201, seed) for seed in range(5)]
    q = torch.cat([q for q, _ in states], dim=1)[:, :9]
    k = torch.cat([k for _, k in states], dim=1)[:, :3]
    kept = BLOCK_SELECTION[sparse.method](q, k, 0.25, sparse, "torch")
    expected = ListedBlocks.of(kept, sparse.block_size, sparse.key_block)
    monkeypatch.setattr(block_attention, "MOST_PAIRS", heads_at_once * kept[0, 0].numel() + 1)
    asked = []
    chosen = BLOCK_SELECTION[method]

    def choose(q, k, *options):
        asked.append((q.shape[1], k.shape[1]))
        return chosen(q, k, *options)

    monkeypatch.setitem(BLOCK_SELECTION, method, choose)
    listed = BlockAttention(sparse, "torch").list_blocks(q, k, 0.25)
    assert max(heads for heads, _ in asked) == heads_at_once
    assert sum(heads for heads, _ in asked) == 9
    assert max(kv_heads for _, kv_heads in asked) == max(1, heads_at_once // 3)
    assert torch.equal(listed.kept, expected.kept) and torch.equal(listed.counts, expected.counts)


# ---- prefill ----

XATTENTION = SparseConfig(block_size=32, stride=8, threshold=0.3)
SPARGE = SparseConfig(method="spargeattn", block_size=32, threshold=0.4, similarity=-1)
FLEX = SparseConfig(
    method="flexprefill", block_size=32, threshold=0.4, divergence=0.15, min_blocks=1
)


@pytest.mark.parametrize(
    ("settings", "num_hosts", "sparse", "family"),
    [
        ({"method": "xattention"}, 1, XATTENTION, "qwen2"),
        ({"method": "full"}, 2, SPARGE, "qwen2"),  # is the method of its name
        ({"method": "flexprefill"}, 1, FLEX, "qwen2_5_vl"),
        ({}, 2, XATTENTION, "qwen2"),
        ({}, 3, SPARGE, "qwen2"),
        ({"overlap": False}, 2, FLEX, "qwen2"),
        ({"method": "star"}, 2, XATTENTION, "qwen2"),
        ({"method": "star"}, 1, FLEX, "qwen2"),
    ],
)
def test_blocks_attend_sparsely_to_themselves(pool, settings, num_hosts, sparse, family):
    method = settings.get("method", "apbv")
    is_whole = method not in ("apbv", "star")
    blocks_per_host = 1 if method == "star" else 2
    length = 201 if is_whole else 100 * num_hosts * blocks_per_host + 37
    if family == "qwen2":
        batch = text_batch(length)
        start = length - 10
    else:
        batch = video_batch(family, 120)
        start = None
    tokens = batch["input_ids"].shape[1]
    settings = settings if is_whole else {"anchor_len": 21, "passing_len": 5, **settings}
    asked = {**settings, "sparse": sparse, "on_single_host": not is_whole}
    results = pool.run(num_hosts, prefill_job, family, batch, start, asked)
    assert {result.method for result in results} == {sparse.method if is_whole else method}
    # What the blocks see, and what they would see without sparse attention.
    if is_whole:
        oracle = DenseOracle(0, tokens, 1, 0, sparse=sparse)
        dense = DenseOracle(0, tokens, 1, 0)
    else:
        oracle = oracle_of({**settings, "sparse": sparse}, num_hosts, start, 0)
        dense = oracle_of(settings, num_hosts, start, 0)
    model = build(family, torch.float64)
    reset_rope(model)
    exact = run_oracle(model, as_double(batch), dense)
    if (method, num_hosts) == ("star", 1):  # all of it is the anchor, which stays dense
        assert relative_error(results[0].logits, exact) < 1e-6 and results[0].density is None
        return
    expected = run_oracle(model, as_double(batch), oracle)
    assert relative_error(expected, exact) > 1e-4  # or a test would prove nothing
    check_prefill(results, expected, zip(oracle.keys, oracle.values, strict=True), 1e-6)
    ((density, exact),) = {(result.density, result.exact) for result in results}
    assert 0.2 < density < 0.98 and not exact


@each_choice(method=[*SPARSE_NAMES, "apbv"], num_hosts=[1, 3])
def test_threshold_1_is_dense(pool, method, num_hosts):
    sparse = SparseConfig(
        method="xattention" if method == "apbv" else method, threshold=1, block_size=32
    )
    batch = text_batch(230)
    settings = {"method": method, "sparse": sparse, "passing_len": 10**6}
    expected, cache = hugging_face("qwen2", torch.float64, batch)
    results = pool.run(num_hosts, prefill_job, "qwen2", batch, 220, settings)
    check_prefill(results, expected, kv_of(cache), 1e-9)
    assert all(result.exact and result.density is None for result in results)


def test_triton_computes_the_same():
    batch = text_batch(70)
    config = PrefillConfig(method="spargeattn", sparse=SPARGE, backend="triton")
    model = build("qwen2", torch.float32)
    logits = prefill(model, as_inputs("qwen2", batch, 60, ALONE), hosts=ALONE, config=config).logits
    oracle = DenseOracle(0, 70, 1, 0, sparse=SPARGE)
    expected = run_oracle(build("qwen2", torch.float64), batch, oracle)
    assert relative_error(expected, hugging_face("qwen2", torch.float64, batch)[0]) > 1e-3
    assert relative_error(logits, expected) < 1e-4
