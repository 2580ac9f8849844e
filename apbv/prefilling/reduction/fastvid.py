"""Reduces by density: each segment of similar frames keeps salient tokens, and merges the rest.

Source: Shen et al., *FastVID: Dynamic Density Pruning for Fast Video Large Language Models* (2025).

- *DySeg* cuts the video where adjacent frames are least alike: at the c - 1 = 7 lowest similarities, and wherever
  one is below 0.9.
- *ATS* spends two fifths of each frame's budget on its most salient tokens.
- *DTM* spends the rest on every fourth frame of a segment, its anchor frames: on tokens that are dense and far
  from denser ones (density peaks, by 4 nearest neighbours). All others of the segment are merged into the most
  similar of these, each of which becomes 0.6 of itself and 0.4 of the mean of what joined it.

What is different here:

- The paper takes salience from the vision tower's [CLS] attention, and frames' similarity from its pooled output.
  Qwen's tower has neither. A frame is represented by the mean of its tokens' embeddings, and salience is the
  attention of that mean to the tokens: their inner product.
- The paper keeps at most a quarter. With more, every fourth frame may have too few tokens to keep; then anchor
  frames are closer: every third, every other, or all.
- Tokens are merged as they are; only similarities are of unit vectors. A merged token stays at the place of the
  token that others were merged into. Of equal densities the earlier token counts as the denser one; the authors
  add noise instead.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ...layout import split_evenly
from .choosing import keep_best
from .frames import KeptRows, SharedVideo

_NUM_SEGMENTS = 8  # c
_ALIKE = 0.9  # tau
_INTERVALS = (4, 3, 2)  # p: the paper's, and what is tried where it leaves too little room
_NUM_NEIGHBOURS = 4  # k
_OWN_SHARE = 0.6  # beta


def cut_segments(similar: Tensor) -> list[range]:
    """Cut a video of T frames into segments (DySeg).

    Args:
        similar: ``[T - 1]``, of each frame to the next.
    """
    unlike = (similar < _ALIKE).nonzero().flatten().tolist()
    cuts = {*keep_best(-similar, _NUM_SEGMENTS - 1).tolist(), *unlike}
    ends = [*(cut + 1 for cut in sorted(cuts)), len(similar) + 1]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def share_budget(counts: list[int], frame_size: int) -> tuple[list[int], dict[int, int]]:
    """Share what a segment may keep out over its frames.

    Args:
        counts: how many tokens each frame of the segment may contribute.

    Returns:
        For every frame how many by their salience; the anchor frames, by their number within the segment, and how
        many each keeps by density.
    """
    salient = [count * 2 // 5 for count in counts]
    dense = [count - taken for count, taken in zip(counts, salient, strict=True)]
    for interval in _INTERVALS:
        frames = range(0, len(counts), interval)
        shares = [len(share) for share in split_evenly(range(sum(dense)), len(frames))]
        if all(share <= frame_size - salient[frame] for frame, share in zip(frames, shares, strict=True)):
            return salient, dict(zip(frames, shares, strict=True))
    return salient, dict(enumerate(dense))


def keep_by_fastvid(video: SharedVideo, count: int) -> KeptRows:
    """Keep ``count`` tokens, of which some have others merged into them; collective.

    A segment is reduced by the host that has its first frame, to which the others send the rest of it.
    """
    size, rank = video.frame_size, video.hosts.rank
    means = functional.normalize(video.gather(video.embeddings.float().mean(dim=1)), dim=-1)
    segments = cut_segments((means[1:] * means[:-1]).sum(dim=-1))
    counts = [len(share) for share in split_evenly(range(count), video.num_frames)]
    of_hosts = [[segment for segment in segments if segment.start in share] for share in video.shares]
    frames = [range(of_host[0].start, of_host[-1].stop) if of_host else range(0) for of_host in of_hosts]
    mine, rows = frames[rank], video.fetch(frames, video.rows)
    places, values = [torch.empty(0, dtype=torch.long)], [rows[:0].flatten(0, 1)]
    for segment in of_hosts[rank]:
        within = rows[segment.start - mine.start : segment.stop - mine.start]
        budget = share_budget(counts[segment.start : segment.stop], size)
        chosen, kept = _reduce_segment(within, video.hidden_size, *budget)
        places.append(segment.start * size + chosen)
        values.append(kept)
    return KeptRows(torch.cat(places), torch.cat(values))


def _reduce_segment(
    rows: Tensor, hidden_size: int, salient: list[int], anchor_shares: dict[int, int]
) -> tuple[Tensor, Tensor]:
    """Keep a segment's salient tokens, and merge the rest into the densest ones of its anchor frames.

    Args:
        rows: ``[F, h * w, (1 + L) * d]``.
        salient, anchor_shares: as of :func:`share_budget`.

    Returns:
        Places ``[K]`` within the segment, ascending, in host memory, and what is kept there.
    """
    size, flat = rows.shape[1], rows.flatten(0, 1)
    embeddings = rows[..., :hidden_size].float()
    state = torch.zeros(len(flat), dtype=torch.long)  # 0: to be merged, 1: salient, 2: an anchor token
    for frame, tokens in enumerate(embeddings):
        salience = (tokens @ tokens.mean(dim=0)).cpu()
        state[frame * size + keep_best(salience, salient[frame])] = 1
        if frame in anchor_shares:
            rest = (state[frame * size : (frame + 1) * size] == 0).nonzero().flatten()
            dense = density_peaks(tokens[rest.to(tokens.device)]).cpu()
            state[frame * size + rest[keep_best(dense, anchor_shares[frame])]] = 2
    anchors, others = (state == 2).nonzero().flatten(), (state == 0).nonzero().flatten()
    values = flat.clone()
    if len(anchors) and len(others):
        values[anchors.to(rows.device)] = _merged(flat, hidden_size, anchors.to(rows.device), others, size)
    kept = state.nonzero().flatten()
    return kept, values[kept.to(rows.device)]


def _merged(flat: Tensor, hidden_size: int, anchors: Tensor, others: Tensor, size: int) -> Tensor:
    """Merge every other token into the most similar anchor token; return the anchors, ``[A, (1 + L) * d]``."""
    targets = functional.normalize(flat[anchors, :hidden_size].float(), dim=-1)
    sums = flat.new_zeros(len(anchors), flat.shape[1], dtype=torch.float32)
    counts = sums.new_zeros(len(anchors), 1)
    for some in others.to(flat.device).split(size):  # a long segment has more similarities than fit in memory
        tokens = flat[some].float()
        nearest = (functional.normalize(tokens[:, :hidden_size], dim=-1) @ targets.T).argmax(dim=-1)
        sums.index_add_(0, nearest, tokens)
        counts.index_add_(0, nearest, counts.new_ones(len(some), 1))
    own = flat[anchors].float()
    mixed = _OWN_SHARE * own + (1 - _OWN_SHARE) * sums / counts.clamp(min=1)
    return torch.where(counts > 0, mixed, own).to(flat.dtype)


def density_peaks(tokens: Tensor) -> Tensor:
    """Score tokens ``[m, d]`` as centres of clusters: density times the distance to the nearest denser token.

    Distances are divided by the root of d. A token's density is exp of minus the mean square of its distances to
    its 4 nearest neighbours. The densest has the frame's greatest distance, as there is no denser token.

    Returns:
        ``[m]`` in fp32.
    """
    count = len(tokens)
    if count < 2:
        return tokens.new_ones(count)
    distances = torch.cdist(tokens, tokens, compute_mode="donot_use_mm_for_euclid_dist") / tokens.shape[1] ** 0.5
    others = distances + torch.diag(distances.new_full((count,), float("inf")))
    nearest = others.topk(min(_NUM_NEIGHBOURS, count - 1), dim=-1, largest=False).values
    density = (-nearest.square().mean(dim=-1)).exp()
    number = torch.arange(count, device=tokens.device)
    denser = (density[None] > density[:, None]) | (
        (density[None] == density[:, None]) & (number[None] < number[:, None])
    )
    reach = torch.where(denser, distances, distances.max()).min(dim=-1).values
    return density * reach
