"""Implements scores of visual tokens in Triton, each in one pass over the embeddings."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runs import in_rows

_EPS = tl.constexpr(1e-12)


def temporal_change(frames: Tensor, before: Tensor | None, after: Tensor | None) -> Tensor:
    """Score tokens as :func:`apbv.kernels.temporal_change` does, with any strides of F and h * w."""
    frames, before, after = (None if part is None else in_rows(part) for part in (frames, before, after))
    num_frames, places, dim = frames.shape
    change = frames.new_empty(num_frames, places, dtype=torch.float32)
    pairs = min(16, triton.next_power_of_2(num_frames + 1))  # of neighbours, the ends included
    runs = triton.cdiv(num_frames, pairs - 1)
    _temporal_change_kernel[(places * runs,)](
        frames, frames if before is None else before, frames if after is None else after, change, num_frames,
        places, runs, dim, *frames.stride()[:2], 0 if before is None else before.stride(0),
        0 if after is None else after.stride(0),
        HAS_BEFORE=before is not None, HAS_AFTER=after is not None,
        ALIGNED=_alignment(*(part for part in (frames, before, after) if part is not None)), BP=pairs,
        BD=_columns(pairs, dim, frames.element_size()), num_warps=4,
    )  # fmt: skip
    return change


def spatial_variety(frames: Tensor, height: int, width: int, crop: int) -> Tensor:
    """Score tokens as :func:`apbv.kernels.spatial_variety` does, with any strides of F and h * w."""
    frames = in_rows(frames)
    variety = frames.new_empty(frames.shape[:2], dtype=torch.float32)
    tokens = max(16, triton.next_power_of_2(crop**2))
    crops_down, crops_across = triton.cdiv(height, crop), triton.cdiv(width, crop)
    _spatial_variety_kernel[(len(frames) * crops_down * crops_across,)](
        frames, variety, height, width, crops_down, crops_across, frames.shape[2], *frames.stride()[:2],
        CROP=crop, BT=tokens, BD=128 // frames.element_size(), num_warps=4 if tokens <= 64 else 8, num_stages=4,
    )  # fmt: skip
    return variety


def similarity_to(rows: Tensor, direction: Tensor) -> Tensor:
    """Score rows as :func:`apbv.kernels.similarity_to` does, with any stride of m."""
    rows, direction = in_rows(rows), in_rows(direction)
    similar = rows.new_empty(len(rows), dtype=torch.float32)
    rows_per_block = 4
    _similarity_kernel[(triton.cdiv(len(rows), rows_per_block),)](
        rows, direction, similar, *rows.shape, rows.stride(0),
        BM=rows_per_block, BD=_columns(rows_per_block, rows.shape[1], rows.element_size()), num_warps=4,
    )  # fmt: skip
    return similar


def _columns(rows: int, dim: int, element_size: int) -> int:
    """Choose the columns of a tile of so many rows: two loads of 16 bytes for each thread of 4 warps."""
    return min(4096 // (rows * element_size), max(16, triton.next_power_of_2(dim)))


def _alignment(*tensors: Tensor) -> int:
    """Return how many bytes, 16 at most, divide the addresses of all rows.

    Where a kernel chooses between two pointers Triton itself knows no alignment.
    """
    strides = [stride * tensor.element_size() for tensor in tensors for stride in tensor.stride()[:-1]]
    return math.gcd(16, *strides, *(tensor.data_ptr() for tensor in tensors))


@triton.jit
def _temporal_change_kernel(
    frames, before, after, change, num_frames, places, runs, dim, s_frames_f, s_frames_p, s_before_p, s_after_p,
    HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, ALIGNED: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    # One program scores BP - 1 frames at one place by BP pairs of neighbours. Pair i has the frames i - 1 and i,
    # where -1 is the one before and num_frames the one after. The right frame of a pair is the left one of the
    # next pair, so the second load of a row comes from the cache.
    i_place = (tl.program_id(0) // runs).to(tl.int64)
    o_pair = tl.arange(0, BP)
    i_pair = tl.program_id(0) % runs * (BP - 1) + o_pair
    m_pair = (i_pair > 0) & (i_pair < num_frames)
    p_right = frames + i_place * s_frames_p + i_pair.to(tl.int64) * s_frames_f
    p_left = p_right - s_frames_f
    if HAS_BEFORE:
        p_left = tl.where(i_pair == 0, before + i_place * s_before_p, p_left)
        m_pair |= i_pair == 0
    if HAS_AFTER:
        p_right = tl.where(i_pair == num_frames, after + i_place * s_after_p, p_right)
        m_pair |= i_pair == num_frames
    p_left, p_right = tl.multiple_of(p_left, ALIGNED), tl.multiple_of(p_right, ALIGNED)

    b_dot = tl.zeros([BP, BD], tl.float32)
    b_left_squared = tl.zeros([BP, BD], tl.float32)
    b_right_squared = tl.zeros([BP, BD], tl.float32)
    for i_d in tl.range(0, dim, BD):
        o_d = i_d + tl.arange(0, BD)
        m_load = m_pair[:, None] & (o_d < dim)
        # [BP, BD]
        b_left = tl.load(p_left[:, None] + o_d, mask=m_load, other=0.0).to(tl.float32)
        # [BP, BD]
        b_right = tl.load(p_right[:, None] + o_d, mask=m_load, other=0.0).to(tl.float32)
        b_dot += b_left * b_right
        b_left_squared += b_left * b_left
        b_right_squared += b_right * b_right
    b_norms = _norm(tl.sum(b_left_squared, axis=1)) * _norm(tl.sum(b_right_squared, axis=1))
    b_similar = tl.sum(b_dot, axis=1) / b_norms

    # [frames, pairs]: frame i stands in the pairs i and i + 1.
    m_around = m_pair & ((o_pair == o_pair[:, None]) | (o_pair == o_pair[:, None] + 1))
    b_count = tl.sum(m_around.to(tl.float32), axis=1)
    b_mean = tl.sum(tl.where(m_around, b_similar, 0.0), axis=1) / tl.maximum(b_count, 1.0)
    o_change = i_pair.to(tl.int64) * places + i_place
    m_change = (o_pair < BP - 1) & (i_pair < num_frames)
    tl.store(change + o_change, tl.where(b_count > 0, 1.0 - b_mean, 0.0), mask=m_change)


@triton.jit
def _spatial_variety_kernel(
    frames, variety, height, width, crops_down, crops_across, dim, s_frames_f, s_frames_p,
    CROP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    # One program scores the tokens of one crop, out of all their dot products with one another.
    i_crop = tl.program_id(0)
    i_frame = (i_crop // (crops_down * crops_across)).to(tl.int64)
    o_token = tl.arange(0, BT)
    o_row = i_crop // crops_across % crops_down * CROP + o_token // CROP
    o_column = i_crop % crops_across * CROP + o_token % CROP
    m_token = (o_token < CROP * CROP) & (o_row < height) & (o_column < width)
    o_place = o_row * width + o_column
    p_tokens = frames + i_frame * s_frames_f + o_place.to(tl.int64) * s_frames_p

    b_gram = tl.zeros([BT, BT], tl.float32)
    for i_d in tl.range(0, dim, BD):
        o_d = i_d + tl.arange(0, BD)
        # [BT, BD]
        b_tokens = tl.load(p_tokens[:, None] + o_d, mask=m_token[:, None] & (o_d < dim), other=0.0)
        b_gram = tl.dot(b_tokens, tl.trans(b_tokens), b_gram, input_precision="ieee")

    b_squared = tl.where(o_token == o_token[:, None], b_gram, 0.0)
    b_similar = b_gram / (_norm(tl.sum(b_squared, axis=1))[:, None] * _norm(tl.sum(b_squared, axis=0)))
    count = tl.sum(m_token.to(tl.float32))
    # Rows of zeros stand where a crop at the edge has no tokens; they add nothing to the mean.
    b_from_mean = b_similar - (tl.sum(b_similar, axis=1) / count)[:, None]
    b_variety = tl.sum(tl.where(m_token, b_from_mean * b_from_mean, 0.0), axis=1) / count
    tl.store(variety + i_frame * height * width + o_place, b_variety, mask=m_token)


@triton.jit
def _similarity_kernel(rows, direction, similar, num_rows, dim, s_rows_m, BM: tl.constexpr, BD: tl.constexpr):
    # One program scores BM rows.
    o_row = tl.program_id(0) * BM + tl.arange(0, BM)
    m_row = o_row < num_rows
    p_rows = rows + o_row.to(tl.int64) * s_rows_m
    b_dot = tl.zeros([BM, BD], tl.float32)
    b_squared = tl.zeros([BM, BD], tl.float32)
    for i_d in tl.range(0, dim, BD):
        o_d = i_d + tl.arange(0, BD)
        # [BM, BD]
        b_rows = tl.load(p_rows[:, None] + o_d, mask=m_row[:, None] & (o_d < dim), other=0.0).to(tl.float32)
        # [BD]
        b_direction = tl.load(direction + o_d, mask=o_d < dim, other=0.0).to(tl.float32)
        b_dot += b_rows * b_direction
        b_squared += b_rows * b_rows
    tl.store(similar + o_row, tl.sum(b_dot, axis=1) / _norm(tl.sum(b_squared, axis=1)), mask=m_row)


@triton.jit
def _norm(b_squared):
    """Return the norms of vectors from their sums of squares, at least _EPS, as one divides by them."""
    return tl.maximum(tl.sqrt(b_squared), _EPS)
