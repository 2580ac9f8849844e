"""Which frames of a clip are read: evenly spaced, or so many a second."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apbv.input.media.video import VideoInfo, read_frames, sample_fps, sample_uniform


def test_indices(encoded):
    for name in ("mp4", "avi h264"):
        _, info, _ = encoded(name)
        assert read_frames(info, []).shape == (0, 48, 64, 3)
        assert read_frames(info, np.array([2, 5])).shape == (2, 48, 64, 3)
        for indices in ([3, 2], [2, 2]):
            with pytest.raises(ValueError, match="ascending"):
                read_frames(info, indices)
        for indices in ([-1, 2], [3, 50]):
            with pytest.raises(IndexError):
                read_frames(info, indices)


def info_at(times):
    fps = (len(times) - 1) / times[-1] if len(times) > 1 else 25
    oriented = (False, False, False)
    nothing = (np.empty(0), np.empty((0, 2)))
    return VideoInfo(
        "a", 9, np.array(times), 2, 2, 4, fps, False, 9.0, np.zeros((1, 2)), *oriented, *nothing
    )


@given(st.integers(0, 2000), st.integers(1, 300))
def test_uniform(n, k):
    got = sample_uniform(n, k)
    assert len(got) == min(n, k)
    assert got == sorted(set(got))
    if len(got) > 1:
        assert (got[0], got[-1]) == (0, n - 1)
        steps = np.diff(got)
        assert steps.max() - steps.min() <= 1
        exact = [Fraction(i * (n - 1), len(got) - 1) for i in range(len(got))]
        assert all(abs(g - e) <= Fraction(1, 2) for g, e in zip(got, exact, strict=True))
    if n:
        assert sample_uniform(info_at([i / 25 for i in range(n)]), k) == got


def test_uniform_examples():
    assert sample_uniform(10, 4) == [0, 3, 6, 9]
    assert sample_uniform(4, 3) == [0, 2, 3]
    assert sample_uniform(7, 1) == [0]
    for n, k in ((5, 0), (-1, 2)):
        with pytest.raises(ValueError, match="cannot sample"):
            sample_uniform(n, k)


@given(
    st.lists(st.integers(1, 400), max_size=60).map(
        lambda steps: list(itertools.accumulate([0, *steps]))
    ),
    st.fractions(Fraction(1, 5), 60, max_denominator=7),
)
def test_fps_takes_the_nearest_frames(ms, fps):
    grid = [i / fps for i in range(int(Fraction(ms[-1], 1000) * fps) + 1)]
    expected = {min(range(len(ms)), key=lambda i: abs(Fraction(ms[i], 1000) - t)) for t in grid}
    assert sample_fps(info_at([t / 1000 for t in ms]), float(fps)) == sorted(expected)


def test_fps_examples():
    info = info_at([i / 25 for i in range(250)])
    assert sample_fps(info, 1) == list(range(0, 250, 25))
    # Ties to the earlier.
    assert sample_fps(info, 2) == sorted([*range(0, 250, 25), *range(12, 250, 25)])
    assert sample_fps(info, 25) == sample_fps(info, 1e9) == list(range(250))
    ties = [
        min(range(250), key=lambda i: abs(Fraction(i, 25) - Fraction(k, 10))) for k in range(100)
    ]
    assert sample_fps(info, 10) == ties
    assert sample_fps(info, 1, max_frames=4) == sample_uniform(250, 4)
    assert sample_fps(info, 1, max_frames=10) == list(range(0, 250, 25))


@pytest.mark.parametrize(
    "args", [(0,), (-1,), (float("nan"),), (float("inf"),), (1e308,), (10**400,), (1, 0)]
)
@pytest.mark.filterwarnings("error")
def test_fps_arguments(args):
    with pytest.raises(ValueError, match=r"fps must lie in|cannot sample"):
        sample_fps(info_at([0, 1]), *args)
