"""DyCoke's first stage, temporal token merging: prunes tokens that hardly changed.

Source: Tao et al., *DyCoke: Dynamic Compression of Tokens for Fast Video Large Language Models*
(CVPR 2025), Section 3.2. In windows of four frames the first is whole. Tokens of the second and the
third are compared with the same place in the first, those of the fourth with that in the third.
Every compared frame keeps equally many tokens, the least similar.

What is different here:

- The ratio is that of the whole video; in the paper it is K, the share that is pruned of a compared
  frame. So ratio = (1 + 3 (1 - K)) / 4, and the paper's K = 0.7 is a ratio of 0.475.
- Below a quarter not even the first frames fit. Then compared frames keep nothing, and the first
  frames are a video of their own, whose windows are four times as long; and so on.
- The last window is a window, however short; the authors' code leaves some of its frames whole.

DyCoke's second stage, which leaves tokens out of decoding steps, is
:mod:`apbv.runner.dynamic_pruning` (``decode_ratio``); by default this stage runs alone.
"""

import torch
from torch.nn import functional

from ...layout import split_evenly
from .choosing import keep_best, keep_even
from .frames import KeptRows, SharedVideo

_WINDOW = 4
_BACK_TO_REFERENCE = (0, 1, 2, 1)  # distance to the reference frame, by place in the window


def plan_windows(
    num_frames: int, frame_size: int, count: int
) -> tuple[range, dict[int, tuple[int, int]]]:
    """Plan which frames are kept whole, and how many tokens of others; the rest is pruned.

    Args:
        count: how many tokens to keep, at least as many as a frame has.

    Returns:
        The whole frames; of others with which frame they are compared, and how many tokens they
        keep: ``{frame: (reference, count)}``.
    """
    stride = 1  # of the frames that are kept whole
    while len(range(0, num_frames, stride)) * frame_size > count:
        stride *= _WINDOW
    whole = range(0, num_frames, stride)
    step = stride // _WINDOW
    others = [frame for frame in range(0, num_frames, max(1, step)) if frame not in whole]
    if not others:
        return whole, {}
    num_left = count - len(whole) * frame_size
    shares = split_evenly(range(num_left), len(others))
    compared = {}
    for frame, share in zip(others, shares, strict=True):
        place_in_window = frame // step % _WINDOW
        reference = frame - _BACK_TO_REFERENCE[place_in_window] * step
        compared[frame] = (reference, len(share))
    return whole, compared


def keep_by_dycoke(video: SharedVideo, count: int) -> KeptRows:
    """Keep ``count`` tokens: whole frames, and what changed in others; collective.

    Less than a frame is evenly spaced tokens of the first one.
    """
    size = video.frame_size
    if count < size:
        return video.kept(keep_even(size, count))
    whole, compared = plan_windows(video.num_frames, size, count)

    # Fetch the frames that this host compares with.
    references = []
    for share in video.shares:
        of_share = {compared[frame][0] for frame in share if frame in compared}
        references.append(sorted(of_share))
    fetched = video.fetch(references, video.embeddings)
    reference_rows = dict(zip(references[video.hosts.rank], fetched, strict=True))

    places = [torch.empty(0, dtype=torch.long)]
    for frame, rows in zip(video.mine, video.embeddings, strict=True):
        if frame in whole:
            tokens = torch.arange(size)
        elif frame in compared:
            reference, num_kept = compared[frame]
            similarity = functional.cosine_similarity(
                rows.float(), reference_rows[reference].float(), dim=-1, eps=1e-12
            )
            tokens = keep_best(-similarity.cpu(), num_kept)
        else:
            continue
        places.append(frame * size + tokens)
    return video.kept(torch.cat(places))
