"""Scores of visual tokens by their embeddings: against the definition in fp64."""

import math

import pytest
import torch

from apbv.kernels import reference, similarity_to, spatial_variety, temporal_change

from device import DEVICE, TRITON_DTYPES
from pairs import each_choice

DTYPES, LAST = [torch.float32, TRITON_DTYPES[-1]], (9, 1, 16, "after")

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


@each_choice(
    dtype=[DTYPES[0], *DTYPES[1:] * 2, DTYPES[0]],
    # Frames, places, numbers, neighbours.
    case=[(0, 3, 16, "before after"), (5, 2, 129, "before after"), (1, 3, 16, ""), (17, 2, 300, "before"), LAST],
)
def test_change_over_time(dtype, case):
    num_frames, places, dim, ends = case
    video = randn(num_frames + 2, places, dim, dtype=dtype)
    frames = video[1:-1]
    neighbours = {end: video[{"before": 0, "after": -1}[end]] for end in ends.split()}
    exact = reference.temporal_change(frames, **neighbours)
    assert_score(temporal_change(frames, **neighbours), exact)
    for place in (within_nan, column_major):
        strided = {end: place(frame) for end, frame in neighbours.items()}
        assert_score(temporal_change(place(frames), **strided), exact)


@each_choice(
    dtype=DTYPES,
    # Height, width, numbers, crop.
    case=[(1, 1, 16, 5), (7, 11, 129, 5), (1, 11, 16, 3), (5, 4, 80, 1), (13, 12, 80, 8)],
)
def test_variety_in_space(dtype, case):
    height, width, dim, crop = case
    frames = randn(2, height * width, dim, dtype=dtype)
    exact = reference.spatial_variety(frames, height, width, crop)
    for given in (within_nan(frames), column_major(frames)):
        assert_score(spatial_variety(given, height, width, crop), exact)


@each_choice(dtype=DTYPES, shape=[(1, 129), (63, 1100), (0, 16), (129, 80)])
def test_similarity_to_a_direction(dtype, shape):
    rows, dim = shape
    vectors = randn(rows, dim, dtype=dtype)
    direction = torch.nn.functional.normalize(randn(20, dim, seed=1), dim=-1).sum(dim=0)
    exact = reference.similarity_to(vectors, direction) / direction.norm()
    every_other = torch.stack([direction, direction], dim=1)[:, 0]
    for rows, along in ((within_nan(vectors), every_other), (column_major(vectors), direction)):
        assert_score(similarity_to(rows, along) / direction.norm(), exact)


def test_shapes_must_fit():
    x = torch.zeros(2, 6, 8)
    for message, call in {
        r"before must have the shape .* not \[3, 8\]": lambda: temporal_change(x, before=x[0, :3]),
        r"h\*w = 4, d\], not \[2, 6, 8\]": lambda: spatial_variety(x, 2, 2),
        r"direction must have the shape \[d = 8\], not \[7\]": lambda: similarity_to(x[0], x[0, 0, :7]),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
