"""What each reduction before the language model keeps, by its definition: loops over the tokens of a whole video.

Of frames ``[T, h * w, x]``, whose first ``hidden`` columns are embeddings and the others deepstack's, a definition
returns what is kept as ``{(frame, place): row}``. Nothing here is shared with the implementation.
"""

import math
from itertools import product

import torch

from oracle import decoder_inputs


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
    num_frames, size = frames.shape[:2]
    if count < num_frames:
        slow, side, fast = [], max(height, width), even(num_frames, count)
    else:
        fast, side = range(num_frames), 1
        most = max(num_frames, count // 4)
        while num_frames * math.ceil(height / side) * math.ceil(width / side) > most:
            side += 1
        squares = math.ceil(height / side) * math.ceil(width / side)
        num_slow = max(k for k in range(num_frames + 1) if k * size + (num_frames - k) * squares <= count)
        slow = even(num_frames, num_slow)
    kept = {}
    for frame in range(num_frames):
        if frame in slow:
            kept.update({(frame, place): frames[frame, place] for place in range(size)})
        elif frame in fast:
            squares = {}
            for y, x in product(range(height), range(width)):
                squares.setdefault((y // side, x // side), []).append((y, x))
            for members in squares.values():
                rows, columns = sorted({y for y, _ in members}), sorted({x for _, x in members})
                middle = rows[(len(rows) - 1) // 2] * width + columns[(len(columns) - 1) // 2]
                kept[frame, middle] = torch.stack([frames[frame, y * width + x] for y, x in members]).mean(dim=0)
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
        whole, compared = video, []
    else:
        whole, compared = video[::4], [number for number in range(len(video)) if number % 4]
    kept = {(frame, place): frames[frame, place] for frame in whole for place in range(size)}
    left = shares(count - len(kept), len(compared)) if compared else []
    for number, share in zip(compared, left, strict=True):
        reference = video[number - {1: 1, 2: 2, 3: 1}[number % 4]]
        frame = video[number]
        change = {p: -cosine(frames[frame, p, :hidden], frames[reference, p, :hidden]) for p in range(size)}
        kept.update({(frame, place): frames[frame, place] for place in best(change, share)})
    return kept


def hippo_scores(main, height, width) -> dict:
    """Change over time and variety in space of the tokens ``[T, h * w, d]``, each z-scored within a frame."""
    (num_frames, size), scores = main.shape[:2], {}
    for frame in range(num_frames):
        beside = [other for other in (frame - 1, frame + 1) if 0 <= other < num_frames]
        change, variety = [], []
        for place in range(size):
            alike = [cosine(main[frame, place], main[other, place]) for other in beside]
            change.append(1 - sum(alike) / len(alike) if alike else 0.0)
            y, x = divmod(place, width)
            rows, columns = range(height)[y // 5 * 5 :][:5], range(width)[x // 5 * 5 :][:5]
            crop = [a * width + b for a, b in product(rows, columns)]
            inside = [cosine(main[frame, place], main[frame, other]) for other in crop]
            variety.append(sum((c - sum(inside) / len(inside)) ** 2 for c in inside) / len(inside))
        for place, both in enumerate(zip(z_scores(change, 1e-6), z_scores(variety, 1e-6), strict=True)):
            scores[frame, place] = sum(both)
    return scores


def z_scores(terms: list[float], damping: float) -> list[float]:
    """Terms with a mean of 0 and a standard deviation of 1, if they differ by much more than ``damping``."""
    mean = sum(terms) / len(terms)
    spread = (sum((term - mean) ** 2 for term in terms) / len(terms)) ** 0.5
    return [(term - mean) / (spread + damping) for term in terms]


def density_scores(tokens, hidden) -> dict:
    """Density times distance to the nearest denser token, of tokens by their place."""
    scale = hidden**0.5
    apart = {(a, b): float((tokens[a] - tokens[b]).norm()) / scale for a in tokens for b in tokens}
    density = {}
    for a in tokens:
        nearest = sorted(apart[a, b] for b in tokens if b != a)[:4]
        density[a] = math.exp(-sum(d * d for d in nearest) / len(nearest)) if nearest else 1.0
    farthest = max(apart.values())
    scores = {}
    for a in tokens:
        denser = [apart[a, b] for b in tokens if (density[b], -b) > (density[a], -a)]
        scores[a] = density[a] * (min(denser) if denser else farthest)
    return scores


def fastvid(frames, height, width, count, hidden) -> dict:
    num_frames, size = frames.shape[:2]
    main = frames[..., :hidden]
    means = main.mean(dim=1)
    alike = {frame: cosine(means[frame], means[frame + 1]) for frame in range(num_frames - 1)}
    cuts = best({frame: -value for frame, value in alike.items()}, 7)
    cuts |= {frame for frame, value in alike.items() if value < 0.9}
    segments, current = [], []
    for frame in range(num_frames):
        current.append(frame)
        if frame in cuts or frame == num_frames - 1:
            segments.append(current)
            current = []
    budget = shares(count, num_frames)
    kept = {}
    for segment in segments:
        salient = {frame: int(0.4 * budget[frame] + 1e-9) for frame in segment}
        dense = {frame: budget[frame] - salient[frame] for frame in segment}
        for interval in (4, 3, 2, 1):
            anchors = segment[::interval]
            quota = dict(zip(anchors, shares(sum(dense.values()), len(anchors)), strict=True))
            if interval == 1:
                quota = dense
            if all(quota[frame] + salient[frame] <= size for frame in anchors):
                break
        pool, tops = [], []
        for frame in segment:
            attention = {place: float(main[frame, place] @ means[frame]) for place in range(size)}
            chosen = best(attention, salient[frame])
            kept.update({(frame, place): frames[frame, place] for place in chosen})
            rest = {place: main[frame, place] for place in range(size) if place not in chosen}
            peaks = best(density_scores(rest, hidden), quota[frame]) if frame in quota and rest else set()
            tops += [(frame, place) for place in sorted(peaks)]
            pool += [(frame, place) for place in rest if place not in peaks]
        joined = {top: [] for top in tops}
        for token in pool if tops else []:
            nearest = max(tops, key=lambda top: cosine(main[token], main[top]))
            joined[nearest].append(frames[token])
        for top, others in joined.items():
            mean = torch.stack(others).mean(dim=0) if others else frames[top]
            kept[top] = 0.6 * frames[top] + 0.4 * mean
    return kept


DEFINITIONS = {"slowfast": slowfast, "dycoke": dycoke, "fastvid": fastvid}


@torch.no_grad()
def reduced_logits(model, batch: dict, videos: list[tuple[int, int, int]], method: str, ratio: float):
    """The last logits ``[1, V]`` of transformers' own language model on a reduced prompt, and its length.

    What the model makes of the whole prompt is taken on its way into the language model, reduced, and run again.

    Args:
        batch: what the processor returned.
        videos: frames, height and width in tokens of the prompt's videos, which come first among its visual tokens
            of this kind; behind a video there may be rows of no frame, as many as are left over.
    """
    decoder, taken = model.get_decoder(), decoder_inputs(model, batch)
    embeds, ids = taken["inputs_embeds"][0], batch["input_ids"][0]
    hidden = embeds.shape[1]
    deepstack = list(taken.get("deepstack_visual_embeds") or [])
    tokens = video_tokens(model.config, ids, videos)
    mask = taken["visual_pos_masks"][0].reshape(-1, len(ids))[0] if deepstack else ids < 0
    numbers = mask.long().cumsum(0) - 1
    total = sum(len(each) for each in tokens)
    count, before = max(1, round(ratio * total)), 0
    stays = torch.ones(len(ids), dtype=torch.bool)
    embeds = embeds.clone()
    for (num_frames, height, width), places in zip(videos, tokens, strict=True):
        share = (before + len(places)) * count // total - before * count // total
        before += len(places)
        streams = [embeds[places], *(layer[numbers[places]] for layer in deepstack)]
        frames = torch.cat(streams, dim=-1).view(num_frames, height * width, -1)
        kept = DEFINITIONS[method](frames, height, width, share, hidden) if share else {}
        stays[places] = False
        for (frame, place), row in kept.items():
            token = places[frame * height * width + place]
            stays[token] = True
            main, *others = row.split(hidden)
            embeds[token] = main
            for layer, value in zip(deepstack, others, strict=True):
                layer[numbers[token]] = value
    position_ids = taken.get("position_ids")
    if position_ids is None:
        position_ids = torch.arange(len(ids))[None]
    extra = {}
    if deepstack:
        left = [layer[stays[mask]] for layer in deepstack]
        extra = {"visual_pos_masks": mask[stays][None], "deepstack_visual_embeds": left}
    hidden_states = decoder(
        inputs_embeds=embeds[stays][None],
        attention_mask=torch.ones(1, int(stays.sum()), dtype=torch.long),  # else gaps mean several sequences
        position_ids=position_ids[..., stays],
        use_cache=False,
        **extra,
    ).last_hidden_state
    return model.lm_head(hidden_states[:, -1]), int(stays.sum())


def whole_videos(family: str, batch: dict) -> list[tuple[int, int, int]]:
    """Frames, height and width in tokens of a prompt's videos, from what the processor returned."""
    if family.startswith("qwen"):
        return [(t, h // 2, w // 2) for t, h, w in batch["video_grid_thw"].tolist()]
    pixels = batch["pixel_values_videos"] if "pixel_values_videos" in batch else batch["pixel_values"]
    frames = pixels.shape[1] if pixels.dim() == 5 else pixels.shape[0]
    return [(frames, 2, 2)] * (pixels.shape[0] if pixels.dim() == 5 else 1)


def video_tokens(config, ids: torch.Tensor, videos: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    """The tokens of every video's frames."""
    token_id = getattr(config, "video_token_id", None) or config.image_token_id
    places, found, ending = (ids == token_id).nonzero().flatten(), [], 0
    spare = len(places) - sum(frames * height * width for frames, height, width in videos)
    for frames, height, width in videos:
        size = frames * height * width
        found.append(places[ending : ending + size])
        ending += size + spare // len(videos)
    return found
