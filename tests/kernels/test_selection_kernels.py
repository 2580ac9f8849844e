"""The importance of keys and the copy of the best, in every back end, against their definition in fp64."""

import math

import pytest
import torch

from apbv.kernels import kv_importance, reference, select_topk

from device import DEVICE, TRITON_DTYPES

BATCH, KV_HEADS = 2, 2
INF, NAN = math.inf, math.nan
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# The largest |importance - exact| / |exact| over all keys. All accumulate products of the same rounded inputs in
# fp32 at least; raw scores may cancel and are compared with the largest.
TOLERANCE = {"fp64": 1e-13, "fp32": 1e-5, "fp16": 1e-5, "bf16": 1e-5}

backends = pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param(backend, dtype, id=f"{backend}-{dtype}")
        for backend, dtypes in {"torch": ("fp64", "fp32", "fp16"), "triton": ("fp32", "fp16", "bf16")}.items()
        for dtype in dtypes
        if backend != "triton" or DTYPES[dtype] in TRITON_DTYPES
    ],
)
reductions = pytest.mark.parametrize("reduce", ["peak", "softmax", "dot"])

# keys, query tokens, heads per KV head, head dimension
SHAPES = {
    "one-key": (1, 5, 4, 64),
    "one-row": (63, 1, 1, 80),
    "several-row-tiles": (111, 10, 7, 64),
    "several-key-tiles": (129, 5, 7, 128),
    "padded-head": (129, 9, 4, 80),
    "several-splits": (600, 5, 1, 16),
}
shapes = pytest.mark.parametrize(("keys", "queries", "group", "dim"), SHAPES.values(), ids=SHAPES)


def strided(states, dtype):
    """The same rows out of a longer buffer ``[B, S, H, D]`` with NaN before, behind and beside them."""
    batch, heads, length, dim = states.shape
    buffer = torch.full((batch, length + 7, heads, dim + 16), NAN, dtype=dtype, device=DEVICE)
    rows = buffer[:, 3 : length + 3, :, 8 : dim + 8].transpose(1, 2)
    rows.copy_(states)
    return rows


def make_inputs(keys, queries, group, dim, dtype="fp64", *, size=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(BATCH, KV_HEADS * group, queries, dim, generator=generator) * size
    k = torch.randn(BATCH, KV_HEADS, keys, dim, generator=generator)
    return strided(q, DTYPES[dtype]), strided(k, DTYPES[dtype])


def lse_of(q, k, scale):
    return reference.segmented_attention(q.double(), [(k.double(), k.double())], scale, causal_last=False)[1]


def assert_close(importance, exact, reduce, tolerance):
    size = exact.abs().amax(dim=-1, keepdim=True) if reduce == "dot" else exact.abs()
    assert ((importance.double() - exact).abs() <= tolerance * size).all()


@backends
@reductions
@shapes
@pytest.mark.each_choice
def test_importance_equals_its_definition(backend, dtype, reduce, keys, queries, group, dim):
    q, k = make_inputs(keys, queries, group, dim, dtype)
    scale = dim**-0.5
    exact = by_definition(q, k, scale, reduce)
    importance = kv_importance(q, k, scale, reduce, backend=backend)
    assert importance.shape == (BATCH, KV_HEADS, keys)
    assert importance.dtype == (torch.float64 if dtype == "fp64" else torch.float32)
    assert_close(importance, exact, reduce, TOLERANCE[dtype])
    lse = lse_of(q, k, scale).to(importance.dtype)
    given = kv_importance(q, k, scale, reduce, lse=strided(lse[..., None], lse.dtype)[..., 0], backend=backend)
    assert_close(given, exact, reduce, TOLERANCE[dtype])


def by_definition(q, k, scale, reduce):
    """In fp64, where the reference hands out fp32; head by head."""
    q, k = q.double(), k.double()
    group = q.shape[1] // k.shape[1]
    heads = []
    for head in range(k.shape[1]):
        scores = (
            torch.cat([q[:, g] for g in range(head * group, (head + 1) * group)], dim=1) @ k[:, head].mT * scale
        )
        weights = scores if reduce == "dot" else scores.softmax(dim=-1)
        heads.append(weights.amax(dim=1) if reduce == "peak" else weights.mean(dim=1))
    return torch.stack(heads, dim=1)


@reductions
def test_reference_equals_the_definition(reduce):
    q, k = make_inputs(63, 5, 7, 80)
    importance = kv_importance(q, k, 0.1, reduce, backend="reference")
    assert_close(importance, by_definition(q, k, 0.1, reduce), reduce, 1e-7)


@backends
@pytest.mark.parametrize("keys", [1, 63])
def test_pooling_takes_the_highest_of_neighbours(backend, dtype, keys):
    q, k = make_inputs(keys, 5, 4, 64, dtype)
    exact = by_definition(q, k, 0.1, "dot")
    pooled = kv_importance(q, k, 0.1, "dot", pool=5, backend=backend)
    wide = [exact[..., max(0, j - 2) : j + 3].amax(dim=-1) for j in range(keys)]
    assert_close(pooled, torch.stack(wide, dim=-1), "dot", TOLERANCE[dtype])


@backends
@pytest.mark.parametrize("reduce", ["peak", "softmax"])
@pytest.mark.parametrize("with_lse", [False, True], ids=["no-lse", "lse"])
def test_scores_of_several_thousand(backend, dtype, reduce, with_lse):
    q, k = make_inputs(129, 5, 4, 64, dtype, size=400.0)
    lse = lse_of(q, k, 1.0)
    assert lse.max() > 5000
    importance = kv_importance(q, k, 1.0, reduce, lse=lse.to(torch.float32) if with_lse else None, backend=backend)
    exact = by_definition(q, k, 1.0, reduce)
    # fp32 holds a score or an lse of eight thousand to 5e-4, and sums of products to ten times that.
    assert_close(importance[exact > 1e-30], exact[exact > 1e-30], reduce, 1e-2)
    assert torch.isfinite(importance).all() and (importance[exact <= 1e-30] < 1e-29).all()


def test_no_keys_have_no_importance():
    q, k = make_inputs(0, 5, 4, 64, "fp32")
    assert kv_importance(q, k, 0.1, pool=5).shape == (BATCH, KV_HEADS, 0)


# ---- selection ----

SCORES = {
    "random": lambda scores: scores,
    "heavy-ties": lambda scores: scores.round(),
    "all-equal": lambda scores: torch.full_like(scores, 0.25),
    "signed-zeros": lambda scores: torch.where(scores > 0, 0.0, -0.0),
    "nan-and-infinite": lambda scores: (
        scores.masked_fill(scores > 0.8, NAN)
        .masked_fill(scores < -0.5, -INF)
        .masked_fill(scores.abs() < 0.05, INF)
    ),
    "all-nan": lambda scores: torch.full_like(scores, NAN),
}


@backends
@pytest.mark.parametrize(
    ("kind", "keys", "dim"),
    [(kind, 129, 80) for kind in SCORES] + [("random", 1, 64), ("all-nan", 1, 64), ("heavy-ties", 4500, 16)],
)
def test_selection_equals_its_definition(backend, dtype, kind, keys, dim):
    generator = torch.Generator().manual_seed(0)
    scores = SCORES[kind](torch.randn(BATCH, KV_HEADS, keys, generator=generator))
    scores = strided(scores[..., None], scores.dtype)[..., 0]
    states = torch.randn(2, BATCH, KV_HEADS, keys, dim, generator=generator)
    k, v = (strided(half, DTYPES[dtype]) for half in states)
    for count in sorted({0, 1, keys // 3, keys - 1, keys}):
        expected, rows = reference.select_topk(scores, k, v, count)
        indices, out = select_topk(scores, k, v, count, backend=backend)
        assert torch.equal(indices, expected) and indices.dtype == torch.int64
        assert torch.equal(out, rows) and out.dtype == k.dtype


@backends
@pytest.mark.parametrize("layout", ["longer", "rows-first", "dims-first"])
def test_selected_rows_land_in_the_callers_buffer(backend, dtype, layout):
    """Its rest stays as it is, whatever the strides."""
    _, k = make_inputs(111, 1, 1, 80, dtype)
    v = strided(k * 2, k.dtype)
    scores = torch.randn(BATCH, KV_HEADS, 111, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    out = torch.full((2, BATCH, KV_HEADS, 50, 80), 7.0, dtype=k.dtype, device=DEVICE)
    if layout == "rows-first":
        out = out.transpose(2, 3).contiguous().transpose(2, 3)
    elif layout == "dims-first":
        out = out.transpose(3, 4).contiguous().transpose(3, 4)
    indices, returned = select_topk(scores, k, v, 37, out=out, backend=backend)
    assert returned is out
    expected, rows = reference.select_topk(scores, k, v, 37)
    assert torch.equal(indices, expected)
    assert torch.equal(out[:, :, :, :37], rows)
    assert (out[:, :, :, 37:] == 7.0).all()


@backends
def test_selection_leaves_its_arguments_alone(backend, dtype):
    _, k = make_inputs(63, 1, 1, 64, dtype)
    scores = torch.randn(BATCH, KV_HEADS, 63).masked_fill(torch.rand(63) < 0.2, NAN).to(DEVICE)
    before = scores.clone(), k.clone()
    select_topk(scores, k, k, 20, backend=backend)
    assert torch.equal(scores.nan_to_num(9.0), before[0].nan_to_num(9.0)) and torch.equal(k, before[1])


# ---- errors ----


def of_shape(*shape):
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduce": "magic"}, "reduce must be one of peak, softmax, dot, not 'magic'"),
        ({"pool": 4}, "pool must be odd"),
        ({"pool": 0}, "pool must be odd"),
        ({"k": of_shape(1, 3, 9, 16)}, "4 query heads are not a multiple of 3"),
        ({"k": of_shape(1, 2, 9, 32)}, "differ in batch or head dimension"),
        ({"q_query": of_shape(1, 4, 0, 16)}, "no tokens"),
        ({"lse": of_shape(1, 2, 5)}, r"lse must be \(1, 4, 5\), not \(1, 2, 5\)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_importance_says_what_it_cannot_do(change, message):
    arguments = {"q_query": of_shape(1, 4, 5, 16), "k": of_shape(1, 2, 9, 16), "scale": 1.0}
    with pytest.raises(ValueError, match=message):
        kv_importance(**arguments | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": -1}, r"count must lie in 0 \.\. 9"),
        ({"count": 10}, r"count must lie in 0 \.\. 9"),
        ({"v": of_shape(1, 4, 9, 16)}, "k and v must have one shape"),
        ({"scores": of_shape(1, 2, 8)}, "k and v must have one shape, and scores"),
        ({"out": of_shape(2, 1, 2, 3, 16)}, "4 or more"),
        ({"out": of_shape(1, 2, 4, 16)}, "out must be"),
        ({"out": of_shape(2, 1, 2, 4, 16).double()}, "float64"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_selection_says_what_it_cannot_do(change, message):
    arguments = {"k": of_shape(1, 2, 9, 16), "v": of_shape(1, 2, 9, 16), "scores": of_shape(1, 2, 9), "count": 4}
    with pytest.raises(ValueError, match=message):
        select_topk(**arguments | change)
