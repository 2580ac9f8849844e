"""Tiny models and their prompts, and what Hugging Face's own attention makes of them."""

import threading
from functools import cache

import torch

from apbv import ModelInputs
from apbv.hosts.simulated import share_weights
from apbv.model.parts import inspect_model

import families
from families import TEXT_FAMILIES, VIDEO_FAMILIES

ALL_FAMILIES = VIDEO_FAMILIES + TEXT_FAMILIES
EXAMPLES = ("qwen2_5_vl", "llama")  # one video and one text family, where others add nothing
POSITIONS = ("qwen2_5_vl", "qwen3_vl", "internvl", "llama")  # each way to count positions
UNCOMPRESSED = 10**6


@cache
def _build(family: str, dtype: torch.dtype):
    return families.build_model(family, dtype=dtype)


def build(family: str, dtype: torch.dtype):
    """A model that is built once a process; a simulated host, which is a thread, gets a twin with its weights."""
    model = _build(family, dtype)
    return model if threading.current_thread() is threading.main_thread() else share_weights(model)


@cache
def video_batch(family: str, frames: int = 29, question: str = "What happens?") -> dict:
    """A processor's output for a clip of 4 visual tokens a frame or patch, so that T > max(h, w) / 2."""
    from transformers.video_utils import VideoMetadata

    processor = families.build_processor(family)
    content = [{"type": "video"}, {"type": "text", "text": question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    metadata = VideoMetadata(total_num_frames=2 * frames, fps=8.0, frames_indices=list(range(0, 2 * frames, 2)))
    video = families.synthetic_video(frames, 56, 70)
    return dict(
        processor(
            text=[text],
            videos=[video],
            video_metadata=[metadata],
            do_sample_frames=False,
            return_tensors="pt",
        )
    )


def text_batch(length: int) -> dict:
    ids = torch.randint(0, 250, (1, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids}


def batch_of(family: str, num_tokens: int | None) -> dict:
    """A text of so many tokens, or the video."""
    return video_batch(family) if num_tokens is None else text_batch(num_tokens)


def as_inputs(family, batch, query_start, hosts, dtype=torch.float32, frame_parallel=True) -> ModelInputs:
    parts = inspect_model(build(family, dtype))
    return ModelInputs.from_processor(parts, batch, hosts, frame_parallel, query_start)


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
