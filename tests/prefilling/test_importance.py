"""The ranking of a block's keys, against loops."""

from itertools import product

import pytest
import torch

from apbv.config import IMPORTANCE_NAMES
from apbv.kernels import torch_importance
from apbv.prefilling.methods.importance import importance_of

from apbv_tests.attention_cases import randn
from apbv_tests.oracle import DenseOracle

BATCH = 2
KV_HEADS = 2
DIM = 16
SCALE = 0.3


def by_definition(name, q_query, k_block):
    """In fp64."""
    length = k_block.shape[2]
    # The question comes after the block.
    q = torch.nn.functional.pad(q_query.double(), (0, 0, length, 0))
    group = q.shape[1] // KV_HEADS
    oracle = DenseOracle(0, length, 1, 0, importance=name)
    scores = [
        oracle.scores(
            q[b : b + 1], k_block[b : b + 1].double(), [*range(length)], head, group, SCALE
        )
        for b, head in product(range(BATCH), range(KV_HEADS))
    ]
    return torch.stack(scores).unflatten(0, (BATCH, KV_HEADS))


@pytest.mark.parametrize(
    "most_scores", [torch_importance.MAX_SCORES, 100], ids=["at once", "in chunks"]
)
@pytest.mark.parametrize("name", IMPORTANCE_NAMES)
def test_equals_its_definition(monkeypatch, name, most_scores):
    monkeypatch.setattr(torch_importance, "MAX_SCORES", most_scores)
    for length, group, queries, dtype, tolerance in (
        (1, 1, 1, torch.float64, 1e-6),
        (129, 2, 3, torch.float64, 1e-6),
        (40, 3, 5, torch.float16, 2e-3),
        (40, 3, 5, torch.bfloat16, 1.5e-2),
    ):
        shapes = (KV_HEADS * group, queries), (KV_HEADS, length)
        tensors = [
            randn(BATCH, *shape, DIM, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)
        ]
        result = importance_of(name, *tensors, SCALE)
        exact = by_definition(name, *tensors)
        assert dtype == torch.float64 or result.dtype == torch.float32
        assert (result - exact).norm() < tolerance * exact.norm()


def test_the_oracle_refuses_an_importance_that_it_does_not_know():
    with pytest.raises(ValueError, match="no importance 'received'"):
        DenseOracle(0, 4, 1, 0, importance="received")
