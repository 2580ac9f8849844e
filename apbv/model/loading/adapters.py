"""Adapters of the PEFT library, merged into the weights of the model that they were trained on."""

import json
import warnings
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session, try_to_load_from_cache
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file, is_peft_available

from ...compat.versions import how_to_install
from ...errors import BackendUnavailableError, UnsupportedModelError
from .adapter_names import fit_names, resize_vocabulary

_CONFIG = "adapter_config.json"
_BASE = "base_model_name_or_path"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# One of these is there where a tokenizer or a processor was saved.
_TOKENIZER_FILES = ("tokenizer_config.json",)
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def find_adapter(
    path: str | Path, adapter: str | Path | None = None
) -> tuple[str | Path, str | Path | None]:
    """Return the model to load, and the adapter to merge into it, if any.

    Args:
        path: a model; or an adapter, whose config names its model.
        adapter: an adapter of this model.

    Raises:
        UnsupportedModelError: an adapter has no config or names no model, or its model has an
            adapter itself.
    """
    config = _find(path, _CONFIG)
    if adapter is None and config is None:
        return path, None
    base = path
    if adapter is None:
        adapter = path
        assert config is not None  # it was found
        base = _base_of(adapter, config)
        config = _find(base, _CONFIG)
    elif _find(adapter, _CONFIG) is None:
        raise UnsupportedModelError(_why_no_adapter(adapter))
    if config is not None:
        raise UnsupportedModelError(
            f"{base}, the model of the adapter {adapter}, has an {_CONFIG} itself: merge that first"
        )
    return base, adapter


def _base_of(adapter: str | Path, config: str) -> str | Path:
    """Return the model that an adapter belongs to.

    Args:
        config: the path of the adapter's config.

    Raises:
        UnsupportedModelError: it names none.
    """
    # A model beside it is the one that it belongs to, for transformers, too.
    if Path(adapter, "config.json").is_file():
        return adapter
    base = json.loads(Path(config).read_text()).get(_BASE)
    if not base or not isinstance(base, str):
        raise UnsupportedModelError(
            f"the adapter {adapter} names no model: give its model and adapter={str(adapter)!r}"
        )
    return base


def _why_no_adapter(adapter: str | Path) -> str:
    if is_absent(adapter):
        return f"the adapter {adapter} does not exist: there is no such directory"
    if not Path(adapter).is_dir() and constants.HF_HUB_OFFLINE:
        return (
            f"the adapter {adapter} is not in the local cache, and HF_HUB_OFFLINE forbids to ask "
            "the hub"
        )
    return f"{adapter} is not a PEFT adapter: it has no {_CONFIG}"


def processor_path(base: str | Path, adapter: str | Path | None, is_video: bool) -> str | Path:
    """Return where to load a processor from: the adapter, if it has one, or the model.

    An adapter may have added tokens.
    """
    if adapter is None:
        return base
    names = _PROCESSOR_FILES if is_video else _TOKENIZER_FILES
    has_processor = any(_find(adapter, name) for name in names)
    return adapter if has_processor else base


def require_mergeable(auto: type[Any], config: PreTrainedConfig, adapter: str | Path) -> None:
    """Reject an adapter that does not fit a model, or cannot be merged.

    To find out, the model is built without storage.

    Raises:
        UnsupportedModelError: peft is not installed, or the adapter is rejected; the message says
            why.
    """
    if Path(adapter).is_dir() and not any(Path(adapter, name).is_file() for name in _WEIGHTS):
        raise UnsupportedModelError(
            f"the adapter {adapter} has no weights: neither {' nor '.join(_WEIGHTS)}"
        )
    if not is_peft_available():
        raise BackendUnavailableError(
            f"{adapter} is an adapter, which needs peft: {how_to_install('adapters')}"
        )
    with torch.device("meta"):
        model = auto.from_config(deepcopy(config))
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of copies without storage
            _merge(model, adapter, has_weights=False)
    except NotImplementedError:
        # The adapter's method looks at the model's weights: whether it can be merged is seen when
        # they are loaded.
        pass
    except Exception as error:  # of many types, by method
        reason = " ".join(str(error).split("\n")[:2])  # which may have a line for every layer
        raise UnsupportedModelError(
            f"cannot merge the adapter {adapter} into its model: {reason}"
        ) from error


def merged(model: PreTrainedModel, adapter: str | Path) -> PreTrainedModel:
    """Merge an adapter into a model's weights, in place; return the model.

    Raises:
        UnsupportedModelError: the adapter's method cannot be merged, or it was made for a model of
            other modules.
    """
    return _merge(model, adapter, has_weights=True)


def _merge(model: PreTrainedModel, adapter: str | Path, has_weights: bool) -> PreTrainedModel:
    """Merge an adapter into a model; one without weights only shows whether that can be done."""
    from peft import PeftConfig, PeftModel
    from peft.utils import load_peft_weights

    config = PeftConfig.from_pretrained(str(adapter))
    config.megatron_config = None  # with which peft would import a module that the adapter names
    weights = load_peft_weights(str(adapter), device="cpu")
    if not has_weights and hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # others, such as PiSSA, decompose the model's weights
    # Make room for it in the model.
    adapted: Any = None
    if not config.is_prompt_learning:
        resize_vocabulary(model, weights)
        key_mapping = fit_names(config, weights, model)
        adapted = PeftModel(model, config)
    if not hasattr(getattr(adapted, "base_model", None), "merge_and_unload"):
        raise UnsupportedModelError(
            f"{getattr(config.peft_type, 'value', config.peft_type)} changes no weights"
        )

    # Load its weights.
    keys = adapted.load_adapter(
        str(adapter), "default", torch_device="cpu", key_mapping=key_mapping
    )
    misfits = _missing(adapted, keys.missing_keys) + keys.unexpected_keys
    if misfits:
        raise UnsupportedModelError(
            f"its weights are not those of the model's modules: {misfits[0]} and "
            f"{len(misfits) - 1} more"
        )

    # Merge them.
    _untie(model)
    merged_model: Any = adapted.merge_and_unload()
    head = merged_model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        # peft may have made it of an embedding, whose sizes are the other way round.
        head.out_features, head.in_features = head.weight.shape
    return merged_model


def _missing(adapted: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the weights that are missing, without those that are loaded under another name.

    Modules may share a weight, which then has several names.

    Args:
        names: of the weights that the adapter's file lacks.
    """
    parameters = dict(adapted.named_parameters(remove_duplicate=False))
    loaded = {id(parameter) for name, parameter in parameters.items() if name not in names}
    return [name for name in names if id(parameters.get(name)) not in loaded]


def _untie(model: PreTrainedModel) -> None:
    """Give the head its own weights if it shares the embedding's, and an adapter adds to either.

    While the model runs, an addition changes one of the two; merged into the weights it would
    change both.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    is_changed = False
    if isinstance(embedding, BaseTunerLayer):
        embedding = embedding.get_base_layer()
        is_changed = True
    if isinstance(head, BaseTunerLayer):
        head = head.get_base_layer()
        is_changed = True
    if not is_changed or head.weight is not embedding.weight:
        return
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
    model.config.get_text_config().tie_word_embeddings = False


def is_absent(path: str | Path) -> bool:
    """Return whether a path is neither a directory nor possibly the id of a model or an adapter."""
    # To ask the hub for a model that it cannot have may take half a minute.
    could_be_id = (
        not isinstance(path, Path) and not path.startswith(("/", ".", "~")) and path.count("/") == 1
    )
    return not could_be_id and not Path(path).is_dir()


def require_reachable(path: str | Path) -> None:
    """Raise OSError at once if a model is not in the cache, and the hub cannot be reached.

    The hub's own client would try each file six times, for half a minute.
    """
    names = ("config.json", _CONFIG)
    is_cached = any(isinstance(try_to_load_from_cache(str(path), name), str) for name in names)
    if constants.HF_HUB_OFFLINE or is_cached:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # of the client's own types
        message = (
            f"it is not in the local cache, and the hub, {constants.ENDPOINT}, cannot be reached: "
            f"{error}"
        )
        raise OSError(message) from error


def _find(path: str | Path, name: str) -> str | None:
    if is_absent(path):
        return None
    if not Path(path).is_dir():
        require_reachable(path)
    return cached_file(
        str(path),
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
