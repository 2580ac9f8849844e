"""Loads models and their processors from a directory or the hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    AutoVideoProcessor,
    PreTrainedConfig,
    PreTrainedModel,
)

from ... import demo
from ...config import DTYPE_NAMES, SamplingParams
from ...config.refusals import refuse
from ...errors import ApbvError, InvalidConfigError, UnsupportedModelError
from ...hosts import HostGroup
from ...reporting import raised_as, warn_caller
from ..families import family_of, require_supported, runnable_config
from .adapters import find_adapter, is_absent, merged, processor_path, require_mergeable
from .checkpoints import load_weights
from .quantization import load_quantized, quantization_of, require_quantization
from .tensor_parallel import load_sharded, require_shardable

# Defaults if a checkpoint has none.
NUM_FRAMES = 64
MAX_NEW_TOKENS = 128
# Settings of a generation config that change the tokens of an answer, and are not supported; each
# with the value that turns it off. None and an empty list do so, too.
_UNSUPPORTED: dict[str, float | None] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}


def load_model(
    path: str | Path,
    dtype: str | torch.dtype,
    hosts: HostGroup,
    with_model: bool = True,
    sharded: bool = False,
    adapter: str | Path | None = None,
    expert_parallel: bool = False,
) -> tuple[PreTrainedModel | None, Any]:
    """Load a model and its processor.

    Of a Qwen2.5-Omni checkpoint it loads the thinker alone, which answers in text.

    Args:
        path: a directory, or a hub id; of a model, or of an adapter, which is merged into the model
            that it names.
        dtype: the weights' type; a name in :data:`apbv.config.DTYPE_NAMES`, or torch's own.
        hosts: the hosts, each of which loads the model onto its own device.
        with_model: if false, only the processor is loaded, and None is returned for the model.
        sharded: with tensor parallelism load only this process's share.
        adapter: an adapter to merge into the model.
        expert_parallel: of a model that is shared out, whether the process gets whole experts, and
            not columns of each.

    Raises:
        InvalidConfigError: there is no such dtype.
        UnsupportedModelError: there is no such model, or the checkpoint lacks weights.
    """
    if isinstance(dtype, str) and dtype not in DTYPE_NAMES:
        raise InvalidConfigError(f"dtype must be one of {', '.join(DTYPE_NAMES)}, not {dtype!r}")
    with _naming_errors(path):
        base, adapter, config = _resolved(path, adapter)
        # The model.
        family = family_of(config)
        auto = family.auto_class
        model = None
        if with_model:
            if sharded and hosts.tensor_parallel_size > 1:
                model = load_sharded(
                    auto, base, config, dtype, hosts, adapter, expert_parallel=expert_parallel
                )
            elif quantization_of(config) is not None:
                model = load_quantized(auto, base, config, dtype, hosts.device)
            else:
                model = load_weights(auto, base, config=config, dtype=dtype)
                model.to(hosts.device)  # type: ignore[arg-type]  # its stub hides Module's
                if adapter is not None:
                    model = merged(model, adapter)
            model = model.eval()

        # Its processor.
        source = processor_path(base, adapter, family.reads_images)
        processor_class = AutoProcessor if family.reads_images else AutoTokenizer
        processor = processor_class.from_pretrained(source, trust_remote_code=False)
        family.prepare_processor(processor)
        if model is not None:
            family.prepare_model(model, processor)
        return model, processor


def require_loadable(
    path: str | Path,
    device: torch.device,
    adapter: str | Path | None = None,
    tensor_parallel: int = 1,
    expert_parallel: bool = False,
) -> PreTrainedConfig:
    """Read a model's config, and make all checks of :func:`load_model` that need no weights.

    Raises:
        InvalidConfigError: settings contradict one another, or expert parallelism has no experts to
            share out.
        UnsupportedModelError: there is no such model, it is not supported, its adapter cannot be
            merged, or its quantized weights cannot be used here.
    """
    with _naming_errors(path):
        _, adapter, config = _resolved(path, adapter)
    family = require_supported(config)
    refuse(
        quantized=quantization_of(config) is not None,
        tensor_parallel=tensor_parallel > 1,
        adapter=None if adapter is None else str(adapter),
    )
    require_shardable(config, tensor_parallel, expert_parallel)
    require_quantization(config, device)
    if adapter is not None:
        require_mergeable(family.auto_class, config, adapter)
    return config


def read_config(path: str | Path) -> PreTrainedConfig:
    """Read a model's config from a directory or the hub; a Qwen2.5-Omni's thinker's config.

    Args:
        path: a model, or an adapter, which names its model.

    Raises:
        UnsupportedModelError: there is no such model.
    """
    with _naming_errors(path):
        _, _, config = _resolved(path)
        return config


def _resolved(
    path: str | Path, adapter: str | Path | None = None
) -> tuple[str | Path, str | Path | None, PreTrainedConfig]:
    """Return the model to load, the adapter to merge into it, if any, and the model's config."""
    base, adapter = find_adapter(path, adapter)
    if is_absent(base):
        message = "there is no such directory"
        if base != path:
            message = f"there is no directory of its base model {base}"
        elif get_close_matches(str(path), ["demo"]):
            message += " (did you mean demo?)"
        raise UnsupportedModelError(message)
    config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    return base, adapter, runnable_config(config)


def read_video_processor(path: str | Path) -> Any:
    """Load the part of a model's processor that resizes videos, from a directory or the hub.

    Raises:
        UnsupportedModelError: there is none.
    """
    with _naming_errors(path):
        base, adapter, config = _resolved(path)
        source = processor_path(base, adapter, is_video=True)
        processor = AutoVideoProcessor.from_pretrained(source, trust_remote_code=False)
        if family_of(config).whole_limits_videos:
            # The processor of all inputs overrides the sizes of its part for videos.
            whole = AutoProcessor.from_pretrained(source, trust_remote_code=False)
            processor.size = whole.videos_kwargs["size"]
        return processor


@contextmanager
def _naming_errors(path: str | Path) -> Iterator[None]:
    """Raise errors of transformers and its hub, and our own, with the model's name before them.

    Raises:
        ApbvError: of the kind of the error in the body, or UnsupportedModelError.
    """
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        kind: type[ApbvError] = UnsupportedModelError
        if isinstance(error, ApbvError):
            kind = type(error)
        reason = str(error)
        if "trust_remote_code" in reason:
            reason = (
                "it has code of its own, which is never run: transformers itself has to know the "
                "model"
            )
        name = "demo" if path == demo.model_path() else path
        raise kind(f"cannot load the model {name}: {reason}") from error


def default_num_frames(processor: Any) -> int:
    """Return how many frames of a video are sampled: as its processor says, or 64."""
    video_processor = getattr(processor, "video_processor", None)
    return getattr(video_processor, "num_frames", None) or NUM_FRAMES


def default_sampling(model: PreTrainedModel, source: str = "auto") -> SamplingParams:
    """Return the generation config's sampling parameters, for what a request leaves open.

    As in transformers, the temperature counts with ``do_sample`` only; otherwise the default is
    greedy. Settings that would change answers and are not supported are warned of.

    Args:
        source: one of :data:`apbv.config.GENERATION_CONFIGS`.

    Raises:
        UnsupportedModelError: the generation config has an invalid value.
    """
    settings = {}
    if source == "auto":
        for name, value in model.generation_config.to_diff_dict().items():
            if value is not None:
                settings[name] = value

    unsupported = []
    for name, neutral_value in _UNSUPPORTED.items():
        if settings.get(name) not in (None, [], neutral_value):
            unsupported.append(name)
    if unsupported:
        warn_caller(
            f"settings of the model's generation config that are ignored: {', '.join(unsupported)}"
        )

    temperature = settings.get("temperature", 1.0) if settings.get("do_sample") else 0.0
    top_k = settings.get("top_k", 0)
    if top_k == -1:  # for all tokens
        top_k = 0
    with raised_as(UnsupportedModelError, "the model's generation config", ValueError):
        return SamplingParams(
            temperature=temperature,
            top_p=settings.get("top_p", 1.0),
            top_k=top_k,
            min_p=settings.get("min_p", 0.0),
            repetition_penalty=settings.get("repetition_penalty", 1.0),
            max_new_tokens=settings.get("max_new_tokens", MAX_NEW_TOKENS),
        )
