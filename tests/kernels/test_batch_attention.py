"""Attention of each sequence's newest tokens, in a batch: by every back end against the
definition."""

import math
from itertools import accumulate

import pytest
import torch

from apbv.kernels import BufferTable, SequenceBuffers, batch_decode_attention, reference

from apbv_tests.attention_cases import OUT_TOLERANCE, PLACES, assert_out_close, randn
from apbv_tests.device import DEVICE, TRITON_DTYPES
from apbv_tests.pairs import each_choice


def make(lengths, *, dim=64, group=2, kv_heads=2, dtype=torch.float32, counts=None):
    """Queries, newest keys and values, and buffers with NaN behind their rows."""
    heads = (kv_heads * group, kv_heads, kv_heads)
    rows = sum(counts or [1] * len(lengths))
    room = max(counts or [3])
    q, k, v = (randn(1, n, rows, dim, dtype=dtype, seed=seed) for seed, n in enumerate(heads))
    buffers = [
        [randn(1, kv_heads, n + room, dim, dtype=dtype, seed=n + s) for n in lengths]
        for s in (3, 4)
    ]
    for buffer, length in zip(buffers[0] + buffers[1], lengths * 2, strict=True):
        buffer[:, :, length:] = math.nan
    return q, k, v, SequenceBuffers(*buffers, lengths, counts)


def copy(buffers: SequenceBuffers, dtype=None) -> SequenceBuffers:
    keys, values = (
        [x.to(dtype or x.dtype, copy=True) for x in each] for each in (buffers.keys, buffers.values)
    )
    return SequenceBuffers(keys, values, buffers.lengths, buffers.counts)


@each_choice(
    way=[("triton", torch.float32), ("triton", TRITON_DTYPES[-1]), ("torch", torch.bfloat16)],
    # In the interpreter a head's keys are split into ranges of 256 at least, over 8 programs at
    # most.
    lengths=[[257, 1, 256], [5, 0, 63], [5, 0, 63], [2400, 8], [0], [700, 1]],
    heads=[(16, 7, 1), (128, 7, 4), (80, 1, 4), (20, 3, 1), (64, 2, 2)],
    place=[*PLACES, PLACES[0]],
    # New rows of each sequence, more than there are sequences; None: one each.
    counts=[None, [37, 1, 2], [1, 6, 1], [2, 1, 5], None],
)
def test_each_sequence_sees_its_own_keys(way, lengths, heads, place, counts):
    (backend, dtype) = way
    (dim, group, kv_heads) = heads
    counts = counts and counts[: len(lengths)]
    q, k, v, buffers = make(
        lengths, dim=dim, group=group, kv_heads=kv_heads, dtype=dtype, counts=counts
    )
    wide = copy(buffers, torch.float64)
    scale = -(dim**-0.5)
    exact = reference.batch_decode_attention(q.double(), k.double(), v.double(), wide, scale)
    out = batch_decode_attention(place(q), place(k), place(v), buffers, scale, backend=backend)
    assert out.shape == q.shape and out.dtype == dtype
    assert_out_close(out, exact, OUT_TOLERANCE[dtype])
    for ours, theirs in zip(buffers.keys + buffers.values, wide.keys + wide.values, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=0, equal_nan=True)


def table_of(buffers: SequenceBuffers, num_rows: int) -> BufferTable:
    """A table with room for so many sequences; those behind are not there."""
    rest = [0] * (num_rows - len(buffers.lengths))
    places = torch.tensor([[*row, *rest] for row in buffers.places], device=DEVICE)
    lengths = torch.tensor([*buffers.lengths, *(-1 for _ in rest)], device=DEVICE)
    starts = None
    if buffers.counts:
        starts = torch.tensor([0, *accumulate([*buffers.counts, *rest])], device=DEVICE)
    most_new = 1 << (max(buffers.counts or [1]) - 1).bit_length()
    return BufferTable(places, lengths, max(buffers.lengths) + most_new, starts, most_new)


@pytest.mark.parametrize("counts", [None, [3, 2]])
def test_a_table_may_have_more_rows_than_there_are_sequences(counts):
    rows = sum(counts or [1, 1])
    q, k, v, buffers = make([40, 300, 0, 7], counts=counts and [*counts, 1, 1])
    there = SequenceBuffers(buffers.keys[:2], buffers.values[:2], buffers.lengths[:2], counts)
    exact = reference.batch_decode_attention(*(x[:, :, :rows] for x in (q, k, v)), copy(there), 0.1)
    q[:, :, rows:] = math.nan
    k[:, :, rows:] = math.nan
    out = batch_decode_attention(q, k, v, table_of(there, 4), 0.1, backend="triton")
    assert_out_close(out[:, :, :rows], exact.double(), OUT_TOLERANCE[q.dtype])
    if counts is None:
        assert torch.equal(out[:, :, 2:], torch.zeros_like(out[:, :, 2:]))
    for states in (buffers.keys, buffers.values):
        for held, length, count in zip(states[:2], there.lengths, counts or [1, 1], strict=True):
            assert (
                not held[:, :, : length + count].isnan().any()
                and held[:, :, length + count :].isnan().all()
            )
        assert states[2].isnan().all() and states[3][:, :, 7:].isnan().all()


def test_a_sequence_with_nan_is_alone_with_it():
    q, k, v, buffers = make([40, 300, 7])
    exact = reference.batch_decode_attention(q, k, v, copy(buffers), 0.1)
    for broken in (buffers.values[1][:, :, 11], k[:, :, 0]):
        broken[:] = math.nan
    for backend in ("torch", "triton"):
        out = batch_decode_attention(q, k, v, copy(buffers), 0.1, backend=backend)
        assert out[:, :, :2].isnan().all()
        torch.testing.assert_close(out[:, :, 2], exact[:, :, 2])


def test_what_is_refused():
    q, k, v, buffers = make([5, 3])
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2"):
        batch_decode_attention(q[:, :3], k, v, buffers, 0.1)
    full = SequenceBuffers(buffers.keys, buffers.values, [5, 6])
    with pytest.raises(ValueError, match="a buffer of 6 rows has no room after row 6"):
        batch_decode_attention(q, k, v, full, 0.1)
    with pytest.raises(ValueError, match="torch backend does not support"):
        batch_decode_attention(q, k, v, table_of(buffers, 2), 0.1, backend="torch")
