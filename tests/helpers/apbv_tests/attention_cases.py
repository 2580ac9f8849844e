"""Inputs, layouts in memory and tolerances for tests of attention."""

import math

import pytest
import torch

from apbv_tests.device import DEVICE

BATCH = 2
KV_HEADS = 2
INF = math.inf
# Beside which the reference is compared with its definition.
BACKENDS = ["torch", "triton"]
# |out - exact| / |exact| over the whole result; half precision rounds inputs of P V and, where
# there are several segments, every partial result. Triton has exp2 in fp32 only.
OUT_TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 2e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}
# Scores are accumulated in fp32 at least.
LSE_TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 3e-6,
    torch.float16: 2e-4,
    torch.bfloat16: 4e-4,
}


def randn(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def make_inputs(queries, keys, *, dim=80, group=4, dtype=torch.float64):
    """q, and (k, v) of segments of so many keys."""
    q = randn(BATCH, KV_HEADS * group, queries, dim, dtype=dtype)
    pairs = [randn(2, BATCH, KV_HEADS, n, dim, dtype=dtype, seed=i + 1) for i, n in enumerate(keys)]
    return q, [tuple(pair) for pair in pairs]


def assert_out_close(out, exact, tolerance):
    assert torch.isfinite(out).all()
    assert (out.double() - exact).norm() <= tolerance * exact.norm()


def assert_lse_close(lse, exact, tolerance):
    """Lse is compared relative to 1: an absolute error e scales weights by a factor of 1 + e."""
    assert not lse.isnan().any()
    nothing = exact == -INF
    assert torch.equal(lse == -INF, nothing)
    difference = (lse.double() - exact)[~nothing].abs()
    assert not len(difference) or difference.max() <= tolerance * max(
        1.0, float(exact[~nothing].abs().max())
    )


def assert_attention(result, exact, dtype):
    """Out and lse are exact but for rounding, and zeros and -inf where nothing is seen."""
    out, lse = result
    assert_out_close(out, exact[0], OUT_TOLERANCE[dtype])
    assert_lse_close(lse, exact[1], LSE_TOLERANCE[dtype])
    assert not out[lse == -INF].any()


def transposed(states):
    """The layout of projections: ``[B, S, H, D]`` seen as ``[B, H, S, D]``."""
    return states.transpose(1, 2).contiguous().transpose(1, 2)


def sliced_rows(states):
    """Rows out of the middle of a longer buffer, whose rest is NaN."""
    batch, heads, rows, dim = states.shape
    buffer = states.new_full((batch, heads, rows + 7, dim), math.nan)
    buffer[:, :, 3 : 3 + rows] = states
    return buffer[:, :, 3 : 3 + rows]


def sliced_heads_and_dim(states):
    """Every other head, and the front of wider rows, as in a fused QKV projection."""
    batch, heads, rows, dim = states.shape
    buffer = states.new_full((batch, 2 * heads, rows, 3 * dim), math.nan)
    buffer[:, ::2, :, :dim] = states
    return buffer[:, ::2, :, :dim]


PLACES = [transposed, sliced_rows, sliced_heads_and_dim]


def poisoned(place, shape, dtype):
    """A view to be filled inside a buffer of NaN, and a look at what of the buffer must stay so."""
    view = place(torch.full(shape, math.nan, dtype=dtype, device=DEVICE))
    buffer = view if view._base is None else view._base
    inside = torch.zeros_like(buffer, dtype=torch.bool)
    inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    return view, lambda: buffer[~inside]


@pytest.fixture
def nan_where_unwritten(monkeypatch):
    """What a kernel does not write is NaN."""
    empty = torch.Tensor.new_empty

    def new_empty(self, *size, **kwargs):
        tensor = empty(self, *size, **kwargs)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
