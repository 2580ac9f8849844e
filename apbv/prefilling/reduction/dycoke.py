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
- DyCoke's second stage, which chooses anew in every decoding step which of the KV the answer
  attends to, is pruned: it saves no prefill.
"""

import torch
from torch.nn import functional

from ...layout import split_evenly
from .choosing import keep_best, keep_even
from .frames import KeptRows, SharedVideo

_WINDOW = 4


def plan_windows(
    num_frames: int, frame_size: int, count: int
) -> tuple[range, dict[int, tuple[int, int]]]:
    """Plan which frames are kept whole, and how many tokens of others; the rest is pruned.

    Of others also with which frame they are compared: ``{frame: (reference, count)}``.

    Args:
        count: the tokens to keep, at least those of one frame.
    """
    stride = 1  # of the frames that are kept whole
    while len(range(0, num_frames, stride)) * frame_size > count:
        stride *= _WINDOW
    whole = range(0, num_frames, stride)
    step = stride // _WINDOW
    others = [frame for frame in range(0, num_frames, max(1, step)) if frame not in whole]
    if not others:
        return whole, {}
    counts = map(len, split_evenly(range(count - len(whole) * frame_size), len(others)))
    back = (0, 1, 2, 1)  # distance to the reference frame, by a frame's number in the window
    return whole, {
        frame: (frame - back[frame // step % _WINDOW] * step, share)
        for frame, share in zip(others, counts, strict=True)
    }


def keep_by_dycoke(video: SharedVideo, count: int) -> KeptRows:
    """Keep ``count`` tokens: whole frames, and what changed in others; collective.

    Less than a frame is evenly spaced tokens of the first one.
    """
    size = video.frame_size
    if count < size:
        return video.kept(keep_even(size, count))
    whole, compared = plan_windows(video.num_frames, size, count)
    references = [
        sorted({compared[frame][0] for frame in share if frame in compared})
        for share in video.shares
    ]
    fetched = video.fetch(references, video.embeddings)
    reference = dict(zip(references[video.hosts.rank], fetched, strict=True))
    places = [torch.empty(0, dtype=torch.long)]
    for frame, rows in zip(video.mine, video.embeddings, strict=True):
        if frame in whole:
            kept = torch.arange(size)
        elif frame in compared:
            other, share = compared[frame]
            similar = functional.cosine_similarity(
                rows.float(), reference[other].float(), dim=-1, eps=1e-12
            )
            kept = keep_best(-similar.cpu(), share)
        else:
            continue
        places.append(frame * size + kept)
    return video.kept(torch.cat(places))
