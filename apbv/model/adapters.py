"""Adapters of the PEFT library, merged into the weights of the model that they were trained on."""

import json
import warnings
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file, is_peft_available

_CONFIG, _BASE = "adapter_config.json", "base_model_name_or_path"
# One of these is there where a tokenizer or a processor was saved.
_TOKENIZER_FILES = ("tokenizer_config.json",)
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def find_adapter(path: str | Path, adapter: str | Path | None = None) -> tuple[str | Path, str | Path | None]:
    """Return the model to load, and the adapter to merge into it, if any.

    Args:
        path: a model; or an adapter, whose config names its model.
        adapter: an adapter of this model.

    Raises:
        ValueError: an adapter has no config or names no model, or its model has an adapter itself.
    """
    config = _find(path, _CONFIG)
    if adapter is None:
        if config is None:
            return path, None
        # A model beside it is the one that it belongs to, for transformers, too.
        base = path if Path(path, "config.json").is_file() else json.loads(Path(config).read_text()).get(_BASE)
        if not base:
            raise ValueError(f"the adapter {path} names no model: give its model and adapter={str(path)!r}")
        path, adapter, config = base, path, _find(base, _CONFIG)
    elif _find(adapter, _CONFIG) is None:
        raise ValueError(f"{adapter} is not a PEFT adapter: it has no {_CONFIG}")
    if config is not None:
        raise ValueError(f"{path}, the model of the adapter {adapter}, has an {_CONFIG} itself: merge that first")
    return path, adapter


def processor_path(base: str | Path, adapter: str | Path | None, is_video: bool) -> str | Path:
    """Return where to load a processor from: from the adapter if it has one, as it may have added tokens."""
    names = _PROCESSOR_FILES if is_video else _TOKENIZER_FILES
    return adapter if adapter is not None and any(_find(adapter, name) for name in names) else base


def require_mergeable(auto: type, config: PreTrainedConfig, adapter: str | Path) -> None:
    """Reject an adapter that does not fit a model, or cannot be merged; the model is built without storage.

    Raises:
        ValueError: peft is not installed, or the adapter is rejected; the message says why.
    """
    if not is_peft_available():
        raise ValueError(f"{adapter} is an adapter, which needs peft: pip install 'apbv[adapters]'")
    with torch.device("meta"):
        model = auto.from_config(config)
    try:
        with warnings.catch_warnings(action="ignore"):  # what is copied to no storage
            merged(model, adapter)
    except Exception as error:  # of many types, by method
        reason = " ".join(str(error).split("\n")[:2])  # which may have a line for every layer
        raise ValueError(f"cannot merge the adapter {adapter} into its model: {reason}") from error


def merged(model: PreTrainedModel, adapter: str | Path) -> PreTrainedModel:
    """Merge an adapter into a model's weights, in place; return the model.

    Raises:
        ValueError: the adapter's method cannot be merged, or it was made for a model of other modules.
    """
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(str(adapter))
    adapted = None if config.is_prompt_learning else PeftModel(model, config)
    if not hasattr(getattr(adapted, "base_model", None), "merge_and_unload"):
        raise ValueError(f"{getattr(config.peft_type, 'value', config.peft_type)} changes no weights")
    keys = adapted.load_adapter(str(adapter), "default", torch_device="cpu")
    if wrong := keys.missing_keys + keys.unexpected_keys:
        raise ValueError(f"its weights are not those of the model's modules: {wrong[0]} and {len(wrong) - 1} more")
    return adapted.merge_and_unload()


def is_absent(path: str | Path) -> bool:
    """Return whether this is neither a directory nor what could be the id of a supported model or its adapter."""
    # To ask the hub for what it cannot have may take half a minute.
    is_no_id = isinstance(path, Path) or path.startswith(("/", ".", "~")) or path.count("/") != 1
    return is_no_id and not Path(path).is_dir()


def _find(path: str | Path, name: str) -> str | None:
    quietly = {f"_raise_exceptions_for_{each}": False for each in ("missing_entries", "connection_errors")}
    return None if is_absent(path) else cached_file(str(path), name, **quietly)
