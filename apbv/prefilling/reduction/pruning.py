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
from ...config.refusals import refuse
from ...device.copies import numbers_in, to_device
from ...errors import InvalidConfigError, PromptError
from ...hosts import HostGroup
from ...hosts.row_exchange import move_rows
from ...input.prompts.model_inputs import ModelInputs
from ...input.prompts.visual import VisualInput
from ...model.families import family_of, hybrid_family
from ...model.parts import ModelParts
from ...runner.dynamic_pruning import DecodePruning
from ...stats import StageTimer
from ..encoding.vision import VisualRows, agree_on_chunks, all_rows, sharing_hosts, stored_rows
from ..memory import HostMemory, Room
from . import REDUCERS
from .choosing import Reduction, count_of, shares_of_videos
from .frames import (
    Reducer,
    VideoPlace,
    num_in_frames,
    require_whole_frames,
    shared_video,
    videos_of,
)

_WHOLE_LAYERS = 3  # of DyCoke's second stage (its L)


def require_usable(
    config: ReduceConfig | None,
    model: PreTrainedConfig,
    reuse: ReuseConfig | None,
    *,
    drafting: str | None = None,
    num_processes: int = 1,
    tensor_parallel: int = 1,
) -> None:
    """Reject a reduction that a model, a prefix cache, a draft or the hosts do not allow.

    Args:
        model: the model's config.
        drafting: the drafting strategy; None: there is no draft.
        num_processes: the processes of all hosts.
        tensor_parallel: T, the processes of each host.

    Raises:
        InvalidConfigError: they are incompatible; the message says why.
    """
    family = family_of(model)
    if config is not None and not family.reads_video:
        # Between layers the visual tokens of images are pruned, too.
        is_readable = config.prunes_between_layers and family.reads_images
        readable = "images only" if family.reads_images else "only text"
        if not is_readable:
            raise InvalidConfigError(
                f"{config.method} prunes a video's visual tokens, but {family} models read "
                f"{readable}"
            )
    refuse(
        hybrid=hybrid_family(model),
        rope_by_length=family.rope_by_length,
        kv_reuse=reuse is not None and reuse.mode == "kv",
        reduction=None if config is None else config.method,
        layer_reduction=None if config is None else config.layer_reduction,
        drafting=drafting,
        several_hosts=num_processes > 1,
        decode_pruning=config is not None and config.prunes_decoding,
        tensor_parallel=tensor_parallel > 1,
    )


def decode_pruning(config: ReduceConfig | None, num_layers: int) -> DecodePruning | None:
    """Return how decoding steps leave out visual tokens; None if they do not.

    Args:
        num_layers: the model's layers.

    Raises:
        InvalidConfigError: the model has too few layers.
    """
    if config is None or not config.prunes_decoding:
        return None
    assert config.decode_ratio is not None, "it prunes decoding"
    layer = config.layer or min(_WHOLE_LAYERS, num_layers - 1)
    if layer >= num_layers:
        raise InvalidConfigError(
            f"decode_ratio cannot leave tokens out after {layer} layers: the model has "
            f"{num_layers}, and at least one must follow"
        )
    return DecodePruning(config.decode_ratio, layer)


def require_reducible(config: ReduceConfig, inputs: ModelInputs) -> None:
    """Reject a prompt that cannot be pruned.

    Raises:
        PromptError: frames are to be reduced, and the prompt has no video, or lacks tokens of its
            frames.
    """
    if config.keeps_all:
        return
    if config.prunes_between_layers:
        if not inputs.num_visual_tokens:
            raise PromptError(
                f"reduce={config.method!r} prunes visual tokens, and the prompt has none"
            )
        return
    if inputs.visual is None or all(item.kind == "image" for item in inputs.visual.items):
        content = "no video" if inputs.visual is None else "images only"
        raise PromptError(
            f"reduce={config.method!r} prunes redundancy between a video's frames, but the prompt "
            f"has {content}"
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

    Args:
        inputs: a prompt that :func:`require_reducible` lets pass, the same on every host.
        source: makes the embeddings of this host's share.
        config: has a reduction.

    Returns:
        The shorter prompt, without pixels; the source of this host's share of its embeddings; and a
        record of the pruning.

    Raises:
        InvalidConfigError: a frame cannot be read, or the vision tower makes another number of rows
            than the prompt has placeholders.
        NotEnoughMemoryError: a host certainly has too little memory for its frames' embeddings,
            which every host raises before they are encoded; or this host ran out of it.
        HostError: another host failed.
    """
    settings = config.reduce
    assert settings is not None  # the config has a reduction
    visual = inputs.require_visual()

    # Check the memory.
    embedding_bytes = len(visual.pieces[visual.host]) * parts.row_width * parts.dtype.itemsize
    memory = HostMemory(
        0,
        {
            "encoding": {"embeddings": embedding_bytes},
            "reduction": {"embeddings": embedding_bytes},
        },
        {"reduction": embedding_bytes},
    )
    room = Room(memory, inputs.num_tokens, hosts)
    room.require()

    # Encode.
    chunk_bytes = visual.chunk_bytes
    if not chunk_bytes:
        chunk_bytes = agree_on_chunks(hosts, parts.device, config.video.chunk_bytes)
    with hosts.local_stage("encode"), room.explained("encoding"):
        chunks = visual.chunks(visual.host, chunk_bytes)
        streams = all_rows(parts, visual, chunks, source, [parts.row_width])
        rows = streams.pop()

    # Prune.
    with hosts.collective_stage("reduction"), room.explained("reduction"), timer.stage("exchange"):
        is_kept, patches, values = choose_rows(
            parts,
            inputs,
            rows,
            sharing_hosts(visual, hosts),
            REDUCERS[settings.method],
            count_of(settings.ratio, num_in_frames(parts, inputs)),
        )
        shorter = _with_rows(parts, inputs, is_kept, patches, chunk_bytes)
    if not visual.is_shared_out:  # every host has chosen among all
        hosts.require_same("the choice of visual tokens", is_kept.numpy().tobytes())
    kept = is_kept.nonzero().flatten()
    reduction = Reduction(
        method=settings.method,
        ratio=settings.ratio,
        num_before=visual.num_rows,
        num_after=len(kept),
        kept=kept,
    )
    return shorter, partial(stored_rows, values, shorter.require_visual(), parts.device), reduction


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
        reducer: chooses among a video's tokens.
        count: how many tokens of frames are kept, over all videos; each keeps the same share, as
            far as that comes out even.

    Returns:
        Which visual tokens stay, bool ``[rows]``, the same on every host; for every host, the
        temporal patches whose kept rows it has; and the kept rows of this host's patches,
        ``[k, (1 + L) * d]``.
    """
    visual = inputs.require_visual()
    videos = videos_of(parts, inputs)
    shares = shares_of_videos(count, [len(video.in_frames) for video in videos])

    # Reduce the videos' frames.
    first = visual.pieces[hosts.rank].start
    is_local = torch.zeros(visual.num_rows, dtype=torch.uint8)
    is_local[first : first + len(rows)] = 1
    chosen = []  # of the videos' tokens that this host has after the reduction
    values = []
    for video, share in zip(videos, shares, strict=True):
        is_local[video.in_frames.start : video.ending.stop] = 0
        if share:
            reduced = reducer(shared_video(parts, inputs, video, rows, hosts), share)
            chosen.append(video.in_frames.start + reduced.places)
            values.append(reduced.values)
    unreduced = is_local.nonzero().flatten()
    is_local[torch.cat([unreduced, *chosen])] = 1
    has_row = hosts.all_gather(is_local.to(rows.device)).wait().bool().cpu()  # [hosts, rows]

    ending = _assign_endings(visual, videos, has_row)
    held = [numbers_in(piece) for piece in visual.pieces]
    values.insert(0, rows[to_device(unreduced - first, rows.device)])
    values.append(move_rows(rows, held, ending, hosts))

    # Put this host's rows in the prompt's order.
    kept_values = torch.cat(values)
    values.clear()  # frees them
    order = torch.cat([unreduced, *chosen, ending[hosts.rank]]).argsort()
    if not torch.equal(order, torch.arange(len(order))):
        kept_values = kept_values[to_device(order, rows.device)]

    # Every host gets the run of temporal patches whose kept rows it has.
    is_kept = has_row.any(dim=0)
    num_rows_to_host = has_row.sum(dim=1).cumsum(0)
    ends = torch.searchsorted(_starts(visual, is_kept), num_rows_to_host).tolist()
    num_patches = len(visual.row_starts) - 1
    bounds = [0, *ends[:-1], num_patches]
    patches = tuple(range(start, stop) for start, stop in pairwise(bounds))
    return is_kept, patches, kept_values


def _assign_endings(visual: VisualInput, videos: list[VideoPlace], has_row: Tensor) -> list[Tensor]:
    """Assign the rows after each video's frames to hosts, and mark them in ``has_row``.

    They go to the host that has the video's last frame now, or stay where they are if no host has
    any of it.

    Args:
        has_row: bool ``[hosts, rows]``: which host has which row after the reduction.

    Returns:
        For every host, the rows that it gets, ascending.
    """
    ending = [torch.arange(0)] * len(has_row)
    for video in videos:
        last_patch = video.patches[-1]
        frame = visual.frames[last_patch]
        has_last = has_row[:, frame.start : frame.stop].any(dim=1)
        is_left_out = not has_last.any()
        for host, share in enumerate(visual.patches):
            if has_last[host] or (is_left_out and last_patch in share):
                ending[host] = torch.cat([ending[host], numbers_in(video.ending)])
                has_row[host, video.ending.start : video.ending.stop] = True
    return ending


def _starts(visual: VisualInput, is_kept: Tensor) -> Tensor:
    """Return the first kept row of every temporal patch, and how many there are in all."""
    num_kept_before = torch.nn.functional.pad(is_kept.long().cumsum(0), (1, 0))
    return num_kept_before[list(visual.row_starts)]


def _with_rows(
    parts: ModelParts,
    inputs: ModelInputs,
    is_kept: Tensor,
    patches: tuple[range, ...],
    chunk_bytes: int,
) -> ModelInputs:
    """Return the prompt with the kept visual tokens only; tokens stay at their positions."""
    visual = inputs.require_visual()
    stays = ~parts.is_visual(inputs.input_ids[0])
    stays[~stays] = is_kept
    row_starts = tuple(_starts(visual, is_kept).tolist())
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
