"""SlowFast-LLaVA: a slow pathway with few frames in full, and a fast one with all others pooled.

Source: Xu et al., *SlowFast-LLaVA: A Strong Training-Free Baseline for Video Large Language
Models*, which the paper of APB-V compares with.

The fast pathway averages every frame in squares of p x p tokens; p is the least with which it takes
at most a quarter of what may be kept, or as many tokens as there are frames. The slow pathway has
as many frames as the rest allows, evenly spaced from the first one. Of every two tokens side by
side it keeps the larger number in each dimension, as the authors' program does. In the paper it is
10 frames of 50, and 16 tokens of each frame, which is an eighth.

What is different here:

- The paper puts the fast pathway's tokens after the slow ones. Here tokens stay in the prompt's
  order and at their positions, a pooled one at those of the token in the middle of what it was made
  of, or left of that; so a slow frame is not there again, averaged. (APB-V's authors gather
  positions in the same way.)
- Where more may be kept than the slow pathway has of all frames, which is half, slow frames are
  whole.
- Where there are fewer tokens to keep than frames, evenly spaced frames keep one each.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from .frames import KeptRows, SharedVideo

_FAST_SHARE = 4  # the fast pathway takes a quarter of all tokens
_Pooling = tuple[Callable[..., Tensor], tuple[int, int]]


def plan_pathways(num_frames: int, height: int, width: int, count: int) -> dict[int, _Pooling]:
    """Share ``count`` tokens out between both pathways.

    Returns:
        For every frame that is not left out, how its tokens are pooled, and in cells of which
        height and width.
    """
    if count < num_frames:
        to_one_token = (functional.avg_pool2d, (height, width))
        return dict.fromkeys(spaced_frames(num_frames, count), to_one_token)

    # The fast pathway: squares of side x side tokens.
    side = 1
    most = max(num_frames, count // _FAST_SHARE)
    while num_frames * _num_cells(height, width, side, side) > most:
        side += 1
    fast = _num_cells(height, width, side, side)

    # The slow pathway: two tokens side by side, or whole frames.
    across = 2 if num_frames * _num_cells(height, width, 1, 2) >= count else 1
    slow = _num_cells(height, width, 1, across)
    num_slow = num_frames
    if fast < slow:
        num_slow = min(num_frames, (count - num_frames * fast) // (slow - fast))

    poolings: dict[int, tuple[Callable[..., Tensor], tuple[int, int]]] = {}
    for frame in range(num_frames):
        poolings[frame] = (functional.avg_pool2d, (side, side))
    for frame in spaced_frames(num_frames, num_slow):
        poolings[frame] = (functional.max_pool2d, (1, across))
    return poolings


def keep_slow_and_fast(video: SharedVideo, count: int) -> KeptRows:
    """Keep at most ``count`` tokens, made of one or several; every host reduces its own frames."""
    height = video.height
    width = video.width
    poolings = plan_pathways(video.num_frames, height, width, count)
    places = [torch.empty(0, dtype=torch.long)]
    values = [video.rows[:0].flatten(0, 1)]
    for frame, rows in zip(video.mine, video.rows, strict=True):
        if frame in poolings:
            pool, cell = poolings[frame]
            grid = rows.float().T.view(1, -1, height, width)
            pooled = pool(grid, cell, ceil_mode=True)  # over what a cell at the edge really has
            places.append(frame * video.frame_size + _middles(height, width, cell))
            values.append(pooled[0].flatten(1).T.to(rows.dtype))
    return KeptRows(torch.cat(places), torch.cat(values))


def spaced_frames(num_frames: int, count: int) -> set[int]:
    """Return ``count`` frames at regular intervals, from the first one on."""
    return {number * num_frames // count for number in range(count)}


def _num_cells(height: int, width: int, down: int, across: int) -> int:
    return -(-height // down) * -(-width // across)


def _middles(height: int, width: int, cell: tuple[int, int]) -> Tensor:
    """Return the places of the middles of a frame's cells, rounded up and to the left."""
    down = _middles_of_line(height, cell[0])
    across = _middles_of_line(width, cell[1])
    return (down[:, None] * width + across).flatten()


def _middles_of_line(length: int, side: int) -> Tensor:
    """Return the middles of a line's pieces of ``side`` tokens; the last may be shorter."""
    middles = []
    for start in range(0, length, side):
        stop = min(start + side, length)
        middles.append((start + stop - 1) // 2)
    return torch.tensor(middles)
