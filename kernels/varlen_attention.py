"""This module offers attention within each of many sequences of different lengths that share one tensor.

A vision tower packs windows or frames so. One call for all of them saves what hundreds of small calls cost.
"""

from torch import Tensor

from .backends import implementation, requested
from .runs import PackedSequences
from .torch_varlen_attention import usable


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float, *, backend: str = "auto"
) -> Tensor:
    """Attend within each sequence: every query sees all keys of its own sequence, and no others.

    Args:
        q: ``[T, Hq, D]``, neighbouring numbers along D.
        k, v: ``[T, Hkv, D]``, Hq a multiple of Hkv.
        sequences: where each begins and ends, the same for q, k and v; together they have T rows.
        scale: factor of the scores, usually ``D ** -0.5``.
        backend: ``"reference"`` and ``"torch"`` are obeyed. Any other name is the same as ``"auto"``, which takes
            an installed FlashAttention where it works, and torch elsewhere.

    Returns:
        ``[T, Hq, D]`` in q's dtype, contiguous.

    Raises:
        ValueError: Hq is not a multiple of Hkv.
        BackendError: there is no such back end.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads")
    if not q.shape[0]:
        return q.new_empty(q.shape)
    wanted = requested(backend)
    if wanted not in ("torch", "reference"):
        wanted = "torch" if usable("flash_attn", q.device, q.dtype, q.shape[2]) else "flash_attn"
    return implementation("varlen_attention", wanted)(q, k, v, sequences, scale)
