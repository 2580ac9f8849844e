"""Segmented attention on torch's own fused kernels, and the merge of partial results.

Shapes: B batch, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), S queries, T keys, D head
dimension. lse is the natural-log sum of exponentials of the scaled scores, -inf where nothing was visible.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Segment = tuple[Tensor, Tensor]

# Rows of scores per KV head, keys and precisions for which a CPU is faster without its fused kernel.
_FEW_ROWS, _MANY_KEYS = 32, 8192
_WIDE = (torch.float32, torch.float64)


def segmented_attention(
    q: Tensor, segments: list[Segment], scale: float, causal_last: bool
) -> tuple[Tensor, Tensor]:
    """Attention over the concatenation of several key/value segments.

    Every segment is fully visible to every query, except the last one where ``causal_last`` is set: there
    query i of S sees the first T - S + i + 1 of its T keys (bottom-right causality, as in decoding).

    Args:
        q: ``[B, Hq, S, D]``.
        segments: (k, v) pairs, each ``[B, Hkv, T_i, D]``; a T_i may be 0.
        scale: factor of the scores, usually ``D ** -0.5``.
        causal_last: whether the last segment is causal.

    Returns:
        out ``[B, Hq, S, D]`` in q's dtype (zeros where nothing was visible) and
        lse ``[B, Hq, S]`` in fp32 (fp64 for fp64 input).

    Raises:
        ValueError: no segment was given, or Hq is not a multiple of Hkv.
    """
    if not segments:
        raise ValueError("segmented_attention needs at least one (k, v) segment")
    if q.shape[1] % segments[0][0].shape[1]:
        raise ValueError(
            f"{q.shape[1]} query heads are not a multiple of {segments[0][0].shape[1]} key/value heads"
        )
    if q.shape[2] == 0:
        return torch.zeros_like(q), _full_lse(q)
    visible, last = (segments[:-1], segments[-1]) if causal_last else (segments, None)
    visible = _coalesce([segment for segment in visible if segment[0].shape[2]], q)
    partials = [_attend(q, k, v, scale, causal=False) for k, v in visible]
    if last is not None and last[0].shape[2]:
        partials += _attend_bottom_right(q, *last, scale)
    if not partials:
        return torch.zeros_like(q), _full_lse(q)
    if len(partials) == 1:
        return partials[0]
    outs, lses = zip(*partials, strict=True)
    out, lse = _merge(outs, torch.stack(lses))
    return out.to(q.dtype), lse


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partial attention results of the same queries over disjoint sets of keys.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i): the online softmax by which APB-V
    merges the hosts' query attention (Eq. 5).

    Args:
        outs: ``[N, B, H, S, D]`` partial results.
        lses: ``[N, B, H, S]``; +inf, which some libraries report for no visible key, counts as -inf.

    Returns:
        out ``[B, H, S, D]`` and lse ``[B, H, S]`` in fp32 (fp64 for fp64 input).
    """
    lses = torch.where(lses == float("inf"), float("-inf"), lses)
    # A partial result that saw nothing may hold anything, NaN included: it must not be multiplied in.
    outs = outs.masked_fill((lses == float("-inf"))[..., None], 0.0)
    return _merge(outs.unbind(), lses)


def _merge(outs: Sequence[Tensor], lses: Tensor) -> tuple[Tensor, Tensor]:
    """The merge itself, of finite partial results; accumulates in the lse's dtype."""
    highest = lses.amax(dim=0).clamp_min(torch.finfo(lses.dtype).min)
    weights = torch.exp(lses - highest)
    total = weights.sum(dim=0)
    lse = highest + total.log()  # log(0) is the -inf of queries that saw nothing
    weights = (weights / total.clamp_min(torch.finfo(lses.dtype).tiny))[..., None]
    merged = outs[0] * weights[0]
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        merged.addcmul_(out.to(merged.dtype), weight)
    return merged, lse


def _coalesce(segments: list[Segment], q: Tensor) -> list[Segment]:
    """Join segments where copying their rows costs less than merging another partial result would.

    APB-V's context blocks see an anchor and passing blocks that are short beside the block itself.
    """
    keys, values = ([pair[i] for pair in segments] for i in (0, 1))
    if len(segments) > 1 and sum(k.shape[2] for k in keys) * keys[0].shape[1] < q.shape[2] * q.shape[1]:
        return [(torch.cat(keys, dim=2), torch.cat(values, dim=2))]
    return segments


def _attend_bottom_right(q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[tuple[Tensor, Tensor]]:
    """Bottom-right causal attention out of a fully visible part and a square causal one.

    Fused kernels disagree on where the diagonal of a non-square causal mask lies; a square one has only one.
    """
    queries, keys = q.shape[2], k.shape[2]
    if queries == keys:
        return [_attend(q, k, v, scale, causal=True)]
    if queries < keys:
        past = keys - queries
        parts = [_attend(q, k[:, :, :past], v[:, :, :past], scale, causal=False)]
        return [*parts, _attend(q, k[:, :, past:], v[:, :, past:], scale, causal=queries > 1)]
    blind = queries - keys
    out, lse = _attend(q[:, :, blind:], k, v, scale, causal=True)
    return [
        (
            torch.cat([torch.zeros_like(q[:, :, :blind]), out], dim=2),
            torch.cat([_full_lse(q[:, :, :blind]), lse], dim=2),
        )
    ]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """One fused call over at least one key; causal only where S = T."""
    # The fused kernels read rows of D neighbouring numbers, and do not check that they are.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    aten = torch.ops.aten
    if q.device.type == "cpu":
        rows = q.shape[2] * (q.shape[1] // k.shape[1])
        if not causal and rows <= _FEW_ROWS and k.shape[2] >= _MANY_KEYS and q.dtype in _WIDE:
            return _attend_few(q, k, v, scale)
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if q.dtype in (torch.float16, torch.bfloat16):
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse
    return _attend_by_definition(q, k, v, scale, causal)


def _attend_few(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Few queries, as in decoding: two matrix products over the keys as they lie, a group's heads side by side.

    On a CPU the fused kernel reads K and V, which no cache holds any more, once for every query head.
    """
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    scores = grouped @ k.transpose(-1, -2)
    scores *= scale
    highest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    out = (weights @ v) / total
    lse = highest + total.log()
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _attend_by_definition(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """fp32 and fp64 on accelerators, where no fused kernel returns the lse: for tests, not for speed."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)


def _full_lse(q: Tensor) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)
