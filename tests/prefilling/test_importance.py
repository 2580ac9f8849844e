"""The ranking of a block's keys against loops over heads and queries."""

import math

import pytest
import torch

from apbv import PrefillConfig
from apbv.kernels import torch_importance as importance
from apbv.prefilling.methods.importance import IMPORTANCE

from pairs import each_choice

BATCH, KV_HEADS, DIM, SCALE = 2, 2, 16, 0.3


def block(length, *, group=3, queries=5, dtype=torch.float64, seed=0):
    """q_query, q_block and k_block of one context block."""
    generator = torch.Generator().manual_seed(seed)
    heads = KV_HEADS * group

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return (
        randn(BATCH, heads, queries, DIM),
        randn(BATCH, heads, length, DIM),
        randn(BATCH, KV_HEADS, length, DIM),
    )


def products(row, keys):
    return [SCALE * sum(a * b for a, b in zip(row.tolist(), key.tolist(), strict=True)) for key in keys]


def softmax_of(scores):
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / sum(weights) for weight in weights]


def per_kv_head(q, k, rank):
    """Apply ``rank(rows of every query head of the group [G][S][D], keys [l_b, D])`` to each KV head."""
    group = q.shape[1] // k.shape[1]
    return torch.tensor(
        [
            [rank([q[b, h * group + g] for g in range(group)], k[b, h]) for h in range(k.shape[1])]
            for b in range(k.shape[0])
        ],
        dtype=torch.float64,
    )


def mean_over(rows_of_scores):
    return [sum(column) / len(rows_of_scores) for column in zip(*rows_of_scores, strict=True)]


def softmax_by_definition(q_query, q_block, k_block):
    return per_kv_head(
        q_query,
        k_block,
        lambda heads, keys: mean_over([softmax_of(products(row, keys)) for head in heads for row in head]),
    )


def dot_by_definition(q_query, q_block, k_block):
    def rank(heads, keys):
        mean = mean_over([products(row, keys) for head in heads for row in head])
        return [max(mean[max(0, j - 2) : j + 3]) for j in range(len(mean))]

    return per_kv_head(q_query, k_block, rank)


def received_by_definition(q_query, q_block, k_block):
    length = k_block.shape[2]
    last = min(64, length) - 1
    picked = [round(i * (length - 1) / last) for i in range(last + 1)] if last else [0]

    def rank(heads, keys):
        rows = [
            softmax_of(products(head[i], keys[: i + 1])) + [0.0] * (length - 1 - i)
            for head in heads
            for i in picked
        ]
        return mean_over(rows)

    return per_kv_head(q_block, k_block, rank)


def peak_by_definition(q_query, q_block, k_block):
    def rank(heads, keys):
        return [
            max(column) for column in zip(*(softmax_of(products(r, keys)) for h in heads for r in h), strict=True)
        ]

    return per_kv_head(q_query, k_block, rank)


DEFINITIONS = {
    "peak": peak_by_definition,
    "softmax": softmax_by_definition,
    "dot": dot_by_definition,
    "received": received_by_definition,
}
names = pytest.mark.parametrize("name", sorted(DEFINITIONS))


def test_registry_has_the_documented_names_and_the_default():
    assert set(IMPORTANCE) == set(DEFINITIONS)
    assert PrefillConfig().importance in IMPORTANCE


@names
def test_equals_its_definition(name):
    for length, group, queries in ((1, 1, 1), (4, 1, 3), (11, 3, 5), (129, 2, 3)):
        tensors = block(length, group=group, queries=queries)
        result = IMPORTANCE[name](*tensors, SCALE)
        assert result.shape == (BATCH, KV_HEADS, length)
        # dot accumulates in fp32
        tolerance = 1e-5 if name == "dot" else 1e-12
        torch.testing.assert_close(result.double(), DEFINITIONS[name](*tensors), rtol=tolerance, atol=tolerance)


@names
def test_ranks_in_fp32(name):
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)):
        tensors = block(40, dtype=dtype)
        result = IMPORTANCE[name](*tensors, SCALE)
        assert result.dtype == torch.float32
        exact = DEFINITIONS[name](*(states.double() for states in tensors))
        assert (result - exact).norm() < tolerance * exact.norm()


@each_choice(name=sorted(DEFINITIONS), max_scores=[1, 1000])
def test_chunks_bound_memory_and_do_not_change_the_result(monkeypatch, name, max_scores):
    tensors, rows_at_once = block(70), []
    whole = IMPORTANCE[name](*tensors, SCALE)
    scores = importance._scores

    def spy(rows, k, scale):
        rows_at_once.append(rows.shape[2])
        return scores(rows, k, scale)

    monkeypatch.setattr(importance, "_MAX_SCORES", max_scores)
    monkeypatch.setattr(importance, "_scores", spy)
    torch.testing.assert_close(IMPORTANCE[name](*tensors, SCALE), whole, rtol=1e-12, atol=1e-12)
    if name == "dot":
        assert not rows_at_once  # one row of scores whatever the question's length
    else:
        num_rows = 3 * (64 if name == "received" else 5)
        assert sum(rows_at_once) == num_rows
        assert max(rows_at_once) == min(num_rows, max(1, max_scores // (KV_HEADS * 70)))


def test_only_received_reads_the_blocks_own_queries():
    q_query, q_block, k_block = block(20)
    for name, rank in IMPORTANCE.items():
        before = rank(q_query, q_block, k_block, SCALE)
        of_query = rank(q_query + 1.0 * torch.randn_like(q_query), q_block, k_block, SCALE)
        of_block = rank(q_query, q_block + 1.0 * torch.randn_like(q_block), k_block, SCALE)
        assert torch.equal(before, of_query) == (name == "received")
        assert torch.equal(before, of_block) == (name != "received")
