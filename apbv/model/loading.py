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

from .. import demo
from ..config import DTYPE_NAMES, SamplingParams
from ..hosts import HostGroup
from ..refusals import refuse
from ..warn import raised_as, warn_caller
from .adapters import find_adapter, is_absent, merged, processor_path, require_mergeable
from .checkpoints import load_weights
from .parts import OMNI_THINKER, VISION_FAMILIES, count_as_the_model, require_supported
from .quantization import load_quantized, quantization_of, require_quantization
from .tensor_parallel import load_sharded, require_shardable

# Defaults if a checkpoint has none.
NUM_FRAMES = 64
MAX_NEW_TOKENS = 128
# Settings of a generation config that change the tokens of an answer, and are not supported.
_UNSUPPORTED = (
    "bad_words_ids begin_suppress_tokens constraints diversity_penalty "
    "encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff "
    "exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_eos_token_id "
    "guidance_scale min_length min_new_tokens no_repeat_ngram_size num_beams penalty_alpha "
    "sequence_bias stop_strings suppress_tokens top_h typical_p watermarking_config"
)


def load_model(
    path: str | Path,
    dtype: str | torch.dtype,
    hosts: HostGroup,
    with_model: bool = True,
    sharded: bool = False,
    adapter: str | Path | None = None,
) -> tuple[PreTrainedModel | None, Any]:
    """Load a model and its processor; of a Qwen2.5-Omni checkpoint the thinker alone, which answers
    in text.

    Args:
        path: a directory, or a hub id; of a model, or of an adapter, which is merged into the model
            that it names.
        dtype: the weights' type; a name in :data:`apbv.config.DTYPE_NAMES`, or torch's own.
        hosts: who loads it; the model goes to this process's device.
        with_model: False: the processor alone; None stands for the model.
        sharded: with tensor parallelism load only this process's share.
        adapter: an adapter to merge into the model.

    Raises:
        ValueError: there is no such model or dtype, or the checkpoint lacks weights.
    """
    if isinstance(dtype, str) and dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_NAMES)}, not {dtype!r}")
    with _described_errors(path):
        base, adapter, config = _described(path, adapter)
        auto = _auto_class(config)
        sees = config.model_type in VISION_FAMILIES
        model = None
        if with_model and sharded and hosts.tensor_parallel_size > 1:
            model = load_sharded(auto, base, config, dtype, hosts, adapter).eval()
        elif with_model and quantization_of(config) is not None:
            model = load_quantized(auto, base, config, dtype, hosts.device).eval()
        elif with_model:
            model = load_weights(auto, base, config=config, dtype=dtype).to(hosts.device)
            model = (model if adapter is None else merged(model, adapter)).eval()
        reader = AutoProcessor if sees else AutoTokenizer
        processor = reader.from_pretrained(
            processor_path(base, adapter, sees), trust_remote_code=False
        )
        count_as_the_model(processor, config)
        if config.model_type == OMNI_THINKER and model is not None:
            # A checkpoint of several models may not say at which token the one that writes ends its
            # answer.
            model.generation_config.eos_token_id = (
                model.generation_config.eos_token_id or processor.tokenizer.eos_token_id
            )
        return model, processor


def require_loadable(
    path: str | Path,
    device: torch.device,
    adapter: str | Path | None = None,
    tensor_parallel: int = 1,
) -> PreTrainedConfig:
    """Read a model's config, after all checks of what :func:`load_model` would load that need no
    weights.

    Raises:
        ValueError: there is no such model, it is not supported, its adapter cannot be merged, or
            its quantized weights cannot be used here.
    """
    with _described_errors(path):
        _, adapter, config = _described(path, adapter)
    require_supported(config)
    refuse(
        quantized=quantization_of(config) is not None,
        tensor_parallel=tensor_parallel > 1,
        adapter=adapter,
    )
    require_shardable(config, tensor_parallel)
    require_quantization(config, device)
    if adapter is not None:
        require_mergeable(_auto_class(config), config, adapter)
    return config


def _auto_class(config: PreTrainedConfig) -> type:
    return (
        AutoModelForImageTextToText
        if config.model_type in VISION_FAMILIES
        else AutoModelForCausalLM
    )


def read_config(path: str | Path) -> PreTrainedConfig:
    """Read a model's config from a directory or the hub; of a Qwen2.5-Omni checkpoint its
    thinker's.

    Args:
        path: a model, or an adapter, which names its model.

    Raises:
        ValueError: there is no such model.
    """
    with _described_errors(path):
        return _described(path)[-1]


def _described(
    path: str | Path, adapter: str | Path | None = None
) -> tuple[str | Path, str | Path | None, PreTrainedConfig]:
    """Return the model to load, the adapter to merge into it, if any, and the model's config."""
    base, adapter = find_adapter(path, adapter)
    if is_absent(base):
        meant = " (did you mean demo?)" if get_close_matches(str(path), ["demo"]) else ""
        raise ValueError(
            f"there is no such directory{f' as its base, {base}' if base != path else meant}"
        )
    config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    if config.model_type != "qwen2_5_omni":
        return base, adapter, config
    thinker = config.thinker_config  # it also has a talker, which would speak the answer
    thinker.dtype = thinker.dtype or config.dtype
    return base, adapter, thinker


def read_video_processor(path: str | Path) -> Any:
    """Load the part of a model's processor that resizes videos, from a directory or the hub.

    Raises:
        ValueError: there is none.
    """
    with _described_errors(path):
        source = processor_path(*find_adapter(path), is_video=True)
        processor = AutoVideoProcessor.from_pretrained(source, trust_remote_code=False)
        if (
            read_config(path).model_type == OMNI_THINKER
        ):  # the whole processor gives it other limits than its own
            whole = AutoProcessor.from_pretrained(source, trust_remote_code=False)
            processor.size = whole.videos_kwargs["size"]
        return processor


@contextmanager
def _described_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        reason = str(error)
        if "trust_remote_code" in reason:
            reason = (
                "it has code of its own, which is never run: transformers itself has to know the "
                "model"
            )
        name = "demo" if path == demo.model_path() else path
        raise ValueError(f"cannot load the model {name}: {reason}") from error


def default_num_frames(processor: Any) -> int:
    """Return how many frames of a video are sampled: the video processor's ``num_frames``, or
    64."""
    video_processor = getattr(processor, "video_processor", None)
    return getattr(video_processor, "num_frames", None) or NUM_FRAMES


def default_sampling(model: PreTrainedModel, source: str = "auto") -> SamplingParams:
    """Return the sampling parameters for what a request leaves open: those of the generation
    config.

    As in transformers, the temperature counts with ``do_sample`` only; otherwise the default is
    greedy. Settings that would change answers and are not supported are warned of.

    Args:
        source: one of :data:`apbv.config.GENERATION_CONFIGS`.

    Raises:
        ValueError: the generation config has an invalid value.
    """
    config = model.generation_config.to_diff_dict() if source == "auto" else {}
    given = {name: value for name, value in config.items() if value is not None}
    if unsupported := [
        name for name in _UNSUPPORTED.split() if given.get(name, 1) not in (0, 1, [])
    ]:
        warn_caller(
            f"settings of the model's generation config that are ignored: {', '.join(unsupported)}"
        )
    with raised_as(ValueError, "the model's generation config", ValueError):
        return SamplingParams(
            temperature=given.get("temperature", 1.0) if given.get("do_sample") else 0.0,
            top_p=given.get("top_p", 1.0),
            top_k=0 if given.get("top_k") == -1 else given.get("top_k", 0),
            min_p=given.get("min_p", 0.0),
            repetition_penalty=given.get("repetition_penalty", 1.0),
            max_new_tokens=given.get("max_new_tokens", MAX_NEW_TOKENS),
        )
