"""Segmented attention in Triton, for prefill and decoding.

Its kernels, in :mod:`apbv.kernels.triton_attention_kernels`, are FlashAttention (Dao, 2023) with
three changes. The keys come in *key segments* of equally long pieces at equal distances in memory,
which is how an exchange leaves passing blocks, so that nothing is concatenated. The query heads of
a group are rows of one tile, so that K and V are read once for all of them. Where there are few
rows, the keys are split over programs whose partial results are merged (Flash-Decoding).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .backends import num_processors
from .segments import KeySegment, Segment, SegmentLayout, find_key_segments
from .strides import (
    cdiv,
    common_alignment,
    in_units,
    magic_divisor,
    strides_of,
    with_contiguous_rows,
)
from .tiles import Tile, tile_of
from .torch_attention import empty_output
from .triton_attention_kernels import CAUSAL, GIVEN_MASK, NO_MASK, segments_kernel, verify_kernel
from .triton_merging import merge_states
from .triton_specialization import hide

# Empty segments pad the key segments to a multiple of this, so that many prompts share a kernel.
SEGMENTS_BUCKET = 4
_FEWEST_KEYS = 512  # fewer keys are not worth a program of their own
# A program whose tile has this many rows leaves no registers of its SM to another.
_ROWS_THAT_FILL = 128
_EMPTY_LAYOUT = SegmentLayout(0, 0, (0, 0, 0, 0), (0, 0, 0, 0))

Strides = tuple[int, ...]


def _split_keys(
    num_programs: int,
    num_keys: int,
    tile: Tile,
    device: torch.device,
) -> tuple[int, int]:
    """Choose the number of key ranges, so that every SM has work at once, and their length."""
    programs_per_processor = 1 if tile.rows >= _ROWS_THAT_FILL else 2
    programs_at_once = num_processors(device) * programs_per_processor
    splits = min(programs_at_once // num_programs, cdiv(num_keys, _FEWEST_KEYS))
    keys_per_split = cdiv(num_keys, max(1, splits))
    # Whole tiles: the rounding may leave fewer ranges than wanted.
    keys_per_split = max(1, cdiv(keys_per_split, tile.keys)) * tile.keys
    return max(1, cdiv(num_keys, keys_per_split)), keys_per_split


def segmented_attention(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    causal_last: bool,
    *,
    num_anchor_queries: int = 0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.segmented_attention` does.

    This takes one launch, or two where keys were split.
    """
    q = with_contiguous_rows(q)
    segments = [(with_contiguous_rows(k), with_contiguous_rows(v)) for k, v in segments]
    kv_heads = segments[0][0].shape[1]
    if out is None:
        out = empty_output(q)

    # The last segment is apart where not all queries see it as they see the others.
    last = None
    if causal_last or num_anchor_queries > 0:
        *segments, last_segment = segments
        last = KeySegment.of_pieces(*last_segment)
    past = find_key_segments(segments)
    plan = plan_segments(
        q.shape,
        kv_heads,
        q.stride(),
        out.stride(),
        tuple([segment.layout for segment in past]),
        None if last is None else last.layout,
        q.dtype,
        q.device,
        causal_last,
        num_anchor_queries,
    )

    # Where keys are split, partial results are merged into out.
    *_, splits = plan.grid
    parts = out
    if splits > 1:
        parts = q.new_empty(splits, *q.shape, dtype=torch.float32)
    lse = q.new_empty(splits, *q.shape[:3], dtype=torch.float32)
    # The keys and values of empty segments are never read: q stands for them.
    unread = [q] * plan.num_empty_segments
    segments_kernel[plan.grid](
        p_q=q,
        p_out=parts,
        p_lse=lse,
        p_ks=tuple([segment.k for segment in past] + unread),
        p_vs=tuple([segment.v for segment in past] + unread),
        p_last_k=q if last is None else last.k,
        p_last_v=q if last is None else last.v,
        segment_lens=plan.segment_lens,
        magics=plan.magics,
        shifts=plan.shifts,
        k_strides=plan.k_strides,
        v_strides=plan.v_strides,
        q_strides=plan.q_strides,
        out_strides=plan.out_strides,
        part_stride=plan.part_stride,
        last_k_strides=plan.last_k_strides,
        last_v_strides=plan.last_v_strides,
        scale=scale,
        num_queries=plan.num_queries,
        num_past=plan.num_past,
        num_last=plan.num_last,
        num_anchor_queries=num_anchor_queries,
        keys_per_split=plan.keys_per_split,
        num_segments=len(past),
        KV_HEADS=kv_heads,
        GROUP=plan.group,
        D=q.shape[3],
        BR=plan.tile.rows,
        BT=plan.tile.keys,
        BD=plan.tile.dim,
        ALIGN=plan.align,
        HAS_LAST=last is not None,
        IS_CAUSAL=causal_last,
        num_warps=plan.tile.num_warps,
        num_stages=plan.tile.num_stages,
    )
    if splits == 1:
        return out, lse[0]
    return merge_states(parts, lse, out=out)


@dataclass(frozen=True)
class _SegmentsPlan:
    """Launch parameters of segments_kernel, by the kernel's names where it has them.

    Attributes:
        grid: tiles of rows, KV heads of all batches, and ranges of keys.
        tile: the rows and keys that a program computes at a time.
        group: query heads per KV head.
        align: the unit of all strides, in elements.
        num_empty_segments: how many empty segments pad the key segments.
    """

    grid: tuple[int, int, int]
    tile: Tile
    group: int
    align: int
    num_empty_segments: int
    segment_lens: tuple[int, ...]
    magics: tuple[int, ...]
    shifts: tuple[int, ...]
    k_strides: tuple[tuple[int, ...], ...]
    v_strides: tuple[tuple[int, ...], ...]
    q_strides: Strides
    out_strides: Strides
    part_stride: int
    last_k_strides: Strides
    last_v_strides: Strides
    num_queries: int
    num_past: int
    num_last: int
    keys_per_split: int


@lru_cache(maxsize=256)
def plan_segments(
    shape: torch.Size,
    kv_heads: int,
    q_strides: Strides,
    out_strides: Strides,
    past: tuple[SegmentLayout, ...],
    last: SegmentLayout | None,
    dtype: torch.dtype,
    device: torch.device,
    causal_last: bool,
    num_anchor_queries: int,
) -> _SegmentsPlan:
    """Compute once the launch parameters that all layers of a prefill share."""
    batch, heads, queries, dim = shape
    group = heads // kv_heads
    if last is None:
        last = _EMPTY_LAYOUT  # which is never read
    num_past = sum(layout.num_rows for layout in past)
    num_keys = num_past + last.num_rows

    # Tiles: anchor queries have tiles of their own, since they see fewer keys.
    tile = tile_of("many", queries * group, dim, dtype.itemsize, device)
    anchor_tiles = cdiv(num_anchor_queries * group, tile.rows)
    other_tiles = cdiv((queries - num_anchor_queries) * group, tile.rows)
    num_tiles = anchor_tiles + other_tiles
    num_programs = num_tiles * batch * kv_heads
    splits, keys_per_split = _split_keys(num_programs, num_keys, tile, device)

    # Segments, padded to whole buckets, of which there is at least one.
    num_buckets = max(1, cdiv(len(past), SEGMENTS_BUCKET))
    num_empty = num_buckets * SEGMENTS_BUCKET - len(past)
    padded = [*past, *[_EMPTY_LAYOUT] * num_empty]

    # Strides.
    part_stride = 0
    if splits > 1:  # partial results lie one after the other
        part_stride = batch * heads * queries * dim
        out_strides = (heads * queries * dim, queries * dim, dim)
    q_strides = strides_of(shape[:3], q_strides[:3])
    out_strides = strides_of(shape[:3], out_strides[:3])
    all_strides = [part_stride, *q_strides, *out_strides]
    for layout in [*padded, last]:
        all_strides += [*layout.k_strides, *layout.v_strides]
    align = common_alignment(dtype.itemsize, all_strides)

    divisors = [magic_divisor(layout.piece_len) for layout in padded]
    return _SegmentsPlan(
        grid=(num_tiles, batch * kv_heads, splits),
        tile=tile,
        group=group,
        align=align,
        num_empty_segments=num_empty,
        segment_lens=hide(*[layout.num_rows for layout in padded]),
        magics=hide(*[magic for magic, _ in divisors]),
        shifts=hide(*[shift for _, shift in divisors]),
        k_strides=_by_dimension([layout.k_strides for layout in padded], align),
        v_strides=_by_dimension([layout.v_strides for layout in padded], align),
        q_strides=hide(*in_units(q_strides, align)),
        out_strides=hide(*in_units(out_strides, align)),
        part_stride=hide(part_stride // align)[0],
        last_k_strides=hide(*in_units(last.k_strides[:3], align)),
        last_v_strides=hide(*in_units(last.v_strides[:3], align)),
        num_queries=queries,
        num_past=num_past,
        num_last=last.num_rows,
        keys_per_split=keys_per_split,
    )


def _by_dimension(segment_strides: list[Strides], align: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each dimension, the hidden strides of all segments in units of ``align``."""
    dimensions = []
    for strides in zip(*segment_strides, strict=True):
        dimensions.append(hide(*in_units(strides, align)))
    return tuple(dimensions)


def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    visible: Tensor | None = None,
    num_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.verify_attention` does.

    This takes one launch, or two where keys were split.
    """
    q = with_contiguous_rows(q)
    k = with_contiguous_rows(k)
    v = with_contiguous_rows(v)
    queries = q.shape[2]
    keys = k.shape[2]

    # What masks the last keys.
    p_visible = q  # which is not read
    visible_stride = 0
    if visible is not None:
        mask = GIVEN_MASK
        num_masked = visible.shape[1]
        p_visible = with_contiguous_rows(visible).view(torch.uint8)
        visible_stride = p_visible.stride(0)
    elif queries == 1:  # a single token sees everything
        mask = NO_MASK
        num_masked = 0
    else:
        mask = CAUSAL
        num_masked = queries

    plan = plan_verification(
        q.shape,
        k.shape[1],
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        q.device,
        visible is not None,
    )
    splits, keys_per_split = _split_keys(plan.num_programs, keys, plan.tile, q.device)
    out = empty_output(q)
    if splits == 1:
        parts = out[None]
        part_stride = 0
        out_strides = plan.out_strides
    else:
        parts = q.new_empty(splits, *q.shape, dtype=torch.float32)
        part_stride = plan.part_stride
        out_strides = plan.split_out_strides
    lse = q.new_empty(splits, *q.shape[:3], dtype=torch.float32)
    q_b, q_h, q_s = plan.q_strides
    k_b, k_h, k_t = plan.k_strides
    v_b, v_h, v_t = plan.v_strides
    out_b, out_h, out_s = out_strides
    # Arguments in the order of the signature: by keyword, each launch takes microseconds longer.
    verify_kernel[(plan.num_tiles, plan.num_programs // plan.num_tiles, splits)](
        q,
        k,
        v,
        parts,
        lse,
        p_visible,
        q if num_keys is None else num_keys,
        scale,
        q_b,
        q_h,
        q_s,
        k_b,
        k_h,
        k_t,
        v_b,
        v_h,
        v_t,
        part_stride,
        out_b,
        out_h,
        out_s,
        visible_stride,
        queries,
        keys,
        num_masked,
        keys_per_split,
        KV_HEADS=k.shape[1],
        GROUP=q.shape[1] // k.shape[1],
        D=q.shape[3],
        BR=plan.tile.rows,
        BT=plan.tile.keys,
        BD=plan.tile.dim,
        ALIGN=plan.align,
        MASK=mask.value,
        HAS_NUM_KEYS=num_keys is not None,
        num_warps=plan.tile.num_warps,
        num_stages=plan.tile.num_stages,
    )
    if splits == 1:
        return out, lse[0]
    return merge_states(parts, lse, out=out)


@dataclass(frozen=True)
class _VerificationPlan:
    """Launch parameters of verify_kernel.

    Attributes:
        tile: the rows and keys that a program computes at a time.
        num_tiles: tiles of rows of one KV head.
        num_programs: tiles of rows of all KV heads and batches.
        align: the unit of all strides, in elements.
        q_strides, k_strides, v_strides: of (batch, head, row).
        out_strides: those of the result, of (batch, head, row).
        split_out_strides, part_stride: those of partial results, and from part to part.
    """

    tile: Tile
    num_tiles: int
    num_programs: int
    align: int
    q_strides: Strides
    k_strides: Strides
    v_strides: Strides
    out_strides: Strides
    split_out_strides: Strides
    part_stride: int


@lru_cache(maxsize=256)
def plan_verification(
    shape: torch.Size,
    kv_heads: int,
    q_strides: Strides,
    k_strides: Strides,
    v_strides: Strides,
    dtype: torch.dtype,
    device: torch.device,
    has_mask: bool,
) -> _VerificationPlan:
    """Compute once the launch parameters that all layers and many tokens share.

    Each Python call costs a tenth of a launch.
    """
    batch, heads, queries, dim = shape
    group = heads // kv_heads
    use = "masked" if has_mask else "few"
    tile = tile_of(use, queries * group, dim, dtype.itemsize, device)
    num_tiles = cdiv(queries * group, tile.rows)

    # The stride from key to key is kept even for one key: plans do not depend on their number.
    q_strides = strides_of(shape[:3], q_strides[:3])
    k_strides = (*strides_of((batch, kv_heads), k_strides[:2]), k_strides[2])
    v_strides = (*strides_of((batch, kv_heads), v_strides[:2]), v_strides[2])
    # All strides of results are multiples of dim.
    align = common_alignment(dtype.itemsize, [*q_strides, *k_strides, *v_strides, dim])
    out_strides = (queries * heads * dim, dim, heads * dim)
    split_out_strides = (heads * queries * dim, queries * dim, dim)
    return _VerificationPlan(
        tile=tile,
        num_tiles=num_tiles,
        num_programs=num_tiles * batch * kv_heads,
        align=align,
        q_strides=in_units(q_strides, align),
        k_strides=in_units(k_strides, align),
        v_strides=in_units(v_strides, align),
        out_strides=in_units(out_strides, align),
        split_out_strides=in_units(split_out_strides, align),
        part_stride=batch * heads * queries * dim // align,
    )
