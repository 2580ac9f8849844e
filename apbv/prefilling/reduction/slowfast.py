"""Reduces by a slow and a fast pathway: few frames in full, all others pooled.

Source: Xu et al., *SlowFast-LLaVA: A Strong Training-Free Baseline for Video Large Language Models*, which the
paper of APB-V compares with.

The fast pathway pools every frame in squares of p x p tokens; p is the least with which it takes at most a quarter
of what may be kept, or as many tokens as there are frames. The slow pathway keeps as many evenly spaced frames in
full as the rest allows. In the paper it is 10 frames of 50 in full and 16 tokens of each frame, which is a fifth.

What is different here:

- The paper puts the fast pathway's tokens behind the slow ones. Here tokens stay in the prompt's order and at
  their positions, a pooled one at those of the token in the middle of its square; so a frame that is there in
  full is not there again, pooled. (APB-V's authors gather positions likewise.)
- The slow frames are not pooled; the paper takes every other column of theirs.
- Where there are fewer tokens to keep than frames, evenly spaced frames keep one each.
"""

import torch
from torch import Tensor
from torch.nn import functional

from .choosing import keep_even
from .frames import KeptRows, SharedVideo

_FAST_SHARE = 4  # the fast pathway takes a quarter of all tokens


def plan_pathways(num_frames: int, height: int, width: int, count: int) -> tuple[set, set, int]:
    """Share ``count`` tokens out between both pathways.

    Returns:
        The frames that are kept in full, those that are pooled, and p, the tokens along a pooled square's side.
    """
    if count < num_frames:
        return set(), set(keep_even(num_frames, count).tolist()), max(height, width)
    side, most = 1, max(num_frames, count // _FAST_SHARE)
    while num_frames * _num_squares(height, width, side) > most:
        side += 1
    pooled, whole = _num_squares(height, width, side), height * width
    most_slow = (count - num_frames * pooled) // max(1, whole - pooled)
    num_slow = num_frames if pooled == whole else min(num_frames, most_slow)
    slow = set(keep_even(num_frames, num_slow).tolist())
    return slow, set(range(num_frames)) - slow, side


def keep_slow_and_fast(video: SharedVideo, count: int) -> KeptRows:
    """Keep at most ``count`` tokens, some of them means of several; every host reduces its own frames."""
    size = video.frame_size
    slow, fast, side = plan_pathways(video.num_frames, video.height, video.width, count)
    places, values = [torch.empty(0, dtype=torch.long)], [video.rows[:0].flatten(0, 1)]
    for frame, rows in zip(video.mine, video.rows, strict=True):
        if frame in slow:
            places.append(frame * size + torch.arange(size))
            values.append(rows)
        elif frame in fast:
            centres, means = _pooled(rows, video.height, video.width, side)
            places.append(frame * size + centres)
            values.append(means)
    return KeptRows(torch.cat(places), torch.cat(values))


def _num_squares(height: int, width: int, side: int) -> int:
    return -(-height // side) * -(-width // side)


def _pooled(rows: Tensor, height: int, width: int, side: int) -> tuple[Tensor, Tensor]:
    """Pool a frame's rows ``[h * w, x]``; return the places of the squares' middles, and their means in order."""
    grid = rows.float().T.view(1, -1, height, width)
    means = functional.avg_pool2d(grid, side, ceil_mode=True)  # over what a square at the edge really has
    down, across = (
        torch.tensor([(start + min(start + side, end) - 1) // 2 for start in range(0, end, side)])
        for end in (height, width)
    )
    return (down[:, None] * width + across).flatten(), means[0].flatten(1).T.to(rows.dtype)
