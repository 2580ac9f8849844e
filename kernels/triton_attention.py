"""Segmented attention in Triton, for prefill and decoding.

Its kernels, in :mod:`apbv.kernels.triton_attention_kernels`, are FlashAttention (Dao, 2023) with three changes.
The keys come in *runs* of equally long pieces at equal distances in memory, which is how an exchange leaves
passing blocks, so that nothing is concatenated. The query heads of a group are rows of one tile, so that K and V
are read once for all of them. Where there are few rows, the keys are split over programs whose partial results are
merged (Flash-Decoding).
"""

from functools import lru_cache

import torch
import triton
from torch import Tensor

from .backends import num_processors
from .runs import Run, Segment, alignment, find_runs, in_rows, row_strides
from .tiles import Tile, tile_of
from .torch_attention import empty_output
from .triton_attention_kernels import CAUSAL, GIVEN_MASK, NO_MASK, segments_kernel, verify_kernel
from .triton_merging import merge_states, veiled

_RUNS_BUCKET = 4  # empty runs pad the runs to a multiple of this, so that many prompts share a compiled kernel
_FEWEST_KEYS = 512  # fewer keys are not worth a program of their own


def _splits(num_programs: int, num_keys: int, block: int, device: torch.device) -> tuple[int, int]:
    """Choose the number of key ranges, so that every SM has work, and the length of each."""
    wanted = min(num_processors(device) * 2 // num_programs, triton.cdiv(num_keys, _FEWEST_KEYS))
    per_split = max(1, triton.cdiv(triton.cdiv(num_keys, max(1, wanted)), block)) * block
    return max(1, triton.cdiv(num_keys, per_split)), per_split


def segmented_attention(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    causal_last: bool,
    *,
    rows_alone: int = 0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.segmented_attention` does, in one launch, or two where keys were split."""
    batch, heads, queries, dim = q.shape
    kv_heads = segments[0][0].shape[1]
    group = heads // kv_heads
    q = in_rows(q)
    segments = [(in_rows(k), in_rows(v)) for k, v in segments]
    has_last = causal_last or rows_alone > 0
    runs = find_runs(segments[:-1] if has_last else segments)
    # Without a last segment its arguments are never read; an empty one is passed.
    last = Run.of(*segments[-1]) if has_last else Run.of(q[:, :, :0], q[:, :, :0])
    num_past = sum(run.num_rows for run in runs)

    block = tile_of(queries * group, dim, q.element_size(), q.device, is_long=True)
    tiles = sum(triton.cdiv(rows * group, block.rows) for rows in (rows_alone, queries - rows_alone))
    splits, keys_per_split = _splits(tiles * batch * kv_heads, num_past + last.num_rows, block.keys, q.device)
    out = empty_output(q) if out is None else out
    parts = out[None] if splits == 1 else q.new_empty(splits, *q.shape, dtype=torch.float32)
    lse = q.new_empty(splits, batch, heads, queries, dtype=torch.float32)

    runs += [Run.of(q[:, :, :0], q[:, :, :0])] * (-max(1, len(runs)) % _RUNS_BUCKET + (not runs))
    strides = [*(run.k_strides for run in runs), *(run.v_strides for run in runs)]
    strides += [last.k_strides, last.v_strides, row_strides(q), (parts.stride(0), *row_strides(parts[0]))]
    align = alignment(q.element_size(), [stride for own in strides for stride in own])
    strides = [tuple(stride // align for stride in own) for own in strides]
    *run_strides, last_k_strides, last_v_strides, q_strides, out_strides = strides
    magics, shifts = zip(*(run.divisor for run in runs), strict=True)
    segments_kernel[(tiles, batch * kv_heads, splits)](
        q, parts, lse, tuple(run.k for run in runs), tuple(run.v for run in runs), last.k, last.v,
        veiled(*(run.num_rows for run in runs)), veiled(*magics), veiled(*shifts),
        tuple(veiled(*own) for own in zip(*run_strides[: len(runs)], strict=True)),
        tuple(veiled(*own) for own in zip(*run_strides[len(runs) :], strict=True)), veiled(*q_strides),
        veiled(*out_strides[1:]), *veiled(out_strides[0]), veiled(*last_k_strides[:3]),
        veiled(*last_v_strides[:3]), scale, queries, num_past, last.num_rows, rows_alone, keys_per_split,
        sum(run.num_rows > 0 for run in runs),
        KV_HEADS=kv_heads, GROUP=group, D=dim, BR=block.rows, BT=block.keys, BD=block.dim, ALIGN=align,
        HAS_LAST=has_last, IS_CAUSAL=causal_last, num_warps=block.num_warps, num_stages=block.num_stages,
    )  # fmt: skip
    return (out, lse[0]) if splits == 1 else merge_states(parts, lse, out=out)


def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    visible: Tensor | None = None,
    num_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.verify_attention` does, in one launch, or two where keys were split."""
    q, k, v = in_rows(q), in_rows(k), in_rows(v)
    queries, keys = q.shape[2], k.shape[2]
    seen, mask, masked = q, CAUSAL, queries
    if visible is not None:
        mask, masked = GIVEN_MASK, visible.shape[1]
        seen = in_rows(visible).view(torch.uint8)
    elif queries == 1:
        mask, masked = NO_MASK, 0  # a single token sees everything
    block, tiles, programs, strides, out_strides, part_strides, constants = _plan_verification(
        q.shape, k.shape[1], q.stride(), k.stride(), v.stride(), q.dtype, q.device, mask == GIVEN_MASK
    )
    splits, keys_per_split = _splits(programs, keys, block.keys, q.device)
    out = empty_output(q)
    parts = out[None] if splits == 1 else q.new_empty(splits, *q.shape, dtype=torch.float32)
    lse = q.new_empty(splits, *q.shape[:3], dtype=torch.float32)
    verify_kernel[(tiles, programs // tiles, splits)](
        q, k, v, parts, lse, seen, q if num_keys is None else num_keys, scale, *strides,
        *(out_strides if splits == 1 else part_strides), 0 if visible is None else seen.stride(0),
        queries, keys, masked, keys_per_split, **constants, MASK=mask, HAS_NUM_KEYS=num_keys is not None,
    )  # fmt: skip
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
        The block; the tiles of rows of one KV head, and of all; the strides of q, k and v, in units of ALIGN
        elements; those of the result, and of partial results, with that from part to part; and what is compiled
        into the kernel.
    """
    batch, heads, queries, dim = shape
    group = heads // kv_heads
    block = tile_of(queries * group, dim, dtype.itemsize, device, has_mask=has_mask)
    tiles = triton.cdiv(queries * group, block.rows)
    out_strides = (0, queries * heads * dim, dim, heads * dim)
    part_strides = (batch * heads * queries * dim, heads * queries * dim, queries * dim, dim)
    # A length of 1 may have any stride.
    strides = [0 if size == 1 else stride for size, stride in zip(shape[:3], q_strides, strict=False)]
    for own in (k_strides, v_strides):
        strides += [0 if size == 1 else stride for size, stride in zip((batch, kv_heads), own, strict=False)]
        strides.append(own[2])
    align = alignment(dtype.itemsize, [*strides, dim])
    constants = {
        "KV_HEADS": kv_heads, "GROUP": group, "D": dim, "BR": block.rows, "BT": block.keys, "BD": block.dim,
        "ALIGN": align, "num_warps": block.num_warps, "num_stages": block.num_stages,
    }  # fmt: skip
    in_units = (tuple(stride // align for stride in own) for own in (strides, out_strides, part_strides))
    return block, tiles, tiles * batch * kv_heads, *in_units, constants
