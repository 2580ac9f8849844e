"""Estimates from a model's config alone whether a prompt fits in memory."""

import re
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from . import demo
from .config import DTYPE_NAMES, PrefillConfig, SpeculativeConfig
from .config.checks import require_type
from .hosts.devices import choose_device
from .input.visual import FRAME_COPIES, PIXEL_COPIES, most_in_a_chunk, num_frames_told
from .layout import ContextLayout, LayoutError
from .model.loading import read_config, read_video_processor
from .model.parts import (
    IMAGE_FAMILIES,
    VIDEO_FAMILIES,
    DecoderSizes,
    hybrid_family,
    prompts_like,
    require_supported,
)
from .model.quantization import quantization_of
from .model.tensor_parallel import require_divisible, weight_bytes
from .prefilling.encode import chunk_bytes_within
from .prefilling.memory import HostMemory, host_memory
from .prefilling.methods import METHODS, resolve_method
from .prefilling.reduction.pruning import require_usable
from .refusals import refuse
from .speculate.strategies import STRATEGIES, prunes
from .stats import free_memory_bytes

# Tokens of a chat before the video, and of a question after it; and those before each temporal
# patch but the first: "<1234.5 seconds>", ",Time 1234.5s:" or "Frame123:", and what marks frames.
_TOKENS_BEFORE = 16
_TOKENS_BEHIND = 64
_TEXT_TOKENS = {"qwen3_vl": 10, "internvl": 9, "glm4v": 5, "video_llama_3": 11}
# Memory of a GPU's driver, library workspaces and collectives, besides tensors: assumed, not
# measured.
_GPU_OVERHEAD = 2**30
_MOST_SEARCHED = 2**24
# Maximum number of copies of the embeddings while a reduction selects among them.
_COPIES_TO_CHOOSE = 3


@dataclass(frozen=True)
class Plan:
    """Estimated memory of a prompt on every process, in bytes, and whether it is available.

    Attributes:
        model: its name.
        method, kv: the method that would run, and where it would place the KV.
        num_tokens: the prompt's tokens, before pruning.
        num_visual_tokens: those of them that stand for the video.
        num_left: about how many tokens the language model reads.
        layout: how the language model's tokens are split over the hosts.
        weights: of the model, on one process.
        draft: of the draft model and its KV; 0 without one.
        overhead: assumed for the device's own libraries.
        hosts: memory of the prefill itself, for a process of every host.
        device_memory: memory available to each process.
        most: maximum number of frames, or tokens of a text, that would fit; None: more than were
            tried.
    """

    model: str
    method: str
    kv: str
    num_tokens: int
    num_visual_tokens: int
    num_left: int
    layout: ContextLayout
    weights: int
    draft: int
    overhead: int
    hosts: tuple[HostMemory, ...]
    device_memory: int
    most: int | None = None

    @property
    def needed(self) -> tuple[int, ...]:
        """Peak memory of a process of every host."""
        return tuple(self.weights + self.draft + self.overhead + host.peak for host in self.hosts)

    @property
    def fits(self) -> bool:
        """Whether every process has enough memory."""
        return max(self.needed) <= self.device_memory

    @property
    def warning(self) -> str | None:
        """What is known to cost accuracy with these lengths of anchor and passing blocks; None:
        nothing."""
        return METHODS[self.method].warning(self.layout)

    def __str__(self) -> str:
        busiest = self.needed.index(max(self.needed))
        left = f"; about {self.num_left:,} are left" if self.num_left < self.num_tokens else ""
        num_hosts = len(self.hosts)
        hosts = "1 host" if num_hosts == 1 else f"{num_hosts} hosts"
        lines = {
            "model": self.model,
            "method": f"{self.method} on {hosts}, KV {self.kv}",
            "prompt": f"about {self.num_tokens:,} tokens, {self.num_visual_tokens:,} of them "
            f"visual{left}",
        }
        if self.layout.is_split:
            lengths = (
                f"anchor {self.layout.anchor_len:,}, passing {self.layout.max_passed:,} tokens"
            )
            lines["split"] = (
                f"{len(self.layout.blocks)} blocks of {self.layout.longest_block:,} tokens, "
                f"{lengths}"
            )
        if self.warning is not None:
            lines["warning"] = self.warning
        lines[f"memory on host {busiest}"] = "about"
        sizes = {"weights": self.weights, "draft": self.draft, "device's libraries": self.overhead}
        for stage, parts in self.hosts[busiest].stages.items():
            sizes |= {
                stage: sum(parts.values()),
                **{f"  {name}": size for name, size in parts.items()},
            }
        lines |= {f"  {name}": _readable(size) for name, size in sizes.items() if size}
        lines["needed"] = (
            f"  {_readable(max(self.needed))} of {_readable(self.device_memory).strip()}"
        )
        lines["fits"] = "yes" if self.fits else "no"
        unit = "frames" if self.num_visual_tokens else "tokens"
        lines[f"{unit} that fit"] = (
            "all that were tried" if self.most is None else f"about {self.most:,}"
        )
        return "\n".join(f"{name:<22}{value}" for name, value in lines.items())


def plan(
    model: str | Path | PreTrainedConfig,
    *,
    num_frames: int | None = None,
    resolution: str | tuple[int, int] = "720p",
    tokens: int | None = None,
    hosts: int = 1,
    tensor_parallel: int = 1,
    prefill: PrefillConfig | None = None,
    speculate: SpeculativeConfig | None = None,
    dtype: str | torch.dtype = "auto",
    device_memory: int | None = None,
) -> Plan:
    """Estimate whether a prompt fits in memory, without loading weights or computing anything.

    Args:
        model: ``"demo"``, a directory, or a hub id, whose video processor then says how large
            frames become; or a config, for a text.
        num_frames: how many frames are sampled from a video. Either this or ``tokens``.
        resolution: of the video, as (height, width), "HxW", or a name such as "720p".
        tokens: the tokens of a long text.
        hosts: H.
        tensor_parallel: T, the processes that share a host's model.
        prefill: the method and its lengths, where the KV is placed, and visual-token pruning.
        speculate: its draft model, and how much of the prompt that keeps, are taken into account.
        dtype: of weights and KV; ``"auto"``: the config's.
        device_memory: bytes available to each process. None: what is free on this process's device.
            On a CPU the hosts are assumed to share this machine's memory.

    Raises:
        ValueError: the model is unknown or not supported; neither frames nor tokens were given, or
            both; or visual tokens are to be pruned from a text.
    """
    require_type(PrefillConfig, prefill=prefill)
    require_type(SpeculativeConfig, speculate=speculate)
    prefill = prefill or PrefillConfig()
    if (num_frames is None) == (tokens is None):
        raise ValueError("give either the frames of a video or the tokens of a text")
    if prefill.reduce is not None and num_frames is None:
        raise ValueError(
            f"{prefill.reduce.method} prunes visual tokens: give the frames of a video"
        )
    counts = {
        "num_frames": num_frames,
        "tokens": tokens,
        "hosts": hosts,
        "tensor_parallel": tensor_parallel,
    }
    for name, count in counts.items():
        if count is not None and not (type(count) is int and count >= 1):
            raise ValueError(f"{name} must be a whole number of at least 1, not {count!r}")
    name, config, processor = _describe(model, demo.model_path)
    require_usable(prefill.reduce, config, None)
    if tensor_parallel > 1:
        require_divisible(config, tensor_parallel)
    device, itemsize = choose_device(), _itemsize(config, dtype)
    sizes = DecoderSizes.from_config(config)
    refuse(
        hybrid=hybrid_family(config),
        drafting=None if speculate is None else speculate.strategy,
    )
    if device_memory is None:
        device_memory = free_memory_bytes(device) // (
            1 if device.type == "cuda" else hosts * tensor_parallel
        )
    height, width = parse_resolution(resolution) if isinstance(resolution, str) else resolution
    refuse(quantized=quantization_of(config) is not None, tensor_parallel=tensor_parallel > 1)
    weights = weight_bytes(config, itemsize, device, tensor_parallel)
    draft_of = _draft(speculate, dtype)
    method = resolve_method(prefill, hosts)
    ratio = 1.0 if prefill.reduce is None else prefill.reduce.ratio
    of_model = {"itemsize": itemsize, "device": device, "tensor_parallel": tensor_parallel}
    of_model["by_layer"] = method.gathers_by_layer(prefill)

    def of(count: int) -> Plan:
        """Plan for a number of frames, or of tokens of a text."""
        num_tokens, num_visual, start, stop = count, 0, 0, max(count - prefill.query_len, 0)
        chunk = num_encoded = 0
        if num_frames is not None:
            video = video_size(config, count, height, width, processor)
            num_visual = video.num_rows
            start = _TOKENS_BEFORE
            stop = start + num_visual + video.num_text_tokens
            num_tokens = stop + _TOKENS_BEHIND
            share = ceil(video.num_patches / (hosts if prefill.frame_parallel else 1))
            held = FRAME_COPIES * 3 * height * width * count + PIXEL_COPIES * video.pixel_bytes
            patch = held // video.num_patches
            most = prefill.video.chunk_bytes or chunk_bytes_within(device_memory)
            chunk = patch * min(share, max(1, most_in_a_chunk(share * patch, patch, most) // patch))
            if ratio < 1:
                num_encoded = _COPIES_TO_CHOOSE * ceil(num_visual * share / video.num_patches)
        num_left = (
            num_tokens - num_visual + max(1, round(num_visual * ratio))
            if num_visual
            else num_tokens
        )
        stop -= num_tokens - num_left
        layout = method.plan(hosts, num_left, start, stop, prefill)
        visual = range(start, stop) if num_visual else range(0)
        memory = [
            host_memory(
                sizes,
                layout,
                host,
                prefill.kv,
                visual=visual,
                num_encoded=num_encoded,
                encodes_all=not prefill.frame_parallel,
                chunk=chunk,
                **of_model,
            )
            for host in range(hosts)
        ]
        return Plan(
            model=name,
            method=method.name,
            kv=prefill.kv,
            num_tokens=num_tokens,
            num_visual_tokens=num_visual,
            num_left=num_left,
            layout=layout,
            weights=weights,
            draft=draft_of(num_tokens, num_visual),
            overhead=_GPU_OVERHEAD if device.type == "cuda" else 0,
            hosts=tuple(memory),
            device_memory=device_memory,
        )

    def is_too_much(count: int) -> bool:
        try:
            return not of(count).fits
        except _TooManyFramesError:
            return True
        except LayoutError:  # too short for the lengths that were asked for
            return False

    planned = of(num_frames or tokens)
    counts = range(1, _MOST_SEARCHED)
    most = bisect(counts, False, key=is_too_much)
    return replace(planned, most=None if most == len(counts) else most)


def parse_resolution(text: str) -> tuple[int, int]:
    """Return (height, width) of "720x1280", or of "720p", with an aspect ratio of 16:9.

    Raises:
        ValueError: the text is neither.
    """
    found = re.fullmatch(r"(\d+)(?:p|x(\d+))", text)
    if not found:
        raise ValueError(f"{text!r} is not a resolution: use HxW, or such as 720p")
    height = int(found[1])
    width = found[2]
    return height, 2 * round(height * 8 / 9) if width is None else int(width)


class _TooManyFramesError(ValueError):
    """Raised if a model's processor leaves no pixel for each frame of a video."""


class VideoSize(NamedTuple):
    """Size of a video as a model reads it.

    Attributes:
        num_patches: its temporal patches, each made of a frame, or of several that the model
            merges.
        num_rows: all visual tokens.
        num_text_tokens: the tokens between its frames.
        pixel_bytes: of the whole video, resized, in fp32.
    """

    num_patches: int
    num_rows: int
    num_text_tokens: int
    pixel_bytes: int


def video_size(
    config: PreTrainedConfig, num_frames: int, height: int, width: int, processor: Any
) -> VideoSize:
    """Compute a video's size by the arithmetic of the model's own video processor, on tensors
    without storage.

    Args:
        config: the whole model's.
        num_frames: how many frames are sampled.
        height, width: of a frame, in pixels.
        processor: transformers' for this model.

    Raises:
        ValueError: the model reads no video, its processor is not there, or it cannot read this
            number of frames.
    """
    if config.model_type in IMAGE_FAMILIES:
        raise ValueError(
            f"{config.model_type} models read images only: give the tokens of a prompt, not the "
            "frames of a video"
        )
    if processor is None:
        raise ValueError(
            f"a video plan needs the processor of the {config.model_type} model, not only its "
            "config"
        )
    told = num_frames_told(
        prompts_like(config.model_type), num_frames, getattr(processor, "temporal_patch_size", 1)
    )
    frames = torch.empty(told, 3, height, width, dtype=torch.uint8, device="meta")
    # What VideoLLaMA 3's leaves out is not known without pixels: it is counted, too.
    options = (
        {"use_token_compression": False} if hasattr(processor, "use_token_compression") else {}
    )
    try:
        batch = processor(videos=[frames], do_sample_frames=False, return_tensors="pt", **options)
    except (
        ZeroDivisionError
    ) as error:  # VideoLLaMA 3's shares out a number of pixels among the frames
        raise _TooManyFramesError(
            f"the video processor of the {config.model_type} model leaves no pixel for each of "
            f"{num_frames:,} frames"
        ) from error
    pixels = batch["pixel_values_videos"]
    vision = config.vision_config
    num_patches = pixels.shape[1]
    if "video_grid_thw" in batch:
        num_patches, *sides = batch["video_grid_thw"][0].tolist()
        merge = (
            int(batch["video_merge_sizes"])
            if "video_merge_sizes" in batch
            else vision.spatial_merge_size
        )
        num_rows = num_patches * prod(sides) // merge**2
    elif (
        config.model_type == "llava_onevision"
    ):  # a frame's side is halved, and a row ends the video
        num_rows = num_patches * ceil(pixels.shape[-1] // vision.patch_size / 2) ** 2 + 1
    elif config.model_type == "llava_next_video":  # four patches of a frame make a token
        height, width = pixels.shape[-2:]
        num_rows = num_patches * (height // vision.patch_size * (width // vision.patch_size) // 4)
    else:
        num_rows = num_patches * config.image_seq_length
    num_text = (num_patches - 1) * _TEXT_TOKENS.get(prompts_like(config.model_type), 0)
    return VideoSize(num_patches, num_rows, num_text, pixels.numel() * 4)


def _draft(
    settings: SpeculativeConfig | None, dtype: str | torch.dtype
) -> Callable[[int, int], int]:
    """Return a function from a prompt's tokens and visual tokens to the draft model's memory."""
    if settings is None or not STRATEGIES[settings.strategy].needs_draft_model:
        return lambda num_tokens, num_visual: 0
    if settings.draft_model is None:
        raise ValueError(f"{settings.strategy} needs a draft_model")
    _, config, _ = _describe(settings.draft_model, demo.draft_path)
    itemsize, row = _itemsize(config, dtype), DecoderSizes.from_config(config).kv_token
    weights = weight_bytes(config, itemsize, choose_device())

    def num_bytes(num_tokens: int, num_visual: int) -> int:
        if prunes(settings) and settings.prune == "prompt":
            kept = num_tokens - num_visual + round(num_visual * (settings.keep_ratio or 0))
            num_tokens = min(num_tokens, settings.keep_tokens or kept)
        return weights + row * num_tokens * itemsize

    return num_bytes


def _describe(
    model: str | Path | PreTrainedConfig, demo_path: Callable[[], Path]
) -> tuple[str, PreTrainedConfig, Any]:
    """Return a model's name, its config, and its video processor where there is one to be read."""
    if isinstance(model, PreTrainedConfig):
        require_supported(model)
        return model.name_or_path or model.model_type, model, None
    path = demo_path() if str(model) == "demo" else model
    config = read_config(path)
    is_video = require_supported(config) in VIDEO_FAMILIES
    return str(model), config, read_video_processor(path) if is_video else None


def _itemsize(config: PreTrainedConfig, wanted: str | torch.dtype) -> int:
    """Return the bytes per number of the dtype in which a model's weights would be loaded.

    Raises:
        ValueError: the dtype is unknown.
    """
    if wanted not in DTYPE_NAMES and not isinstance(wanted, torch.dtype):
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_NAMES)}, not {wanted!r}")
    if wanted == "auto":
        wanted = (
            getattr(config, "dtype", None)
            or getattr(config.get_text_config(), "dtype", None)
            or "float32"
        )
    return getattr(torch, str(wanted).removeprefix("torch.")).itemsize


def _readable(size: int) -> str:
    return f"{size / 1e9:10.2f} GB" if size >= 1e8 else f"{size / 1e6:10.2f} MB"
