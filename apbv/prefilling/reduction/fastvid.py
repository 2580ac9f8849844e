"""FastVID: each segment of similar frames keeps salient tokens, and merges the rest.

Source: Shen et al., *FastVID: Dynamic Density Pruning for Fast Video Large Language Models* (2025),
as in the authors' program for LLaVA-Video.

- *DySeg* cuts the video where adjacent frames are least alike: at the c - 1 = 7 lowest
  similarities, and wherever one is below tau.
- *ATS* spends three fifths of a segment's budget evenly on the most salient tokens of its frames.
- *DTM* spends the rest on every fourth frame of a segment, counted from its last: its anchor
  frames. It takes tokens that are dense and far from denser ones (density peaks, by 4 nearest
  neighbours). Into those of each anchor frame, all tokens of the segment that are neither salient
  nor among them are merged: each becomes 0.6 of itself and 0.4 of the mean of the tokens that are
  more similar to it than to the others.

What is different here:

- A frame is represented by the mean of its tokens' embeddings, with tau = 0.84, as in the authors'
  program for Qwen2.5-VL; the paper's 0.9 is for the vision tower's pooled output. That program also
  spends nothing on a frame whose next one is more similar than 0.95, and so keeps fewer tokens than
  its ratio says.
- Salience is a stand-in, as not all towers have a [CLS] token, whose attention the paper takes; the
  program for Qwen2.5-VL takes how the mean query of the last vision block attends to a token's
  keys. Here those tokens are salient whose embeddings are least similar to their frame's mean. They
  are only in part the same tokens.
- The paper keeps at most a quarter. With more, every fourth frame may have too few tokens to keep;
  then anchor frames are closer: every third, every other, or all.
- A merged token stays at the place of the token that others were merged into. Of equal densities
  the earlier token counts as the denser one; the authors add noise instead.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ...device.copies import to_device
from ...layout import split_evenly
from .choosing import keep_best
from .frames import KeptRows, SharedVideo

_NUM_SEGMENTS = 8  # c
_ALIKE = 0.84  # tau
_INTERVALS = (4, 3, 2, 1)  # p: the paper's, and what is tried where it leaves too little room
_NUM_NEIGHBOURS = 4  # k, the token itself among them
_OWN_SHARE = 0.6  # beta


def cut_segments(similar: Tensor) -> list[range]:
    """Cut a video of T frames into segments (DySeg).

    Args:
        similar: ``[T - 1]``, of each frame to the next.
    """
    least_similar = keep_best(-similar, _NUM_SEGMENTS - 1).tolist()
    unlike = (similar < _ALIKE).nonzero().flatten().tolist()
    num_frames = len(similar) + 1
    segments = []
    start = 0
    for last_frame in sorted({*least_similar, *unlike}):
        segments.append(range(start, last_frame + 1))
        start = last_frame + 1
    segments.append(range(start, num_frames))
    return segments


def share_budget(counts: list[int], frame_size: int) -> tuple[list[int], dict[int, int]]:
    """Share a segment's budget out over its frames.

    Args:
        counts: how many tokens each frame of the segment may contribute.

    Returns:
        For every frame how many tokens it keeps by salience; for every anchor frame, by its number
        within the segment, how many it keeps by density.
    """
    total = sum(counts)
    dense = total * 2 // 5
    salient = [len(share) for share in split_evenly(range(total - dense), len(counts))]
    for interval in _INTERVALS:
        frames = range(len(counts) - 1, -1, -interval)
        shares = {}
        for frame, share in zip(frames, split_evenly(range(dense), len(frames)), strict=True):
            shares[frame] = len(share)
        if all(salient[frame] + share <= frame_size for frame, share in shares.items()):
            break
    return salient, shares


def keep_by_fastvid(video: SharedVideo, count: int) -> KeptRows:
    """Keep ``count`` tokens, of which some have others merged into them; collective.

    A segment is reduced by the host that has its first frame, to which the others send the rest of
    it.
    """
    size = video.frame_size
    rank = video.hosts.rank
    means = functional.normalize(video.gather(video.embeddings.float().mean(dim=1)), dim=-1)
    segments = cut_segments((means[1:] * means[:-1]).sum(dim=-1))
    counts = [len(share) for share in split_evenly(range(count), video.num_frames)]

    # A host reduces the segments whose first frame it has, which follow one another.
    segments_of = []
    frames_for = []
    for share in video.shares:
        of_host = [segment for segment in segments if segment.start in share]
        segments_of.append(of_host)
        frames_for.append(range(of_host[0].start, of_host[-1].stop) if of_host else range(0))
    first_frame = frames_for[rank].start
    rows = video.fetch(frames_for, video.rows)
    places = [torch.empty(0, dtype=torch.long)]
    values = [rows[:0].flatten(0, 1)]
    for segment in segments_of[rank]:
        segment_rows = rows[segment.start - first_frame : segment.stop - first_frame]
        segment_counts = counts[segment.start : segment.stop]
        kept = _reduce_segment(segment_rows, video.hidden_size, segment_counts)
        places.append(segment.start * size + kept.places)
        values.append(kept.values)
    return KeptRows(torch.cat(places), torch.cat(values))


def _reduce_segment(rows: Tensor, hidden_size: int, counts: list[int]) -> KeptRows:
    """Keep a segment's salient tokens, and merge the rest into dense tokens of anchor frames.

    Args:
        rows: ``[F, h * w, (1 + L) * d]``.
        counts: see :func:`share_budget`.

    Returns:
        Places within the segment, in CPU memory, and the rows that are kept there.
    """
    size = rows.shape[1]
    flat = rows.flatten(0, 1)
    salient, anchor_shares = share_budget(counts, size)
    is_salient = torch.zeros(len(flat), dtype=torch.bool)
    anchors = []
    for frame, tokens in enumerate(rows[..., :hidden_size].float()):
        to_mean = functional.cosine_similarity(tokens, tokens.mean(dim=0), dim=-1).cpu()
        of_frame = is_salient[frame * size : (frame + 1) * size]  # a view
        of_frame[keep_best(-to_mean, salient[frame])] = True
        if anchor_shares.get(frame):
            rest = (~of_frame).nonzero().flatten()
            dense = density_peaks(tokens[rest.to(tokens.device)]).cpu()
            anchors.append(frame * size + rest[keep_best(dense, anchor_shares[frame])])
    values = flat.clone()
    is_kept = is_salient.clone()
    for places in anchors:
        is_other = ~is_salient
        is_other[places] = False
        is_kept[places] = True
        others = is_other.nonzero().flatten()
        places = to_device(places, rows.device)
        values[places] = _merged(flat, hidden_size, places, others, size)
    places = is_kept.nonzero().flatten()
    return KeptRows(places, values[to_device(places, rows.device)])


def density_peaks(tokens: Tensor) -> Tensor:
    """Score rows ``[m, d]`` as centres of clusters, ``[m]``.

    A score is a row's density times the distance to the nearest denser row. Distances are divided
    by √d. A row's density is exp(−mean of the squared distances to its nearest rows, itself among
    them). The densest row's distance is the largest of all. Of equally dense rows the earlier one
    is denser.
    """
    # Without matrix products, by which the distances of equal rows are not quite 0.
    distances = torch.cdist(tokens, tokens, compute_mode="donot_use_mm_for_euclid_dist")
    distances = distances / tokens.shape[1] ** 0.5
    nearest = distances.topk(min(_NUM_NEIGHBOURS, len(tokens)), largest=False).values
    density = nearest.square().mean(dim=1).neg().exp()
    ranks = torch.arange(len(tokens), device=tokens.device)
    rank = torch.empty_like(ranks)
    rank[density.argsort(descending=True, stable=True)] = ranks
    to_denser = distances.masked_fill(rank[None] >= rank[:, None], float("inf")).min(dim=1).values
    return to_denser.clamp(max=distances.max()) * density


def _merged(flat: Tensor, hidden_size: int, anchors: Tensor, others: Tensor, size: int) -> Tensor:
    """Merge every other token into the most similar anchor token.

    Args:
        flat: the segment's rows, ``[m, (1 + L) * d]``.
        anchors: the A places to merge into.
        others: the places of the tokens to merge.
        size: how many of these are merged at a time.

    Returns:
        The anchors' rows, ``[A, (1 + L) * d]``.
    """
    targets = functional.normalize(flat[anchors, :hidden_size].float(), dim=-1)
    sums = flat.new_zeros(len(anchors), flat.shape[1], dtype=torch.float32)
    counts = sums.new_zeros(len(anchors), 1)
    # A long segment has more similarities than fit in memory.
    for places in others.to(flat.device).split(size):
        tokens = flat[places].float()
        # A token's own length does not change which target is nearest.
        nearest = (tokens[:, :hidden_size] @ targets.T).argmax(dim=-1)
        sums.index_add_(0, nearest, tokens)
        counts.index_add_(0, nearest, counts.new_ones(len(places), 1))
    anchor_rows = flat[anchors].float()
    mixed = _OWN_SHARE * anchor_rows + (1 - _OWN_SHARE) * sums / counts.clamp(min=1)
    return torch.where(counts > 0, mixed, anchor_rows).to(flat.dtype)
