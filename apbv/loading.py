"""Models and their processors, from a directory or the hub."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
)

from .hosts import HostGroup
from .models import VIDEO_FAMILIES
from .tensor_parallel import load_sharded

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(
    path: str | Path,
    dtype: str | torch.dtype,
    hosts: HostGroup,
    with_model: bool = True,
    sharded: bool = False,
) -> tuple[PreTrainedModel | None, Any]:
    """A model, where it is wanted, and its processor.

    Args:
        dtype: of the weights; one of :data:`DTYPES` or torch's own.
        sharded: with tensor parallelism load only this process's share.

    Raises:
        ValueError: there is no such model, or no such dtype.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    try:
        config = AutoConfig.from_pretrained(path)
        is_video = config.model_type in VIDEO_FAMILIES
        auto = AutoModelForImageTextToText if is_video else AutoModelForCausalLM
        model = None
        if with_model and sharded and hosts.tensor_parallel_size > 1:
            model = load_sharded(auto, path, config, dtype, hosts).eval()
        elif with_model:
            model = auto.from_pretrained(path, dtype=dtype).to(hosts.device).eval()
        return model, (AutoProcessor if is_video else AutoTokenizer).from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"cannot load the model {path}: {error}") from error
