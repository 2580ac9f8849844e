"""Prunes visual tokens before the language model, after the frames are encoded.

The result is a shorter prompt, and the embeddings of its visual tokens on their hosts. It is
prefilled like any other, with any method.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...config import PrefillConfig, ReduceConfig, ReuseConfig
from ...hosts import HostGroup
from ...input.model_inputs import ModelInputs
from ...input.visual import PromptError, VisualInput
from ...model.parts import IMAGE_FAMILIES, VIDEO_FAMILIES, ModelParts, hybrid_family
from ...model.rotary import rope_by_length
from ...refusals import refuse
from ...stats import StageTimer
from ...transfer import numbers_in, to_device
from ..encode import VisualRows, agree_on_chunks, all_rows, sharing_hosts
from ..memory import HostMemory, Room
from ..moving import move_rows
from ..reuse import stored_rows
from . import REDUCERS
from .choosing import Reduction, count_of, shares_of_videos
from .frames import Reducer, num_in_frames, require_whole_frames, shared_video, videos_of


def require_usable(
    config: ReduceConfig | None, model: PreTrainedConfig, reuse: ReuseConfig | None
) -> None:
    """Reject a reduction and a prefix cache that are incompatible with each other or with the
    model.

    Args:
        model: the model's config.

    Raises:
        ValueError: they are; the message says why.
    """
    if config is not None and model.model_type not in VIDEO_FAMILIES:
        what = "images only" if model.model_type in IMAGE_FAMILIES else "only text"
        raise ValueError(
            f"{config.method} prunes a video's visual tokens, but {model.model_type} models read "
            f"{what}"
        )
    kv_reuse = reuse is not None and reuse.mode == "kv"
    refuse(
        hybrid=hybrid_family(model),
        rope_by_length=rope_by_length(model.get_text_config()),
        kv_reuse=kv_reuse,
        reduction=None if config is None else config.method,
    )


def require_reducible(config: ReduceConfig, inputs: ModelInputs) -> None:
    """Reject a prompt that cannot be pruned.

    Raises:
        PromptError: frames are to be reduced, and the prompt has no video, or lacks tokens of its
            frames.
    """
    if config.leaves_all:
        return
    if inputs.visual is None or all(item.kind == "image" for item in inputs.visual.items):
        has = "no video" if inputs.visual is None else "images only"
        raise PromptError(
            f"reduce={config.method!r} prunes redundancy between a video's frames, but the prompt "
            f"has {has}"
        )
    require_whole_frames(inputs, f"reduce={config.method!r}")


def reduce_prompt(
    parts: ModelParts,
    inputs: ModelInputs,
    source: VisualRows,
    hosts: HostGroup,
    config: PrefillConfig,
    timer: StageTimer,
) -> tuple[ModelInputs, VisualRows, Reduction]:
    """Encode this host's share of a prompt's frames, and prune visual tokens; collective.

    Returns:
        The shorter prompt, without pixels, the source of this host's share of its embeddings, and
        what was left.

    Args:
        inputs: a prompt that :func:`require_reducible` lets pass, the same on every host.
        source: makes the embeddings of this host's share.
        config: with a reduction.

    Raises:
        ValueError: a frame cannot be read, or the vision tower makes another number of rows than
            the prompt has placeholders.
        NotEnoughMemoryError: a host certainly has too little memory for its frames' embeddings,
            which every host raises before they are encoded; or this host ran out of it.
        HostError: another host failed.
    """
    settings = config.reduce
    visual = inputs.visual
    embeddings = len(visual.pieces[visual.host]) * parts.row_width * parts.dtype.itemsize
    stages = {stage: {"embeddings": embeddings} for stage in ("encoding", "reduction")}
    room = Room(HostMemory(0, stages, {"reduction": embeddings}), inputs.num_tokens, hosts)
    room.require()
    num_bytes = visual.chunk_bytes or agree_on_chunks(hosts, parts.device, config.video.chunk_bytes)
    with hosts.local_stage("encode"), room.explained("encoding"):
        (rows,) = all_rows(
            parts, visual, visual.chunks(visual.host, num_bytes), source, [parts.row_width]
        )
    with hosts.collective_stage("reduction"), room.explained("reduction"), timer.stage("exchange"):
        count = count_of(settings.ratio, num_in_frames(parts, inputs))
        stays, patches, values = choose_rows(
            parts, inputs, rows, sharing_hosts(visual, hosts), REDUCERS[settings.method], count
        )
        shorter = _with_rows(parts, inputs, stays, patches, num_bytes)
    if not visual.is_shared_out:  # every host has chosen among all
        hosts.require_same("the choice of visual tokens", stays.numpy().tobytes())
    kept = stays.nonzero().flatten()
    reduction = Reduction(settings.method, settings.ratio, visual.num_rows, len(kept), kept)
    return shorter, partial(stored_rows, values, shorter.visual, parts.device), reduction


def choose_rows(
    parts: ModelParts,
    inputs: ModelInputs,
    rows: Tensor,
    hosts: HostGroup,
    reducer: Reducer,
    count: int,
) -> tuple[Tensor, tuple[range, ...], Tensor]:
    """Choose some of the tokens of a prompt's frames; collective.

    All visual tokens that belong to no frame of a video are kept.

    Args:
        rows: ``[rows of this host's share, (1 + L) * d]``.
        hosts: those that have the rows together.
        count: how many tokens of frames are kept, over all videos; each keeps the same share, as
            far as that comes out even.

    Returns:
        Which visual tokens stay, bool ``[rows]``, the same on every host; for every host, the
        temporal patches whose kept rows it has; and the kept rows of this host's patches,
        ``[k, (1 + L) * d]``.
    """
    visual = inputs.visual
    videos = videos_of(parts, inputs)
    shares = shares_of_videos(count, [len(video.in_frames) for video in videos])
    first = visual.pieces[hosts.rank].start
    mine = torch.zeros(visual.num_rows, dtype=torch.uint8)
    mine[first : first + len(rows)] = 1
    chosen, values = [], []  # of the videos' tokens that this host has after the reduction
    for video, share in zip(videos, shares, strict=True):
        mine[video.in_frames.start : video.ending.stop] = 0
        if share:
            places, of_video = reducer(shared_video(parts, inputs, video, rows, hosts), share)
            chosen.append(video.in_frames.start + places)
            values.append(of_video)
    unreduced = mine.nonzero().flatten()
    mine[torch.cat([unreduced, *chosen])] = 1
    has = hosts.all_gather(mine.to(rows.device)).wait().bool().cpu()
    # A video's ending rows go to the host that has its last frame now, or stay if no host has any
    # of it.
    held = [*map(numbers_in, visual.pieces)]
    ending = [torch.arange(0)] * hosts.size
    for video in videos:
        frame = visual.frames[video.patches[-1]]
        end = slice(video.ending.start, video.ending.stop)
        has_last = has[:, frame.start : frame.stop].any(dim=1)
        for host, share in enumerate(visual.patches):
            if has_last[host] or (not has_last.any() and video.patches[-1] in share):
                ending[host] = torch.cat([ending[host], numbers_in(video.ending)])
                has[host, end] = True
    values = [
        rows[to_device(unreduced - first, rows.device)],
        *values,
        move_rows(rows, held, ending, hosts),
    ]
    values = torch.cat(values)
    order = torch.cat([unreduced, *chosen, ending[hosts.rank]]).argsort()
    if not torch.equal(order, torch.arange(len(order))):
        values = values[to_device(order, rows.device)]
    kept = has.any(dim=0)
    ends = torch.searchsorted(_starts(visual, kept), has.sum(dim=1).cumsum(0)).tolist()
    ends = [0, *ends[:-1], len(visual.row_starts) - 1]
    return kept, tuple(range(start, stop) for start, stop in pairwise(ends)), values


def _starts(visual: VisualInput, kept: Tensor) -> Tensor:
    """Return the first kept row of every temporal patch, and how many there are in all."""
    return torch.nn.functional.pad(kept.long().cumsum(0), (1, 0))[list(visual.row_starts)]


def _with_rows(
    parts: ModelParts,
    inputs: ModelInputs,
    kept: Tensor,
    patches: tuple[range, ...],
    chunk_bytes: int,
) -> ModelInputs:
    """Return the prompt without the visual tokens that are not kept; the others stay at their
    positions."""
    visual = inputs.visual
    stays = ~parts.is_visual(inputs.input_ids[0])
    stays[~stays] = kept
    row_starts = tuple(_starts(visual, kept).tolist())
    return replace(
        inputs,
        input_ids=inputs.input_ids[:, stays],
        position_ids=inputs.position_ids[..., stays],
        context_start=int(stays[: inputs.context_start].sum()),
        query_start=int(stays[: inputs.query_start].sum()),
        visual=replace(
            visual, patches=patches, row_starts=row_starts, pixels=None, chunk_bytes=chunk_bytes
        ),
    )
