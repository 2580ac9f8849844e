"""The ranking of a block's keys: by the kernels' reference, and for ``received`` against loops."""

import pytest
import torch

from apbv.kernels import reference
from apbv.prefilling.methods.importance import IMPORTANCE

from attention_cases import randn

BATCH, KV_HEADS, DIM, SCALE = 2, 2, 16, 0.3


def block(length, *, group=3, queries=5, dtype=torch.float64):
    """q_query, q_block and k_block of one context block."""
    shapes = [(KV_HEADS * group, queries), (KV_HEADS * group, length), (KV_HEADS, length)]
    return [randn(BATCH, *shape, DIM, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def by_definition(name, q_query, q_block, k_block):
    """In fp64; the attention that is received is that of 64 of the block's queries at most."""
    q_query, q_block, k_block = (states.double() for states in (q_query, q_block, k_block))
    if name != "received":
        return reference.kv_importance(q_query, k_block, SCALE, name, pool=5 if name == "dot" else 1)
    length, group = k_block.shape[2], q_block.shape[1] // k_block.shape[1]
    last, result = min(64, length) - 1, torch.zeros(k_block.shape[:3], dtype=torch.float64)
    picked = [round(i * (length - 1) / last) for i in range(last + 1)] if last else [0]
    for b in range(BATCH):
        for head in range(q_block.shape[1]):
            for i in picked:
                keys = k_block[b, head // group, : i + 1]
                shares = (keys @ q_block[b, head, i] * SCALE).softmax(dim=0) / (len(picked) * group)
                result[b, head // group, : i + 1] += shares
    return result


@pytest.mark.parametrize("name", IMPORTANCE)
def test_equals_its_definition(name):
    for length, group, queries, dtype, tolerance in (
        (1, 1, 1, torch.float64, 1e-6),
        (129, 2, 3, torch.float64, 1e-6),
        (40, 3, 5, torch.float16, 2e-3),
        (40, 3, 5, torch.bfloat16, 1.5e-2),
    ):
        tensors = block(length, group=group, queries=queries, dtype=dtype)
        result, exact = IMPORTANCE[name](*tensors, SCALE), by_definition(name, *tensors)
        assert dtype == torch.float64 or result.dtype == torch.float32
        assert (result - exact).norm() < tolerance * exact.norm()
