"""Packed attention of vision towers, over all windows and frames in one call.

The vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL lay all windows or frames one after the
other, and so does Qwen2.5-Omni's audio tower with its windows. By default transformers cuts them
apart again in every layer and attends to each by itself: a thousand small calls where one does. It
makes one call where an attention of the name "flash…" is in force, and tells it where the sequences
end.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ..errors import UnsupportedModelError
from ..kernels import PackedSequences, varlen_attention

# The towers pass on boundaries where they find "flash" in the name (transformers'
# is_flash_attention_requested).
_NAME = "apbv_flash_varlen"
_REPLACED = "sdpa"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    apbv_packing: dict[int, tuple[Tensor, PackedSequences]],
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention function contract: returns (``[1, T, H, D]`` contiguous, None)."""
    if attention_mask is not None or dropout:
        raise UnsupportedModelError(
            "attention of packed sequences supports neither a mask nor dropout"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Layers that have the same boundaries share what is worked out of them. They are known by their
    # identity, and kept, so that no other tensor can come to have it.
    if id(cu_seq_lens_q) not in apbv_packing:
        sequences = PackedSequences(cu_seq_lens_q.to(query.device), max_length_q)
        apbv_packing[id(cu_seq_lens_q)] = cu_seq_lens_q, sequences
    _, sequences = apbv_packing[id(cu_seq_lens_q)]
    # [T, H, D]
    q, k, v = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return varlen_attention(q, k, v, sequences, scale)[None], None


AttentionInterface.register(_NAME, _attention)


@contextmanager
def packed_attention(tower: PreTrainedModel | None) -> Iterator[None]:
    """Make a tower attend to all its windows or frames in one call; restored even on errors.

    It replaces transformers' default, sdpa, and the result is the same up to rounding. Another
    implementation that the caller has chosen stays in force. A tower is used by one thread at a
    time; every model has its own.

    Args:
        tower: one that packs; None, for those that do not (InternVL's, LLaVA-OneVision's), is left
            alone.
    """
    if tower is None or tower.config._attn_implementation != _REPLACED:
        yield
        return

    def pass_packing(tower: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs | {"apbv_packing": {}}

    hook = tower.register_forward_pre_hook(pass_packing, with_kwargs=True)
    tower.config._attn_implementation = _NAME
    try:
        yield
    finally:
        tower.config._attn_implementation = _REPLACED
        hook.remove()
