"""Partial results from several places, some of them of the last queries only, merged where they are
wanted."""

import math

import pytest
import torch

from apbv.kernels import BackendError, merge_states, reference

from apbv_tests.attention_cases import (
    BACKENDS,
    BATCH,
    OUT_TOLERANCE,
    PLACES,
    assert_lse_close,
    assert_out_close,
    poisoned,
    randn,
    sliced_rows,
    transposed,
)
from apbv_tests.pairs import each_choice

INF = math.inf
HEADS = 3
# Triton does not merge in fp64, and the interpreter computes products of bf16 wrongly.
DTYPES = [torch.float32, torch.float16]


def partial_results(lengths, *, dim=80, dtype=torch.float32):
    outs = [
        randn(BATCH, HEADS, length, dim, dtype=dtype, seed=i) for i, length in enumerate(lengths)
    ]
    lses = [
        3 * randn(BATCH, HEADS, n, dtype=torch.float32, seed=9 + i) for i, n in enumerate(lengths)
    ]
    return outs, lses


def by_definition(outs, lses, queries=None):
    """Eq. 5 in fp64, of those results that reach so far back and saw anything."""
    queries = queries or max(out.shape[2] for out in outs)
    pad = torch.nn.functional.pad
    lses = torch.stack([pad(lse.double(), (queries - lse.shape[2], 0), value=-INF) for lse in lses])
    lses[lses == INF] = -INF
    outs = torch.stack(
        [pad(out.double(), (0, 0, queries - out.shape[2], 0)) for out in outs]
    ).nan_to_num()
    return (lses.softmax(dim=0).nan_to_num()[..., None] * outs).sum(dim=0), lses.logsumexp(dim=0)


def check(found, exact, dtype=torch.float32):
    out, lse = found
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_out_close(out, exact[0], OUT_TOLERANCE[dtype])
    assert_lse_close(lse, exact[1], 3e-6)
    assert not out[lse == -INF].any()


@each_choice(
    backend=BACKENDS,
    dtype=[*DTYPES, *DTYPES[::-1]],
    place=PLACES,
    nothing=[None, None, -INF, -INF, INF, INF],
    lengths=[(9, 9), (12, 9), (12, 37, 5), (5, 1, 5, 2), (37, 12), (17,)],
)
def test_results_of_the_last_queries_go_where_they_are_wanted(
    backend, dtype, place, nothing, lengths
):
    """What saw nothing may hold anything, and before the earliest query there is room for
    others."""
    outs, lses = partial_results(lengths, dtype=dtype)
    if nothing is not None:
        outs[0][:, :, -2:] = math.nan
        lses[0][:, :, -2:] = nothing
        for out, lse in zip(outs, lses, strict=True):
            out[:, :, -1] = math.nan
            lse[:, :, -1] = nothing
    queries = max(lengths) + 2
    exact = by_definition(outs, lses, queries)
    check(
        reference.merge_states(outs, lses, out=torch.empty_like(exact[0], dtype=dtype)),
        exact,
        dtype,
    )
    out, untouched = poisoned(place, (BATCH, HEADS, queries, 80), dtype)
    result, lse = merge_states([place(out) for out in outs], lses, out=out, backend=backend)
    assert result is out
    check((out, lse), exact, dtype)
    assert untouched().isnan().all(), "what lies beside the result was written"
    if lengths[0] == queries - 2:  # as in a ring, where results come one after the other
        running = transposed(outs[0])
        exact = by_definition(outs, lses)
        check(merge_states([running, *outs[1:]], lses, out=running, backend=backend), exact, dtype)


def in_one_buffer(outs, lses):
    """As a host receives them: the bytes of one out, then those of its lse; and NaN between them
    and the next."""
    parts = outs.flatten(1).view(torch.uint8)
    rows = lses.flatten(1).view(torch.uint8)
    buffer = outs.new_full(
        (len(outs), (parts.shape[1] + rows.shape[1]) // outs.element_size() + 8), math.nan
    )
    packed = buffer.view(torch.uint8)[:, : parts.shape[1] + rows.shape[1]]
    packed.copy_(torch.cat([parts, rows], dim=1))
    received = packed.split([parts.shape[1], rows.shape[1]], dim=1)
    return received[0].view(outs.dtype).view(outs.shape), received[1].view(lses.dtype).view(
        lses.shape
    )


def of_other_layouts(outs, lses):
    """Queries before heads, cut out of NaN; lses likewise, and the batch first."""
    outs = torch.stack([sliced_rows(transposed(out)) for out in outs]).transpose(2, 3).contiguous()
    return outs.transpose(2, 3), lses.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1)


@each_choice(
    backend=BACKENDS,
    dtype=[
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ],
    # Results, queries, numbers; the last of more results than a program loads together, for each
    # back end.
    shape=[
        (3, 0, 16),
        (1, 2, 256),
        (3, 9, 80),
        (9, 33, 16),
        (2, 1, 128),
        (17, 3, 129),
        *[(131, 3, 24)] * 2,
    ],
    layout=[None, in_one_buffer, of_other_layouts],
)
def test_results_in_one_tensor_are_merged_wherever_they_lie(backend, dtype, shape, layout):
    parts, queries, dim = shape
    outs, lses = map(torch.stack, partial_results([queries] * parts, dim=dim, dtype=dtype))
    lses[:, :, 2] *= 1000
    lses[0, :, 1] = INF
    outs[0, :, 1] = math.nan
    exact = by_definition(outs, lses)
    check(reference.merge_states(outs, lses), exact)
    outs, lses = layout(outs, lses) if layout else (outs, lses)
    check(merge_states(outs, lses, backend=backend), exact)


def test_what_does_not_fit_is_refused():
    outs, lses = partial_results((7, 4))
    with pytest.raises(ValueError, match="results of 7 queries do not fit into 5 rows"):
        merge_states(outs, lses, out=torch.empty(BATCH, HEADS, 5, 80))
    with pytest.raises(ValueError):
        merge_states(outs, lses[::-1])
    with pytest.raises(BackendError, match="accumulate in float32"):
        merge_states([outs[0].double()], [lses[0].double()], backend="triton")
