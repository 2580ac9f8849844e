"""Segmented attention in Triton, for prefill and decoding.

Its kernels, in :mod:`apbv.kernels.triton_attention_kernels`, are FlashAttention (Dao, 2023) with
three changes. The keys come in *runs* of equally long pieces at equal distances in memory, which is
how an exchange leaves passing blocks, so that nothing is concatenated. The query heads of a group
are rows of one tile, so that K and V are read once for all of them. Where there are few rows, the
keys are split over programs whose partial results are merged (Flash-Decoding).
"""

from functools import lru_cache

import torch
from torch import Tensor

from .backends import num_processors
from .runs import Run, RunForm, Segment, alignment, cdiv, divisor, find_runs, in_rows, strides_of
from .tiles import Tile, tile_of
from .torch_attention import empty_output
from .triton_attention_kernels import CAUSAL, GIVEN_MASK, NO_MASK, segments_kernel, verify_kernel
from .triton_merging import merge_states, veiled

_RUNS_BUCKET = (
    4  # empty runs pad the runs to a multiple of this, so that many prompts share a compiled kernel
)
_FEWEST_KEYS = 512  # fewer keys are not worth a program of their own
_ROWS_THAT_FILL = (
    128  # a program with a tile of that height leaves no registers of its SM to another
)


def _splits(num_programs: int, num_keys: int, tile: Tile, device: torch.device) -> tuple[int, int]:
    """Choose the number of key ranges, so that every SM has work at once, and the length of
    each."""
    at_once = 1 if tile.rows >= _ROWS_THAT_FILL else 2
    wanted = min(num_processors(device) * at_once // num_programs, cdiv(num_keys, _FEWEST_KEYS))
    per_split = max(1, cdiv(cdiv(num_keys, max(1, wanted)), tile.keys)) * tile.keys
    return max(1, cdiv(num_keys, per_split)), per_split


def segmented_attention(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    causal_last: bool,
    *,
    rows_alone: int = 0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.segmented_attention` does, in one launch, or two where keys
    were split."""
    q = in_rows(q)
    segments = [(in_rows(k), in_rows(v)) for k, v in segments]
    has_last = causal_last or rows_alone > 0
    runs = find_runs(segments[:-1] if has_last else segments)
    last = Run.of(*segments[-1]) if has_last else None
    out = empty_output(q) if out is None else out
    forms = tuple([run.form for run in runs])
    grid, num_empty, before_scale, after_scale, constants = _plan_segments(
        q.shape,
        segments[0][0].shape[1],
        q.stride(),
        out.stride(),
        forms,
        last and last.form,
        q.dtype,
        q.device,
        causal_last,
        rows_alone,
    )
    *_, splits = grid
    parts = out if splits == 1 else q.new_empty(splits, *q.shape, dtype=torch.float32)
    lse = q.new_empty(splits, *q.shape[:3], dtype=torch.float32)
    keys, values = (
        [*states, *[q] * num_empty] for states in ([x.k for x in runs], [x.v for x in runs])
    )
    segments_kernel[grid](
        q,
        parts,
        lse,
        tuple(keys),
        tuple(values),
        *((last.k, last.v) if last else (q, q)),
        *before_scale,
        scale,
        *after_scale,
        **constants,
    )
    return (out, lse[0]) if splits == 1 else merge_states(parts, lse, out=out)


@lru_cache(maxsize=256)
def _plan_segments(
    shape: torch.Size,
    kv_heads: int,
    q_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    runs: tuple[RunForm, ...],
    last: RunForm | None,
    dtype: torch.dtype,
    device: torch.device,
    causal_last: bool,
    rows_alone: int,
) -> tuple[tuple[int, int, int], int, tuple, tuple, dict[str, int]]:
    """Compute once the launch parameters of segments_kernel that all layers of a prefill share.

    Returns:
        The grid; how many empty runs pad the runs; what comes before and after the scale; what is
        compiled into the kernel.
    """
    batch, heads, queries, dim = shape
    group = heads // kv_heads
    num_past = sum(num_rows for num_rows, *_ in runs)
    nothing = 0, 0, (0,) * 4, (0,) * 4
    # Without a last segment its arguments are never read.
    num_last, _, last_k, last_v = last or nothing

    block = tile_of("many", queries * group, dim, dtype.itemsize, device)
    tiles = sum(cdiv(rows * group, block.rows) for rows in (rows_alone, queries - rows_alone))
    splits, keys_per_split = _splits(tiles * batch * kv_heads, num_past + num_last, block, device)
    if splits > 1:  # partial results, one after the other
        out_strides = heads * queries * dim, queries * dim, dim
    q_strides, out_strides = (strides_of(shape[:3], own[:3]) for own in (q_strides, out_strides))
    part_stride = batch * heads * queries * dim if splits > 1 else 0

    num_empty = -max(1, len(runs)) % _RUNS_BUCKET + (not runs)
    num_rows, lengths, run_k, run_v = zip(*runs, *[nothing] * num_empty, strict=True)
    strides = [*run_k, *run_v, last_k, last_v, q_strides, (part_stride, *out_strides)]
    align = alignment(dtype.itemsize, [stride for own in strides for stride in own])
    run_k, run_v = (
        tuple(veiled(*(stride // align for stride in own)) for own in zip(*strides, strict=True))
        for strides in (run_k, run_v)
    )
    last_k, last_v, q_strides, out_strides = (
        veiled(*(stride // align for stride in own[:3]))
        for own in (last_k, last_v, q_strides, out_strides)
    )
    magics, shifts = zip(*map(divisor, lengths), strict=True)
    before_scale = (
        veiled(*num_rows),
        veiled(*magics),
        veiled(*shifts),
        run_k,
        run_v,
        q_strides,
        out_strides,
        *veiled(part_stride // align),
        last_k,
        last_v,
    )
    after_scale = queries, num_past, num_last, rows_alone, keys_per_split, len(runs)
    constants = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "D": dim,
        "BR": block.rows,
        "BT": block.keys,
        "BD": block.dim,
        "ALIGN": align,
        "HAS_LAST": last is not None,
        "IS_CAUSAL": causal_last,
        "num_warps": block.num_warps,
        "num_stages": block.num_stages,
    }
    return (tiles, batch * kv_heads, splits), num_empty, before_scale, after_scale, constants


def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    visible: Tensor | None = None,
    num_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.verify_attention` does, in one launch, or two where keys were
    split."""
    q = in_rows(q)
    k = in_rows(k)
    v = in_rows(v)
    queries = q.shape[2]
    keys = k.shape[2]
    seen = q
    mask = CAUSAL
    masked = queries
    if visible is not None:
        mask = GIVEN_MASK
        masked = visible.shape[1]
        seen = in_rows(visible).view(torch.uint8)
    elif queries == 1:
        mask, masked = NO_MASK, 0  # a single token sees everything
    block, tiles, programs, strides, out_strides, part_strides, constants = _plan_verification(
        q.shape,
        k.shape[1],
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        q.device,
        mask == GIVEN_MASK,
    )
    splits, keys_per_split = _splits(programs, keys, block, q.device)
    out = empty_output(q)
    parts = out[None] if splits == 1 else q.new_empty(splits, *q.shape, dtype=torch.float32)
    lse = q.new_empty(splits, *q.shape[:3], dtype=torch.float32)
    verify_kernel[(tiles, programs // tiles, splits)](
        q,
        k,
        v,
        parts,
        lse,
        seen,
        q if num_keys is None else num_keys,
        scale,
        *strides,
        *(out_strides if splits == 1 else part_strides),
        0 if visible is None else seen.stride(0),
        queries,
        keys,
        masked,
        keys_per_split,
        **constants,
        MASK=mask,
        HAS_NUM_KEYS=num_keys is not None,
    )
    return (out, lse[0]) if splits == 1 else merge_states(parts, lse, out=out)


@lru_cache(maxsize=256)
def _plan_verification(
    shape: torch.Size,
    kv_heads: int,
    q_strides: tuple[int, ...],
    k_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    has_mask: bool,
) -> tuple[Tile, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, int]]:
    """Compute once the launch parameters of verify_kernel that all layers and many tokens share.

    Each Python call costs a tenth of a launch.

    Returns:
        The block; the tiles of rows of one KV head, and of all; the strides of q, k and v, in units
        of ALIGN elements; those of the result, and of partial results, with that from part to part;
        and what is compiled into the kernel.
    """
    batch, heads, queries, dim = shape
    group = heads // kv_heads
    block = tile_of("masked" if has_mask else "few", queries * group, dim, dtype.itemsize, device)
    tiles = cdiv(queries * group, block.rows)
    out_strides = (0, queries * heads * dim, dim, heads * dim)
    part_strides = (batch * heads * queries * dim, heads * queries * dim, queries * dim, dim)
    # A length of 1 may have any stride.
    strides = [*strides_of(shape[:3], q_strides[:3])]
    for own in (k_strides, v_strides):
        strides += [*strides_of((batch, kv_heads), own[:2]), own[2]]
    align = alignment(dtype.itemsize, [*strides, dim])
    constants = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "D": dim,
        "BR": block.rows,
        "BT": block.keys,
        "BD": block.dim,
        "ALIGN": align,
        "num_warps": block.num_warps,
        "num_stages": block.num_stages,
    }
    in_units = (
        tuple(stride // align for stride in own) for own in (strides, out_strides, part_strides)
    )
    return block, tiles, tiles * batch * kv_heads, *in_units, constants
