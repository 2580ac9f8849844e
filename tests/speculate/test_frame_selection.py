"""Drafts that see what is chosen from the frames alone: HIPPO's Figure 7, as plain loops."""

from itertools import chain

import pytest
import torch

from apbv import HostGroup
from apbv.config import FRAME_POLICIES
from apbv.layout import split_evenly
from apbv.model.parts import inspect_model
from apbv.prefilling.encoding.vision import encode_visual
from apbv.prefilling.reduction.frames import SharedVideo, num_in_frames
from apbv.speculate.strategies.frame_selection import FRAME_SELECTIONS, keep_from_frames

from apbv_tests.prompts import as_inputs, build, reset_rope, video_batch

NUM_FRAMES = 11
HEIGHT = 2
WIDTH = 3
HIDDEN = 8
SIZE = HEIGHT * WIDTH


def film() -> torch.Tensor:
    """Frames ``[T, h * w, d]`` that drift, with cuts before frames 4, 5 and 9."""
    generator = torch.Generator().manual_seed(0)
    frames = [torch.randn(SIZE, HIDDEN, generator=generator)]
    for number in range(1, NUM_FRAMES):
        fresh = torch.randn(SIZE, HIDDEN, generator=generator)
        drift = 1.0 if number in (4, 5, 9) else 0.02 * number
        frames.append((1 - drift) * frames[-1] + drift * fresh)
    return torch.stack(frames)


def spaced(frames: torch.Tensor, num_kept: int) -> list[int]:
    return [number * len(frames) // num_kept for number in range(num_kept)]


def at_transitions(frames: torch.Tensor, num_kept: int) -> list[int]:
    similarity = {}
    for number in range(1, len(frames)):
        previous = frames[number - 1].mean(dim=0)
        mean = frames[number].mean(dim=0)
        similarity[number] = float(torch.cosine_similarity(previous, mean, dim=0))
    least_alike = sorted(similarity, key=similarity.get)[: num_kept - 1]
    return sorted([0, *least_alike])


CHOSEN_FRAMES = {"frames": spaced, "transitions": at_transitions}


def tokens_of_frame(frame: int) -> range:
    return range(frame * SIZE, (frame + 1) * SIZE)


def film_job(hosts: HostGroup, name: str, count: int) -> list[int]:
    shares = tuple(split_evenly(range(NUM_FRAMES), hosts.size))
    mine = shares[hosts.rank]
    video = SharedVideo(film()[mine.start : mine.stop], shares, HEIGHT, WIDTH, HIDDEN, hosts)
    return FRAME_SELECTIONS[name](video, count).places.tolist()


@pytest.mark.parametrize("name", CHOSEN_FRAMES)
@pytest.mark.parametrize("num_hosts", [1, 3])
def test_whole_frames_are_kept(pool, name, num_hosts):
    for num_kept in (1, 4, NUM_FRAMES):
        frames = CHOSEN_FRAMES[name](film(), num_kept)
        expected = list(chain.from_iterable(map(tokens_of_frame, frames)))
        # What is left of the budget buys no further frame.
        of_hosts = pool.run(num_hosts, film_job, name, num_kept * SIZE + SIZE - 1)
        assert list(chain.from_iterable(of_hosts)) == expected
    assert at_transitions(film(), 4) == [0, 4, 5, 9]


@pytest.mark.parametrize("name", CHOSEN_FRAMES)
def test_less_than_a_frame_is_spread_over_the_first(name):
    assert film_job(HostGroup.single(), name, 3) == [0, 2, 5]


def kept_job(hosts: HostGroup, family: str, name: str, count: int) -> tuple[list[int], int, int]:
    parts = inspect_model(build(family, torch.float32))
    inputs = as_inputs(family, video_batch(family), None, hosts)
    rows = encode_visual(parts, inputs.visual)
    kept = keep_from_frames(parts, inputs, rows, hosts, name, count)
    return kept.tolist(), inputs.num_visual_tokens, num_in_frames(parts, inputs)


@pytest.mark.parametrize("name", FRAME_POLICIES)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "llava_onevision"])
def test_hosts_choose_as_one_would(pool, family, name):
    reset_rope(build(family, torch.float32))
    count = 20
    kept, num_visual, num_of_frames = kept_job(HostGroup.single(), family, name, count)
    assert 0 < len(kept) <= count < num_visual
    # Rows that end a video belong to no frame: they stay.
    assert set(range(num_of_frames, num_visual)) <= set(kept)
    for of_host, *_ in pool.run(3, kept_job, family, name, count):
        assert of_host == kept
