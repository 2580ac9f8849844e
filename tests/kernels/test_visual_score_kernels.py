"""Scores of visual tokens by their embeddings: against the definition in fp64."""

import math

import pytest
import torch
from torch.nn import functional

from apbv.kernels import similarity_to, spatial_variety, temporal_change

from apbv_tests.device import DEVICE, TRITON_DTYPES
from apbv_tests.pairs import each_choice

DTYPES = [torch.float32, TRITON_DTYPES[-1]]
LAST = (9, 1, 16, "after")

# Largest difference of cosine similarities (or, of a direction's length, of sums of them) from
# those in fp64.
TOLERANCE = 1e-6


def randn(*shape, dtype=torch.float32, seed=0):
    """Vectors that have something in common, as embeddings do; some are zero."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(*shape, generator=generator) + torch.randn(shape[-1], generator=generator)
    vectors.view(-1, shape[-1])[2::7] = 0.0
    return vectors.to(DEVICE, dtype)


def within_nan(vectors):
    """The same, cut out of a larger tensor whose rest is NaN; every dimension but the last is
    strided."""
    *lead, dim = vectors.shape
    buffer = vectors.new_full((*(2 * size + 1 for size in lead), dim + 16), math.nan)
    view = buffer[(*(slice(1, None, 2) for _ in lead), slice(8, 8 + dim))]
    return view.copy_(vectors)


def column_major(vectors):
    return vectors.transpose(-1, -2).contiguous().transpose(-1, -2)


def assert_score(score, exact):
    assert score.dtype == torch.float32 and score.shape == exact.shape
    torch.testing.assert_close(score, exact, rtol=TOLERANCE, atol=TOLERANCE)


def exact_change(frames, before=None, after=None):
    """Compute 1 minus the mean cosine similarity with the same place in the adjacent frames."""
    units = functional.normalize(frames.double(), dim=-1)
    ends = [
        None if end is None else functional.normalize(end.double(), dim=-1)
        for end in (before, after)
    ]
    neighbours = [ends[0], *units, ends[1]]
    changes = []
    for frame, unit in enumerate(units):
        similar = [
            (unit * other).sum(dim=-1)
            for other in neighbours[frame : frame + 3 : 2]
            if other is not None
        ]
        changes.append(
            1 - torch.stack(similar).mean(dim=0) if similar else torch.zeros_like(unit[:, 0])
        )
    return (
        torch.stack(changes).float()
        if changes
        else frames.new_zeros(frames.shape[:2], dtype=torch.float32)
    )


def exact_variety(frames, height, width, crop):
    """Compute the variance of a token's cosine similarities with all tokens of its crop."""
    units = functional.normalize(frames.double(), dim=-1)
    rows = torch.arange(height, device=frames.device)
    columns = torch.arange(width, device=frames.device)
    crops = ((rows // crop)[:, None] * (width + crop) + columns // crop).flatten()
    together = crops[:, None] == crops
    similar = units @ units.transpose(1, 2)
    count = together.sum(dim=-1)
    mean = (similar * together).sum(dim=-1) / count
    return (((similar - mean[..., None]) ** 2 * together).sum(dim=-1) / count).float()


def exact_similarity(rows, direction):
    """Multiply each row's unit vector by one vector."""
    return (functional.normalize(rows.double(), dim=-1) @ direction.double()).float()


@each_choice(
    dtype=[DTYPES[0], *DTYPES[1:] * 2, DTYPES[0]],
    # Frames, places, numbers, neighbours.
    case=[
        (0, 3, 16, "before after"),
        (5, 2, 129, "before after"),
        (1, 3, 16, ""),
        (17, 2, 300, "before"),
        LAST,
    ],
)
def test_change_over_time(dtype, case):
    num_frames, places, dim, ends = case
    video = randn(num_frames + 2, places, dim, dtype=dtype)
    frames = video[1:-1]
    neighbours = {end: video[{"before": 0, "after": -1}[end]] for end in ends.split()}
    exact = exact_change(frames, **neighbours)
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
    exact = exact_variety(frames, height, width, crop)
    for given in (within_nan(frames), column_major(frames)):
        assert_score(spatial_variety(given, height, width, crop), exact)


@each_choice(dtype=DTYPES, shape=[(1, 129), (63, 1100), (0, 16), (129, 80)])
def test_similarity_to_a_direction(dtype, shape):
    rows, dim = shape
    vectors = randn(rows, dim, dtype=dtype)
    direction = torch.nn.functional.normalize(randn(20, dim, seed=1), dim=-1).sum(dim=0)
    exact = exact_similarity(vectors, direction) / direction.norm()
    every_other = torch.stack([direction, direction], dim=1)[:, 0]
    for rows, along in ((within_nan(vectors), every_other), (column_major(vectors), direction)):
        assert_score(similarity_to(rows, along) / direction.norm(), exact)


def test_shapes_must_fit():
    x = torch.zeros(2, 6, 8)
    for message, call in {
        r"before must have the shape .* not \[3, 8\]": lambda: temporal_change(x, before=x[0, :3]),
        r"h\*w = 4, d\], not \[2, 6, 8\]": lambda: spatial_variety(x, 2, 2),
        r"direction must have the shape \[d = 8\], not \[7\]": lambda: similarity_to(
            x[0], x[0, 0, :7]
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
