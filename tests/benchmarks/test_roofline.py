"""What an operator has to compute and to move, against the operands themselves."""

import pytest
import torch

from pairs import each_choice
from support import roofline

SHAPES = {"batch": 2, "heads": 6, "kv_heads": 2, "queries": 5, "keys": 40, "dim": 16}


def tensor_bytes(*shapes, dtype=torch.float16):
    return sum(torch.empty(shape, dtype=dtype).nbytes for shape in shapes)


@each_choice(operator=["segmented_attention", "verify_attention"], causal=[0, 3, 40])
def test_attention_is_counted_by_what_is_seen(operator, causal):
    flops, moved = roofline.cost_of(operator, SHAPES | {"causal": causal}, torch.float16)
    seen = torch.ones(5, 40, dtype=torch.bool)
    if causal:
        seen[:, 40 - causal :] = torch.ones(5, causal, dtype=torch.bool).tril(causal - 5)
    assert flops == int(seen.sum()) * 2 * 6 * 2 * 2 * 16
    states = tensor_bytes((2, 6, 5, 16), (2, 6, 5, 16), (2, 2, 40, 16), (2, 2, 40, 16))
    assert moved == states + tensor_bytes((2, 6, 5), dtype=torch.float32)


def test_the_lower_roof_bounds():
    assert roofline.predicted_seconds((100, 10), 10.0, 10.0) == (10.0, "arithmetic")
    assert roofline.predicted_seconds((100, 100), 100.0, 10.0) == (10.0, "memory")
    with pytest.raises(ValueError, match="no roof"):
        roofline.predicted_seconds((1, 1), 0.0, 1.0)
