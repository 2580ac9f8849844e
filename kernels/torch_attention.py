"""Segmented attention by attending over one segment at a time and merging.

Within packed sequences torch's FlashAttention attends in one call where it works, else torch length
by length.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from . import reference
from .backends import capability, drawn_numbers, implementation, mistake_of
from .library_attention import (
    Attend,
    attend_masked,
    attend_with,
    is_bottom_right,
    why_not_library,
    with_positive_scale,
)
from .segments import Segment
from .sequences import PackedSequences
from .strides import with_contiguous_rows
from .torch_merging import merge_finite

# With so few queries, reading K and V once for all heads of a group is worth rearranging the
# queries.
FEW_QUERIES = 64


def segmented_attention(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    causal_last: bool,
    *,
    num_anchor_queries: int = 0,
    out: Tensor | None = None,
    library: str = "torch",
    merging: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.segmented_attention` does, by torch or another library.

    Args:
        library: what attends to one segment.
        merging: ``"torch"`` or ``"triton"``, which merges the results of several.
    """
    attend = attend_with(library, q, segments[0][0])
    # Every part's queries see some of its keys: torch need not check for undefined results.
    merge = merge_finite if merging == "torch" else implementation("merging.merge_states", merging)
    is_block = causal_last and not num_anchor_queries and q.shape[2] > FEW_QUERIES
    groups = q.shape[1] // segments[0][0].shape[1]
    if is_block and is_bottom_right(library, q.device, q.dtype, q.shape[3], groups):
        segments = join_for_one_call(q, segments)
        k, v = segments[0]
        if len(segments) == 1 and k.shape[2] > q.shape[2]:
            result = attend(
                with_contiguous_rows(q),
                with_contiguous_rows(k),
                with_contiguous_rows(v),
                scale,
                True,
            )
            return _merged(q, [result], merge, out)
    return attend_segments(
        q,
        segments,
        scale,
        causal_last,
        attend,
        merge,
        num_anchor_queries=num_anchor_queries,
        out=out,
    )


def join_for_one_call(q: Tensor, segments: list[Segment]) -> list[Segment]:
    """Join segments where one call under a causal mask costs less than several and their merge.

    The mask's diagonal ends at the bottom right. One call saves writing a second partial result and
    reading both back; for it, those keys and values are copied that would not be in any case.
    """
    *earlier, (k, v) = segments
    # An empty last segment stays: without it the mask would be of the one before, which all queries
    # see.
    earlier = [segment for segment in earlier if segment[0].shape[2] > 0]
    segments = [*earlier, (k, v)]
    queries = q.shape[2]
    num_past = k.shape[2] - queries
    if num_past < 0 or not earlier:
        return segments

    # What all queries see, which one call would have to copy if several calls would not anyway.
    fully_visible = list(earlier)
    if num_past > 0:
        fully_visible.append((k[:, :, :num_past], v[:, :, :num_past]))
    num_copied = queries
    if not _is_worth_joining(fully_visible, q):
        num_copied += sum(keys.shape[2] for keys, _ in fully_visible)
    # In rows of D numbers: K and V are read and written; a partial result is written, and one more
    # of two read.
    cost_of_copies = 4 * num_copied * k.shape[1]
    cost_of_merge = 2 * queries * q.shape[1]
    if cost_of_copies < cost_of_merge:
        return [joined(segments)]
    return segments


def attend_segments(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    causal_last: bool,
    attend: Attend,
    merge: Callable = merge_finite,
    *,
    num_anchor_queries: int = 0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend over several segments with one call of ``attend`` for each, or for some joined.

    A partial result of fewer queries than there are is of the last queries: those after the anchor,
    or, where there are fewer keys than queries, those that see a key.
    """
    q = with_contiguous_rows(q)
    segments = [(with_contiguous_rows(k), with_contiguous_rows(v)) for k, v in segments]
    *earlier, (k, v) = segments
    queries = q.shape[2]
    keys = k.shape[2]
    # Fused kernels disagree on where the diagonal of a non-square causal mask lies; a square one
    # has only one. So causal keys are cut into those that all queries see, and the last ones, at
    # most as many as the queries.
    num_past = keys
    if causal_last and queries > 1:
        num_past = max(0, keys - queries)
    last = (k[:, :, :num_past], v[:, :, :num_past])

    # Keys that queries see fully, with the first of these queries.
    if num_anchor_queries > 0:
        calls = [(num_anchor_queries, earlier), (0, [last])]
    else:
        calls = [(0, [*earlier, last])]
    partials = []
    for first, group in calls:
        rows = q[:, :, first:]
        if rows.shape[2] == 0:
            continue
        seen = [segment for segment in group if segment[0].shape[2] > 0]
        if _is_worth_joining(seen, rows):
            seen = [joined(seen)]
        for seen_k, seen_v in seen:
            partials.append(_attend_all(rows, seen_k, seen_v, scale, attend))

    # The triangle of the last keys, of which the last queries see more and more.
    if num_past < keys:
        square = keys - num_past
        partials.append(
            attend(
                q[:, :, queries - square :],
                k[:, :, num_past:],
                v[:, :, num_past:],
                scale,
                square > 1,
            )
        )
    return _merged(q, partials, merge, out)


def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    visible: Tensor | None = None,
    num_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.verify_attention` does; a length is waited for."""
    attend = attend_with("torch", q, k)
    if num_keys is not None:
        k = k[:, :, : int(num_keys)]
        v = v[:, :, : int(num_keys)]
    q = with_contiguous_rows(q)
    k = with_contiguous_rows(k)
    v = with_contiguous_rows(v)
    if visible is None:
        if q.shape[2] == 1:  # it sees everything
            return _attend_all(q, k, v, scale, attend)
        return attend_segments(q, [(k, v)], scale, True, attend)
    num_past = k.shape[2] - visible.shape[1]
    partials = []
    if num_past:
        partials.append(_attend_all(q, k[:, :, :num_past], v[:, :, :num_past], scale, attend))
    if visible.shape[1]:
        partials.append(attend_masked(q, k[:, :, num_past:], v[:, :, num_past:], visible, scale))
    return _merged(q, partials, merge_finite, None)


def _merged(
    q: Tensor, partials: list[tuple[Tensor, Tensor]], merge: Callable, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the result for all queries, in ``out`` where it is given."""
    if len(partials) == 1 and partials[0][0].shape == q.shape:
        whole, lse = partials[0]
        if out is None:
            return whole.to(q.dtype), lse
        return out.copy_(whole), lse
    if not partials:
        return result_without_keys(q, out)
    if out is None:
        out = empty_output(q)
    outs = [partial for partial, _ in partials]
    lses = [lse for _, lse in partials]
    return merge(outs, lses, out=out)


def empty_output(q: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Make room for an output like q, ``[B, Hq, S, D]``, with a query's heads side by side.

    A layer hands its output on in this memory layout: no copy is needed then.
    """
    batch, heads, queries, dim = q.shape
    return q.new_empty((batch, queries, heads, dim), dtype=dtype).transpose(1, 2)


def _attend_all(
    q: Tensor, k: Tensor, v: Tensor, scale: float, attend: Attend
) -> tuple[Tensor, Tensor]:
    """Attend where every query sees every key: a group's heads can be more queries of one head."""
    if q.shape[2] > FEW_QUERIES:
        return attend(q, k, v, scale, False)
    # [B, Hkv, G * S, D]
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    out, lse = attend(grouped, k, v, scale, False)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _is_worth_joining(segments: list[Segment], q: Tensor) -> bool:
    """Return whether joining segments costs less than merging as many further partial results.

    APB-V's context blocks see an anchor and passing blocks that are short compared with the block
    itself. On many hosts they see many of these, together longer than the block; but each is one
    more result of all queries to be merged.
    """
    num_further = len(segments) - 1
    num_key_rows = sum(k.shape[1] * k.shape[2] for k, _ in segments)
    num_query_rows = q.shape[1] * q.shape[2]
    return num_key_rows < num_further * num_query_rows


def joined(segments: list[Segment]) -> Segment:
    """Copy segments to one."""
    k = torch.cat([k for k, _ in segments], dim=2)
    v = torch.cat([v for _, v in segments], dim=2)
    return k, v


def result_without_keys(q: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the result of attention to no keys: an output of zeros and an lse of -inf."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)
    if out is None:
        return torch.zeros_like(q), lse
    return out.zero_(), lse


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float
) -> Tensor:
    """Attend within each sequence, in one call by FlashAttention or in one call per length."""
    q, scale = with_positive_scale(q, scale)
    if not varlen_obstacle(q.device, q.dtype, q.shape[2]):
        return varlen_flash(q, k, v, sequences, scale)
    result = None
    for length, rows in sequences.by_length:
        # [N, H, length, D]
        out = functional.scaled_dot_product_attention(
            _sequences_of(q, rows, length),
            _sequences_of(k, rows, length),
            _sequences_of(v, rows, length),
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        # [N * length, H, D]
        out = out.transpose(1, 2).flatten(0, 1)
        if rows is None:
            return out.contiguous()
        if result is None:
            result = q.new_empty(q.shape)
        result.index_copy_(0, rows, out)
    assert result is not None, "there are rows"
    return result


def _sequences_of(states: Tensor, rows: Tensor | None, length: int) -> Tensor:
    """Return sequences of one length in a tensor ``[T, H, D]`` as ``[N, H, length, D]``."""
    if rows is not None:
        states = states.index_select(0, rows)
    return states.unflatten(0, (-1, length)).transpose(1, 2)


@cache
def varlen_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why :func:`varlen_flash` cannot attend like this, or None if it can.

    Args:
        device, dtype: of q, k and v.
        head_dim: D.
    """
    if device.type != "cuda":
        return f"it runs on CUDA devices, and the tensors are on {device.type}"
    obstacle = why_not_library("torch", capability(device), dtype, head_dim)
    return obstacle or probe_varlen(device, dtype, head_dim)


@torch.no_grad()
def probe_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Run :func:`varlen_flash` on a small problem; return its error, or None if there is none."""
    lengths = [129, 5, 64, 1, 63]  # none fills a whole number of tiles
    boundaries = torch.tensor([0, *lengths], device="cpu").cumsum(0, dtype=torch.int32).to(device)
    sequences = PackedSequences(boundaries, max(lengths))
    scale = head_dim**-0.5
    q, k, v = drawn_numbers(device, dtype)(3, sum(lengths), 2, head_dim)
    exact = reference.varlen_attention(q.double(), k.double(), v.double(), sequences, scale)
    # Out averages numbers of about 1, so that rounding to `dtype` costs about its epsilon.
    return mistake_of(
        lambda: [varlen_flash(q, k, v, sequences, scale)], [exact], [8 * torch.finfo(dtype).eps]
    )


def varlen_flash(
    q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float
) -> Tensor:
    """Attend within each sequence by torch's own FlashAttention, on a GPU in half precision."""
    out, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        sequences.boundaries,  # of queries
        sequences.boundaries,  # of keys
        sequences.longest,
        sequences.longest,
        0.0,  # dropout
        False,  # not causal
        False,  # no mask for debugging
        scale=scale,
    )
    return out
