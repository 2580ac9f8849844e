"""Inputs, shapes and tolerances for tests of attention."""

import math

import pytest
import torch

from device import DEVICE

BATCH, KV_HEADS = 2, 2
INF = math.inf
# |out - exact| / |exact| over the whole result; half precision rounds inputs of P V and, where there are
# several segments, every partial result.
OUT_TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Scores are accumulated in fp32 at least.
LSE_TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 2e-4, torch.bfloat16: 4e-4}


def dtype_name(dtype):
    return str(dtype).split(".")[1]


dtypes = pytest.mark.parametrize("dtype", list(OUT_TOLERANCE), ids=dtype_name)
causality = pytest.mark.parametrize("causal_last", [False, True], ids=["visible", "causal"])
LENGTHS = {
    "one-query-one-key": (1, [1]),
    "decode": (1, [129]),
    "square": (63, [63]),
    "fewer-queries-than-keys": (63, [129]),
    "more-queries-than-keys": (129, [63]),
    "one-visible-key": (111, [1]),
    "one-fully-visible-key": (63, [1, 63]),
    "three-segments": (111, [63, 1, 111]),
    "more-queries-than-last-keys": (129, [111, 63]),
    "decode-two-segments": (1, [111, 129]),
    "few-queries-many-keys": (7, [129, 1, 111, 63]),
    "decode-long": (1, [8200]),
    "verify-long": (5, [8200, 63]),
    "empty-first": (63, [0, 63]),
    "empty-middle": (63, [111, 0, 63]),
    "empty-last": (63, [129, 0]),
    "empty-but-first": (1, [63, 0, 0]),
    "all-empty": (63, [0, 0]),
}
lengths = pytest.mark.parametrize(("queries", "keys"), LENGTHS.values(), ids=LENGTHS)


def make_inputs(queries, keys, *, dim=80, group=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    q = randn(BATCH, KV_HEADS * group, queries, dim)
    return q, [(randn(BATCH, KV_HEADS, n, dim), randn(BATCH, KV_HEADS, n, dim)) for n in keys]


def in_fp64(q, segments):
    return q.double(), [(k.double(), v.double()) for k, v in segments]


def assert_out_close(out, exact, tolerance):
    assert torch.isfinite(out).all()
    assert (out.double() - exact).norm() <= tolerance * exact.norm()


def assert_lse_close(lse, exact, tolerance):
    """Lse is compared relative to 1: an absolute error e scales weights by a factor of 1 + e."""
    assert not lse.isnan().any()
    nothing = exact == -INF
    assert torch.equal(lse == -INF, nothing)
    difference = (lse.double() - exact)[~nothing].abs()
    assert not len(difference) or difference.max() <= tolerance * max(1.0, float(exact[~nothing].abs().max()))


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
