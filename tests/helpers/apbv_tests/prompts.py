"""Tiny models and their prompts, and what Hugging Face's own attention makes of them."""

import threading
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers.video_utils import VideoMetadata

from apbv import ModelInputs, prefill
from apbv.input.media.video import probe, sample_uniform
from apbv.model.parts import inspect_model
from apbv.testing.simulated import share_weights

from apbv_tests import families
from apbv_tests.configs import prefill_config
from apbv_tests.families import HYBRID_FAMILIES, IMAGE_FAMILIES, TEXT_FAMILIES, VISION_FAMILIES
from apbv_tests.video_files import decode_all

ALL_FAMILIES = VISION_FAMILIES + TEXT_FAMILIES
# In all layers.
ATTENDING = tuple(family for family in ALL_FAMILIES if family not in HYBRID_FAMILIES)
EXAMPLES = ("qwen2_5_vl", "llama")  # one video and one text family, where others add nothing
UNCOMPRESSED = 10**6


@cache
def _build(family: str, dtype: torch.dtype):
    return families.build_model(family, dtype=dtype)


def build(family: str, dtype: torch.dtype):
    """A model that is built once a process; a simulated host, which is a thread, gets a twin with
    its weights."""
    model = _build(family, dtype)
    return model if threading.current_thread() is threading.main_thread() else share_weights(model)


def sampled(path: str | Path, num_frames: int) -> tuple[torch.Tensor, VideoMetadata]:
    """Evenly spread frames ``[T, 3, h, w]`` of a file, of those that PyAV decodes, and their
    metadata."""
    info = probe(path)
    picked = sample_uniform(info, num_frames)
    frames = torch.from_numpy(np.stack(decode_all(path))[picked]).permute(0, 3, 1, 2)
    return frames, VideoMetadata(info.num_frames, fps=info.fps, frames_indices=picked)


def by_processor(
    processor, content: list[dict], videos: list[tuple] = (), images: list | None = None
) -> dict:
    """What a processor makes of a chat's only turn; videos are frames, each with its metadata."""
    parts = []
    for part in content:
        shown_part = {"type": part["type"]}
        if "text" in part:
            shown_part["text"] = part["text"]
        parts.append(shown_part)
    asked = [{"role": "user", "content": parts}]
    text = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    shown = {}
    metadata = [told for _, told in videos]
    if videos:
        frames = [each for each, _ in videos]
        shown = {"videos": frames, "video_metadata": metadata, "do_sample_frames": False}
    batch = processor(text=[text], images=images or None, return_tensors="pt", **shown)
    return dict(families.timed(processor, batch, metadata))


def processed(family: str, *parts) -> dict:
    """A processor's output for texts, images and videos ``[T, 3, h, w]``, of every other frame of a
    file."""
    videos = [part for part in parts if torch.is_tensor(part)]
    images = [part for part in parts if not isinstance(part, (str, torch.Tensor))]
    content = []
    for part in parts:
        kind = "text" if isinstance(part, str) else "video" if torch.is_tensor(part) else "image"
        content.append({"type": kind} | ({"text": part} if kind == "text" else {}))
    frames = [range(0, 2 * len(video), 2) for video in videos]
    times = [VideoMetadata(each.stop, fps=8.0, frames_indices=list(each)) for each in frames]
    return by_processor(
        families.build_processor(family), content, [*zip(videos, times, strict=True)], images
    )


def shown_batch(family: str, frames: int, question: str, seed: int = 0) -> dict:
    """A clip of 4 visual tokens a frame or patch, so that T > max(h, w) / 2.

    Where a family reads no video, images instead, fewer than there are frames.
    """
    if family not in IMAGE_FAMILIES:
        return processed(family, families.synthetic_video(frames, 56, 70, seed=seed), question)
    count = max(1, frames // 4)
    images = [families.synthetic_image(56, 70, seed=seed + place) for place in range(count)]
    return processed(family, *images, question)


@cache
def video_batch(family: str, frames: int = 29, question: str = "What happens?") -> dict:
    """``shown_batch``, made once."""
    return shown_batch(family, frames, question)


def text_batch(length: int) -> dict:
    ids = torch.randint(0, 250, (1, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids}


def batch_of(family: str, num_tokens: int | None) -> dict:
    """A text of so many tokens, or the video."""
    return video_batch(family) if num_tokens is None else text_batch(num_tokens)


def as_inputs(
    family, batch, query_start, hosts, dtype=torch.float32, frame_parallel=True
) -> ModelInputs:
    parts = inspect_model(build(family, dtype))
    return ModelInputs.from_processor(
        parts, batch, hosts, query_start, frame_parallel=frame_parallel
    )


@torch.no_grad()
def hugging_face(family: str, dtype: torch.dtype, batch: dict):
    """Logits ``[1, V]`` of the last token and the cache, by the model itself."""
    model = build(family, dtype)
    reset_rope(model)
    output = model(**batch, use_cache=True)
    return output.logits[:, -1], output.past_key_values


@cache
def hugging_face_on(family: str, dtype: torch.dtype, num_tokens: int | None):
    """``hugging_face`` on a text of so many tokens, or on the video."""
    return hugging_face(family, dtype, batch_of(family, num_tokens))


def reset_rope(model) -> None:
    """Qwen-VL models remember the last prompt's rope_deltas."""
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    reference = reference.double()
    return ((ours.double() - reference).abs().max() / reference.abs().max()).item()


def kv_of(cache):
    """The keys and values of each layer, as they are now; None of a host without a cache."""
    if cache is None:
        return None
    layers = []
    for layer in cache.layers:
        layers.append(tuple(states.clone() for states in _states_of(layer)))
    return layers


def _states_of(layer) -> tuple:
    """A layer's keys and values, or what linear attention has instead."""
    return (
        (layer.keys, layer.values)
        if hasattr(layer, "keys")
        else (layer.conv_states[0], layer.recurrent_states[0])
    )


@contextmanager
def unwritten_memory_is_nan():
    """Let PyTorch fill tensors with NaN, or with their largest integer, until they are written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def prefilled(
    hosts, family: str, batch: dict, query_start: int | None, settings: dict, dtype=torch.float64
):
    """A state, and what of it travels, made where memory holds NaN until it is written."""
    config = prefill_config(**{"on_single_host": True, **settings})
    inputs = as_inputs(family, batch, query_start, hosts, dtype, config.ablation.frame_parallel)
    with unwritten_memory_is_nan():
        state = prefill(build(family, dtype), inputs, hosts=hosts, config=config)
    names = ("logits", "num_tokens", "exact", "method", "density", "reduction")
    facts = {name: getattr(state, name) for name in names} | {"start": inputs.context_start}
    return state, SimpleNamespace(
        kv=kv_of(state.to_dynamic_cache()), query_start=inputs.query_start, **facts
    )


def prefill_job(*args):
    return prefilled(*args)[1]


def check_prefill(results: list, logits: torch.Tensor, states, tolerance: float) -> None:
    """Every host's logits, and host 0's KV."""
    for host, result in enumerate(results):
        assert relative_error(result.logits, logits) < tolerance
        assert (result.kv is None) == (host > 0)
    for ours, theirs in zip(results[0].kv, states, strict=True):
        assert ours[0].shape == theirs[0].shape
        assert all(relative_error(*pair) < tolerance for pair in zip(ours, theirs, strict=True))
