"""Partial results from several places, some of them of the last queries only, merged where they are wanted."""

import math

import pytest
import torch

from apbv.kernels import merge_states, reference, segmented_attention

from attention_cases import (
    BATCH,
    LSE_TOLERANCE,
    OUT_TOLERANCE,
    assert_lse_close,
    assert_out_close,
    in_fp64,
    make_inputs,
    sliced_heads_and_dim,
    sliced_rows,
    transposed,
)
from device import DEVICE

HEADS = 3
BACKENDS = ["torch", "triton", "reference"]
# Triton does not merge in fp64, and the interpreter computes products of bf16 wrongly.
DTYPES = [torch.float32, torch.float16]
PLACES = [transposed, sliced_rows, sliced_heads_and_dim]

backends = pytest.mark.parametrize("backend", BACKENDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16"])
places = pytest.mark.parametrize("place", PLACES, ids=lambda function: function.__name__)


def partial_results(lengths, *, dim=80, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    outs = [torch.randn(BATCH, HEADS, length, dim, generator=generator) for length in lengths]
    lses = [3 * torch.randn(BATCH, HEADS, length, generator=generator) for length in lengths]
    return [out.to(DEVICE, dtype) for out in outs], [lse.to(DEVICE) for lse in lses]


def expected(outs, lses, queries):
    """Eq. 5 query by query, of those results that reach so far back."""
    merged = torch.zeros(BATCH, HEADS, queries, outs[0].shape[3], dtype=torch.float64, device=DEVICE)
    lse = torch.full(merged.shape[:3], -math.inf, dtype=torch.float64, device=DEVICE)
    for query in range(queries):
        seen = [(o, x) for o, x in zip(outs, lses, strict=True) if query >= queries - o.shape[2]]
        if seen:
            last = query - queries
            ranked = torch.stack([x[:, :, last].double() for _, x in seen])
            parts = torch.stack([o[:, :, last].double() for o, _ in seen])
            merged[:, :, query] = (ranked.softmax(dim=0)[..., None] * parts).sum(dim=0)
            lse[:, :, query] = ranked.logsumexp(dim=0)
    return merged, lse


def poisoned(place, shape, dtype):
    """A view to be filled inside a buffer of NaN, and a look at what of the buffer must stay so."""
    view = place(torch.full(shape, math.nan, dtype=dtype, device=DEVICE))
    inside = torch.zeros_like(view._base, dtype=torch.bool)
    inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    return view, lambda: view._base[~inside]


@backends
@dtypes
@places
@pytest.mark.parametrize(
    "lengths", [(9, 9), (37, 12), (12, 37, 5), (63,), (5, 1, 5, 2)], ids=lambda x: "-".join(map(str, x))
)
@pytest.mark.pairwise
def test_results_of_the_last_queries_go_where_they_are_wanted(backend, dtype, place, lengths):
    outs, lses = partial_results(lengths, dtype=dtype)
    queries = max(lengths)
    out, untouched = poisoned(place, (BATCH, HEADS, queries, 80), dtype)
    result, lse = merge_states(outs, lses, out=out, backend=backend)
    assert result is out and lse.dtype == torch.float32
    merged, merged_lse = expected(outs, lses, queries)
    assert_out_close(out, merged, OUT_TOLERANCE[dtype])
    assert_lse_close(lse, merged_lse, 3e-6)
    assert untouched().isnan().all(), "what lies beside the result was written"


@backends
def test_queries_that_no_result_is_of_saw_nothing(backend):
    outs, lses = partial_results((7, 4))
    for of in (outs, torch.stack([out[:, :, -4:] for out in outs])):
        given = lses if of is outs else torch.stack([lse[:, :, -4:] for lse in lses])
        out, lse = merge_states(of, given, out=torch.full((BATCH, HEADS, 11, 80), math.nan), backend=backend)
        merged, merged_lse = expected(list(of), list(given), 11)
        assert_out_close(out, merged, 2e-6)
        assert_lse_close(lse, merged_lse, 3e-6)


@backends
@dtypes
def test_the_first_result_may_be_overwritten(backend, dtype):
    """So results that come one after the other, as in a ring, need room for one."""
    outs, lses = partial_results((37, 37, 12), dtype=dtype)
    merged, merged_lse = expected(outs, lses, 37)
    running = transposed(outs[0])
    out, lse = merge_states([running, *outs[1:]], lses, out=running, backend=backend)
    assert out is running
    assert_out_close(out, merged, OUT_TOLERANCE[dtype])
    assert_lse_close(lse, merged_lse, 3e-6)


@backends
@pytest.mark.parametrize("nothing", [-math.inf, math.inf], ids=["minus-inf", "plus-inf"])
def test_what_saw_nothing_may_hold_anything(backend, nothing):
    outs, lses = partial_results((9, 9, 4))
    for part in (0, 2):
        outs[part][:, :, -2:], lses[part][:, :, -2:] = math.nan, nothing
    outs[1][:, :, -1], lses[1][:, :, -1] = math.nan, nothing
    out, lse = merge_states(outs, lses, backend=backend)
    seen = [torch.where(x.isinf(), -math.inf, x).double() for x in lses]
    finite = [o.nan_to_num(0.0) for o in outs]
    merged, merged_lse = expected(finite, seen, 9)
    assert_out_close(out[:, :, :-1], merged[:, :, :-1], 2e-6)
    assert_lse_close(lse[:, :, :-1], merged_lse[:, :, :-1], 3e-6)
    assert not out[:, :, -1].any() and (lse[:, :, -1] == -math.inf).all()


def test_room_for_fewer_queries_is_refused():
    outs, lses = partial_results((7, 4))
    with pytest.raises(ValueError, match="results of 7 queries do not fit into 5 rows"):
        merge_states(outs, lses, out=torch.empty(BATCH, HEADS, 5, 80))
    with pytest.raises(ValueError, match="do not have lses of shape"):
        merge_states(outs, lses[::-1])


# --- attention into a given output ---

SHAPES = {
    "square": (63, [63], 0),
    "passing": (63, [40, 23, 63], 0),
    "first rows alone": (63, [40, 23, 63], 17),
    "all rows alone": (63, [40, 63], 63),
    "blind rows": (63, [20], 0),
    "blind rows alone": (63, [9, 20], 50),
    "few queries": (5, [129, 1, 63], 0),
    "one query": (1, [1200], 0),
    "nothing to see": (9, [0, 0], 0),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal_last", [False, True], ids=["visible", "causal"])
@places
@dtypes
@pytest.mark.parametrize(("queries", "keys", "alone"), SHAPES.values(), ids=SHAPES)
@pytest.mark.pairwise
def test_attention_goes_where_it_is_wanted(backend, causal_last, place, dtype, queries, keys, alone):
    q, segments = make_inputs(queries, keys, dtype=dtype, dim=64, group=2)
    out, untouched = poisoned(place, q.shape, dtype)
    options = {"rows_alone": alone}
    result, lse = segmented_attention(q, segments, 0.1, causal_last, **options, out=out, backend=backend)
    exact = reference.segmented_attention(*in_fp64(q, segments), 0.1, causal_last, **options)
    assert result.data_ptr() == out.data_ptr() and result.stride() == out.stride()
    assert_out_close(out, exact[0], OUT_TOLERANCE[dtype])
    assert_lse_close(lse, exact[1], LSE_TOLERANCE[dtype])
    assert untouched().isnan().all(), "what lies beside the result was written"


def test_an_output_that_does_not_fit_is_refused():
    q, segments = make_inputs(5, [9], dtype=torch.float32)
    for out in (q[:, :, :4], q.half()):
        with pytest.raises(ValueError, match=r"the result is of shape .*, and out is of shape"):
            segmented_attention(q, segments, 0.1, True, out=out)
