"""FastVID: each segment of similar frames keeps salient tokens, and merges the rest.

Source: Shen et al., *FastVID: Dynamic Density Pruning for Fast Video Large Language Models* (2025),
as in the authors' program for LLaVA-Video.

- *DySeg* cuts the video where adjacent frames are least alike: at the c - 1 = 7 lowest
  similarities, and wherever one is below tau.
- *ATS* spends three fifths of a segment's budget evenly on the most salient tokens of its frames.
- *DTM* spends the rest on every fourth frame of a segment, counted from its last: its anchor
  frames. Of an anchor frame it keeps *centres*, tokens that are dense and far from denser ones
  (density peaks, by 4 nearest neighbours). Into the centres of every anchor frame, all tokens of
  the segment are merged that are neither salient nor centres of that frame: a centre becomes 0.6
  of itself and 0.4 of the mean of the tokens that are more similar to it than to other centres.

What is different here:

- A frame is represented by the mean of its tokens' embeddings, with tau = 0.84, as in the authors'
  program for Qwen2.5-VL; the paper's 0.9 is for the vision tower's pooled output. Unlike this file,
  that program spends nothing on a frame whose next one is more similar than 0.95, and so keeps
  fewer tokens than its ratio says.
- Salience is a stand-in, as not all towers have a [CLS] token, whose attention the paper takes; the
  program for Qwen2.5-VL takes the attention that the mean query of the last vision block gives to
  a token. Here those tokens are salient whose embeddings are least similar to their frame's mean.
  They are only in part the same tokens.
- The paper keeps at most a quarter. With more, every fourth frame may have too few tokens to keep;
  then anchor frames are closer: every third, every other, or all.
- A merged token stays at the place of the token that others were merged into. Of equal densities
  the earlier token counts as the denser one; the authors add noise instead.
"""

from fractions import Fraction

import torch
from torch import Tensor
from torch.nn import functional

from ...device.copies import to_device
from ...layout import split_evenly
from .choosing import keep_best
from .frames import KeptRows, SharedVideo

_FEWEST_SEGMENTS = 8  # c; tau may cut more
_ALIKE = 0.84  # tau
_INTERVALS = (4, 3, 2, 1)  # p: the paper's, and what is tried where it leaves too little room
_NUM_NEIGHBOURS = 4  # k, the token itself among them
_OWN_SHARE = 0.6  # beta
_DENSE_SHARE = Fraction(2, 5)  # of a segment's budget, for centres


def cut_segments(similarity: Tensor) -> list[range]:
    """Cut a video of T frames into segments (DySeg).

    Args:
        similarity: ``[T - 1]``, of each frame to the next.
    """
    # The frames after which the video is cut.
    least_similar = keep_best(-similarity, _FEWEST_SEGMENTS - 1).tolist()
    unlike = (similarity < _ALIKE).nonzero().flatten().tolist()
    num_frames = len(similarity) + 1
    segments = []
    start = 0
    for last_frame in sorted({*least_similar, *unlike}):
        segments.append(range(start, last_frame + 1))
        start = last_frame + 1
    segments.append(range(start, num_frames))
    return segments


def share_budget(budget: int, num_frames: int, frame_size: int) -> tuple[list[int], dict[int, int]]:
    """Share a segment's budget out over its frames.

    Args:
        budget: the tokens that the segment keeps, at most as many as it has.
        num_frames: its frames.
        frame_size: the tokens of a frame.

    Returns:
        For every frame how many tokens it keeps by salience; for every anchor frame, by its number
        within the segment, how many centres it keeps.
    """
    num_dense = budget * _DENSE_SHARE.numerator // _DENSE_SHARE.denominator
    num_salient = [len(share) for share in split_evenly(range(budget - num_dense), num_frames)]
    for interval in _INTERVALS:
        anchor_frames = range(num_frames - 1, -1, -interval)
        shares = split_evenly(range(num_dense), len(anchor_frames))
        num_centres = {}
        for frame, share in zip(anchor_frames, shares, strict=True):
            num_centres[frame] = len(share)
        # With the last interval every frame is an anchor frame, which has room for its share.
        if all(num_salient[frame] + count <= frame_size for frame, count in num_centres.items()):
            break
    return num_salient, num_centres


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
        budget = sum(counts[segment.start : segment.stop])
        kept = _reduce_segment(segment_rows, video.hidden_size, budget)
        places.append(segment.start * size + kept.places)
        values.append(kept.values)
    return KeptRows(torch.cat(places), torch.cat(values))


def _reduce_segment(rows: Tensor, hidden_size: int, budget: int) -> KeptRows:
    """Keep a segment's salient tokens, and merge the rest into the centres of anchor frames.

    Args:
        rows: ``[F, h * w, (1 + L) * d]``.
        budget: how many tokens to keep.

    Returns:
        Places within the segment, in CPU memory, and the rows that are kept there.
    """
    num_frames, size, _ = rows.shape
    flat = rows.flatten(0, 1)
    num_salient, num_centres = share_budget(budget, num_frames, size)

    # Choose the salient tokens of every frame, and the centres of every anchor frame.
    is_salient = torch.zeros(len(flat), dtype=torch.bool)
    centres_of_frames = []
    for frame, tokens in enumerate(rows[..., :hidden_size].float()):
        mean = tokens.mean(dim=0)
        similarity = functional.cosine_similarity(tokens, mean, dim=-1).cpu()
        is_salient_here = is_salient[frame * size : (frame + 1) * size]  # a view
        is_salient_here[keep_best(-similarity, num_salient[frame])] = True
        if num_centres.get(frame):
            rest = (~is_salient_here).nonzero().flatten()
            peaks = density_peaks(tokens[rest.to(tokens.device)]).cpu()
            centres_of_frames.append(frame * size + rest[keep_best(peaks, num_centres[frame])])

    # As in the paper every anchor frame gets all other tokens of the segment, other frames' centres
    # among them, as they were before any merge.
    values = flat.clone()
    is_kept = is_salient.clone()
    for centres in centres_of_frames:
        is_other = ~is_salient
        is_other[centres] = False
        is_kept[centres] = True
        others = is_other.nonzero().flatten()
        centres_on_device = to_device(centres, rows.device)
        values[centres_on_device] = _merged(flat, hidden_size, centres_on_device, others, size)
    kept = is_kept.nonzero().flatten()
    return KeptRows(kept, values[to_device(kept, rows.device)])


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
    order = density.argsort(descending=True, stable=True)
    density_rank = torch.empty_like(order)
    density_rank[order] = torch.arange(len(tokens), device=tokens.device)
    not_denser = density_rank[None] >= density_rank[:, None]
    distance_to_denser = distances.masked_fill(not_denser, float("inf")).min(dim=1).values
    # The densest row has no denser one.
    return distance_to_denser.clamp(max=distances.max()) * density


def _merged(
    flat: Tensor, hidden_size: int, centres: Tensor, others: Tensor, rows_at_once: int
) -> Tensor:
    """Merge every other token into the most similar centre.

    Args:
        flat: the segment's rows, ``[m, (1 + L) * d]``.
        centres: the A places of the centres.
        others: the places of the tokens to merge.
        rows_at_once: how many of the others are merged at a time.

    Returns:
        The centres' rows, ``[A, (1 + L) * d]``.
    """
    targets = functional.normalize(flat[centres, :hidden_size].float(), dim=-1)
    sums = flat.new_zeros(len(centres), flat.shape[1], dtype=torch.float32)
    counts = sums.new_zeros(len(centres), 1)
    # A long segment has more similarities than fit in memory.
    for places in others.to(flat.device).split(rows_at_once):
        tokens = flat[places].float()
        # A token's own length does not change which target is nearest.
        nearest = (tokens[:, :hidden_size] @ targets.T).argmax(dim=-1)
        sums.index_add_(0, nearest, tokens)
        counts.index_add_(0, nearest, counts.new_ones(len(places), 1))
    centre_rows = flat[centres].float()
    mixed = _OWN_SHARE * centre_rows + (1 - _OWN_SHARE) * sums / counts.clamp(min=1)
    return torch.where(counts > 0, mixed, centre_rows).to(flat.dtype)
