"""Segmented attention and the merge of partial results, against their definition.

The reference is itself compared with torch's scaled_dot_product_attention under an explicit mask; everything
else is compared with the reference on the same numbers in fp64.
"""

import math
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from apbv.kernels import BackendError, merge_states, reference, segmented_attention

from attention_cases import (
    BATCH,
    LENGTHS,
    LSE_TOLERANCE,
    OUT_TOLERANCE,
    assert_lse_close,
    assert_out_close,
    causality,
    dtype_name,
    dtypes,
    in_fp64,
    lengths,
    make_inputs,
    sliced_heads_and_dim,
    sliced_rows,
    transposed,
)
from device import DEVICE
from families import KV_HEADS

INF = math.inf


def visibility(queries, keys, causal_last):
    """``[S, T]`` booleans: query i of S sees the first T - S + i + 1 of the last segment."""
    rows = []
    for i in range(queries):
        row = [True] * sum(keys[:-1])
        row += [not causal_last or j < keys[-1] - queries + i + 1 for j in range(keys[-1])]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.bool, device=DEVICE).reshape(queries, sum(keys))


def by_definition(q, segments, scale, causal_last):
    """Torch's attention with a dense mask, and the lse, in fp64; zeros and -inf where nothing is visible."""
    visible = visibility(q.shape[2], [k.shape[2] for k, _ in segments], causal_last)
    k, v = (torch.cat(states, dim=2).double() for states in zip(*segments, strict=True))
    group = q.shape[1] // k.shape[1]
    k, v = (states.repeat_interleave(group, dim=1) for states in (k, v))
    scores = (torch.einsum("bhsd,bhtd->bhst", q.double(), k) * scale).masked_fill(~visible, -INF)
    seeing = visible.any(dim=1)
    out = torch.zeros(q.shape, dtype=torch.float64, device=DEVICE)
    if seeing.any():
        with sdpa_kernel(SDPBackend.MATH):
            out[:, :, seeing] = scaled_dot_product_attention(
                q.double()[:, :, seeing], k, v, attn_mask=visible[seeing], scale=scale
            )
    return out, scores.logsumexp(dim=-1)


@lengths
@causality
@pytest.mark.parametrize("group", [1, 4], ids="G{}".format)
@pytest.mark.pairwise
def test_reference_equals_masked_sdpa(queries, keys, causal_last, group):
    q, segments = make_inputs(queries, keys, dim=16, group=group)
    out, lse = reference.segmented_attention(q, segments, 0.3, causal_last)
    expected_out, expected_lse = by_definition(q, segments, 0.3, causal_last)
    assert_out_close(out, expected_out, 1e-14)
    assert_lse_close(lse, expected_lse, 1e-6)  # the reference hands its lse out in fp32
    assert torch.equal(out[lse == -INF], torch.zeros_like(out[lse == -INF]))


@pytest.mark.parametrize(
    ("queries", "keys", "causal_last", "dtype"),
    [
        pytest.param(*shape, causal, dtype, id=f"{dtype_name(dtype)}-{'causal' if causal else 'visible'}-{name}")
        for name, shape in LENGTHS.items()
        for causal in (False, True)
        for dtype in OUT_TOLERANCE
        if "long" not in name or (dtype, causal) in [(torch.float32, True), (torch.bfloat16, False)]
    ],
)
def test_segmented_attention_for_awkward_lengths(queries, keys, causal_last, dtype):
    q, segments = make_inputs(queries, keys, dtype=dtype)
    out, lse = segmented_attention(q, segments, 80**-0.5, causal_last)
    assert out.shape == q.shape and out.dtype == dtype
    assert lse.shape == q.shape[:3]
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact_out, _ = reference.segmented_attention(*in_fp64(q, segments), 80**-0.5, causal_last)
    _, exact_lse = by_definition(q, segments, 80**-0.5, causal_last)
    assert_out_close(out, exact_out, OUT_TOLERANCE[dtype])
    assert_lse_close(lse, exact_lse, LSE_TOLERANCE[dtype])
    assert torch.equal(out[lse == -INF], torch.zeros_like(out[lse == -INF]))


@pytest.mark.parametrize("dim", [16, 64, 80, 128], ids="D{}".format)
@pytest.mark.parametrize("group", [1, 4, 7], ids="G{}".format)
@dtypes
@pytest.mark.pairwise
def test_segmented_attention_for_head_shapes(dim, group, dtype):
    q, segments = make_inputs(63, [129, 111], dim=dim, group=group, dtype=dtype, seed=1)
    out, lse = segmented_attention(q, segments, dim**-0.5, causal_last=True)
    exact_out, exact_lse = reference.segmented_attention(*in_fp64(q, segments), dim**-0.5, causal_last=True)
    assert_out_close(out, exact_out, OUT_TOLERANCE[dtype])
    assert_lse_close(lse, exact_lse.double(), max(LSE_TOLERANCE[dtype], 1e-6))


@causality
def test_how_keys_are_cut_into_segments_does_not_matter(causal_last):
    q, [(k, v)] = make_inputs(20, [129])
    whole = segmented_attention(q, [(k, v)], 0.2, causal_last)
    for cuts in ([1], [64], [109], [40, 40, 41]):
        parts = zip(*(states.tensor_split(cuts, dim=2) for states in (k, v)), strict=True)
        # The last part keeps at least the 20 keys of the causal triangle.
        out, lse = segmented_attention(q, list(parts), 0.2, causal_last)
        assert_out_close(out, whole[0], 1e-14)
        assert_lse_close(lse, whole[1], 1e-13)


def column_major(states):
    return states.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize(
    "strided",
    [
        transposed,
        sliced_rows,
        sliced_heads_and_dim,
        column_major,
    ],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_strides_do_not_matter(strided, dtype):
    q, segments = make_inputs(63, [111, 63], dtype=dtype)
    out, lse = segmented_attention(q, segments, 0.1, causal_last=True)
    views = [(strided(k), strided(v)) for k, v in segments]
    assert not strided(q).is_contiguous() and torch.equal(strided(q), q)
    strided_out, strided_lse = segmented_attention(strided(q), views, 0.1, causal_last=True)
    torch.testing.assert_close(strided_out, out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(strided_lse, lse, rtol=1e-6, atol=1e-6)


def test_one_kv_head_expanded_to_all():
    q, [(k, v)] = make_inputs(63, [63], group=2)
    k, v = (states[:, :1].expand(-1, 4, -1, -1) for states in (k, v))
    out, lse = segmented_attention(q, [(k, v)], 0.1, causal_last=True)
    exact_out, exact_lse = by_definition(q, [(k, v)], 0.1, causal_last=True)
    assert_out_close(out, exact_out, 1e-14)
    assert_lse_close(lse, exact_lse, 1e-13)


@causality
def test_scores_beyond_the_range_of_exp(causal_last):
    """Scores of several thousand: exp overflows without subtracting the maximum."""
    q, segments = make_inputs(63, [111, 63], dim=16, dtype=torch.float32)
    q, segments = q * 50, [(k * 50, v) for k, v in segments]
    out, lse = segmented_attention(q, segments, 1.0, causal_last)
    exact_out, exact_lse = by_definition(q, segments, 1.0, causal_last)
    assert exact_lse.max() > 1e4
    # fp32 rounds scores of 1e4 by 1e-3, and the weights of close competitors with them.
    assert_out_close(out, exact_out, 1e-2)
    assert_lse_close(lse, exact_lse, 1e-6)


@causality
def test_no_queries(causal_last):
    q, segments = make_inputs(0, [63, 5])
    out, lse = segmented_attention(q, segments, 0.1, causal_last)
    assert out.shape == q.shape and lse.shape == q.shape[:3]


def test_no_segments_is_an_error():
    q, _ = make_inputs(3, [3])
    with pytest.raises(ValueError, match="at least one"):
        segmented_attention(q, [], 0.1, causal_last=True)


@pytest.mark.parametrize("heads", [3, 5, 1])
def test_query_heads_must_be_a_multiple_of_kv_heads(heads):
    _, segments = make_inputs(3, [3])
    with pytest.raises(ValueError, match=rf"\b{heads} query heads .* {KV_HEADS} key/value heads"):
        segmented_attention(segments[0][0].new_zeros(BATCH, heads, 3, 80), segments, 0.1, causal_last=True)


# --- merge_states ---

# Triton's kernel accumulates in fp32.
MERGERS = {"torch": torch.float64, "triton": torch.float32, "reference": torch.float64}
MERGE_TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}

mergers = pytest.mark.parametrize(
    "merge", [partial(merge_states, backend=backend) for backend in MERGERS], ids=list(MERGERS)
)
mergers_and_dtypes = pytest.mark.parametrize(
    ("merge", "dtype"),
    [
        pytest.param(partial(merge_states, backend=backend), dtype, id=f"{backend}-{dtype_name(dtype)}")
        for backend, dtype in [*MERGERS.items(), ("torch", torch.float32)]
    ],
)
fp32_mergers = pytest.mark.parametrize("backend", ["torch", "triton"])


def make_partials(parts, *, queries=5, dim=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(parts, BATCH, 3, queries, dim, generator=generator, dtype=torch.float64)
    lses = torch.randn(parts, BATCH, 3, queries, generator=generator, dtype=torch.float64) * 3
    return outs.to(DEVICE, dtype), lses.to(DEVICE, dtype)


def merge_by_definition(outs, lses):
    """Eq. 5, number by number; a partial result that saw nothing takes no part."""
    outs, lses = outs.cpu(), lses.cpu()
    out, lse = torch.zeros_like(outs[0]), torch.full_like(lses[0], -INF)
    for index in torch.cartesian_prod(*map(torch.arange, lse.shape)).tolist():
        part = [i for i in range(len(outs)) if math.isfinite(lses[(i, *index)])]
        if not part:
            continue
        highest = max(float(lses[(i, *index)]) for i in part)
        weights = {i: math.exp(float(lses[(i, *index)]) - highest) for i in part}
        total = math.fsum(weights.values())
        lse[tuple(index)] = highest + math.log(total)
        out[tuple(index)] = sum(weights[i] / total * outs[(i, *index)] for i in part)
    return out.to(DEVICE), lse.to(DEVICE)


def assert_merged(merge, outs, lses, tolerance=1e-13):
    out, lse = merge(outs, lses)
    exact_out, exact_lse = merge_by_definition(outs.double(), lses.double())
    assert_out_close(out, exact_out, tolerance)
    assert_lse_close(lse, exact_lse, tolerance)


@mergers_and_dtypes
@pytest.mark.parametrize("parts", [1, 2, 9])
def test_merge_equals_its_definition(merge, dtype, parts):
    assert_merged(merge, *make_partials(parts, dtype=dtype), MERGE_TOLERANCE[dtype])


def test_the_reference_returns_what_the_others_do():
    """Hosts send each other what it returned, as bytes: all of them must have merged to one precision."""
    outs, lses = make_partials(3, dtype=torch.float32)
    assert {state.dtype for state in merge_states(outs, lses, backend="reference")} == {torch.float32}


@fp32_mergers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("parts", "queries", "dim"), [(2, 1, 128), (3, 9, 80), (9, 63, 16), (17, 3, 129), (1, 2, 256)]
)
def test_merge_equals_the_reference_in_fp32(backend, parts, queries, dim, dtype):
    outs, lses = make_partials(parts, queries=queries, dim=dim)
    outs, lses = outs.to(dtype), lses.float()
    out, lse = merge_states(outs, lses, backend=backend)
    assert out.dtype == lse.dtype == torch.float32
    exact_out, exact_lse = reference.merge_states(outs, lses)
    assert_out_close(out, exact_out, 1e-6)
    assert_lse_close(lse, exact_lse, 1e-6)


def in_one_buffer(outs, lses):
    """As a host receives them: the bytes of one out, then those of its lse; and NaN between them and the next."""
    parts, rows = outs.flatten(1).view(torch.uint8), lses.flatten(1).view(torch.uint8)
    buffer = outs.new_full((len(outs), (parts.shape[1] + rows.shape[1]) // outs.element_size() + 8), math.nan)
    packed = buffer.view(torch.uint8)[:, : parts.shape[1] + rows.shape[1]]
    packed.copy_(torch.cat([parts, rows], dim=1))
    received = packed.split([parts.shape[1], rows.shape[1]], dim=1)
    return received[0].view(outs.dtype).view(outs.shape), received[1].view(lses.dtype).view(lses.shape)


def of_other_layouts(outs, lses):
    """Queries before heads, cut out of NaN; lses likewise, and the batch first."""
    layout = torch.stack([sliced_rows(transposed(out)) for out in outs])
    return layout.transpose(2, 3).contiguous().transpose(2, 3), lses.permute(1, 3, 0, 2).contiguous().permute(
        2, 0, 3, 1
    )


@fp32_mergers
@pytest.mark.parametrize("strided", [in_one_buffer, of_other_layouts], ids=lambda function: function.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_merge_of_partials_wherever_they_lie(backend, strided, dtype):
    outs, lses = make_partials(3, queries=7, dim=80)
    outs, lses = outs.to(dtype), lses.float()
    views = strided(outs, lses)
    assert not views[0].is_contiguous() and not views[1].is_contiguous()
    assert torch.equal(views[0], outs) and torch.equal(views[1], lses)
    for merged, strided_merged in zip(
        merge_states(outs, lses, backend=backend), merge_states(*views, backend=backend), strict=True
    ):
        torch.testing.assert_close(strided_merged, merged, rtol=1e-6, atol=1e-6)


@mergers
def test_merge_of_no_queries(merge):
    out, lse = merge(torch.zeros(3, 1, 2, 0, 16, device=DEVICE), torch.zeros(3, 1, 2, 0, device=DEVICE))
    assert out.shape == (1, 2, 0, 16) and lse.shape == (1, 2, 0)


def test_merge_needs_an_lse_for_each_row():
    outs, lses = make_partials(2)
    with pytest.raises(ValueError, match=r"do not have lses of shape \[2, 2, 3, 4\]"):
        merge_states(outs, lses[..., :4])


def test_triton_does_not_merge_in_fp64():
    with pytest.raises(BackendError, match="accumulate in float32"):
        merge_states(*make_partials(2), backend="triton")


@mergers_and_dtypes
def test_merge_of_attention_over_parts_is_attention_over_all(merge, dtype):
    q, segments = make_inputs(31, [63, 1, 111], dim=16, group=2)
    partials = [reference.segmented_attention(q, [segment], 0.2, causal_last=False) for segment in segments]
    outs, lses = (torch.stack(states).to(dtype) for states in zip(*partials, strict=True))
    out, lse = merge(outs, lses)
    exact_out, exact_lse = by_definition(q, segments, 0.2, causal_last=False)
    assert_out_close(out, exact_out, MERGE_TOLERANCE[dtype])
    assert_lse_close(lse, exact_lse, MERGE_TOLERANCE[dtype])


@mergers_and_dtypes
@pytest.mark.parametrize("nothing", [-INF, INF], ids=["minus-inf", "plus-inf"])
@pytest.mark.parametrize("garbage", [0.0, math.nan, INF], ids=["zeros", "nan", "inf"])
@pytest.mark.parametrize("empty", [(0,), (2,), (0, 1), (0, 1, 2)], ids=str)
@pytest.mark.pairwise
def test_merge_ignores_partials_that_saw_nothing(merge, nothing, garbage, empty, dtype):
    outs, lses = make_partials(3, dtype=dtype)
    outs[list(empty), :, :, 2:] = garbage
    lses[list(empty), :, :, 2:] = nothing
    assert_merged(merge, outs, lses, tolerance=1e-6)
    if len(empty) == 3:
        out, lse = merge(outs, lses)
        assert torch.equal(out[:, :, 2:], torch.zeros_like(out[:, :, 2:]))
        assert (lse[:, :, 2:] == -INF).all()


@mergers
@pytest.mark.parametrize("base", [-1e4, -200.0, 0.0, 200.0, 1e4])
@pytest.mark.parametrize("gap", [10.0, 100.0, 1000.0])
def test_merge_of_far_apart_partials(merge, base, gap):
    outs, lses = make_partials(3, dtype=torch.float32)
    lses = lses * 0 + base + gap * torch.tensor([-1.0, 1.0, 0.0], device=DEVICE)[:, None, None, None]
    assert_merged(merge, outs, lses, tolerance=1e-6)


@mergers
def test_merge_leaves_its_arguments_alone(merge):
    outs, lses = make_partials(3, dtype=torch.float32)
    lses[0], outs[0] = INF, math.nan
    before = outs.clone(), lses.clone()
    merge(outs, lses)
    assert torch.equal(lses, before[1]) and outs.equal(outs) is False
    assert torch.equal(outs.nan_to_num(7.0), before[0].nan_to_num(7.0))
