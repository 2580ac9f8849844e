"""The importance of keys and the copy of the best, in every back end, against their definition in
fp64."""

import math

import pytest
import torch

from apbv.kernels import block_means, kv_importance, reference, select_topk

from apbv_tests.attention_cases import randn
from apbv_tests.device import DEVICE, TRITON_DTYPES
from apbv_tests.pairs import each_choice

BATCH = 2
KV_HEADS = 2
INF = math.inf
NAN = math.nan
TWO_WAYS = [("torch", torch.float32), ("triton", torch.float16)]


def strided(states, dtype):
    """The same rows out of a longer buffer ``[B, S, H, D]`` with NaN before, behind and beside
    them."""
    batch, heads, length, dim = states.shape
    buffer = torch.full((batch, length + 7, heads, dim + 16), NAN, dtype=dtype, device=DEVICE)
    rows = buffer[:, 3 : length + 3, :, 8 : dim + 8].transpose(1, 2)
    return rows.copy_(states)


def make_inputs(keys, queries, group, dim, dtype=torch.float64, size=1.0):
    q = randn(BATCH, KV_HEADS * group, queries, dim) * size
    k = randn(BATCH, KV_HEADS, keys, dim, seed=1)
    return strided(q, dtype), strided(k, dtype)


def lse_of(q, k, scale):
    return reference.segmented_attention(
        q.double(), [(k.double(), k.double())], scale, causal_last=False
    )[1]


def assert_close(importance, exact, reduce, tolerance):
    """Relative to each key's; raw scores may cancel and are compared with the largest."""
    size = exact.abs().amax(dim=-1, keepdim=True) if reduce == "dot" else exact.abs()
    assert ((importance.double() - exact).abs() <= tolerance * size).all()


def by_definition(q, k, scale, reduce):
    """In fp64, head by head."""
    (q, k) = (q.double(), k.double())
    heads = []
    group = q.shape[1] // k.shape[1]
    for head in range(k.shape[1]):
        rows = torch.cat([q[:, g] for g in range(head * group, (head + 1) * group)], dim=1)
        scores = rows @ k[:, head].mT * scale
        weights = scores if reduce == "dot" else scores.softmax(dim=-1)
        heads.append(weights.amax(dim=1) if reduce == "peak" else weights.mean(dim=1))
    return torch.stack(heads, dim=1)


@each_choice(
    backend=["triton", "torch", "triton"],
    is_half=[False, True],
    # keys, query tokens, heads per KV head, head dimension; several tiles of rows, or of keys, or
    # splits
    shape=[(111, 10, 7, 64), (129, 5, 7, 128), (63, 1, 1, 80), (1, 5, 4, 64), (600, 5, 1, 16)],
)
def test_importance_equals_its_definition(backend, is_half, shape):
    """With an lse that is given, or not; and pooled."""
    wide, half = {
        "torch": (torch.float64, torch.float16),
        "triton": (torch.float32, TRITON_DTYPES[-1]),
    }[backend]
    q, k = make_inputs(*shape, half if is_half else wide)
    scale = shape[3] ** -0.5
    tolerance = 1e-13 if k.dtype == torch.float64 else 1e-5
    for reduce in ("peak", "softmax", "dot"):
        exact = by_definition(q, k, scale, reduce)
        pooled = [exact[..., max(0, j - 2) : j + 3].amax(dim=-1) for j in range(shape[0])]
        importance = kv_importance(q, k, scale, reduce, backend=backend)
        assert importance.dtype == torch.promote_types(k.dtype, torch.float32)
        assert_close(importance, exact, reduce, tolerance)
        lse = strided(lse_of(q, k, scale)[..., None], importance.dtype)[..., 0]
        assert_close(
            kv_importance(q, k, scale, reduce, lse=lse, backend=backend), exact, reduce, 1e-5
        )
        found = kv_importance(q, k, scale, reduce, pool=5, backend=backend)
        assert_close(found, torch.stack(pooled, dim=-1), reduce, tolerance)
        assert_close(reference.kv_importance(q, k, scale, reduce), exact, reduce, 1e-6)


@each_choice(way=TWO_WAYS, reduce=["peak", "softmax"], with_lse=[False, True, True, False])
def test_scores_of_several_thousand(way, reduce, with_lse):
    backend, dtype = way
    q, k = make_inputs(129, 5, 4, 64, dtype, size=400.0)
    lse = lse_of(q, k, 1.0)
    assert lse.max() > 5000
    importance = kv_importance(
        q, k, 1.0, reduce, lse=lse.to(torch.float32) if with_lse else None, backend=backend
    )
    exact = by_definition(q, k, 1.0, reduce)
    # fp32 holds a score or an lse of eight thousand to 5e-4, and sums of products to ten times
    # that.
    assert_close(importance[exact > 1e-30], exact[exact > 1e-30], reduce, 1e-2)
    assert torch.isfinite(importance).all() and (importance[exact <= 1e-30] < 1e-29).all()


# ---- selection ----

SCORES = {
    "random": lambda scores: scores,
    "heavy-ties": lambda scores: scores.round(),
    "signed-zeros": lambda scores: torch.where(scores > 0, 0.0, -0.0),
    "nan-and-infinite": lambda scores: torch.where(
        scores > 0.8, NAN, torch.where(scores < -0.5, -INF, INF)
    ),
    "all-nan": lambda scores: torch.full_like(scores, NAN),
}


def by_place(scores, k, v, count):
    """The places of the highest scores, of equal ones the earlier, NaN last; and their rows."""
    scores = scores.nan_to_num(nan=-INF, posinf=INF, neginf=-INF)
    indices = scores.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(dim=-1).values
    places = indices[..., None].expand(-1, -1, -1, k.shape[3])
    return indices, torch.stack([k.gather(2, places), v.gather(2, places)])


MORE = [
    ("heavy-ties", 9000, 16),
    ("heavy-ties", 1100, 16),
    ("random", 1, 64),
    ("signed-zeros", 129, 80),
]


@each_choice(way=TWO_WAYS, case=[*((kind, 129, 80) for kind in SCORES), *MORE])
def test_selection_equals_its_definition(way, case):
    (backend, dtype) = way
    (kind, keys, dim) = case
    scores = strided(
        SCORES[kind](randn(BATCH, KV_HEADS, keys, dtype=torch.float32))[..., None], torch.float32
    )
    scores = scores[..., 0]
    before = scores.clone()
    k, v = (strided(randn(BATCH, KV_HEADS, keys, dim, seed=seed), dtype) for seed in (1, 2))
    for count in sorted({0, 1, keys // 3, keys - 1, keys}):
        expected, rows = by_place(scores, k, v, count)
        assert all(map(torch.equal, reference.select_topk(scores, k, v, count), (expected, rows)))
        indices, out = select_topk(scores, k, v, count, backend=backend)
        assert torch.equal(indices, expected) and indices.dtype == torch.int64
        assert torch.equal(out, rows) and out.dtype == k.dtype
        # A longer buffer of the caller's, whose rest stays as it is, whatever the strides.
        dims = [(2, 2), (2, 3)][count % 2]
        longer = torch.full((2, BATCH, KV_HEADS, count + 13, dim), 7.0, dtype=dtype, device=DEVICE)
        longer = longer.transpose(*dims).contiguous().transpose(*dims)
        indices, returned = select_topk(scores, k, v, count, out=longer, backend=backend)
        assert returned is longer and torch.equal(indices, expected)
        assert torch.equal(longer[:, :, :, :count], rows) and (longer[:, :, :, count:] == 7.0).all()
    assert torch.equal(scores.nan_to_num(9.0), before.nan_to_num(9.0))


# ---- errors ----


def test_no_keys_have_no_importance_and_what_cannot_be_is_refused():
    assert kv_importance(*make_inputs(0, 5, 4, 64, torch.float32), 0.1, pool=5).shape == (
        BATCH,
        KV_HEADS,
        0,
    )
    q, k, scores, out = map(
        torch.zeros, ((1, 4, 5, 16), (1, 2, 9, 16), (1, 2, 9), (2, 1, 2, 3, 16))
    )
    for operator, *arguments, options, message in (
        (
            kv_importance,
            q,
            k,
            1.0,
            {"reduce": "magic"},
            "reduce must be one of peak, softmax, dot, not 'magic'",
        ),
        (kv_importance, q, k, 1.0, {"pool": 2}, "pool must be odd"),
        (block_means, k, 0, {}, "a block must have at least one row, not 0"),
        (
            kv_importance,
            q,
            k.expand(3, 2, 9, 16),
            1.0,
            {},
            r"k must have the shape \[B = 1, Hkv, T, D = 16\], not",
        ),
        (kv_importance, q[:, :3], k, 1.0, {}, "3 query heads are not a multiple of 2"),
        (kv_importance, q[:, :, :0], k, 1.0, {}, "no tokens"),
        (
            kv_importance,
            q,
            k,
            1.0,
            {"lse": q[:, :2, :, 0]},
            r"lse must have the shape \[B = 1, Hq = 4, n_q = 5\], not \[1, 2, 5\]",
        ),
        (select_topk, scores, k, k, 10, {}, r"count must lie in 0 \.\. 9"),
        (select_topk, scores[..., 1:], k, k, 4, {}, "scores must have the shape"),
        (select_topk, scores, k, k, 4, {"out": out}, "3 rows, not for 4"),
    ):
        with pytest.raises(ValueError, match=message):
            operator(*arguments, **options)
