"""Attention of a few new tokens under a mask, by every back end."""

import math

import pytest
import torch

from apbv.kernels import reference, verify_attention

from apbv_tests.attention_cases import (
    BACKENDS,
    assert_attention,
    make_inputs,
    nan_where_unwritten,  # noqa: F401  (a fixture)
    sliced_rows,
    transposed,
)
from apbv_tests.device import DEVICE, TRITON_DTYPES
from apbv_tests.pairs import each_choice

pytestmark = pytest.mark.usefixtures("nan_where_unwritten")


def given_mask(queries, num_masked):
    """Whose numbers are side by side along the queries."""
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(num_masked, queries, generator=generator) < 0.4).to(DEVICE).mT


@each_choice(
    way=[
        ("torch", torch.float32),
        *(("triton", dtype) for dtype in TRITON_DTYPES),
        ("torch", torch.float64),
    ],
    shape=[(1, 129), (5, 5), (1, 1), (26, 129), (6, 63), (1, 2100), (16, 300)],  # queries, keys
    mask=["tree", "none", "some see nothing", "chain", "tree"],
)
def test_new_tokens_see_what_the_mask_lets_them(way, shape, mask):
    (backend, dtype) = way
    (queries, keys) = shape
    q, [(k, v)] = make_inputs(queries, [keys], dtype=dtype, group=7 if queries < 6 else 4)
    num_masked = {"chain": queries, "none": 0}.get(mask, min(keys, queries + 3))
    options = {}
    if mask != "chain":
        options["visible"] = given_mask(queries, num_masked)
        options["visible"][: mask == "some see nothing"] = False
    exact = reference.verify_attention(q.double(), k.double(), v.double(), 80**-0.5, **options)
    result = verify_attention(
        q, sliced_rows(k), transposed(v), 80**-0.5, **options, backend=backend
    )
    assert result[0].dtype == dtype
    assert_attention(result, exact, dtype)


@each_choice(
    mask=["chain", "tree", "none"],
    backend=BACKENDS,
    shape=[(1, (1, 2, 129, 1500)), (5, (8, 70, 1499))],
)
def test_a_length_in_memory(mask, backend, shape):
    """One launch serves all lengths of a buffer, behind whose keys there is anything, NaN
    included."""
    queries, lengths = shape
    q, [(k, v)] = make_inputs(queries, [1500], dtype=torch.float32, dim=64)
    num_masked = {"chain": queries, "none": 0}.get(mask, queries + 3 if queries > 1 else 1)
    options = {} if mask == "chain" else {"visible": given_mask(queries, num_masked)}
    for length in lengths:
        mine = (states[:, :, :length] for states in (k, v))
        exact = reference.verify_attention(*(x.double() for x in (q, *mine)), 0.1, **options)
        buffers = [states.clone() for states in (k, v)]
        for buffer in buffers:
            buffer[:, :, length:] = math.nan
        num_keys = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        result = verify_attention(q, *buffers, 0.1, num_keys=num_keys, **options, backend=backend)
        assert_attention(result, exact, torch.float32)


def test_what_does_not_fit_is_refused():
    q, [(k, v)] = make_inputs(4, [3], dtype=torch.float32)
    with pytest.raises(ValueError, match="last 4 keys, but there are only 3"):
        verify_attention(q, k, v, 0.1)
    for wrong in (torch.tensor([3]), torch.tensor(3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="num_keys must be one int32"):
            verify_attention(q[:, :, :1], k, v, 0.1, num_keys=wrong)
