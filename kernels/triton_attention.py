"""This module implements :mod:`apbv.kernels.attention` in one Triton kernel, for prefill and for decoding.

The kernel is FlashAttention (Dao, 2023) with three changes. The keys come in *runs* of equally long pieces at
equal distances in memory, which is how an exchange leaves passing blocks, so that nothing is concatenated. The
query heads of a group are rows of one tile, so that K and V are read once for all of them. Where there are few
rows, the keys are split over programs whose partial results are merged (Flash-Decoding).
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runs import Run, Segment, alignment, find_runs, in_rows, row_strides
from .triton_merging import merge_states

_NO_MASK, _CAUSAL, _GIVEN_MASK = range(3)
_RUNS_BUCKET = 4  # empty runs pad the runs to a multiple of this, so that many prompts share a compiled kernel
_FEWEST_KEYS = 512  # fewer keys are not worth a program of their own


@triton.jit
def _pick(values, index):
    """Return values[index] of a tuple for an index that is known only at run time."""
    picked = values[0]
    for i in tl.static_range(1, len(values)):
        picked = tl.where(index == i, values[i], picked)
    return picked


@triton.jit
def _plain(number):
    """Return the integer that :func:`_veiled` hid."""
    return number >> 2


@triton.jit
def _attend_tile(
    b_acc, b_max, b_sum, b_q, p_k, p_v, o_t, stop, piece_len, k_strides, v_strides, p_kept, b_limit, p_visible,
    m_d, scale, BT: tl.constexpr, BD: tl.constexpr, ALIGN: tl.constexpr,
    BOUNDED: tl.constexpr, HAS_KEPT: tl.constexpr, GIVEN_MASK: tl.constexpr,
):  # fmt: skip
    """Add BT keys from place o_t on to the online softmax; where BOUNDED, a row sees those before its b_limit."""
    o_t = o_t + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    m_t = o_t < stop
    if HAS_KEPT:
        o_row = tl.load(p_kept + o_t, mask=m_t, other=0).to(tl.int64)
        o_k, o_v = o_row * k_strides[1], o_row * v_strides[1]
    else:
        o_piece, o_row = (o_t // piece_len).to(tl.int64), (o_t % piece_len).to(tl.int64)
        o_k = o_piece * k_strides[0] + o_row * k_strides[1]
        o_v = o_piece * v_strides[0] + o_row * v_strides[1]
    m_k, m_v = m_d[:, None], m_d[None, :]
    if BOUNDED or GIVEN_MASK:
        m_k, m_v = m_k & m_t[None, :], m_v & m_t[:, None]
    # [BD, BT]
    b_k = tl.load(p_k + (o_k * ALIGN)[None, :] + o_d[:, None], mask=m_k, other=0.0)
    # [BR, BT]
    b_s = tl.dot(b_q, b_k, input_precision="tf32x3") * scale
    if BOUNDED:
        b_s = tl.where(o_t[None, :] < b_limit[:, None], b_s, float("-inf"))
    if GIVEN_MASK:
        b_visible = tl.load(p_visible[:, None] + o_t[None, :], mask=m_t[None, :], other=0)
        b_s = tl.where(b_visible != 0, b_s, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, axis=1))
    # A row that has seen nothing yet has -inf here, and -inf - -inf would be NaN.
    b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_p = tl.exp2(b_s - b_shift[:, None])
    b_decay = tl.exp2(b_max - b_shift)
    # [BT, BD]
    b_v = tl.load(p_v + (o_v * ALIGN)[:, None] + o_d[None, :], mask=m_v, other=0.0)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision="tf32x3")
    return b_acc, b_new_max, b_sum * b_decay + tl.sum(b_p, axis=1)


@triton.jit(
    do_not_specialize=[
        "visible_stride", "num_queries", "num_past", "num_last", "rows_alone", "keys_per_split", "num_runs",
    ]  # one compiled kernel serves all lengths; ALIGN tells loads what they need to know of the strides
)  # fmt: skip
def _attend_kernel(
    p_q, p_out, p_lse, p_ks, p_vs, p_last_k, p_last_v, p_visible, p_kept,
    run_lens, piece_lens, k_strides, v_strides, q_strides, last_k_strides, last_v_strides, visible_stride,
    kept_strides, scale, num_queries, num_past, num_last, rows_alone, keys_per_split, num_runs,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr, ALIGN: tl.constexpr, MASK: tl.constexpr, HAS_KEPT: tl.constexpr,
    HAS_ROWS_ALONE: tl.constexpr,
):  # fmt: skip
    """One program attends from a tile of rows (query tokens times heads of a group) to a range of one head's keys.

    Strides are in units of ALIGN elements, in the order (batch, head, row); those of runs have the distance from
    piece to piece in front. Integers in tuples are hidden by :func:`_veiled`.
    """
    # Under a causal mask the last tiles have the most keys: they start first.
    i_r = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    i_bh = tl.program_id(1).to(tl.int64)
    i_split = tl.program_id(2).to(tl.int64)
    i_b, i_h = i_bh // KV_HEADS, i_bh % KV_HEADS

    o_r = i_r * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    m_r, m_d = o_r < num_queries * GROUP, o_d < D
    o_s, o_head = o_r // GROUP, i_h * GROUP + o_r % GROUP
    # [BR, BD]
    o_q = i_b * _plain(q_strides[0]) + o_head * _plain(q_strides[1]) + o_s * _plain(q_strides[2])
    b_q = tl.load(p_q + (o_q * ALIGN)[:, None] + o_d[None, :], mask=m_r[:, None] & m_d[None, :], other=0.0)
    scale *= 1.4426950408889634  # log2(e): exp2 is the hardware's own exponential

    b_acc = tl.zeros([BR, BD], tl.float32)
    b_max = tl.full([BR], float("-inf"), tl.float32)
    b_sum = tl.zeros([BR], tl.float32)
    first_s = (i_r * BR // GROUP).to(tl.int32)
    last_s = tl.minimum(((i_r + 1) * BR - 1) // GROUP, num_queries - 1).to(tl.int32)
    first_key = (i_split * keys_per_split).to(tl.int32)
    stop_key = tl.minimum(first_key + keys_per_split, num_past + num_last)

    past_stop = stop_key
    if HAS_ROWS_ALONE:
        past_stop = tl.where(last_s < rows_alone, first_key, stop_key)
    p_kept += i_b * _plain(kept_strides[0]) + i_h * _plain(kept_strides[1])
    run_first = 0
    for i_run in range(num_runs):
        k_b, k_h = _plain(_pick(k_strides[1], i_run)), _plain(_pick(k_strides[2], i_run))
        v_b, v_h = _plain(_pick(v_strides[1], i_run)), _plain(_pick(v_strides[2], i_run))
        p_k = _pick(p_ks, i_run) + (i_b * k_b + i_h * k_h) * ALIGN
        p_v = _pick(p_vs, i_run) + (i_b * v_b + i_h * v_h) * ALIGN
        k_steps = (_plain(_pick(k_strides[0], i_run)), _plain(_pick(k_strides[3], i_run)))
        v_steps = (_plain(_pick(v_strides[0], i_run)), _plain(_pick(v_strides[3], i_run)))
        run_len, piece_len = _plain(_pick(run_lens, i_run)), _plain(_pick(piece_lens, i_run))
        start = tl.maximum(first_key - run_first, 0)
        stop = tl.minimum(past_stop - run_first, run_len)
        whole = start + tl.maximum(stop - start, 0) // BT * BT
        b_limit = tl.where(o_s >= rows_alone, stop, 0)
        for o_t in range(start, whole, BT):
            b_acc, b_max, b_sum = _attend_tile(
                b_acc, b_max, b_sum, b_q, p_k, p_v, o_t, stop, piece_len, k_steps, v_steps, p_kept, b_limit, p_q,
                m_d, scale, BT, BD, ALIGN, HAS_ROWS_ALONE, HAS_KEPT, False,
            )  # fmt: skip
        if whole < stop:
            b_acc, b_max, b_sum = _attend_tile(
                b_acc, b_max, b_sum, b_q, p_k, p_v, whole, stop, piece_len, k_steps, v_steps, p_kept, b_limit, p_q,
                m_d, scale, BT, BD, ALIGN, True, HAS_KEPT, False,
            )  # fmt: skip
        run_first += run_len

    if MASK != 0:
        p_k = p_last_k + (i_b * _plain(last_k_strides[0]) + i_h * _plain(last_k_strides[1])) * ALIGN
        p_v = p_last_v + (i_b * _plain(last_v_strides[0]) + i_h * _plain(last_v_strides[1])) * ALIGN
        k_steps, v_steps = (0, _plain(last_k_strides[2])), (0, _plain(last_v_strides[2]))  # one piece
        p_seen = p_visible + tl.minimum(o_s, num_queries - 1) * visible_stride  # the mask has no rows behind these
        start = tl.maximum(first_key - num_past, 0)
        stop = tl.minimum(stop_key - num_past, num_last)
        whole, b_limit = start, o_s.to(tl.int32)
        if MASK == 1:
            # Query s sees the first num_last - num_queries + s + 1 keys.
            hidden = num_last - num_queries + 1
            whole = start + tl.maximum(tl.minimum(stop, hidden + first_s) - start, 0) // BT * BT
            stop = tl.minimum(stop, hidden + last_s)
            b_limit = tl.minimum(o_s.to(tl.int32) + hidden, stop)
        for o_t in range(start, whole, BT):
            b_acc, b_max, b_sum = _attend_tile(
                b_acc, b_max, b_sum, b_q, p_k, p_v, o_t, stop, num_last, k_steps, v_steps, p_kept, b_limit, p_seen,
                m_d, scale, BT, BD, ALIGN, False, False, False,
            )  # fmt: skip
        for o_t in range(whole, stop, BT):
            b_acc, b_max, b_sum = _attend_tile(
                b_acc, b_max, b_sum, b_q, p_k, p_v, o_t, stop, num_last, k_steps, v_steps, p_kept, b_limit, p_seen,
                m_d, scale, BT, BD, ALIGN, MASK == 1, False, MASK == 2,
            )  # fmt: skip

    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)  # for rows that saw nothing, whose b_max is -inf and b_acc 0
    b_lse = (b_max + tl.log2(b_sum)) * 0.6931471805599453  # ln(2)
    b_out = b_acc / b_sum[:, None]
    # Both are written without gaps: [splits, B, Hq, S] rows.
    o_row = ((i_split * tl.num_programs(1) + i_bh) * GROUP + o_r % GROUP) * num_queries + o_s
    tl.store(p_lse + o_row, b_lse, mask=m_r)
    tl.store(
        p_out + (o_row * D)[:, None] + o_d[None, :],
        b_out.to(p_out.dtype.element_ty),
        mask=m_r[:, None] & m_d[None, :],
    )


@dataclass(frozen=True)
class _Blocks:
    """The sizes of the tiles that one program computes at a time, and its warps and pipeline stages."""

    rows: int
    keys: int
    dim: int
    num_warps: int
    num_stages: int


def _blocks(rows: int, dim: int, element_size: int, has_mask: bool, device: torch.device) -> _Blocks:
    """Choose tiles so that in half precision nothing spills and the stages of K and V fit into shared memory."""
    dim = max(16, triton.next_power_of_2(dim))
    few = max(16, triton.next_power_of_2(rows))
    if element_size == 4:
        return _Blocks(min(32, few), 32, dim, 4, 2)
    if _shared_memory(device) < 200 * 1024:  # not Hopper or later: tensor cores take operands from registers
        return _Blocks(min(64 if dim <= 128 else 32, few), 32, dim, 8, 2)
    if has_mask:  # whose tile takes registers
        return _Blocks(min(64, few), 32, dim, 8, 3)
    if rows <= 64:
        return _Blocks(few, 64, dim, 4, 3) if dim <= 128 else _Blocks(few, 32, dim, 8, 3)
    if dim <= 128:
        return _Blocks(128, 128 if dim <= 64 else 64, dim, 8, 3)
    return _Blocks(128, 32, dim, 8, 2)


def _splits(num_programs: int, num_keys: int, block: int, device: torch.device) -> tuple[int, int]:
    """Choose into how many ranges the keys are split, so that every processor has work, and how long each is."""
    wanted = min(_num_processors(device) * 2 // num_programs, triton.cdiv(num_keys, _FEWEST_KEYS))
    per_split = max(1, triton.cdiv(triton.cdiv(num_keys, max(1, wanted)), block)) * block
    return max(1, triton.cdiv(num_keys, per_split)), per_split


@cache
def _num_processors(device: torch.device) -> int:
    # An interpreted kernel has none; 8 makes it split keys in some of the tests.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@cache
def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program can have."""
    if device.type != "cuda":
        return 227 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def segmented_attention(
    q: Tensor, segments: list[Segment], scale: float, causal_last: bool, *, rows_alone: int = 0
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.segmented_attention` does, in one launch, or two where keys were split."""
    if causal_last:
        return _attend(q, segments[:-1], segments[-1], scale, rows_alone=rows_alone)
    if rows_alone:  # they see all of the last segment, as if it were masked by a mask of ones
        visible = torch.ones(1, segments[-1][0].shape[2], dtype=torch.bool, device=q.device)
        visible = visible.expand(q.shape[2], -1)
        return _attend(q, segments[:-1], segments[-1], scale, rows_alone=rows_alone, visible=visible)
    return _attend(q, segments, None, scale)


def verify_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, visible: Tensor | None = None, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.verify_attention` does."""
    masked = q.shape[2] if visible is None else visible.shape[1]
    if visible is None and masked == 1 and kept is None:
        masked = 0  # a single token sees everything
    past = k.shape[2] - masked
    last = (k[:, :, past:], v[:, :, past:]) if masked else None
    return _attend(q, [(k[:, :, :past], v[:, :, :past])], last, scale, visible=visible, kept=kept)


def _attend(
    q: Tensor,
    segments: list[Segment],
    last: Segment | None,
    scale: float,
    *,
    rows_alone: int = 0,
    visible: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to segments seen by rows from ``rows_alone`` on, and to a last one, causal or under ``visible``."""
    batch, heads, queries, dim = q.shape
    q = in_rows(q)
    segments = [(in_rows(k), in_rows(v)) for k, v in segments]
    runs = find_runs(segments) if kept is None else [Run.of(*segments[0])]
    # Without a last segment its arguments are never looked at; an empty one stands in.
    own = Run.of(*map(in_rows, last)) if last is not None else Run.of(q[:, :, :0], q[:, :, :0])
    kv_heads = (segments[0][0] if segments else own.k).shape[1]
    group = heads // kv_heads
    run_lens = [run.num_rows for run in runs] if kept is None else [kept.shape[2]]
    num_past = sum(run_lens)
    seen = q if visible is None else in_rows(visible).view(torch.uint8)
    chosen = q if kept is None else in_rows(kept)

    block = _blocks(queries * group, dim, q.element_size(), visible is not None, q.device)
    tiles = triton.cdiv(queries * group, block.rows)
    splits, keys_per_split = _splits(tiles * batch * kv_heads, num_past + own.num_rows, block.keys, q.device)
    out = q.new_empty(splits, batch, heads, queries, dim, dtype=q.dtype if splits == 1 else torch.float32)
    lse = q.new_empty(splits, batch, heads, queries, dtype=torch.float32)

    missing = -len(runs) % _RUNS_BUCKET if runs else _RUNS_BUCKET
    padded = [*runs, *[Run(q, q, 0, 1, (0,) * 4, (0,) * 4)] * missing]
    all_strides = [*(run.k_strides for run in padded), *(run.v_strides for run in padded)]
    all_strides += [own.k_strides, own.v_strides, row_strides(q)]
    align = alignment(q.element_size(), [stride for strides in all_strides for stride in strides])
    all_strides = [tuple(stride // align for stride in strides) for strides in all_strides]
    *run_strides, own_k_strides, own_v_strides, q_strides = all_strides
    _attend_kernel[(tiles, batch * kv_heads, splits)](
        q,
        out,
        lse,
        tuple(run.k for run in padded),
        tuple(run.v for run in padded),
        own.k,
        own.v,
        seen,
        chosen,
        _veiled(*run_lens, *[0] * missing),
        _veiled(*(run.piece_len for run in padded)),
        tuple(_veiled(*strides) for strides in zip(*run_strides[: len(padded)], strict=True)),
        tuple(_veiled(*strides) for strides in zip(*run_strides[len(padded) :], strict=True)),
        _veiled(*q_strides),
        _veiled(*own_k_strides[1:]),
        _veiled(*own_v_strides[1:]),
        0 if visible is None else seen.stride(0),
        _veiled(0, 0) if kept is None else _veiled(*chosen.stride()[:2]),
        scale,
        queries,
        num_past,
        own.num_rows,
        rows_alone,
        keys_per_split,
        len(runs),
        KV_HEADS=kv_heads,
        GROUP=group,
        D=dim,
        BR=block.rows,
        BT=block.keys,
        BD=block.dim,
        ALIGN=align,
        MASK=_NO_MASK if last is None else _CAUSAL if visible is None else _GIVEN_MASK,
        HAS_KEPT=kept is not None,
        HAS_ROWS_ALONE=rows_alone > 0,
        num_warps=block.num_warps,
        num_stages=block.num_stages,
    )
    if splits == 1:
        return out[0], lse[0]
    merged, lse = merge_states(out, lse)
    return merged.to(q.dtype), lse


def _veiled(*numbers: int) -> tuple[int, ...]:
    """Encode integers so that Triton sees neither that one is 1 nor that 16 divides it.

    Triton would compile anew for each such combination, as ``do_not_specialize`` has no effect inside tuples.
    """
    return tuple(4 * number + 3 for number in numbers)
