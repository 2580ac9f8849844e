"""Reduces a prompt before the language model: the frames are encoded, and then some tokens left out.

What is left is a shorter prompt, and the embeddings of its visual tokens where they lie. It is prefilled as any
other, by any method.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ...config import PrefillConfig, ReduceConfig, ReuseConfig
from ...hosts import HostGroup
from ...input.model_inputs import ModelInputs
from ...input.visual import PromptError, VisualInput
from ...layout import intersect
from ...model.parts import VIDEO_FAMILIES, ModelParts
from ...refusals import refuse
from ...stats import StageTimer
from ..encode import VisualRows, agree_on_chunks, all_rows
from ..memory import HostMemory, Room
from ..reuse import StoredRows
from . import EARLY_REDUCERS
from .choosing import Reduction, count_of, shares_of_videos
from .frames import EarlyReducer, SharedVideo, VideoPlace, num_in_frames, shared_video, videos_of


def require_usable(config: ReduceConfig | None, family: str, reuse: ReuseConfig | None) -> None:
    """Refuse a reduction that does not go together with the model, or with what is kept for further questions.

    Args:
        family: the model's.

    Raises:
        ValueError: the model reads text only, or KV is kept.
    """
    if config is None:
        return
    if family not in VIDEO_FAMILIES:
        raise ValueError(f"{config.method} leaves visual tokens out, and {family} models read text only")
    refuse(kv_reuse=reuse is not None and reuse.mode == "kv", reduction=config.method)


def require_reducible(config: ReduceConfig | None, inputs: ModelInputs) -> None:
    """Refuse a prompt of which nothing can be left out.

    Raises:
        PromptError: frames are to be reduced, and the prompt has no video.
    """
    if config is None or config.leaves_all or not config.needs_video:
        return
    if inputs.visual is None or all(item.kind == "image" for item in inputs.visual.items):
        has = "no video" if inputs.visual is None else "images only"
        raise PromptError(
            f"reduce={config.method!r} leaves out what a video's frames repeat: the prompt has {has}"
        )


def reduce_prompt(
    parts: ModelParts,
    inputs: ModelInputs,
    source: VisualRows,
    hosts: HostGroup,
    config: PrefillConfig,
    timer: StageTimer,
) -> tuple[ModelInputs, VisualRows, Reduction]:
    """Encode this host's share of a prompt's frames, and leave out visual tokens; collective.

    Returns:
        The shorter prompt, without pixels, the source of this host's share of its embeddings, and what was left.

    Args:
        inputs: a prompt that :func:`require_reducible` lets pass, the same on every host.
        source: makes the embeddings of this host's share.
        config: with a reduction before the language model.

    Raises:
        ValueError: a frame cannot be read, or the vision tower makes another number of rows than the prompt has
            placeholders.
        NotEnoughMemoryError: a host certainly has too little memory for its frames' embeddings, which every host
            raises before they are encoded; or this host ran out of it.
        HostError: another host failed.
    """
    settings, visual = config.reduce, inputs.visual
    embeddings = len(visual.pieces[hosts.rank]) * parts.row_width * parts.dtype.itemsize
    stages = {stage: {"embeddings": embeddings} for stage in ("encoding", "reduction")}
    room = Room(HostMemory(0, stages, {"reduction": embeddings}), inputs.num_tokens, hosts)
    room.require()
    num_bytes = visual.chunk_bytes or agree_on_chunks(hosts, parts.device, config.video.chunk_bytes)
    with hosts.local_stage("encode"), room.explained("encoding"):
        rows = all_rows(parts, visual, source, num_bytes)
    with hosts.collective_stage("reduction"), room.explained("reduction"), timer.stage("exchange"):
        count = count_of(settings.ratio, num_in_frames(parts, inputs))
        stays, patches, values = choose_rows(parts, inputs, rows, hosts, EARLY_REDUCERS[settings.method], count)
        shorter = _with_rows(parts, inputs, stays, patches, num_bytes)
    kept = stays.nonzero().flatten()
    reduction = Reduction(settings.method, settings.ratio, visual.num_rows, len(kept), kept)
    return shorter, StoredRows(values, shorter.visual, parts.device), reduction


def choose_rows(
    parts: ModelParts, inputs: ModelInputs, rows: Tensor, hosts: HostGroup, reducer: EarlyReducer, count: int
) -> tuple[Tensor, tuple[range, ...], Tensor]:
    """Choose some of the tokens of a prompt's frames; collective.

    All visual tokens that belong to no frame of a video are kept.

    Args:
        rows: ``[rows of this host's share, (1 + L) * d]``.
        count: how many tokens of frames are kept, over all videos; each keeps the same share, as far as that comes
            out even.

    Returns:
        Which visual tokens stay, bool ``[rows]``, the same on every host; for every host, the temporal patches
        whose kept rows it has; and the kept rows of this host's patches, ``[k, (1 + L) * d]``.
    """
    visual, videos = inputs.visual, videos_of(parts, inputs)
    kept = torch.ones(visual.num_rows, dtype=torch.bool)
    first = visual.pieces[hosts.rank].start  # of this host's rows
    done, shares = 0, shares_of_videos(count, [len(video.in_frames) for video in videos])
    owned: list[list[range]] = [[] for _ in range(hosts.size)]
    values = []

    def keep_all(patches: range) -> None:
        for host, share in enumerate(visual.patches):
            owned[host].append(intersect(share, patches))
        here = visual.rows_of(owned[hosts.rank][-1])
        values.append(rows[here.start - first : here.stop - first])

    for video, share in zip(videos, shares, strict=True):
        keep_all(range(done, video.patches.start))
        done, place = video.patches.stop, video.in_frames
        shared = shared_video(parts, inputs, video, rows, hosts)
        nothing = torch.empty(0, dtype=torch.long)
        frames, places, rows_kept = reducer(shared, share) if share else shared.kept(nothing)
        kept[place.start : place.stop] = _agreed_mask(places, shared)
        for host, of_host in enumerate(_frames_of_hosts(frames, shared)):
            owned[host].append(range(video.patches.start + of_host.start, video.patches.start + of_host.stop))
        values += [rows_kept, _ending_rows(visual, video, rows, owned, hosts)]
    keep_all(range(done, visual.num_temporal_patches))
    return kept, _joined(owned), torch.cat(values)


def _agreed_mask(places: Tensor, video: SharedVideo) -> Tensor:
    """Return which tokens of a video are kept on any host: bool ``[T * h * w]``; collective."""
    mask = torch.zeros(video.num_frames * video.frame_size, dtype=torch.uint8)
    mask[places] = 1
    if video.replicated:
        video.hosts.require_same("the choice of visual tokens", mask.numpy().tobytes())
        return mask.bool()
    return video.hosts.all_gather(mask.to(video.rows.device)).wait().any(dim=0).cpu()


def _frames_of_hosts(frames: range, video: SharedVideo) -> list[range]:
    """Return for every host the frames whose kept tokens it has; collective."""
    if video.replicated:
        return [frames] * video.hosts.size
    ends = video.hosts.gather_floats([frames.start, frames.stop])[:: video.hosts.tensor_parallel_size]
    return [range(int(start), int(stop)) for start, stop in ends]


def _ending_rows(
    visual: VisualInput, video: VideoPlace, rows: Tensor, owned: list[list[range]], hosts: HostGroup
) -> Tensor:
    """Bring the rows behind a video's last frame to the host that has that frame now; collective."""
    count, last = video.num_ending_rows, video.patches[-1]
    nothing = rows[:0]
    if not count:
        return nothing
    had = next(host for host, share in enumerate(visual.patches) if last in share)
    first = visual.pieces[hosts.rank].start
    if hosts.rank == had or visual.replicated:
        ending = rows[video.in_frames.stop - first : video.rows.stop - first].clone()
    else:
        ending = rows.new_empty(count, rows.shape[1])
    if not visual.replicated:
        ending = hosts.broadcast(ending, had)
    return ending if last in owned[hosts.rank][-1] else nothing


def _joined(owned: list[list[range]]) -> tuple[range, ...]:
    """Join every host's adjacent runs of temporal patches to one."""
    joined: list[range] = []
    for runs in owned:
        runs = [run for run in runs if run]
        end = joined[-1].stop if joined else 0
        joined.append(range(runs[0].start, runs[-1].stop) if runs else range(end, end))
    return tuple(joined)


def _with_rows(
    parts: ModelParts, inputs: ModelInputs, kept: Tensor, patches: tuple[range, ...], chunk_bytes: int
) -> ModelInputs:
    """Return the prompt without the visual tokens that are not kept; the others stay at their positions."""
    visual = inputs.visual
    stays = ~parts.is_visual(inputs.input_ids[0])
    stays[~stays] = kept
    starts = torch.nn.functional.pad(kept.long().cumsum(0), (1, 0))[list(visual.row_starts)]
    return replace(
        inputs,
        input_ids=inputs.input_ids[:, stays],
        position_ids=inputs.position_ids[..., stays],
        context_start=int(stays[: inputs.context_start].sum()),
        query_start=int(stays[: inputs.query_start].sum()),
        visual=replace(
            visual, patches=patches, row_starts=tuple(starts.tolist()), pixels=None, chunk_bytes=chunk_bytes
        ),
    )
