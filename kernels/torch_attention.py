"""Implements attention over segments by attending over one segment at a time and merging."""

from collections.abc import Callable

import torch
from torch import Tensor

from .backends import implementation
from .library_attention import Attend, attend_masked, attend_with, is_bottom_right
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
    out: Tensor | None = None,
    library: str = "torch",
    merging: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.segmented_attention` does, by the kernels of torch or of another library.

    Args:
        library: what attends to one segment.
        merging: what merges the results of several; see :func:`apbv.kernels.backends.choose`.
    """
    attend = attend_with(library, q, segments[0][0])
    # No part is of queries that see none of its keys: torch need not look for results that hold anything.
    merge = merge_finite if merging == "torch" else implementation("merging.merge_states", merging)
    is_block = causal_last and not rows_alone and q.shape[2] > _FEW_QUERIES
    if is_block and is_bottom_right(library, q, segments[0][0]):
        segments = join_for_one_call(q, segments)
        if len(segments) == 1 and segments[0][0].shape[2] > q.shape[2]:
            return _merged(q, [attend(in_rows(q), *map(in_rows, segments[0]), scale, True)], merge, out)
    return attend_segments(q, segments, scale, causal_last, attend, merge, rows_alone=rows_alone, out=out)


def join_for_one_call(q: Tensor, segments: list[Segment]) -> list[Segment]:
    """Join segments where one call under a causal mask costs less than a call for each part, and their merge.

    The mask's diagonal ends at the bottom right. One call saves writing a second partial result and reading both
    back; for it, those keys and values are copied that would not be in any case.
    """
    *earlier, (k, v) = segments
    # An empty last segment stays: without it the mask would be of the one before, which all queries see.
    segments = [*(segment for segment in earlier if segment[0].shape[2]), (k, v)]
    *earlier, _ = segments
    queries, past = q.shape[2], k.shape[2] - q.shape[2]
    if past < 0 or not earlier:
        return segments
    visible = [*earlier, (k[:, :, :past], v[:, :, :past])] if past else earlier
    num_seen = sum(keys.shape[2] for keys, _ in visible)
    num_copied = queries + (0 if _is_worth_joining(visible, q) else num_seen)
    # In rows of D numbers: K and V are read and written; a partial result is written, and one more of two read.
    return [_joined(segments)] if 4 * num_copied * k.shape[1] < 2 * queries * q.shape[1] else segments


def attend_segments(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    causal_last: bool,
    attend: Attend,
    merge: Callable = merge_finite,
    *,
    rows_alone: int = 0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend over several segments with one call of ``attend`` for each, or for several joined ones.

    A partial result of fewer queries than there are is of the last ones: those behind ``rows_alone``, or those of
    a triangle of fewer keys than queries.
    """
    q, segments = in_rows(q), [(in_rows(k), in_rows(v)) for k, v in segments]
    *earlier, (k, v) = segments
    queries, keys = q.shape[2], k.shape[2]
    # Fused kernels disagree on where the diagonal of a non-square causal mask lies; a square one has only one. So
    # causal keys are cut into those that all queries see, and the last ones, at most as many as the queries.
    past = max(0, keys - queries) if causal_last and queries > 1 else keys
    last = [(k[:, :, :past], v[:, :, :past])]
    partials = []
    for first, group in [(rows_alone, earlier), (0, last)] if rows_alone else [(0, earlier + last)]:
        rows = q[:, :, first:]
        seen = [segment for segment in group if segment[0].shape[2] and rows.shape[2]]
        if _is_worth_joining(seen, rows):
            seen = [_joined(seen)]
        partials += [_attend_all(rows, *segment, scale, attend) for segment in seen]
    if past < keys:
        square = keys - past
        triangle = q[:, :, queries - square :], k[:, :, past:], v[:, :, past:]
        partials.append(attend(*triangle, scale, square > 1))
    return _merged(q, partials, merge, out)


def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    visible: Tensor | None = None,
    kept: Tensor | None = None,
    num_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.verify_attention` does; kept rows are copied, and a length is waited for."""
    attend = attend_with("torch", q, k)
    if num_keys is not None:
        k, v = (states[:, :, : int(num_keys)] for states in (k, v))
    q, k, v = (in_rows(x) for x in (q, k, v))
    if visible is None and kept is None:
        if q.shape[2] == 1:  # it sees everything
            return _attend_all(q, k, v, scale, attend)
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
    return merge_finite(*zip(*partials, strict=True), out=torch.empty_like(q))


def _merged(
    q: Tensor, partials: list[tuple[Tensor, Tensor]], merge: Callable, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the result for all queries, in ``out`` where it is given."""
    if len(partials) == 1 and partials[0][0].shape == q.shape:
        whole, lse = partials[0]
        return (whole, lse) if out is None else (out.copy_(whole), lse)
    if not partials:
        return result_without_keys(q, out)
    outs, lses = zip(*partials, strict=True)
    return merge(outs, lses, out=empty_output(q) if out is None else out)


def empty_output(q: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Make room for an output like q, ``[B, Hq, S, D]``, with the heads of a query side by side in memory."""
    return q.new_empty(q.transpose(1, 2).shape, dtype=dtype).transpose(1, 2)


def _attend_all(q: Tensor, k: Tensor, v: Tensor, scale: float, attend: Attend) -> tuple[Tensor, Tensor]:
    """Attend where every query sees every key, so that a group's heads can be more queries of one head."""
    if q.shape[2] > _FEW_QUERIES:
        return attend(q, k, v, scale, False)
    out, lse = attend(q.reshape(q.shape[0], k.shape[1], -1, q.shape[3]), k, v, scale, False)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _is_worth_joining(segments: list[Segment], q: Tensor) -> bool:
    """Tell whether copying segments' rows to join them costs less than merging another partial result.

    APB-V's context blocks see an anchor and passing blocks that are short beside the block itself.
    """
    num_rows = sum(k.shape[1] * k.shape[2] for k, _ in segments)
    return len(segments) > 1 and num_rows < q.shape[1] * q.shape[2]


def _joined(segments: list[Segment]) -> Segment:
    k, v = (torch.cat(states, dim=2) for states in zip(*segments, strict=True))
    return k, v


def result_without_keys(q: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what attention to no keys gives: an output of zeros and an lse of -inf."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)
    return torch.zeros_like(q) if out is None else out.zero_(), lse
