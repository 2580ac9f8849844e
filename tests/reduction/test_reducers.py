"""Reductions against their definitions, on videos whose frames lie on several hosts."""

import pytest
import torch

from apbv import HostGroup
from apbv.layout import split_evenly
from apbv.prefilling.reduction import REDUCERS
from apbv.prefilling.reduction.frames import SharedVideo

from apbv_tests.reduction_oracle import DEFINITIONS

WIDTH = 12
DEEPSTACK = 2
ALIKE = 0.97, 0.9  # how much of a frame is the one before it, by turns


def movie(num_frames: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    """Rows ``[T, h * w, 3 d]`` of frames that resemble one another, and of cuts where they do
    not."""
    generator = torch.Generator().manual_seed(seed)
    frames = []
    for number in range(num_frames):
        fresh = torch.randn(height * width, WIDTH * (1 + DEEPSTACK), generator=generator)
        is_cut = not frames or number % 11 == 7
        alike = ALIKE[number % 2]
        frames.append(fresh if is_cut else alike * frames[-1] + (1 - alike**2) ** 0.5 * fresh)
    return torch.stack(frames)


def reduce_job(hosts: HostGroup, method: str, shape: tuple, count: int):
    parts = tuple(split_evenly(range(shape[0]), hosts.size))
    mine = movie(*shape)[parts[hosts.rank].start : parts[hosts.rank].stop]
    video = SharedVideo(mine, parts, *shape[1:], WIDTH, hosts)
    return REDUCERS[method](video, count)


def merged(results: list, size: int) -> dict:
    """What all hosts kept; every frame is answered for by one of them, in their order."""
    frames = [set((result.places // size).tolist()) for result in results]
    assert sum(map(len, frames)) == len(set().union(*frames))
    places = torch.cat([result.places for result in results]).tolist()
    assert places == sorted(set(places))
    values = torch.cat([result.values for result in results])
    return {divmod(place, size): value for place, value in zip(places, values, strict=True)}


# Frames, height, width, and how many tokens are kept.
CASES = [((24, 2, 3), 137), ((14, 3, 6), 63), ((14, 3, 6), 20)]
CASES += [((30, 1, 4), 13), ((5, 6, 5), 74), ((1, 3, 3), 4), ((3, 2, 2), 1)]


@pytest.mark.parametrize("method", REDUCERS)
def test_a_reducer_keeps_what_its_definition_says(pool, method):
    for shape, count in CASES:
        expected = DEFINITIONS[method](movie(*shape).double(), shape[1], shape[2], count, WIDTH)
        assert len(expected) == count or (method == "slowfast" and 0 < len(expected) <= count)
        for num_hosts in (1, 4):
            found = merged(
                pool.run(num_hosts, reduce_job, method, shape, count), shape[1] * shape[2]
            )
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(found[key].double(), value, rtol=1e-5, atol=1e-5)


def test_of_equal_tokens_the_earlier_is_kept():
    """A still picture, on which every score is the same."""
    still = torch.ones(9, WIDTH * 3)
    for method, expected in (("dycoke", [*range(9), 9, 10, 18, 27]),):
        video = SharedVideo(still.expand(4, -1, -1), (range(4),), 3, 3, WIDTH, HostGroup.single())
        assert REDUCERS[method](video, len(expected)).places.tolist() == expected
