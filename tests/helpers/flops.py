"""The arithmetic that torch dispatches."""

import torch
from torch.utils.flop_counter import FlopCounterMode

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def flash_flops(q, k, v, dropout_p=0.0, is_causal=False, **kwargs) -> int:
    """Of torch's fused CPU attention, which its counter does not know; causal attention has no pairs to spare."""
    batch, heads, queries, dim = q
    assert not is_causal or queries == k[2]
    return 4 * batch * heads * dim * (queries * (queries + 1) // 2 if is_causal else queries * k[2])


def flop_counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping={FLASH: flash_flops})
