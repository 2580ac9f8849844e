"""Estimates from a model's config alone whether a prompt fits in memory."""

import re
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from . import demo
from .config import DTYPE_NAMES, PrefillConfig, SpeculativeConfig
from .config.checks import require_type
from .config.refusals import refuse
from .errors import InvalidConfigError, InvalidRequestError
from .hosts.devices import choose_device
from .input.prompts.visual import FRAME_COPIES, PIXEL_COPIES, most_in_a_chunk
from .layout import ContextLayout, LayoutError
from .model.families import DecoderSizes, family_of, hybrid_family, require_supported
from .model.loading.load import read_config, read_video_processor
from .model.loading.quantization import quantization_of
from .model.loading.tensor_parallel import require_divisible, shares_whole_experts, weight_bytes
from .prefilling.encoding.vision import chunk_bytes_within
from .prefilling.memory import HostMemory, host_memory
from .prefilling.methods import METHODS, PrefillMethod, resolve_method
from .prefilling.methods.anchor import share_anchor
from .prefilling.reduction.pruning import require_usable
from .speculate.strategies.table import STRATEGIES, prunes
from .stats import free_memory_bytes

# Tokens of a chat before the video, and of a question after it.
_TOKENS_BEFORE = 16
_TOKENS_BEHIND = 64
# Memory of a GPU's driver, library workspaces and collectives, besides tensors: assumed, not
# measured.
_GPU_OVERHEAD = 2**30
# To find the largest number of frames or tokens that fits, numbers below this are tried.
_MOST_SEARCHED = 2**24
# Maximum number of copies of the embeddings while a reduction selects among them.
_COPIES_TO_CHOOSE = 3


@dataclass(frozen=True)
class Plan:
    """Estimated memory of a prompt on every process, in bytes, and whether it is available.

    Attributes:
        model: the model's name.
        method: the method that would run.
        kv: where it would place the KV.
        num_tokens: the prompt's tokens, before pruning.
        num_visual_tokens: the tokens among these that stand for the video.
        num_left: about how many tokens the language model reads, after pruning.
        layout: how the language model's tokens are split over the hosts.
        weights: bytes of the model's weights on one process.
        draft: bytes of the draft model and its KV; 0 without one.
        overhead: bytes that the device's own libraries are assumed to take.
        hosts: memory of the prefill itself, for a process of every host.
        device_memory: bytes available to each process.
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
        """Peak memory of a process of every host, in bytes."""
        return tuple(self.weights + self.draft + self.overhead + host.peak for host in self.hosts)

    @property
    def fits(self) -> bool:
        """Whether every process has enough memory."""
        return max(self.needed) <= self.device_memory

    @property
    def warning(self) -> str | None:
        """Known loss of accuracy with these anchor and passing lengths; None: none is known."""
        return METHODS[self.method].warning(self.layout)

    def __str__(self) -> str:
        # What would run.
        busiest = self.needed.index(max(self.needed))
        num_hosts = len(self.hosts)
        hosts = "1 host" if num_hosts == 1 else f"{num_hosts} hosts"
        prompt = f"about {self.num_tokens:,} tokens, {self.num_visual_tokens:,} of them visual"
        if self.num_left < self.num_tokens:
            prompt += f"; about {self.num_left:,} are left"
        lines = {
            "model": self.model,
            "method": f"{self.method} on {hosts}, KV {self.kv}",
            "prompt": prompt,
        }
        layout = self.layout
        if layout.is_split:
            passing = " / ".join(
                f"{min(length, layout.longest_block):,}" for length in layout.passing_lengths
            )
            lines["split"] = (
                f"{len(layout.blocks)} blocks of {layout.longest_block:,} tokens, anchor "
                f"{layout.anchor_len:,}, passing {passing} tokens"
            )
        if self.warning is not None:
            lines["warning"] = self.warning

        # What it takes on the busiest host: a prefill's stages come one after the other, each with
        # its parts below it.
        lines[f"memory on host {busiest}"] = "about"
        sizes = {"weights": self.weights, "draft": self.draft, "device's libraries": self.overhead}
        for stage, parts in self.hosts[busiest].stages.items():
            sizes[stage] = sum(parts.values())
            for name, size in parts.items():
                sizes[f"  {name}"] = size
        for name, size in sizes.items():
            if size:
                lines[f"  {name}"] = _readable(size)

        # Whether it fits.
        needed = _readable(max(self.needed))
        available = _readable(self.device_memory).strip()
        lines["needed"] = f"  {needed} of {available}"
        lines["fits"] = "yes" if self.fits else "no"
        unit = "frames" if self.num_visual_tokens else "tokens"
        most = "all that were tried" if self.most is None else f"about {self.most:,}"
        lines[f"{unit} that fit"] = most
        return "\n".join(f"{name:<22}{value}" for name, value in lines.items())


def plan(
    model: str | Path | PreTrainedConfig,
    *,
    num_frames: int | None = None,
    resolution: str | tuple[int, int] = "720p",
    tokens: int | None = None,
    hosts: int = 1,
    tensor_parallel: int = 1,
    expert_parallel: bool = False,
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
        expert_parallel: whether each of them has whole experts, and not columns of all.
        prefill: the method and its lengths, where the KV is placed, and visual-token pruning.
        speculate: how answers are drafted: the draft model and its KV take memory, too.
        dtype: the dtype of weights and KV; ``"auto"``: the config's.
        device_memory: bytes available to each process. None: the free bytes of this process's
            device; on a CPU the hosts are assumed to share this machine's memory.

    Raises:
        InvalidConfigError: the model is unknown or not supported; neither frames nor tokens were
            given, or both; or visual tokens are to be pruned from a text.
    """
    # Check the arguments.
    require_type(PrefillConfig, prefill=prefill)
    require_type(SpeculativeConfig, speculate=speculate)
    prefill = prefill or PrefillConfig()
    if (num_frames is None) == (tokens is None):
        raise InvalidConfigError("give either the frames of a video or the tokens of a text")
    if prefill.reduce is not None and num_frames is None:
        raise InvalidConfigError(
            f"{prefill.reduce.method} prunes visual tokens: give the frames of a video"
        )
    _require_positive(
        num_frames=num_frames, tokens=tokens, hosts=hosts, tensor_parallel=tensor_parallel
    )

    # Read the model's config, and check that it supports all this.
    name, config, processor = _describe(model, demo.model_path)
    require_usable(prefill.reduce, config, None)
    require_divisible(config, tensor_parallel, expert_parallel)
    itemsize = _itemsize(config, dtype)
    sizes = DecoderSizes.from_config(config)
    refuse(
        hybrid=hybrid_family(config),
        drafting=None if speculate is None else speculate.strategy,
    )
    device = choose_device()
    if device_memory is None:
        num_processes = 1 if device.type == "cuda" else hosts * tensor_parallel
        device_memory = free_memory_bytes(device) // num_processes
    frame_shape = parse_resolution(resolution) if isinstance(resolution, str) else resolution
    refuse(quantized=quantization_of(config) is not None, tensor_parallel=tensor_parallel > 1)

    # Plan.
    planner = _Planner(
        name=name,
        config=config,
        processor=processor,
        sizes=sizes,
        frame_shape=None if num_frames is None else frame_shape,
        num_hosts=hosts,
        tensor_parallel=tensor_parallel,
        expert_parallel=tensor_parallel > 1 and shares_whole_experts(config, expert_parallel),
        prefill=prefill,
        method=resolve_method(prefill, hosts),
        draft=_draft_memory(speculate, dtype),
        weights=weight_bytes(config, itemsize, device, tensor_parallel),
        itemsize=itemsize,
        device=device,
        device_memory=device_memory,
    )
    count = tokens if num_frames is None else num_frames
    assert count is not None, "one of both is given"
    planned = planner.plan(count)
    return replace(planned, most=planner.find_most())


def _require_positive(**counts: int | None) -> None:
    """Raise InvalidConfigError for a count that is not a whole number of at least 1; None is
    allowed."""
    for name, count in counts.items():
        if count is not None and not (type(count) is int and count >= 1):
            raise InvalidConfigError(f"{name} must be a whole number of at least 1, not {count!r}")


@dataclass(frozen=True)
class _Prompt:
    """Estimated size of a prompt.

    Attributes:
        num_tokens: all tokens.
        num_visual: the visual tokens.
        context: the tokens from the first visual one to the last; of a text, all but the query.
        chunk_bytes: bytes of the frames, pixels and activations that are encoded at a time.
        num_encoded: the embeddings that a host has while a reduction selects among them, in tokens;
            a copy counts again.
    """

    num_tokens: int
    num_visual: int
    context: range
    chunk_bytes: int = 0
    num_encoded: int = 0


@dataclass(frozen=True)
class _DraftMemory:
    """Memory of a draft model.

    Attributes:
        settings: they say how much of the prompt it reads.
        weights: bytes of its weights.
        token_bytes: bytes of a token's KV.
        state_bytes: bytes of a hybrid's states of linear attention behind the prompt.
    """

    settings: SpeculativeConfig
    weights: int
    token_bytes: int
    state_bytes: int

    def of_prompt(self, num_tokens: int, num_visual: int) -> int:
        """Return the bytes of the weights, and of KV and states of a prompt with these tokens."""
        settings = self.settings
        if prunes(settings) and settings.prune == "prompt":
            num_kept = settings.keep_tokens
            if not num_kept:
                num_text = num_tokens - num_visual
                num_kept = num_text + round(num_visual * (settings.keep_ratio or 0))
            num_tokens = min(num_tokens, num_kept)
        return self.weights + self.token_bytes * num_tokens + self.state_bytes


@dataclass(frozen=True)
class _Planner:
    """Plans prompts of any length for one model and configuration.

    Attributes:
        name, config, processor: the result of :func:`_describe` for the model.
        sizes: the sizes of the model's decoder.
        frame_shape: height and width of the video's frames, in pixels; None: prompts are texts.
        num_hosts: H.
        tensor_parallel: T.
        expert_parallel: whether each of T processes has whole experts.
        prefill: how prompts are prefilled.
        method: the method that runs.
        draft: the draft model's memory; None without a draft model.
        weights: bytes of the model's weights on one process.
        itemsize: bytes per number of weights and KV.
        device: the kind of device.
        device_memory: bytes available to each process.
    """

    name: str
    config: PreTrainedConfig
    processor: Any
    sizes: DecoderSizes
    frame_shape: tuple[int, int] | None
    num_hosts: int
    tensor_parallel: int
    expert_parallel: bool
    prefill: PrefillConfig
    method: type[PrefillMethod]
    draft: _DraftMemory | None
    weights: int
    itemsize: int
    device: torch.device
    device_memory: int

    @property
    def _ratio(self) -> float:
        """The share of visual tokens that the language model reads."""
        reduce = self.prefill.reduce
        # Where tokens are pruned between layers, the first ones read them all.
        if reduce is None or reduce.prunes_between_layers:
            return 1.0
        return reduce.ratio

    def plan(self, count: int) -> Plan:
        """Plan for a number of frames, or of tokens of a text."""
        prompt = self._text(count) if self.frame_shape is None else self._video(count)

        # After a reduction the prompt is shorter.
        num_left = prompt.num_tokens
        if prompt.num_visual:
            num_visual_left = max(1, round(prompt.num_visual * self._ratio))
            num_left = prompt.num_tokens - prompt.num_visual + num_visual_left
        context_stop = prompt.context.stop - (prompt.num_tokens - num_left)
        context = range(prompt.context.start, context_stop)
        layout = self.method.plan(
            self.num_hosts, num_left, context.start, context.stop, self.prefill
        )
        layout = share_anchor(
            layout, self.method.facts, self.prefill, self.sizes, self.device, self.itemsize
        )

        # Estimate the memory of each host, and of a draft.
        memory = []
        for host in range(self.num_hosts):
            of_host = host_memory(
                self.sizes,
                layout,
                host,
                self.prefill.kv,
                itemsize=self.itemsize,
                device=self.device,
                tensor_parallel=self.tensor_parallel,
                expert_parallel=self.expert_parallel,
                asks_apart=self.method.asks_apart(self.prefill),
                by_layer=self.method.gathers_by_layer(self.prefill),
                question_start=context.stop,
                visual=context if prompt.num_visual else range(0),
                num_encoded=prompt.num_encoded,
                encodes_all=not self.prefill.ablation.frame_parallel,
                chunk=prompt.chunk_bytes,
            )
            memory.append(of_host)
        draft = 0
        if self.draft is not None:
            draft = self.draft.of_prompt(prompt.num_tokens, prompt.num_visual)
        return Plan(
            model=self.name,
            method=self.method.name,
            kv=self.prefill.kv,
            num_tokens=prompt.num_tokens,
            num_visual_tokens=prompt.num_visual,
            num_left=num_left,
            layout=layout,
            weights=self.weights,
            draft=draft,
            overhead=_GPU_OVERHEAD if self.device.type == "cuda" else 0,
            hosts=tuple(memory),
            device_memory=self.device_memory,
        )

    def find_most(self) -> int | None:
        """Return the most frames, or tokens of a text, that fit; None: more than are tried."""
        counts = range(1, _MOST_SEARCHED)
        # Counts that fit come before those that don't, and bisect finds where they end.
        num_that_fit = bisect(counts, False, key=self._is_too_much)
        return None if num_that_fit == len(counts) else num_that_fit

    def _is_too_much(self, count: int) -> bool:
        try:
            return not self.plan(count).fits
        except _TooManyFramesError:
            return True
        except LayoutError:  # too short for the requested lengths
            return False

    def _text(self, num_tokens: int) -> _Prompt:
        """Estimate a prompt that is a text."""
        context = range(max(num_tokens - self.prefill.query_len, 0))
        return _Prompt(num_tokens, 0, context)

    def _video(self, num_frames: int) -> _Prompt:
        """Estimate a prompt of a video and a question."""
        assert self.frame_shape is not None, "a video is planned"
        height, width = self.frame_shape
        video = video_size(self.config, num_frames, height, width, self.processor)
        context_stop = _TOKENS_BEFORE + video.num_rows + video.num_text_tokens

        # A host encodes its share of the temporal patches, chunk by chunk.
        num_encoders = self.num_hosts if self.prefill.ablation.frame_parallel else 1
        share = ceil(video.num_patches / num_encoders)
        frame_bytes = FRAME_COPIES * 3 * height * width * num_frames
        pixel_bytes = PIXEL_COPIES * video.pixel_bytes
        patch_bytes = (frame_bytes + pixel_bytes) // video.num_patches
        limit = self.prefill.video.chunk_bytes or chunk_bytes_within(self.device_memory)
        patches_per_chunk = most_in_a_chunk(share * patch_bytes, patch_bytes, limit) // patch_bytes
        chunk_bytes = patch_bytes * min(share, max(1, patches_per_chunk))

        num_encoded = 0
        if self._ratio < 1:
            num_rows_here = ceil(video.num_rows * share / video.num_patches)
            num_encoded = _COPIES_TO_CHOOSE * num_rows_here
        return _Prompt(
            num_tokens=context_stop + _TOKENS_BEHIND,
            num_visual=video.num_rows,
            context=range(_TOKENS_BEFORE, context_stop),
            chunk_bytes=chunk_bytes,
            num_encoded=num_encoded,
        )


def parse_resolution(text: str) -> tuple[int, int]:
    """Return (height, width) of "720x1280", or of "720p", with an aspect ratio of 16:9.

    Raises:
        InvalidConfigError: the text is neither.
    """
    match = re.fullmatch(r"(\d+)(?:p|x(\d+))", text)
    if match is None:
        raise InvalidConfigError(f"{text!r} is not a resolution: use HxW, or such as 720p")
    height = int(match[1])
    if match[2] is not None:
        return height, int(match[2])
    return height, 2 * round(height * 8 / 9)


class _TooManyFramesError(InvalidRequestError):
    """Raised if a model's processor leaves no pixel for each frame of a video."""


class VideoSize(NamedTuple):
    """Size of a video as a model reads it.

    Attributes:
        num_patches: its temporal patches, each a frame, or several that the model merges.
        num_rows: all visual tokens.
        num_text_tokens: the text tokens between its frames.
        pixel_bytes: bytes of the whole video's pixels, resized, in fp32.
    """

    num_patches: int
    num_rows: int
    num_text_tokens: int
    pixel_bytes: int


def video_size(
    config: PreTrainedConfig, num_frames: int, height: int, width: int, processor: Any
) -> VideoSize:
    """Compute a video's size.

    This is the arithmetic of the model's own video processor, on tensors without storage.

    Args:
        config: the whole model's config.
        num_frames: how many frames are sampled.
        height, width: height and width of a frame, in pixels.
        processor: transformers' video processor for this model.

    Raises:
        InvalidConfigError: the model reads no video, its processor is missing, or it cannot read
            this number of frames.
    """
    # Check.
    family = family_of(config)
    if family.reads_images and not family.reads_video:
        raise InvalidConfigError(
            f"{family} models read images only: give the tokens of a prompt, not the frames of a "
            "video"
        )
    if processor is None:
        raise InvalidConfigError(
            f"a video plan needs the processor of the {family} model, not only its config"
        )

    # Run the processor.
    frames_per_patch = getattr(processor, "temporal_patch_size", 1)
    num_frames_read = family.num_frames_told(num_frames, frames_per_patch)
    frames = torch.empty(num_frames_read, 3, height, width, dtype=torch.uint8, device="meta")
    options = {}
    if hasattr(processor, "use_token_compression"):
        # VideoLLaMA 3 drops tokens that differ little from the last frame's; which is not known
        # without pixels, so all are counted.
        options["use_token_compression"] = False
    try:
        batch = processor(videos=[frames], do_sample_frames=False, return_tensors="pt", **options)
    except ZeroDivisionError as error:
        # VideoLLaMA 3's processor divides a number of pixels among the frames.
        raise _TooManyFramesError(
            f"the video processor of the {family} model leaves no pixel for each of "
            f"{num_frames:,} frames"
        ) from error

    # Count the tokens, by the model's rule.
    pixels = batch["pixel_values_videos"]
    num_patches, num_rows = family.video_size(batch)
    num_text = (num_patches - 1) * family.text_tokens_per_patch
    return VideoSize(num_patches, num_rows, num_text, pixels.numel() * 4)


def _draft_memory(
    settings: SpeculativeConfig | None, dtype: str | torch.dtype
) -> _DraftMemory | None:
    """Return the draft model's memory; None if no draft model is needed."""
    if settings is None or not STRATEGIES[settings.strategy].facts.needs_draft_model:
        return None
    if settings.draft_model is None:
        raise InvalidConfigError(f"{settings.strategy} needs a draft_model")
    _, config, _ = _describe(settings.draft_model, demo.draft_path)
    itemsize = _itemsize(config, dtype)
    sizes = DecoderSizes.from_config(config)
    return _DraftMemory(
        settings=settings,
        weights=weight_bytes(config, itemsize, choose_device()),
        token_bytes=sizes.kv_token * itemsize,
        state_bytes=sizes.state_bytes(itemsize),
    )


def _describe(
    model: str | Path | PreTrainedConfig, demo_path: Callable[[], Path]
) -> tuple[str, PreTrainedConfig, Any]:
    """Return a model's name, its config, and its video processor; None: it has none to read.

    Args:
        model: as in :func:`plan`.
        demo_path: returns the directory that ``"demo"`` means.
    """
    if isinstance(model, PreTrainedConfig):
        family = require_supported(model)
        return family.checkpoint or family.name, model, None
    path = demo_path() if str(model) == "demo" else model
    config = read_config(path)
    processor = None
    if require_supported(config).reads_video:
        processor = read_video_processor(path)
    return str(model), config, processor


def _itemsize(config: PreTrainedConfig, dtype: str | torch.dtype) -> int:
    """Return the bytes per number of the dtype in which a model's weights would be loaded.

    Raises:
        InvalidConfigError: the dtype is unknown.
    """
    if dtype not in DTYPE_NAMES and not isinstance(dtype, torch.dtype):
        raise InvalidConfigError(f"dtype must be one of {', '.join(DTYPE_NAMES)}, not {dtype!r}")
    if dtype == "auto":
        dtype = family_of(config).dtype
    return getattr(torch, str(dtype).removeprefix("torch.")).itemsize


def _readable(size: int) -> str:
    """Return a number of bytes in GB, or in MB below 0.1 GB."""
    return f"{size / 1e9:10.2f} GB" if size >= 1e8 else f"{size / 1e6:10.2f} MB"
