"""Attention over segments by a function that attends over one of them: torch's own, or a library's."""

from collections.abc import Callable

import torch
from torch import Tensor

from .merging import merge_finite
from .runs import Segment, in_rows

# (q, k, v, scale, causal) to (out, lse); see apbv.kernels.library_attention.
Attend = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]

# With so few queries, reading K and V once for all heads of a group is worth rearranging the queries.
_FEW_QUERIES = 64


def attend_natively(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Torch's attention where no library is needed: on a CPU, and, for tests, fp64 and the like on a GPU."""
    if q.device.type != "cpu":
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        out, lse = _attend_masked(q, k, v, visible.tril() if causal else visible, scale)
        return out.to(q.dtype), lse
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def segmented_attention(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    causal_last: bool,
    *,
    rows_alone: int = 0,
    attend: Attend = attend_natively,
) -> tuple[Tensor, Tensor]:
    """See :func:`apbv.kernels.segmented_attention`; one call per segment, or for several joined ones."""
    if rows_alone:
        return _in_two(q, segments, scale, causal_last, rows_alone, attend)
    q, segments = in_rows(q), [(in_rows(k), in_rows(v)) for k, v in segments]
    visible, triangle = segments, None
    if causal_last and q.shape[2] > 1:  # a single query sees everything
        visible, triangle = _cut_triangle(segments, q.shape[2])
    visible = _coalesce([segment for segment in visible if segment[0].shape[2]], q)
    partials = [_attend_all(q, k, v, scale, attend) for k, v in visible]
    if triangle is not None:
        partials.append(_attend_triangle(q, *triangle, scale, attend))
    if len(partials) == 1:
        return partials[0]
    outs, lses = zip(*partials, strict=True)
    out, lse = merge_finite(outs, torch.stack(lses))
    return out.to(q.dtype), lse


def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    visible: Tensor | None = None,
    kept: Tensor | None = None,
    attend: Attend = attend_natively,
) -> tuple[Tensor, Tensor]:
    """See :func:`apbv.kernels.verify_attention`; kept rows are copied."""
    q, k, v = (in_rows(x) for x in (q, k, v))
    if visible is None and kept is None:
        return segmented_attention(q, [(k, v)], scale, causal_last=True, attend=attend)
    if visible is None:
        visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    num_past = k.shape[2] - visible.shape[1]
    past = tuple(states[:, :, :num_past] for states in (k, v))
    if kept is not None:
        places = kept.long()[..., None].expand(-1, -1, -1, k.shape[3])
        past = tuple(states.gather(2, places) for states in past)
    partials = []
    if past[0].shape[2]:
        partials.append(_attend_all(q, *past, scale, attend))
    if visible.shape[1]:
        partials.append(_attend_masked(q, k[:, :, num_past:], v[:, :, num_past:], visible, scale))
    if len(partials) == 1:
        out, lse = partials[0]
        return out.to(q.dtype), lse
    outs, lses = zip(*partials, strict=True)
    out, lse = merge_finite([out.to(lses[0].dtype) for out in outs], torch.stack(lses))
    return out.to(q.dtype), lse


def _attend_all(q: Tensor, k: Tensor, v: Tensor, scale: float, attend: Attend) -> tuple[Tensor, Tensor]:
    """Every query sees every key: then those of a group's heads can be as many more queries of one head."""
    if q.shape[2] > _FEW_QUERIES:
        return attend(q, k, v, scale, False)
    out, lse = attend(q.reshape(q.shape[0], k.shape[1], -1, q.shape[3]), k, v, scale, False)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _in_two(
    q: Tensor, segments: list[Segment], scale: float, causal_last: bool, rows_alone: int, attend: Attend
) -> tuple[Tensor, Tensor]:
    """The first rows see the last segment only, and of it, where it is causal, less than the others."""
    k, v = segments[-1]
    others = q.shape[2] - rows_alone
    end = max(0, k.shape[2] - others) if causal_last else k.shape[2]
    parts = [
        segmented_attention(
            q[:, :, :rows_alone], [(k[:, :, :end], v[:, :, :end])], scale, causal_last, attend=attend
        )
        if end
        else (torch.zeros_like(q[:, :, :rows_alone]), _full_lse(q[:, :, :rows_alone]))
    ]
    if others:
        parts.append(segmented_attention(q[:, :, rows_alone:], segments, scale, causal_last, attend=attend))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _coalesce(segments: list[Segment], q: Tensor) -> list[Segment]:
    """Join segments where copying their rows costs less than merging another partial result would.

    APB-V's context blocks see an anchor and passing blocks that are short beside the block itself.
    """
    keys, values = ([pair[i] for pair in segments] for i in (0, 1))
    if len(segments) > 1 and sum(k.shape[2] for k in keys) * keys[0].shape[1] < q.shape[2] * q.shape[1]:
        return [(torch.cat(keys, dim=2), torch.cat(values, dim=2))]
    return segments


def _cut_triangle(segments: list[Segment], queries: int) -> tuple[list[Segment], Segment | None]:
    """Bottom-right causal keys as those that all queries see, and at most as many as there are queries.

    Fused kernels disagree on where the diagonal of a non-square causal mask lies; a square one has only one.
    """
    *visible, (k, v) = segments
    past = k.shape[2] - queries
    if past > 0:
        visible.append((k[:, :, :past], v[:, :, :past]))
        k, v = k[:, :, past:], v[:, :, past:]
    return visible, (k, v) if k.shape[2] else None


def _attend_triangle(q: Tensor, k: Tensor, v: Tensor, scale: float, attend: Attend) -> tuple[Tensor, Tensor]:
    """Causal attention to no more keys than there are queries, of which the first may see nothing."""
    blind = q.shape[2] - k.shape[2]
    out, lse = attend(q[:, :, blind:], k, v, scale, k.shape[2] > 1)
    if not blind:
        return out, lse
    blind_q = q[:, :, :blind]
    return torch.cat([torch.zeros_like(blind_q), out], dim=2), torch.cat([_full_lse(blind_q), lse], dim=2)


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """By definition, in fp32 at least: no fused kernel takes a mask and returns the lse. S and N are tens."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, S, D]
    k, v = (states.to(wide).unsqueeze(2) for states in (k, v))
    scores = (grouped @ k.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(wide).min)[..., None])
    return (weights @ v).flatten(1, 2), lse.flatten(1, 2)


def _full_lse(q: Tensor) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)
