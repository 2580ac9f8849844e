"""Scores of visual tokens by their embeddings: every back end against the definition in fp64."""

import math

import pytest
import torch

from apbv.kernels import BackendError, reference, similarity_to, spatial_variety, temporal_change

from device import DEVICE, TRITON_DTYPES

backends = pytest.mark.parametrize("backend", ["torch", "triton"])
dtypes = pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=lambda dtype: str(dtype).split(".")[1])

# Largest difference of cosine similarities (or, of a direction's length, of sums of them) from those in fp64.
TOLERANCE = 1e-6


def randn(*shape, dtype=torch.float32, seed=0):
    """Vectors that have something in common, as embeddings do; some are zero."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(*shape, generator=generator) + torch.randn(shape[-1], generator=generator)
    vectors.view(-1, shape[-1])[2::7] = 0.0
    return vectors.to(DEVICE, dtype)


def within_nan(vectors):
    """The same, cut out of a larger tensor whose rest is NaN; every dimension but the last is strided."""
    *lead, dim = vectors.shape
    buffer = vectors.new_full((*(2 * size + 1 for size in lead), dim + 16), math.nan)
    view = buffer[(*(slice(1, None, 2) for _ in lead), slice(8, 8 + dim))]
    return view.copy_(vectors)


def column_major(vectors):
    return vectors.transpose(-1, -2).contiguous().transpose(-1, -2)


def assert_score(score, exact):
    assert score.dtype == torch.float32 and score.shape == exact.shape
    torch.testing.assert_close(score, exact, rtol=TOLERANCE, atol=TOLERANCE)


@backends
@dtypes
@pytest.mark.parametrize("ends", ["", "before", "after", "before after"])
@pytest.mark.parametrize(
    ("num_frames", "places", "dim"), [(0, 3, 16), (1, 3, 16), (2, 5, 80), (5, 2, 129), (17, 2, 300), (33, 1, 16)]
)
@pytest.mark.pairwise
def test_change_over_time(backend, dtype, ends, num_frames, places, dim):
    video = randn(num_frames + 2, places, dim, dtype=dtype)
    frames = video[1:-1]
    neighbours = {end: video[{"before": 0, "after": -1}[end]] for end in ends.split()}
    exact = reference.temporal_change(frames, **neighbours)
    assert_score(temporal_change(frames, **neighbours, backend=backend), exact)
    strided = {end: within_nan(frame) for end, frame in neighbours.items()}
    assert_score(temporal_change(within_nan(frames), **strided, backend=backend), exact)


@backends
def test_a_frame_alone_changes_nowhere_and_a_still_one_neither(backend):
    frame = randn(1, 6, 80, dtype=torch.float16)
    assert temporal_change(frame, backend=backend).abs().max() == 0
    still = temporal_change(frame.expand(4, -1, -1), backend=backend)
    is_zero = (frame == 0).all(dim=-1)[0]
    assert still[:, ~is_zero].abs().max() <= TOLERANCE
    assert (still[:, is_zero] == 1).all()  # zeros are similar to nothing, not even to zeros


@backends
def test_nan_stays_with_its_neighbours(backend):
    frames = randn(6, 2, 80)
    frames[3, 1, 70] = math.nan
    change = temporal_change(frames, backend=backend)
    assert change.isnan().nonzero().tolist() == [[2, 1], [3, 1], [4, 1]]
    frames = randn(2, 35, 16)
    frames[1, 13, 3] = math.nan
    variety = spatial_variety(frames, 5, 7, backend=backend).view(2, 5, 7)
    assert variety[1, :, 5:].isnan().all() and variety.isnan().sum() == 5 * 2


@backends
@dtypes
@pytest.mark.parametrize("dim", [16, 129])
@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (5, 5), (6, 7), (11, 1), (1, 11), (7, 11)], ids=lambda size: str(size)
)
@pytest.mark.pairwise
def test_variety_in_space(backend, dtype, height, width, dim):
    frames = randn(2, height * width, dim, dtype=dtype)
    exact = reference.spatial_variety(frames, height, width)
    assert_score(spatial_variety(frames, height, width, backend=backend), exact)
    assert_score(spatial_variety(within_nan(frames), height, width, backend=backend), exact)


@backends
@pytest.mark.parametrize("crop", [1, 3, 8, 11])
def test_crops_of_other_sizes(backend, crop):
    frames = randn(1, 13 * 12, 80)
    exact = reference.spatial_variety(frames, 13, 12, crop)
    assert_score(spatial_variety(frames, 13, 12, crop, backend=backend), exact)


def test_crops_that_triton_cannot_hold():
    frames = randn(1, 13 * 12, 16)
    assert_score(spatial_variety(frames, 13, 12, 12), reference.spatial_variety(frames, 13, 12, 12))
    with pytest.raises(BackendError, match="11 tokens per side, not 12"):
        spatial_variety(frames, 13, 12, 12, backend="triton")


@backends
@dtypes
@pytest.mark.parametrize("rows", [0, 1, 63, 129])
@pytest.mark.parametrize("dim", [16, 80, 129, 1100])
@pytest.mark.pairwise
def test_similarity_to_a_direction(backend, dtype, rows, dim):
    vectors = randn(rows, dim, dtype=dtype)
    direction = torch.nn.functional.normalize(randn(20, dim, seed=1), dim=-1).sum(dim=0)
    exact = reference.similarity_to(vectors, direction) / direction.norm()
    assert_score(similarity_to(vectors, direction, backend=backend) / direction.norm(), exact)
    strided = similarity_to(within_nan(vectors), within_nan(direction), backend=backend)
    assert_score(strided / direction.norm(), exact)


@backends
def test_the_last_dimension_may_be_strided(backend):
    frames, before = randn(3, 35, 80), randn(35, 80, seed=1)
    changes = temporal_change(column_major(frames), column_major(before), backend=backend)
    assert_score(changes, reference.temporal_change(frames, before))
    varieties = spatial_variety(column_major(frames), 5, 7, backend=backend)
    assert_score(varieties, reference.spatial_variety(frames, 5, 7))
    direction = torch.stack([before[0], before[1]], dim=1)[:, 0]
    similar = similarity_to(column_major(frames[0]), direction, backend=backend)
    torch.testing.assert_close(similar, reference.similarity_to(frames[0], direction), rtol=1e-6, atol=1e-5)


def test_half_precision_is_summed_in_fp32():
    """By the back end that is chosen: on the CPU torch, since Triton's interpreter computes no bfloat16."""
    frames, direction = randn(3, 35, 300, dtype=torch.bfloat16), randn(300)
    assert_score(temporal_change(frames), reference.temporal_change(frames))
    assert_score(spatial_variety(frames, 5, 7), reference.spatial_variety(frames, 5, 7))
    similar = similarity_to(frames[0], direction)
    torch.testing.assert_close(similar, reference.similarity_to(frames[0], direction), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: temporal_change(x, before=x[0, :3]), r"before is torch.float32 \[3, 8\]"),
        (lambda x: temporal_change(x, after=x[0].half()), r"after is torch.float16 \[6, 8\]"),
        (lambda x: spatial_variety(x, 2, 2), "2 x 2 tokens cannot have 6"),
        (lambda x: spatial_variety(x, 2, 3, crop=0), "must be positive, not 0"),
        (lambda x: similarity_to(x[0], x[0, 0, :7]), r"\[6, 8\] have no direction of shape \[7\]"),
    ],
)
def test_shapes_must_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 6, 8))
