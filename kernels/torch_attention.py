"""This module implements :mod:`apbv.kernels.attention` by attending over one segment at a time and merging."""

import torch
from torch import Tensor

from .library_attention import Attend, attend_masked, attend_with
from .runs import Segment, in_rows
from .torch_merging import merge_finite

# With so few queries, reading K and V once for all heads of a group is worth rearranging the queries.
_FEW_QUERIES = 64


def segmented_attention(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    causal_last: bool,
    *,
    rows_alone: int = 0,
    library: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.segmented_attention` does, by the kernels of torch or of another library."""
    attend = attend_with(library, q, segments[0][0])
    return attend_segments(q, segments, scale, causal_last, attend, rows_alone=rows_alone)


def attend_segments(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    causal_last: bool,
    attend: Attend,
    *,
    rows_alone: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend over several segments with one call of ``attend`` for each, or for several joined ones."""
    if rows_alone:
        return _attend_in_two_parts(q, segments, scale, causal_last, rows_alone, attend)
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
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.verify_attention` does; kept rows are copied."""
    attend = attend_with("torch", q, k)
    q, k, v = (in_rows(x) for x in (q, k, v))
    if visible is None and kept is None:
        return attend_segments(q, [(k, v)], scale, True, attend)
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
        partials.append(attend_masked(q, k[:, :, num_past:], v[:, :, num_past:], visible, scale))
    if len(partials) == 1:
        out, lse = partials[0]
        return out.to(q.dtype), lse
    outs, lses = zip(*partials, strict=True)
    out, lse = merge_finite([out.to(lses[0].dtype) for out in outs], torch.stack(lses))
    return out.to(q.dtype), lse


def _attend_all(q: Tensor, k: Tensor, v: Tensor, scale: float, attend: Attend) -> tuple[Tensor, Tensor]:
    """Attend where every query sees every key, so that a group's heads can be more queries of one head."""
    if q.shape[2] > _FEW_QUERIES:
        return attend(q, k, v, scale, False)
    out, lse = attend(q.reshape(q.shape[0], k.shape[1], -1, q.shape[3]), k, v, scale, False)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _attend_in_two_parts(
    q: Tensor, segments: list[Segment], scale: float, causal_last: bool, rows_alone: int, attend: Attend
) -> tuple[Tensor, Tensor]:
    """Attend separately for the first rows, which see the last segment only, and for the others."""
    k, v = segments[-1]
    others = q.shape[2] - rows_alone
    # Under a causal mask none of the first rows sees the keys of the rows behind them.
    end = max(0, k.shape[2] - others) if causal_last else k.shape[2]
    alone = q[:, :, :rows_alone]
    if end:
        parts = [attend_segments(alone, [(k[:, :, :end], v[:, :, :end])], scale, causal_last, attend)]
    else:
        parts = [result_without_keys(alone)]
    if others:
        parts.append(attend_segments(q[:, :, rows_alone:], segments, scale, causal_last, attend))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _coalesce(segments: list[Segment], q: Tensor) -> list[Segment]:
    """Join segments where copying their rows costs less than merging another partial result.

    APB-V's context blocks see an anchor and passing blocks that are short beside the block itself.
    """
    keys, values = ([pair[i] for pair in segments] for i in (0, 1))
    if len(segments) > 1 and sum(k.shape[2] for k in keys) * keys[0].shape[1] < q.shape[2] * q.shape[1]:
        return [(torch.cat(keys, dim=2), torch.cat(values, dim=2))]
    return segments


def _cut_triangle(segments: list[Segment], queries: int) -> tuple[list[Segment], Segment | None]:
    """Cut causal keys into those that all queries see, and the last ones, at most as many as the queries.

    Fused kernels disagree on where the diagonal of a non-square causal mask lies; a square one has only one.
    """
    *visible, (k, v) = segments
    past = k.shape[2] - queries
    if past > 0:
        visible.append((k[:, :, :past], v[:, :, :past]))
        k, v = k[:, :, past:], v[:, :, past:]
    return visible, (k, v) if k.shape[2] else None


def _attend_triangle(q: Tensor, k: Tensor, v: Tensor, scale: float, attend: Attend) -> tuple[Tensor, Tensor]:
    """Attend causally to no more keys than there are queries, the first of which may see nothing."""
    blind = q.shape[2] - k.shape[2]
    out, lse = attend(q[:, :, blind:], k, v, scale, k.shape[2] > 1)
    if not blind:
        return out, lse
    blind_out, blind_lse = result_without_keys(q[:, :, :blind])
    return torch.cat([blind_out, out], dim=2), torch.cat([blind_lse, lse], dim=2)


def result_without_keys(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return what attention to no keys gives: an output of zeros and an lse of -inf."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)
