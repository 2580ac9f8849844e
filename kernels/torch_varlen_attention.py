"""Attends within packed sequences with FlashAttention where there is one, or else length by length."""

from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import reference
from .backends import capability, mistake_of
from .library_attention import FLASH_MODULES, flash_version, why_not_library
from .runs import PackedSequences


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float, *, library: str | None = None
) -> Tensor:
    """Attend within each sequence, in one call where there is FlashAttention, else in one for each length."""
    if library is None and usable("torch", q.device, q.dtype, q.shape[2]):
        return attend_by_length(q, k, v, sequences, scale)
    return FLASH[library or "torch"](q, k, v, sequences, scale)


def attend_by_length(q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float) -> Tensor:
    """Attend to all sequences of one length as one batch; as many calls as there are different lengths."""
    outs = []
    for length, rows in sequences.by_length:
        batch = (x if rows is None else x.index_select(0, rows) for x in (q, k, v))
        q_, k_, v_ = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in batch)  # [N, H, length, D]
        out = scaled_dot_product_attention(q_, k_, v_, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        outs.append((rows, out.transpose(1, 2).flatten(0, 1)))
    if outs[0][0] is None:
        return outs[0][1].contiguous()
    result = q.new_empty(q.shape)
    for rows, out in outs:
        result.index_copy_(0, rows, out)
    return result


@cache
def usable(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return what keeps a FlashAttention from attending like this, or None if nothing does.

    Args:
        name: ``"flash_attn"``, or ``"torch"`` for the one that torch has built in.
        device, dtype: those of q, k and v.
        head_dim: D.
    """
    if device.type != "cuda":
        return f"it runs on CUDA devices, and the tensors are on {device.type}"
    obstacle = why_not_library(name, capability(device), dtype, head_dim)
    return obstacle or probe(name, device, dtype, head_dim)


@torch.no_grad()
def probe(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Run a FlashAttention on a small problem, and return what it raises or gets wrong, or None if all is well."""
    lengths = [129, 5, 64, 1, 63]  # none fills a whole number of tiles
    boundaries = torch.tensor([0, *lengths], device="cpu").cumsum(0, dtype=torch.int32).to(device)
    sequences, scale = PackedSequences(boundaries, max(lengths)), head_dim**-0.5
    shape = (3, sum(lengths), 2, head_dim)
    generator = torch.Generator("cpu").manual_seed(0)
    q, k, v = torch.randn(shape, generator=generator, device="cpu").to(device, dtype)
    exact = reference.varlen_attention(q.double(), k.double(), v.double(), sequences, scale)
    # Out averages numbers of about 1, so that rounding to `dtype` costs about its epsilon.
    return mistake_of(lambda: [FLASH[name](q, k, v, sequences, scale)], [exact], [8 * torch.finfo(dtype).eps])


def _attend_library(q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float) -> Tensor:
    """Attend with an installed FlashAttention; all its versions have these names, and some return the lse too."""
    major, _ = capability(q.device)
    version = flash_version(major)
    if version is None:
        raise ImportError("no FlashAttention is installed that runs on this GPU")
    result = import_module(FLASH_MODULES[version]).flash_attn_varlen_func(
        *(q, k, v),
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), sequences.boundaries),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), sequences.longest),
        softmax_scale=scale,
        causal=False,
    )
    return result[0] if isinstance(result, tuple) else result


def _attend_torch_flash(q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float) -> Tensor:
    ends, longest = sequences.boundaries, sequences.longest
    return torch.ops.aten._flash_attention_forward(
        q, k, v, ends, ends, longest, longest, 0.0, False, False, scale=scale
    )[0]


FLASH: dict[str, Callable[[Tensor, Tensor, Tensor, PackedSequences, float], Tensor]] = {
    "flash_attn": _attend_library,
    "torch": _attend_torch_flash,
}
