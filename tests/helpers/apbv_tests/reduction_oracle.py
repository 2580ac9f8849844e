"""What each reduction before the language model keeps, by its definition: loops over the tokens of
a whole video.

Of frames ``[T, h * w, x]``, whose first ``hidden`` columns are embeddings and the others
deepstack's, a definition returns what is kept as ``{(frame, place): row}``. Nothing here is shared
with the implementation.
"""

import math
from itertools import product

import torch


def cosine(a, b) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def best(scores: dict, count: int) -> set:
    """The keys of the highest scores, of equal ones the lowest key."""
    return set(sorted(scores, key=lambda key: (-scores[key], key))[:count])


def even(total: int, count: int) -> list[int]:
    return [place * (total - 1) // max(1, count - 1) for place in range(count)]


def shares(count: int, parts: int) -> list[int]:
    return [count // parts + (part < count % parts) for part in range(parts)]


def slowfast(frames, height, width, count, hidden) -> dict:
    """Slow frames at i T / N, their tokens the maxima of pairs; all others averaged. As ours shares
    tokens out."""
    num_frames = len(frames)
    pairs = height * math.ceil(width / 2)
    if count < num_frames:
        slow = []
        fast = [i * num_frames // count for i in range(count)]
        side = max(height, width)
    else:
        fast = range(num_frames)
        side = 1
        while num_frames * math.ceil(height / side) * math.ceil(width / side) > max(
            num_frames, count // 4
        ):
            side += 1
        squares = math.ceil(height / side) * math.ceil(width / side)
        size = pairs if num_frames * pairs >= count else height * width
        fits = [n for n in range(num_frames + 1) if n * size + (num_frames - n) * squares <= count]
        slow = [i * num_frames // max(fits) for i in range(max(fits))]
    kept = {}
    for frame in range(num_frames):
        if frame in slow:
            down = 1
            across = 2 if num_frames * pairs >= count else 1
        elif frame in fast:
            down = across = side
        else:
            continue
        cells = {}
        for y, x in product(range(height), range(width)):
            cells.setdefault((y // down, x // across), []).append((y, x))
        for members in cells.values():
            rows = sorted({y for y, _ in members})
            columns = sorted({x for _, x in members})
            middle = rows[(len(rows) - 1) // 2] * width + columns[(len(columns) - 1) // 2]
            values = [frames[frame, y * width + x].tolist() for y, x in members]
            pool = (
                max if frame in slow else lambda of_dimension: sum(of_dimension) / len(of_dimension)
            )
            kept[frame, middle] = torch.tensor(
                [pool(each) for each in zip(*values, strict=True)]
            ).to(frames)
    return kept


def dycoke(frames, height, width, count, hidden) -> dict:
    """With windows of 4 frames; below a quarter, the same on the windows' first frames."""
    num_frames, size = frames.shape[:2]
    if count < size:
        return {(0, place): frames[0, place] for place in even(size, count)}
    video = list(range(num_frames))
    while len(video[::4]) * size > count and len(video) > 1:
        video = video[::4]
    if len(video) * size <= count:
        whole = video
        compared = []
    else:
        whole = video[::4]
        compared = [number for number in range(len(video)) if number % 4]
    kept = {(frame, place): frames[frame, place] for frame in whole for place in range(size)}
    left = shares(count - len(kept), len(compared)) if compared else []
    for number, share in zip(compared, left, strict=True):
        reference = video[number - {1: 1, 2: 2, 3: 1}[number % 4]]
        frame = video[number]
        change = {
            p: -cosine(frames[frame, p, :hidden], frames[reference, p, :hidden])
            for p in range(size)
        }
        kept.update({(frame, place): frames[frame, place] for place in best(change, share)})
    return kept


def density_scores(tokens, hidden) -> dict:
    """Density times distance to the nearest denser token, of tokens by their place."""
    scale = hidden**0.5
    apart = {(a, b): float((tokens[a] - tokens[b]).norm()) / scale for a in tokens for b in tokens}
    density = {}
    for a in tokens:
        nearest = sorted(apart[a, b] for b in tokens)[:4]  # itself the first
        density[a] = math.exp(-sum(d * d for d in nearest) / len(nearest))
    farthest = max(apart.values())
    scores = {}
    for a in tokens:
        denser = [apart[a, b] for b in tokens if (density[b], -b) > (density[a], -a)]
        scores[a] = density[a] * (min(denser) if denser else farthest)
    return scores


def fastvid(frames, height, width, count, hidden) -> dict:
    """The rule of the authors' program for LLaVA-Video, with frames' means and salience as ours has
    them."""
    num_frames, size = frames.shape[:2]
    main = frames[..., :hidden]
    means = main.mean(dim=1)
    alike = {frame: cosine(means[frame], means[frame + 1]) for frame in range(num_frames - 1)}
    cuts = best({frame: -value for frame, value in alike.items()}, 7)
    cuts |= {frame for frame, value in alike.items() if value < 0.84}
    segments = []
    current = []
    for frame in range(num_frames):
        current.append(frame)
        if frame in cuts or frame == num_frames - 1:
            segments.append(current)
            current = []
    budget = shares(count, num_frames)
    kept = {}
    for segment in segments:
        total = sum(budget[frame] for frame in segment)
        num_context = int(0.4 * total + 1e-9)
        salient = dict(zip(segment, shares(total - num_context, len(segment)), strict=True))
        for interval in (4, 3, 2, 1):
            anchors = [
                frame for frame in reversed(segment) if (segment[-1] - frame) % interval == 0
            ]
            quota = dict(zip(anchors, shares(num_context, len(anchors)), strict=True))
            if all(quota[frame] + salient[frame] <= size for frame in anchors):
                break
        left = []
        tops = []
        for frame in segment:
            unlike = {place: -cosine(main[frame, place], means[frame]) for place in range(size)}
            chosen = best(unlike, salient[frame])
            kept.update({(frame, place): frames[frame, place] for place in chosen})
            rest = {place: main[frame, place] for place in range(size) if place not in chosen}
            left += [(frame, place) for place in rest]
            if quota.get(frame):
                tops.append(
                    [
                        (frame, place)
                        for place in sorted(best(density_scores(rest, hidden), quota[frame]))
                    ]
                )
        for of_frame in tops:
            joined = {top: [] for top in of_frame}
            for token in left:
                if token not in of_frame:
                    joined[max(of_frame, key=lambda top: cosine(main[token], main[top]))].append(
                        frames[token]
                    )
            for top, others in joined.items():
                mean = torch.stack(others).mean(dim=0) if others else frames[top]
                kept[top] = 0.6 * frames[top] + 0.4 * mean
    return kept


DEFINITIONS = {"slowfast": slowfast, "dycoke": dycoke, "fastvid": fastvid}
