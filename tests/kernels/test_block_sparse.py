"""Block-sparse attention and the scores of blocks: every back end against plain loops in fp64."""

import itertools
import math

import pytest
import torch

from apbv.kernels import (
    ListedBlocks,
    antidiagonal_scores,
    block_means,
    block_sparse_attention,
    reference,
    tiles,
    torch_block_scores,
    triton_block_sparse,
)

from apbv_tests.attention_cases import BACKENDS, assert_attention, sliced_rows, transposed
from apbv_tests.device import DEVICE, TRITON_DTYPES
from apbv_tests.pairs import each_choice

backends = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = [torch.float32, TRITON_DTYPES[-1]]
HEADS = 4
KV_HEADS = 2


def states(tokens, dim, dtype=torch.float64, seed=0, batch=1):
    """q, k and v as projections leave them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, tokens, dim) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [
        transposed(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes
    ]


def masked(tokens, query_block, key_block, density, batch=1):
    """Any blocks, those on and behind the diagonal included, of which nothing must depend."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, HEADS, -(-tokens // query_block), -(-tokens // key_block))
    return (torch.rand(shape, generator=generator) < density).to(DEVICE)


def row_by_row(q, k, v, kept, scale, blocks):
    """Attention of each query to the keys of the blocks before its own that are kept, and to its
    own block's."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    query_block, key_block = blocks
    out = torch.zeros_like(q)
    lse = torch.zeros(q.shape[:3], dtype=torch.float64)
    for head in range(q.shape[1]):
        keys, values = (x[0, head // (q.shape[1] // k.shape[1])] for x in (k, v))
        for row in range(q.shape[2]):
            block = row // query_block
            seen = [
                key for key in range(block * query_block) if kept[0, head, block, key // key_block]
            ]
            seen += range(block * query_block, row + 1)
            scores = keys[seen] @ q[0, head, row] * scale
            lse[0, head, row] = scores.logsumexp(dim=0)
            out[0, head, row] = scores.softmax(dim=0) @ values[seen]
    return out.to(DEVICE), lse.to(DEVICE)


@each_choice(
    backend=["torch", "triton"],
    case=[(1, (32, 32)), (63, (32, 16)), (150, (64, 32)), (63, (32, 16))],
)
def test_each_query_sees_its_block_and_the_listed_ones(backend, case):
    tokens, blocks = case
    q, k, v = states(tokens, 16, torch.float32)
    kept = masked(tokens, *blocks, 0.4)
    listed = ListedBlocks.of(kept, *blocks)
    result = block_sparse_attention(q, k, v, listed, 0.3, backend=backend)
    exact = row_by_row(q, k, v, kept, 0.3, blocks)
    assert_attention(result, exact, torch.float32)
    defined = reference.block_sparse_attention(q, k, v, listed, 0.3, out=torch.empty_like(q))
    assert_attention(defined, exact, torch.float32)


@each_choice(
    backend=["triton", "triton", "torch"],
    dtype=DTYPES,
    shape=[(129, 80), (256, 16), (200, 128)],
    blocks=[(128, 128), (64, 16), (128, 64), (256, 32)],
    density=[0.3, 1.0, 0.3, 0.0],
)
def test_many_blocks(backend, dtype, shape, blocks, density):
    (tokens, dim) = shape
    batch = 2 if density == 0.3 else 1
    q, k, v = (sliced_rows(x) for x in states(tokens, dim, dtype, batch=batch))
    listed = ListedBlocks.of(masked(tokens, *blocks, density, batch), *blocks)
    exact = reference.block_sparse_attention(
        *(x.double() for x in (q, k, v)),
        listed,
        dim**-0.5,
        out=torch.empty_like(q, dtype=torch.float64),
    )
    given = transposed(torch.full_like(q, math.nan))
    for out in (None, given):
        result = block_sparse_attention(q, k, v, listed, dim**-0.5, out=out, backend=backend)
        assert out is None or result[0].data_ptr() == out.data_ptr()
        assert_attention(result, exact, dtype)


def skipping_row_by_row(q, k, v, listed, scale, skip_below):
    """As FlashAttention's loop goes over blocks, and which values are left out."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    out = torch.zeros_like(q)
    lse = torch.zeros(q.shape[:3], dtype=torch.float64)
    num_left_out = 0
    for head in range(q.shape[1]):
        keys = k[0, head // (q.shape[1] // k.shape[1])]
        values = v[0, head // (q.shape[1] // k.shape[1])]
        for first in range(0, q.shape[2], 16):
            rows = range(first, min(first + 16, q.shape[2]))
            block = first // listed.query_block
            highest = {row: -math.inf for row in rows}
            sums = {row: 0.0 for row in rows}
            totals = {row: torch.zeros(q.shape[3], dtype=torch.float64) for row in rows}
            columns = [
                range(start * listed.key_block, (start + 1) * listed.key_block)
                for start in listed.indices[
                    0, head, block, : listed.counts[0, head, block]
                ].tolist()
            ]
            own = range(block * listed.query_block, q.shape[2])
            for column in [*columns, own]:
                distances = []
                weights = {}
                for row in rows:
                    seen = column if column is not own else range(own.start, row + 1)
                    scores = keys[seen.start : seen.stop] @ q[0, head, row] * scale
                    before = highest[row]
                    highest[row] = max(before, float(scores.max()))
                    distances.append(float(scores.max()) - highest[row])
                    weights[row] = (scores - highest[row]).exp()
                    decay = math.exp(before - highest[row])
                    sums[row] = sums[row] * decay + float(weights[row].sum())
                    totals[row] = totals[row] * decay
                if column is not own and max(distances) < skip_below:
                    num_left_out += 1
                    continue
                for row in rows:
                    stop = column.start + len(weights[row])
                    totals[row] = totals[row] + weights[row] @ values[column.start : stop]
            for row in rows:
                out[0, head, row] = totals[row] / sums[row]
                lse[0, head, row] = highest[row] + math.log(sums[row])
    return (out.to(DEVICE), lse.to(DEVICE)), num_left_out


@each_choice(
    backend=["torch", "triton"],
    case=[(150, (64, 32)), (130, (32, 16)), (300, (128, 64)), (75, (32, 32))],
    skip_below=[-1.0, -0.5, -30.0],
)
def test_values_that_weigh_little_are_left_out(backend, case, skip_below):
    tokens, blocks = case
    q, k, v = states(tokens, 16, torch.float32)
    # Some blocks weigh more than others.
    k = k * torch.linspace(0.2, 4.0, tokens, device=DEVICE)[:, None].flip(0)
    listed = ListedBlocks.of(masked(tokens, *blocks, 0.7), *blocks)
    exact, num_left_out = skipping_row_by_row(q, k, v, listed, 0.3, skip_below)
    assert (num_left_out > 0) == (skip_below > -30)
    result = block_sparse_attention(q, k, v, listed, 0.3, skip_below=skip_below, backend=backend)
    assert_attention(result, exact, torch.float32)
    defined = reference.block_sparse_attention(
        q, k, v, listed, 0.3, skip_below=skip_below, out=torch.empty_like(q)
    )
    assert_attention(defined, exact, torch.float32)


@each_choice(
    backend=["triton", "triton", "torch"],
    dtype=DTYPES,
    shape=[(129, 80), (256, 16), (200, 128)],
    blocks=[(128, 64), (64, 32), (256, 128)],
)
def test_many_blocks_of_which_values_are_left_out(backend, dtype, shape, blocks):
    tokens, dim = shape
    q, k, v = (sliced_rows(x) for x in states(tokens, dim, dtype, batch=2))
    listed = ListedBlocks.of(masked(tokens, *blocks, 0.8, batch=2), *blocks)
    skip_below = -0.123  # no score of another precision is likely to come between
    exact = reference.block_sparse_attention(
        *(x.double() for x in (q, k, v)),
        listed,
        dim**-0.5,
        skip_below=skip_below,
        out=torch.empty_like(q, dtype=torch.float64),
    )
    result = block_sparse_attention(
        q, k, v, listed, dim**-0.5, skip_below=skip_below, backend=backend
    )
    assert_attention(result, exact, dtype)


@pytest.mark.filterwarnings("ignore:All-NaN")
@backends
def test_what_is_not_listed_is_not_read(backend):
    """Nothing but its own queries sees the second block, so that others stay free of what it
    holds."""
    q, k, v = states(160, 16, torch.float32)
    k[:, :, 32:64] = math.nan
    v[:, :, 32:64] = math.nan
    kept = torch.ones(1, HEADS, 5, 5, dtype=torch.bool, device=DEVICE)
    kept[..., 1] = False
    out, lse = block_sparse_attention(q, k, v, ListedBlocks.of(kept, 32, 32), 0.3, backend=backend)
    for result in (out, lse):
        others = torch.cat([result[:, :, :32], result[:, :, 64:]], dim=2)
        assert others.isfinite().all() and result[:, :, 32:64].isnan().all()


@pytest.mark.parametrize("gpu", [(8, 163), (9, 227), (10, 227), (12, 99)], ids=str)
def test_spargeattns_blocks_are_tiles_in_half_precision(monkeypatch, gpu):
    monkeypatch.setattr(
        tiles, "gpu_of", lambda device: ("none", tiles.kind_of(gpu[0], gpu[1] * 1024), "any")
    )
    for rows, dim in itertools.product((32, 64, 128), (64, 80, 128)):
        listed = ListedBlocks.of(masked(300, rows, rows // 2, 1), rows, rows // 2)
        tile = triton_block_sparse.choose_tile(
            torch.empty(1, HEADS, 300, dim, dtype=torch.bfloat16), listed
        )
        assert (tile.rows, tile.keys) == (rows, rows // 2)


def test_lists_hold_what_a_mask_keeps_before_the_diagonal():
    kept = masked(300, 64, 32, 0.5)
    listed = ListedBlocks.of(kept, 64, 32)
    for head in range(HEADS):
        for row in range(5):
            places = [c for c in range(10) if kept[0, head, row, c] and c < 2 * row]
            count = listed.counts[0, head, row].item()
            assert listed.indices[0, head, row, :count].tolist() == places
            assert listed.kept[0, head, row].nonzero().flatten().tolist() == places
    # 300 tokens are four blocks of 64 queries, and one of 44.
    earlier = (
        listed.kept.repeat_interleave(64, dim=2)
        .repeat_interleave(32, dim=3)[:, :, :300, :300]
        .sum()
    )
    own = HEADS * (4 * 64 * 65 // 2 + 44 * 45 // 2)
    assert listed.num_scores(300) == earlier + own


@each_choice(
    backend=["torch", "triton"],
    shape=[(1, 4, 8), (41, 3, 12), (32, 8, 16), (29, 1, 8), (150, 4, 32)],
    dtype=[*DTYPES, torch.float32],
)
def test_antidiagonals_are_those_of_the_reference(backend, shape, dtype):
    """Which ``test_sparse`` compares with the paper's."""
    tokens, *sizes = shape
    q, k = (sliced_rows(x) for x in states(tokens, 16, dtype)[:2])
    scores = antidiagonal_scores(q, k, 0.5, *sizes, backend=backend)
    exact = reference.antidiagonal_scores(q.double(), k.double(), 0.5, *sizes)
    torch.testing.assert_close(scores.double(), exact.double(), rtol=1e-5, atol=1e-6)


@each_choice(
    backend=["torch", "triton", "torch", "triton"],
    dtype=DTYPES,
    # Rows, numbers, rows of a block, whether centred, and how many numbers are widened at a time.
    case=[
        (1, 16, 64, True, 1),
        (64, 80, 64, False, 1),
        (200, 128, 64, True, 2**15),
        (301, 33, 128, False, 2**30),
    ],
)
def test_means_of_blocks_and_of_all_cosines_in_them(monkeypatch, backend, dtype, case):
    tokens, dim, block, is_centered, most = case
    rows = states(tokens, dim, dtype)[1] + torch.randn(dim, device=DEVICE).to(dtype)
    rows[:, :, tokens // 2] = 0  # similar to nothing, not even to itself
    rows = sliced_rows(rows)
    center = rows.float().mean(dim=2) if is_centered else None
    monkeypatch.setattr(torch_block_scores, "MOST_ELEMENTS", most)
    found = block_means(rows, block, center=center, backend=backend)
    center = None if center is None else center.double()
    exact = reference.block_means(rows.double(), block, center=center)
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=1e-6)


def test_shapes_must_fit():
    q, k, _ = states(40, 16)
    listed = ListedBlocks.of(masked(40, 32, 16, 0.5), 32, 16)
    for message, call, *arguments, options in (
        (
            r"k must have the shape .*S = 40.* not \[",
            block_sparse_attention,
            q,
            k[:, :, 1:],
            k[:, :, 1:],
            listed,
            1.0,
            {},
        ),
        (
            r"out must have the shape .* not \[1, 2, 40",
            block_sparse_attention,
            q,
            k,
            k,
            listed,
            1.0,
            {"out": q[:, :2]},
        ),
        ("blocks of 16 queries and 32 keys", ListedBlocks.of, listed.kept, 16, 32, {}),
        ("a stride of 3 does not divide", antidiagonal_scores, q, k, 1.0, 3, 32, {}),
        (r"center must have the shape \[B = 1, H", block_means, k, 8, {"center": k[:, :, :1]}),
    ):
        with pytest.raises(ValueError, match=message):
            call(*arguments, **options)
