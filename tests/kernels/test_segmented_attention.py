"""Segmented attention of every back end against plain attention under a dense mask, in fp64."""

import math

import pytest
import torch

from apbv.kernels import reference, segmented_attention, triton_attention
from apbv.kernels.segments import find_key_segments
from apbv.kernels.strides import magic_divisor

from apbv_tests.attention_cases import (
    BACKENDS,
    INF,
    PLACES,
    assert_attention,
    assert_lse_close,
    assert_out_close,
    make_inputs,
    nan_where_unwritten,  # noqa: F401  (a fixture)
    poisoned,
    randn,
)
from apbv_tests.device import DEVICE, TRITON_DTYPES

pytestmark = pytest.mark.usefixtures("nan_where_unwritten")


def by_definition(q, segments, scale, causal_last, alone=0):
    """Out and lse in fp64: query i of S sees T - S + i + 1 keys of the last segment, the first rows
    those only."""
    keys = [k.shape[2] for k, _ in segments]
    queries = q.shape[2]
    visible = torch.ones(queries, sum(keys), dtype=torch.bool, device=DEVICE)
    visible[:alone, : sum(keys[:-1])] = False
    if causal_last:
        visible[:, sum(keys[:-1]) :] = torch.ones(queries, keys[-1], device=DEVICE).tril(
            keys[-1] - queries
        )
    k, v = (torch.cat(states, dim=2).double() for states in zip(*segments, strict=True))
    k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for states in (k, v))
    scores = (q.double() @ k.mT * scale).masked_fill(~visible, -INF)
    return scores.softmax(dim=-1).nan_to_num(0.0) @ v, scores.logsumexp(dim=-1)


SHAPES = {  # queries, keys of each segment, rows alone
    "one-query-one-key": (1, [1], 0),
    "one-query-split": (1, [1200], 0),
    "few-queries-split": (5, [1200, 63], 0),
    "fewer-queries-than-keys": (63, [129], 20),
    "blind-rows-alone": (63, [9, 20], 50),
    "first-rows-alone": (63, [40, 0, 23, 63], 17),
    "all-rows-alone": (63, [129, 63], 63),
    "more-segments-than-a-bucket": (20, [3, 5, 7, 9, 11, 1, 20], 0),
    "empty-first-and-last": (63, [0, 129, 0], 0),
    "all-empty": (63, [0, 0], 0),
    "no-queries": (0, [63, 5], 0),
}
WIDE = {"torch": torch.float64, "triton": torch.float32}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_lengths_lie_anywhere(backend, shape):
    """Inputs in buffers of NaN, and a result that is put into another, beside which nothing is
    written."""
    (queries, keys, alone) = SHAPES[shape]
    dtype = WIDE[backend]
    row = list(SHAPES).index(shape)
    place = PLACES[row % len(PLACES)]
    causal_last = row % 5 != 4
    q, segments = make_inputs(queries, keys, dim=16, group=2, dtype=dtype)
    exact = by_definition(q, segments, 0.3, causal_last, alone)
    assert_attention(
        reference.segmented_attention(q, segments, 0.3, causal_last, num_anchor_queries=alone),
        exact,
        dtype,
    )
    q = place(q)
    segments = [(place(k), place(v)) for k, v in segments]
    out, untouched = poisoned(place, q.shape, dtype)
    for into in (None, out)[backend == "triton" :]:
        options = {"num_anchor_queries": alone, "out": into, "backend": backend}
        found, lse = segmented_attention(q, segments, 0.3, causal_last, **options)
        assert found.dtype == lse.dtype == dtype
        assert_attention((found, lse), exact, dtype)
        assert into is None or (found.data_ptr(), found.stride()) == (out.data_ptr(), out.stride())
    assert untouched().isnan().all(), "what lies beside the result was written"


@pytest.mark.parametrize(
    ("backend", "dtype", "dim", "group", "queries", "keys", "scale"),
    [
        ("torch", torch.float32, 128, 4, 5, [8200, 9], 0.1),
        ("torch", torch.float32, 80, 7, 63, [129, 111], -0.1),
        ("torch", torch.bfloat16, 16, 4, 129, [111, 63], 0.2),
        ("torch", torch.float16, 16, 2, 9, [31], 0.0),
        ("triton", torch.float32, 256, 1, 5, [300, 33], -0.1),
        ("triton", TRITON_DTYPES[-1], 128, 4, 65, [51, 33], 0.1),
        ("triton", torch.float16, 80, 7, 11, [69, 51], 0.0),
    ],
)
def test_heads_of_any_shape_dtype_and_scale(backend, dtype, dim, group, queries, keys, scale):
    """Also with numbers side by side along the keys, and one KV head that stands for all."""
    q, segments = make_inputs(queries, keys, dim=dim, group=group, dtype=dtype)
    turned = [(k.mT.contiguous().mT, v[:, :1].expand_as(k)) for k, v in segments]
    for pairs in (segments, turned, [(k[:, :1].expand_as(k), v) for k, v in segments]):
        result = segmented_attention(q, pairs, scale, True, backend=backend)
        assert_attention(result, by_definition(q, pairs, scale, True), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_beyond_the_range_of_exp(backend):
    """Scores of several thousand: exp overflows without subtracting the maximum."""
    q, segments = make_inputs(33, [71, 33], dim=16, dtype=torch.float32)
    q = q * 50
    segments = [(k * 50, v) for k, v in segments]
    out, lse = segmented_attention(q, segments, 1.0, True, backend=backend)
    exact_out, exact_lse = by_definition(q, segments, 1.0, True)
    assert exact_lse.max() > 1e4
    assert_out_close(out, exact_out, 1e-2)  # fp32 rounds scores of 1e4 by 1e-3
    assert_lse_close(lse, exact_lse, 1e-6)


# ---- key segments, which Triton's kernel finds ----


def gathered(num_hosts, count, length, padding=5):
    """K and V of blocks as exchanges leave them, ``[H, 2, B, Hkv, rows, D]``: the padding is
    NaN."""
    buffers = randn(num_hosts, 2, 1, 2, length + padding, 64, dtype=torch.float32, seed=3)
    buffers[..., length:, :] = math.nan
    return [(k[:, :, :length], v[:, :, :length]) for k, v in buffers[-count:]]


def test_gathered_buffers_are_one_key_segment_each():
    """The passing blocks of a late block: all of the first exchange, and of the second those from
    the back."""
    first = gathered(4, 4, 17)
    second = gathered(4, 2, 17)
    q, local = make_inputs(20, [20], dtype=torch.float32, dim=64, group=2)
    q = q[:1]
    local = [(k[:1], v[:1]) for k, v in local]
    layouts = [segment.layout for segment in find_key_segments([*first, *second])]
    assert [(layout.num_rows, layout.piece_len) for layout in layouts] == [(68, 17), (34, 17)]
    for segments, alone in (
        ([*first, *second], 0),
        ([*first[::-1], *second], 7),
        ([first[0], *first[2:]], 0),
    ):
        result = segmented_attention(
            q, [*segments, *local], 0.125, True, num_anchor_queries=alone, backend="triton"
        )
        assert_attention(
            result, by_definition(q, [*segments, *local], 0.125, True, alone), torch.float32
        )
    _, odd = make_inputs(20, SHAPES["more-segments-than-a-bucket"][1])
    assert len(find_key_segments(odd)) > triton_attention.SEGMENTS_BUCKET


def test_a_product_and_a_shift_divide_as_a_division_does():
    rows = torch.cat(
        [torch.arange(5000), 2**31 - 1 - torch.arange(5000), torch.randint(2**31, (5000,))]
    )
    for length in [
        *range(1, 70),
        127,
        128,
        129,
        1023,
        1024,
        1182,
        2**16 - 1,
        2**20 + 1,
        2**30 + 1,
        2**31 - 1,
    ]:
        magic, shift = magic_divisor(length)
        assert magic < 2**32
        # Products of less than 2 ** 63, in two parts of 16 bits.
        product = (rows * (magic >> 16) + (rows * (magic & 0xFFFF) >> 16)) >> 16
        assert torch.equal(product >> shift, rows // max(2, length)), length


def test_what_does_not_fit_is_refused():
    q, segments = make_inputs(5, [9], group=2)
    for message, given, into in (
        ("at least one", (q, []), None),
        ("3 query heads .* 2 key/value heads", (q[:, :3], segments), None),
        (f"float16 on {DEVICE.type}.* does not match", (q, segments), q.half()),
    ):
        with pytest.raises(ValueError, match=message):
            segmented_attention(*given, 0.1, True, out=into)


def test_the_former_name_of_anchor_queries_warns():
    q, segments = make_inputs(5, [9, 5])
    expected = segmented_attention(q, segments, 0.1, True, num_anchor_queries=2)
    with pytest.warns(DeprecationWarning, match="num_anchor_queries"):
        found = segmented_attention(q, segments, 0.1, True, rows_alone=2)
    for new, former in zip(expected, found, strict=True):
        torch.testing.assert_close(former, new)
