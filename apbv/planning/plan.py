"""This module says, from a model's config alone, whether a prompt will fit in memory."""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from .. import demo
from ..config import DTYPE_NAMES, PrefillConfig, SpeculativeConfig
from ..hosts.devices import choose_device
from ..input.video_size import VideoSize, parse_resolution, video_size
from ..input.visual import FRAME_COPIES, PIXEL_COPIES, VisualInput, VisualItem, equal_row_starts
from ..layout import LayoutError, split_evenly
from ..model.loading import read_config, read_video_processor
from ..model.parts import VIDEO_FAMILIES, num_deepstack_layers, require_supported
from ..model.sizes import DecoderSizes, num_audio_tokens, num_weights
from ..model.tensor_parallel import require_divisible
from ..prefilling.encode import chunk_bytes_within
from ..prefilling.memory import Share, host_memory
from ..prefilling.methods import resolve_method
from ..prefilling.reduction.early import reduces_first, require_usable
from ..prefilling.reduction.forecast import Forecast, reduction_memory, shape_left
from ..prefilling.reduction.shape import PromptShape
from ..speculate.strategies import STRATEGIES, prunes
from ..stats import free_memory_bytes
from .figures import Plan, PlannedReduction

# Tokens of a chat before the video, and of a question behind it.
_TOKENS_BEFORE, _TOKENS_BEHIND = 16, 64
# What a GPU's driver, its libraries' workspaces and the exchanges take beside tensors: assumed, not measured.
_GPU_OVERHEAD = 2**30
_MOST_SEARCHED = 2**22


def plan(
    model: str | Path | PreTrainedConfig,
    *,
    frames: int | None = None,
    resolution: str | tuple[int, int] = "720p",
    audio_seconds: float = 0.0,
    tokens: int | None = None,
    hosts: int = 1,
    tensor_parallel: int = 1,
    prefill: PrefillConfig | None = None,
    speculate: SpeculativeConfig | None = None,
    dtype: str | torch.dtype = "auto",
    device_memory: int | None = None,
) -> Plan:
    """Estimate whether a prompt fits in memory, before any weights are loaded. Nothing is exchanged or computed.

    Args:
        model: ``"demo"``, a directory, or a hub id, whose video processor then says how large frames become; or a
            config alone, by which every frame is taken as large as it is.
        frames: how many frames are sampled from a video. Either this or ``tokens``.
        resolution: of the video, as (height, width), "HxW", or a name such as "720p".
        audio_seconds: how long it is heard, by a model that hears.
        tokens: the tokens of a long text.
        hosts: H.
        tensor_parallel: T, the processes that share a host's model.
        prefill: the method and its lengths, and where the KV is placed.
        speculate: its draft model, and how much of the prompt that keeps, are taken into account.
        dtype: of weights and KV; ``"auto"``: the config's.
        device_memory: bytes that each process may take. None: what is free on this process's device. On a CPU the
            hosts are taken to share this machine's.

    Raises:
        ValueError: the model is unknown or not supported, or does not hear and is to; neither frames nor tokens
            were given, or both; or visual tokens are to be left out of a text, or behind more layers than there
            are.
    """
    if (frames is None) == (tokens is None):
        raise ValueError("a plan needs the frames of a video or the tokens of a text: give one of them")
    if audio_seconds < 0 or (audio_seconds and frames is None):
        raise ValueError(
            "audio_seconds is how long a video is heard: it needs its frames, and must not be negative"
        )
    counts = {"frames": frames, "tokens": tokens, "hosts": hosts, "tensor_parallel": tensor_parallel}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}")
    config = prefill or PrefillConfig()
    name, described, processor = _describe(model)
    require_usable(config.reduce, described.model_type, None)
    if config.reduce is not None and frames is None:
        raise ValueError(f"{config.reduce.method} leaves visual tokens out: it needs the frames of a video")
    require_divisible(described, tensor_parallel)
    device, number_type = choose_device(), _dtype_of(described, dtype)
    if device_memory is None:
        device_memory = free_memory_bytes(device) // (1 if device.type == "cuda" else hosts * tensor_parallel)
    sizes = DecoderSizes.from_config(described)
    task = _Task(
        config=described,
        video_processor=processor,
        resolution=parse_resolution(resolution) if isinstance(resolution, str) else resolution,
        is_video=frames is not None,
        num_audio=num_audio_tokens(described, audio_seconds) if audio_seconds else 0,
        num_hosts=hosts,
        prefill=config,
        share=Share(sizes, number_type.itemsize, device, tensor_parallel, num_deepstack_layers(described)),
        draft=None if speculate is None else _Draft.of(speculate, dtype),
        chunk_bytes=config.video.chunk_bytes or chunk_bytes_within(device_memory),
        empty=Plan(
            model=name,
            method=resolve_method(config, hosts).name,
            kv=config.kv,
            num_tokens=0,
            num_visual_tokens=0,
            num_audio_tokens=0,
            weights=num_weights(described, tensor_parallel) * number_type.itemsize,
            draft=0,
            overhead=_GPU_OVERHEAD if device.type == "cuda" else 0,
            hosts=(),
            device_memory=device_memory,
        ),
    )
    wanted = frames or tokens
    return replace(task.plan(wanted), most=_most_that_fit(task, wanted))


@dataclass(frozen=True)
class _Draft:
    """A _Draft is a draft model that has not been loaded.

    Attributes:
        weights: its bytes.
        kv_row: the bytes of a token's KV in all layers.
        settings: how much of the prompt it sees.
    """

    weights: int
    kv_row: int
    settings: SpeculativeConfig

    @classmethod
    def of(cls, settings: SpeculativeConfig, dtype: str | torch.dtype) -> "_Draft | None":
        """Read the draft model's config; None where the strategy needs no second model."""
        if not STRATEGIES[settings.strategy].needs_draft_model:
            return None
        if settings.draft_model is None:
            raise ValueError(f"{settings.strategy} needs a draft_model")
        _, config, _ = _describe(settings.draft_model, is_draft=True)
        itemsize, sizes = _dtype_of(config, dtype).itemsize, DecoderSizes.from_config(config)
        return cls(num_weights(config) * itemsize, sizes.kv_token * itemsize, settings)

    def num_bytes(self, num_tokens: int, num_visual: int) -> int:
        """Return the bytes of weights and KV beside a prompt."""
        if prunes(self.settings) and self.settings.prune == "prompt":
            kept = self.settings.keep_tokens
            share = round(num_visual * (self.settings.keep_ratio or 0))
            num_tokens = num_tokens - num_visual + share if kept is None else min(num_tokens, kept)
        return self.weights + self.kv_row * num_tokens


@dataclass(frozen=True)
class _Task:
    """A _Task is what is to be planned, for any number of frames or tokens."""

    config: PreTrainedConfig
    video_processor: Any
    resolution: tuple[int, int]
    is_video: bool
    num_audio: int
    num_hosts: int
    prefill: PrefillConfig
    share: Share
    draft: _Draft | None
    chunk_bytes: int
    empty: Plan

    def plan(self, count: int) -> Plan:
        """Plan for so many frames, or tokens of a text."""
        config, num_hosts = self.prefill, self.num_hosts
        video, visual = None, None
        shape = PromptShape(count, 0, max(count - config.query_len, 0))
        if self.is_video:
            video = video_size(self.config, count, *self.resolution, self.video_processor)
            visual = self._shares(video, count)
            stop = _TOKENS_BEFORE + video.num_rows + video.num_text_tokens + self.num_audio
            frames = (video.num_temporal_patches, video.height, video.width)
            shape = PromptShape(stop + _TOKENS_BEHIND, _TOKENS_BEFORE, stop, video.num_rows, (frames,))
        is_reduced_first = reduces_first(config)
        left = shape_left(config.reduce, shape) if is_reduced_first else shape
        forecast = Forecast.of_shape(config, self.share.sizes, num_hosts, left)
        hosts = []
        for host in range(num_hosts):
            chunk, reduction = 0, None
            if visual is not None:
                patches = visual.chunks(host, self.chunk_bytes)
                chunk = visual.items[0].patch_bytes * max(map(len, patches), default=0)
            if is_reduced_first:
                reduction = reduction_memory(config.reduce, self.share, shape, visual.pieces, host)
            hosts.append(host_memory(self.share, forecast.most, host, config.kv, chunk, reduction))
        num_visual = shape.num_visual
        return replace(
            self.empty,
            num_tokens=shape.num_tokens,
            num_visual_tokens=num_visual,
            num_audio_tokens=self.num_audio,
            draft=0 if self.draft is None else self.draft.num_bytes(shape.num_tokens, num_visual),
            hosts=tuple(hosts),
            reduction=self._reduction(forecast, shape),
        )

    def _reduction(self, forecast: Forecast, shape: PromptShape) -> PlannedReduction | None:
        """Return what is left of a prompt of this shape."""
        settings = self.prefill.reduce
        if settings is None or settings.leaves_all:
            return None
        others = shape.num_tokens - shape.num_visual
        by_layer = [run.layout.num_tokens - others for run in forecast.most for _ in range(run.num_layers)]
        num_left = forecast.most[-1].layout.num_tokens
        return PlannedReduction(
            method=settings.method,
            ratio=settings.ratio,
            num_tokens=num_left,
            num_visual_tokens=num_left - others,
            by_layer=tuple(by_layer),
            is_bound=forecast.most != forecast.fewest,
        )

    def _shares(self, video: VideoSize, num_frames: int) -> VisualInput:
        """Return which host encodes how much of the video."""
        everything = range(video.num_temporal_patches)
        hosts, parallel = self.num_hosts, self.prefill.frame_parallel
        patches = tuple(split_evenly(everything, hosts) if parallel else [everything] * hosts)
        frames = FRAME_COPIES * 3 * prod(self.resolution) * num_frames
        patch_bytes = (frames + PIXEL_COPIES * video.pixel_bytes) // len(everything)
        starts = equal_row_starts(0, len(everything), video.num_rows, video.num_ending_rows)
        return VisualInput(
            items=(VisualItem("video", len(everything), video.num_ending_rows, patch_bytes),),
            patches=patches,
            host=0,
            row_starts=(*starts, video.num_rows),
            replicated=not parallel,
        )


def _most_that_fit(task: _Task, wanted: int) -> int | None:
    """Return the largest number of frames or tokens that fit; None where none was found that does not."""

    def fits(count: int) -> bool:
        try:
            return task.plan(count).fits
        except LayoutError:  # too short for the lengths that were asked for
            return True

    low, high = 0, wanted
    while fits(high):
        low, high = high, 2 * high
        if low > _MOST_SEARCHED:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _describe(model: str | Path | PreTrainedConfig, is_draft: bool = False) -> tuple[str, PreTrainedConfig, Any]:
    """Return a model's name, its config, and its video processor where there is one to be read."""
    if isinstance(model, PreTrainedConfig):
        require_supported(model)
        return model.name_or_path or model.model_type, model, None
    path = (demo.draft_path() if is_draft else demo.model_path()) if str(model) == "demo" else model
    config = read_config(path)
    is_video = require_supported(config) in VIDEO_FAMILIES
    return str(model), config, read_video_processor(path) if is_video else None


def _dtype_of(config: PreTrainedConfig, wanted: str | torch.dtype) -> torch.dtype:
    """Return the type in which a model's weights would be loaded.

    Raises:
        ValueError: there is no such type.
    """
    if isinstance(wanted, torch.dtype):
        return wanted
    if wanted not in DTYPE_NAMES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_NAMES)}, not {wanted!r}")
    if wanted != "auto":
        return getattr(torch, wanted)
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    return getattr(torch, found) if isinstance(found, str) else found


__all__ = ["Plan", "PlannedReduction", "plan"]
