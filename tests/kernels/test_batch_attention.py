"""Attention of each sequence's newest token, in a batch: by every back end against the definition."""

import math

import pytest
import torch

from apbv.kernels import BufferTable, SequenceBuffers, batch_decode_attention, reference

from attention_cases import OUT_TOLERANCE, PLACES, assert_out_close, randn
from device import DEVICE, TRITON_DTYPES
from pairs import each_choice


def make(lengths, *, dim=64, group=2, kv_heads=2, dtype=torch.float32):
    """Queries, newest keys and values, and buffers with NaN behind their rows."""
    heads = kv_heads * group, kv_heads, kv_heads
    q, k, v = (randn(1, n, len(lengths), dim, dtype=dtype, seed=seed) for seed, n in enumerate(heads))
    buffers = [[randn(1, kv_heads, n + 3, dim, dtype=dtype, seed=n + s) for n in lengths] for s in (3, 4)]
    for buffer, length in zip(buffers[0] + buffers[1], lengths * 2, strict=True):
        buffer[:, :, length:] = math.nan
    return q, k, v, SequenceBuffers(*buffers, lengths)


def copy(buffers: SequenceBuffers, dtype=None) -> SequenceBuffers:
    keys, values = ([x.to(dtype or x.dtype, copy=True) for x in each] for each in (buffers.keys, buffers.values))
    return SequenceBuffers(keys, values, buffers.lengths)


@each_choice(
    way=[("triton", torch.float32), ("triton", TRITON_DTYPES[-1]), ("torch", torch.bfloat16)],
    # In the interpreter a head's keys are split into ranges of 256 at least, over 8 programs at most.
    lengths=[[257, 1, 256], [5, 0, 63], [5, 0, 63], [2300, 8], [0], [700, 1]],
    heads=[(16, 7, 1), (80, 1, 4), (128, 7, 4), (20, 3, 1), (64, 2, 2)],
    place=[*PLACES, PLACES[0]],
)
def test_each_sequence_sees_its_own_keys(way, lengths, heads, place):
    (backend, dtype), (dim, group, kv_heads) = way, heads
    q, k, v, buffers = make(lengths, dim=dim, group=group, kv_heads=kv_heads, dtype=dtype)
    wide, scale = copy(buffers, torch.float64), -(dim**-0.5)
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
    return BufferTable(places, lengths, most_rows=max(buffers.lengths) + 1)


def test_a_table_may_have_more_rows_than_there_are_sequences():
    q, k, v, buffers = make([40, 300, 0, 7])
    there = SequenceBuffers(buffers.keys[:2], buffers.values[:2], buffers.lengths[:2])
    exact = batch_decode_attention(q[:, :, :2], k[:, :, :2], v[:, :, :2], copy(there), 0.1, backend="reference")
    q[:, :, 2:], k[:, :, 2:] = math.nan, math.nan
    out = batch_decode_attention(q, k, v, table_of(there, 4), 0.1, backend="triton")
    assert_out_close(out[:, :, :2], exact.double(), OUT_TOLERANCE[q.dtype])
    assert torch.equal(out[:, :, 2:], torch.zeros_like(out[:, :, 2:]))
    for states, (r, length) in ((s, r) for s in (buffers.keys, buffers.values) for r in enumerate(there.lengths)):
        assert not states[r][:, :, length].isnan().any() and states[r][:, :, length + 1 :].isnan().all()


def test_a_sequence_with_nan_is_alone_with_it():
    q, k, v, buffers = make([40, 300, 7])
    exact = batch_decode_attention(q, k, v, copy(buffers), 0.1, backend="reference")
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
