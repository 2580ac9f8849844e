"""The arithmetic that torch dispatches."""

from math import prod

import torch
from torch.utils.flop_counter import FlopCounterMode

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def flash_flops(q, k, v, dropout_p=0.0, is_causal=False, **kwargs) -> int:
    """Of torch's fused CPU attention, which its counter does not know; causal attention has no pairs to spare."""
    batch, heads, queries, dim = q
    assert not is_causal or queries == k[2]
    return 4 * batch * heads * dim * (queries * (queries + 1) // 2 if is_causal else queries * k[2])


def solver_flops(a, b, upper, left=True, unitriangular=False, **kwargs) -> int:
    """Of a triangular system, counted as the product with a whole matrix, as a GPU computes it."""
    *batch, rows, columns = b
    return 2 * prod(batch) * rows * rows * columns


def flop_counter() -> FlopCounterMode:
    mapping = {FLASH: flash_flops, torch.ops.aten.linalg_solve_triangular: solver_flops}
    return FlopCounterMode(display=False, custom_mapping=mapping)
