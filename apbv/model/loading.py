"""Loads models and their processors from a directory or the hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    AutoVideoProcessor,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..config import DTYPE_NAMES
from ..hosts import HostGroup
from .parts import OMNI_THINKER, VIDEO_FAMILIES
from .tensor_parallel import load_sharded

# Defaults if a checkpoint has none.
NUM_FRAMES = 64
MAX_NEW_TOKENS = 128


def load_model(
    path: str | Path,
    dtype: str | torch.dtype,
    hosts: HostGroup,
    with_model: bool = True,
    sharded: bool = False,
) -> tuple[PreTrainedModel | None, Any]:
    """Load a model and its processor; of a Qwen2.5-Omni checkpoint the thinker alone, which answers in text.

    Args:
        path: a directory, or a hub id.
        dtype: the weights' type; a name in :data:`apbv.config.DTYPE_NAMES`, or torch's own.
        hosts: who loads it; the model goes to this process's device.
        with_model: False: the processor alone; None stands for the model.
        sharded: with tensor parallelism load only this process's share.

    Raises:
        ValueError: there is no such model, or no such dtype.
    """
    if isinstance(dtype, str) and dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_NAMES)}, not {dtype!r}")
    config = read_config(path)
    with _described_errors(path):
        is_video = config.model_type in VIDEO_FAMILIES
        auto = AutoModelForImageTextToText if is_video else AutoModelForCausalLM
        model = None
        if with_model and sharded and hosts.tensor_parallel_size > 1:
            model = load_sharded(auto, path, config, dtype, hosts).eval()
        elif with_model:
            model = auto.from_pretrained(path, config=config, dtype=dtype).to(hosts.device).eval()
        processor = (AutoProcessor if is_video else AutoTokenizer).from_pretrained(path)
        if config.model_type == OMNI_THINKER and model is not None:
            # A checkpoint of several models may not say at which token the one that writes ends its answer.
            model.generation_config.eos_token_id = (
                model.generation_config.eos_token_id or processor.tokenizer.eos_token_id
            )
        return model, processor


def read_config(path: str | Path) -> PreTrainedConfig:
    """Read a model's config from a directory or the hub; of a Qwen2.5-Omni checkpoint its thinker's.

    Raises:
        ValueError: there is no such model.
    """
    # Of no model that is supported does the hub have such a name, and to ask it may take half a minute.
    is_no_id = isinstance(path, Path) or path.startswith(("/", ".", "~")) or path.count("/") != 1
    if is_no_id and not Path(path).is_dir():
        meant = " (did you mean demo?)" if get_close_matches(str(path), ["demo"]) else ""
        raise ValueError(f"cannot load the model {path}: there is no such directory{meant}")
    with _described_errors(path):
        config = AutoConfig.from_pretrained(path)
    if config.model_type != "qwen2_5_omni":
        return config
    thinker = config.thinker_config  # it also has a talker, which would speak the answer
    thinker.dtype = thinker.dtype or config.dtype
    return thinker


def read_video_processor(path: str | Path) -> Any:
    """Load the part of a model's processor that resizes videos, from a directory or the hub.

    Raises:
        ValueError: there is none.
    """
    with _described_errors(path):
        processor = AutoVideoProcessor.from_pretrained(path)
        if read_config(path).model_type == OMNI_THINKER:  # the whole processor gives it other limits than its own
            processor.size = AutoProcessor.from_pretrained(path).videos_kwargs["size"]
        return processor


@contextmanager
def _described_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"cannot load the model {path}: {error}") from error


def default_num_frames(processor: Any) -> int:
    """Return how many frames of a video are sampled: the video processor's ``num_frames``, or 64."""
    video_processor = getattr(processor, "video_processor", None)
    return getattr(video_processor, "num_frames", None) or NUM_FRAMES


def default_max_new_tokens(model: PreTrainedModel) -> int:
    """Return how many tokens an answer may have: the generation config's ``max_new_tokens``, or 128."""
    return model.generation_config.max_new_tokens or MAX_NEW_TOKENS
