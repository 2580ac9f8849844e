"""The Triton kernel of attention, and attention of a few tokens by every back end, by definition."""

import math
from itertools import product

import pytest
import torch

from apbv.kernels import reference, segmented_attention, triton_attention, verify_attention
from apbv.kernels.runs import Run, find_runs

from attention_cases import (
    LENGTHS,
    assert_lse_close,
    assert_out_close,
    causality,
    dtype_name,
    in_fp64,
    make_inputs,
    sliced_heads_and_dim,
    sliced_rows,
    transposed,
)
from device import DEVICE, TRITON_DTYPES

INF = math.inf
# |out - exact| / |exact|, and lse absolutely, relative to 1; exp2 in fp32 and, in half precision, P rounded.
OUT_TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 1e-14}
LSE_TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-4, torch.bfloat16: 4e-4, torch.float64: 1e-6}

dtypes = pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=dtype_name)
# Long enough for the keys to be split, and no longer: the interpreter is slow.
TRITON_LENGTHS = LENGTHS | {"decode-long": (1, [1200]), "verify-long": (5, [1200, 63])}
HALF_LENGTHS = {"one-query-one-key", "more-queries-than-keys", "three-segments", "verify-long", "all-empty"}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel does not write is NaN."""
    empty = torch.Tensor.new_empty

    def new_empty(self, *size, **kwargs):
        tensor = empty(self, *size, **kwargs)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


def check(q, segments, scale, causal_last, rows_alone=0):
    out, lse = segmented_attention(q, segments, scale, causal_last, rows_alone=rows_alone, backend="triton")
    exact = reference.segmented_attention(*in_fp64(q, segments), scale, causal_last, rows_alone=rows_alone)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert_out_close(out, exact[0], OUT_TOLERANCE[q.dtype])
    assert_lse_close(lse, exact[1], LSE_TOLERANCE[q.dtype])
    assert torch.equal(out[lse == -INF], torch.zeros_like(out[lse == -INF]))


@pytest.mark.parametrize(
    ("queries", "keys", "dtype", "causal_last"),
    [
        pytest.param(
            *shape,
            dtype,
            is_causal,
            id=f"{'causal' if is_causal else 'visible'}-{dtype_name(dtype)}-{name}",
            # What all keys are visible to is also in the causal ones, for all segments but the last.
            marks=[]
            if is_causal or (dtype, name in HALF_LENGTHS) == (torch.float32, True)
            else pytest.mark.thorough,
        )
        for is_causal in (False, True)
        for dtype in TRITON_DTYPES
        for name, shape in TRITON_LENGTHS.items()
        if dtype == torch.float32 or name in HALF_LENGTHS
    ],
)
def test_awkward_lengths(queries, keys, causal_last, dtype):
    q, segments = make_inputs(queries, keys, dtype=dtype, dim=64, group=2)
    check(q, segments, 64**-0.5, causal_last)


@pytest.mark.parametrize(("dim", "group"), [(16, 4), (64, 1), (80, 7), (128, 4), (256, 1)], ids="{}".format)
@dtypes
@pytest.mark.each_choice
def test_head_shapes(dim, group, dtype):
    q, segments = make_inputs(63, [129, 111], dim=dim, group=group, dtype=dtype, seed=1)
    check(q, segments, dim**-0.5, causal_last=True)


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
@causality
@pytest.mark.parametrize(
    ("keys", "alone"),
    [([63], 20), ([129, 0, 63], 1), ([129, 0, 63], 20), ([129, 0, 63], 63), ([7, 100], 20), ([129, 0], 63)],
    ids=str,
)
@pytest.mark.each_choice
def test_the_first_rows_alone(backend, causal_last, alone, keys):
    """Against two calls: what the first rows see of the last segment, and what the others see."""
    q, segments = make_inputs(63, keys, dtype=torch.float32, group=2)
    out, lse = segmented_attention(q, segments, 0.1, causal_last, rows_alone=alone, backend=backend)
    q, segments = in_fp64(q, segments)
    mine = reference.segmented_attention(q, segments[-1:], 0.1, causal_last)
    others = reference.segmented_attention(q, segments, 0.1, causal_last)
    for result, first, second, check in zip(
        (out, lse), mine, others, (assert_out_close, assert_lse_close), strict=True
    ):
        check(result, torch.cat([first[:, :, :alone], second[:, :, alone:]], dim=2), 3e-6)


@pytest.mark.parametrize("strided", [transposed, sliced_rows, sliced_heads_and_dim], ids=lambda f: f.__name__)
@dtypes
def test_strides_are_read_as_they_are(strided, dtype):
    """No copy is made, and what lies between the rows, which is NaN, is not read."""
    q, segments = make_inputs(63, [111, 63], dtype=dtype, group=2)
    check(strided(q), [(strided(k), strided(v)) for k, v in segments], 0.1, causal_last=True)


def gathered(num_hosts, count, length, dtype, padding=5):
    """K and V of blocks as exchanges leave them, ``[H, 2, B, Hkv, rows, D]``: the padding is NaN."""
    generator = torch.Generator().manual_seed(3)
    buffers = torch.randn(num_hosts, 2, 1, 2, length + padding, 64, generator=generator).to(DEVICE, dtype)
    buffers[..., length:, :] = math.nan
    return [(k[:, :, :length], v[:, :, :length]) for k, v in buffers[-count:]]


@dtypes
def test_gathered_buffers_are_one_run_each(dtype):
    """The passing blocks of a late block: all of the first exchange, and of the second those from the back."""
    first, second = gathered(4, 4, 33, dtype), gathered(4, 2, 33, dtype)
    q, local = make_inputs(40, [40], dtype=dtype, dim=64, group=2)
    q, local = q[:1], [(k[:1], v[:1]) for k, v in local]
    runs = find_runs([*first, *second])
    assert [(run.num_rows, run.piece_len) for run in runs] == [(132, 33), (66, 33)]
    check(q, [*first, *second, *local], 0.125, causal_last=True)
    check(q, [*first[::-1], *second, *local], 0.125, causal_last=True, rows_alone=7)


def test_a_product_and_a_shift_divide_as_a_division_does():
    rows = torch.cat([torch.arange(5000), 2**31 - 1 - torch.arange(5000), torch.randint(2**31, (5000,))])
    for length in [*range(1, 70), 127, 128, 129, 1023, 1024, 1182, 2**16 - 1, 2**20 + 1, 2**30 + 1, 2**31 - 1]:
        k = torch.empty(1, 1, 1, 1).expand(1, 1, length, 1)
        magic, shift = Run.of(k, k, 2, 0, 0).divisor
        assert magic < 2**32
        # Products of less than 2 ** 63, in two parts of 16 bits.
        product = (rows * (magic >> 16) + (rows * (magic & 0xFFFF) >> 16)) >> 16
        assert torch.equal(product >> shift, rows // max(2, length)), length


@dtypes
def test_more_runs_than_a_bucket_holds(dtype):
    q, segments = make_inputs(20, [3, 5, 7, 9, 11, 1, 20], dtype=dtype, dim=16, group=1)
    assert len(find_runs(segments)) > triton_attention._RUNS_BUCKET
    check(q, segments, 0.25, causal_last=True)


@pytest.mark.parametrize("strided", [transposed, sliced_rows, sliced_heads_and_dim], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("queries", "keys"), [(63, [111, 63]), (1, [1200])], ids=["long", "split"])
@dtypes
def test_the_result_goes_where_it_is_wanted(queries, keys, strided, dtype):
    """And nowhere else in the buffer."""
    q, segments = make_inputs(queries, keys, dtype=dtype, dim=64, group=2)
    wanted, wanted_lse = triton_attention.segmented_attention(q, segments, 0.1, True)
    out = strided(torch.full_like(q, 3.0))
    buffer = out._base
    result, lse = triton_attention.segmented_attention(q, segments, 0.1, True, out=out)
    assert result is out or result.data_ptr() == out.data_ptr()
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    inside = strided(torch.zeros_like(q))._base
    assert torch.equal(buffer.isnan(), inside.isnan()), "what lies between the rows was written"


@causality
def test_scores_beyond_the_range_of_exp(causal_last):
    q, segments = make_inputs(63, [111, 63], dim=16, group=1, dtype=torch.float32)
    q, segments = q * 50, [(k * 50, v) for k, v in segments]
    out, lse = segmented_attention(q, segments, 1.0, causal_last, backend="triton")
    exact_out, exact_lse = reference.segmented_attention(*in_fp64(q, segments), 1.0, causal_last)
    assert exact_lse.max() > 1e4
    assert_out_close(out, exact_out, 1e-2)  # fp32 rounds scores of 1e4 by 1e-3
    assert_lse_close(lse, exact_lse, 1e-6)


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_any_scale(scale):
    check(*make_inputs(5, [111, 5], dtype=torch.float32), scale, causal_last=True)


# --- verify_attention ---


def random_rows(batch, heads, rows, count, dtype):
    order = torch.stack([torch.randperm(rows, generator=torch.Generator().manual_seed(i)) for i in range(heads)])
    return order[:, :count].expand(batch, -1, -1).to(DEVICE, dtype)


SHAPES = {  # queries, keys
    "one-token-one-key": (1, 1),
    "one-token": (1, 129),
    "one-token-long": (1, 2100),
    "window": (6, 63),
    "window-long": (16, 700),
    "tree": (26, 129),
    "nothing-but-itself": (5, 5),
}
MASKS = ("chain", "tree", "none", "some-see-nothing")
SHARES = (None, 0.5, 0, 1.0)  # of the past that are kept


def verify_cases():
    """Of two shapes every mask with every share, of the others each mask and share; in half precision windows."""
    for name, shape in SHAPES.items():
        is_short = name in ("window", "nothing-but-itself")
        for mask, share in product(MASKS, SHARES) if is_short else zip(MASKS, SHARES, strict=True):
            for backend, dtypes in (("torch", [torch.float32, torch.float64]), ("triton", TRITON_DTYPES)):
                for dtype in dtypes:
                    if dtype in (torch.float32, torch.float64) or "window" in name:
                        label = f"{backend}-{dtype_name(dtype)}-{name}-{mask}-kept={share}"
                        yield pytest.param(backend, dtype, *shape, mask, share, id=label)


@pytest.mark.parametrize(("backend", "dtype", "queries", "keys", "mask", "kept"), verify_cases())
@pytest.mark.each_choice
def test_verify_attention(backend, dtype, queries, keys, mask, kept):
    q, [(k, v)] = make_inputs(queries, [keys], dtype=dtype, dim=80, group=7 if queries < 6 else 4)
    num_masked = {"chain": queries, "none": 0}.get(mask, min(keys, queries + 3))
    visible = None
    if mask != "chain":
        visible = torch.rand(queries, num_masked, generator=torch.Generator().manual_seed(1)) < 0.4
        visible = visible.to(DEVICE)
        visible[: mask == "some-see-nothing"] = False
    if kept is not None:
        past = keys - num_masked
        kept = random_rows(
            q.shape[0], k.shape[1], past, int(kept * past), torch.int32 if queries % 2 else torch.long
        )
    out, lse = verify_attention(q, k, v, 80**-0.5, visible=visible, kept=kept, backend=backend)
    exact = reference.verify_attention(q.double(), k.double(), v.double(), 80**-0.5, visible=visible, kept=kept)
    assert out.dtype == dtype
    assert_out_close(out, exact[0], OUT_TOLERANCE[dtype])
    assert_lse_close(lse, exact[1], LSE_TOLERANCE[dtype])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_that_are_not_kept_are_not_read(backend):
    q, [(k, v)] = make_inputs(3, [70], dtype=torch.float32, dim=64)
    kept = torch.arange(0, 60, 2, device=DEVICE).expand(2, 2, -1)
    exact = verify_attention(q, k, v, 0.1, kept=kept, backend="reference")
    for states in (k, v):
        states[:, :, 1:60:2] = math.nan
    out, lse = verify_attention(q, k, v, 0.1, kept=kept, backend=backend)
    assert_out_close(out, exact[0], 2e-6)
    assert_lse_close(lse, exact[1], 3e-6)


@pytest.mark.parametrize("mask", ["chain", "tree", "none"])
@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
@pytest.mark.parametrize(
    ("queries", "lengths"), [(1, (1, 2, 129, 1500)), (5, (8, 70, 1499))], ids=["one", "window"]
)
@pytest.mark.parametrize("is_kept", [False, True], ids=["all", "kept"])
@pytest.mark.each_choice
def test_a_length_in_memory(mask, backend, queries, lengths, is_kept):
    """One launch serves all lengths of a buffer, behind whose keys there is anything, NaN included."""
    q, [(k, v)] = make_inputs(queries, [1500], dtype=torch.float32, dim=64)
    num_masked = {"chain": queries, "none": 0}.get(mask, queries + 3 if queries > 1 else 1)
    options = {}
    if mask != "chain":
        visible = torch.rand(queries, num_masked, generator=torch.Generator().manual_seed(1)) < 0.6
        options["visible"] = visible.to(DEVICE)
    if is_kept:
        shortest = lengths[0] - num_masked
        options["kept"] = random_rows(q.shape[0], k.shape[1], shortest, shortest, torch.int32)
    for length in lengths:
        mine = [states[:, :, :length] for states in (k, v)]
        exact = reference.verify_attention(*(x.double() for x in (q, *mine)), 0.1, **options)
        buffers = [torch.full_like(states, math.nan) for states in (k, v)]
        for buffer, states in zip(buffers, mine, strict=True):
            buffer[:, :, :length] = states
        num_keys = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        out, lse = verify_attention(q, *buffers, 0.1, num_keys=num_keys, **options, backend=backend)
        assert_out_close(out, exact[0], OUT_TOLERANCE[torch.float32])
        assert_lse_close(lse, exact[1], LSE_TOLERANCE[torch.float32])


def test_a_length_that_is_no_int32_is_refused():
    q, [(k, v)] = make_inputs(1, [3], dtype=torch.float32)
    for wrong in (torch.tensor([3]), torch.tensor(3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="num_keys must be one int32"):
            verify_attention(q, k, v, 0.1, num_keys=wrong)


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_a_strided_mask_and_cache(backend):
    q, [(k, v)] = make_inputs(4, [40], dtype=torch.float32, dim=64)
    visible = (torch.rand(9, 4, generator=torch.Generator().manual_seed(2)) < 0.5).to(DEVICE).t()
    exact = reference.verify_attention(q, k, v, 0.1, visible=visible)
    out, lse = verify_attention(q, sliced_rows(k), transposed(v), 0.1, visible=visible, backend=backend)
    assert_out_close(out, exact[0], 2e-6)
    assert_lse_close(lse, exact[1], 3e-6)


def test_a_mask_of_more_keys_than_there_are_is_refused():
    q, [(k, v)] = make_inputs(4, [3], dtype=torch.float32)
    with pytest.raises(ValueError, match="last 4 keys, but there are only 3"):
        verify_attention(q, k, v, 0.1)


def test_the_keys_are_split_where_there_are_few_rows():
    """Otherwise the tests above would not have seen partial results merged."""
    assert triton_attention._splits(4, 4500, 64, torch.device("cpu"))[0] == 4
    assert triton_attention._splits(400, 4500, 64, torch.device("cpu"))[0] == 1
    assert set(LENGTHS) >= {"decode-long", "verify-long"}
