"""Fits a PEFT adapter's names, and its vocabulary, to a model of this release of transformers.

An adapter names the modules that it changes. Earlier releases of transformers had other names for
the parts of vision-language models, and an adapter may have been trained on the text model alone,
which has its own.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import UnsupportedModelError

_PREFIX = "base_model.model."  # peft's own, before the name of a module
# What earlier releases called the parts beside the decoder.
_OLDER_NAMES = (
    ("visual.", "model.visual."),
    ("vision_tower.", "model.vision_tower."),
    ("vision_model.", "model.vision_model."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("audio_tower.", "model.audio_tower."),
    ("language_model.lm_head", "lm_head"),
)
# The names of a module's own weights, which stand directly behind the module's name where it is
# saved whole.
_OWN_WEIGHTS = ("weight", "bias")
# A part of an embedding that is trained for a few tokens; peft finds it by other settings.
_SOME_TOKENS = "token_adapter"


def fit_names(config: Any, weight_names: Iterable[str], model: PreTrainedModel) -> dict[str, str]:
    """Return how peft must rename an adapter's weights, and fit its config to the model's modules.

    Args:
        config: the adapter's, whose fields are changed where it would find other modules than have
            weights.
        weight_names: those of the adapter's file.

    Returns:
        A ``key_mapping`` for :meth:`peft.PeftModel.load_adapter`; empty if the names fit already.
    """
    modules = dict(model.named_modules())
    decoder = next(name for name, module in modules.items() if module is model.get_decoder())
    renamed: dict[str, str] = {}
    changed: set[str] = set()  # modules to which something is added; others are saved whole
    for weight_name in weight_names:
        if not weight_name.startswith(_PREFIX):
            continue  # what all modules share
        path = weight_name.removeprefix(_PREFIX)
        module, rest = _module_of(path, modules, decoder)
        if module is None:
            module, rest, older = _module_by_older_name(path, modules, decoder)
            if module is None:
                continue  # peft tells of it
            renamed[older] = module
        if rest.split(".")[0] not in (*_OWN_WEIGHTS, _SOME_TOKENS, "base_layer"):
            changed.add(module)
    if changed and (renamed or _finds_others(config, changed, modules, decoder)):
        config.target_modules = changed
        config.layers_to_transform = None
        config.layers_pattern = None
        config.exclude_modules = None
        for patterns in ("rank_pattern", "alpha_pattern"):
            by_older_name = getattr(config, patterns, None) or {}
            by_name = {}
            for name, value in by_older_name.items():
                by_name[renamed.get(name, name)] = value
            setattr(config, patterns, by_name)
    return {rf"^{re.escape(older)}(?=\.)": name for older, name in renamed.items()}


def _module_of(path: str, modules: Mapping[str, nn.Module], decoder: str) -> tuple[str | None, str]:
    """Return the module with weights of its own that a name begins with, and the name's rest."""
    steps = path.split(".")
    for count in range(len(steps) - 1, 0, -1):
        name = ".".join(steps[:count])
        # Not LLaVA-OneVision's whole model, which has a weight of its own beside its parts.
        if name in modules and modules[name]._parameters and not decoder.startswith(f"{name}."):
            return name, ".".join(steps[count:])
    return None, ""


def _module_by_older_name(
    path: str, modules: Mapping[str, nn.Module], decoder: str
) -> tuple[str | None, str, str]:
    """Return the module that a name of an older release, or of a text model, begins with.

    Returns:
        The module's name, the rest of the path, and the module's older name.
    """
    path_in_thinker = path.removeprefix("thinker.")  # Qwen2.5-Omni's whole model
    prefix = path[: len(path) - len(path_in_thinker)]
    decoders = [("language_model.model.", f"{decoder}."), ("model.", f"{decoder}."), ("", "")]
    for older, newer in (*_OLDER_NAMES, *decoders):
        if path_in_thinker.startswith(older):
            module, rest = _module_of(newer + path_in_thinker.removeprefix(older), modules, decoder)
            if module is not None:
                return module, rest, prefix + older + module.removeprefix(newer)
    return None, "", ""


def _finds_others(
    config: Any, changed: set[str], modules: Mapping[str, nn.Module], decoder: str
) -> bool:
    """Return whether a text model's adapter would also find modules of the towers.

    Some have the same names as modules of the decoder.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    if getattr(config, "target_modules", None) is None:
        return False
    if not all(name.startswith(decoder) for name in changed):
        return False
    outside = [name for name in modules if name and not name.startswith(decoder)]
    return any(check_target_module_exists(config, name) for name in outside)


def resize_vocabulary(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Give a model the number of tokens that an adapter was trained with.

    Raises:
        UnsupportedModelError: it has embeddings of another number of tokens, but no head for these.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    inputs = _rows_saved(model, embedding, weights)
    outputs = _rows_saved(model, head, weights)
    if outputs is None and head.weight is embedding.weight:
        outputs = inputs
    num_tokens = embedding.weight.shape[0]
    if inputs in (None, num_tokens) and outputs in (None, num_tokens):
        return
    if inputs != outputs:
        raise UnsupportedModelError(
            f"it has {inputs or 'no'} rows of the embedding and {outputs or 'no'} rows of the "
            f"head, but the model has {num_tokens} tokens: without both the others would be random"
        )
    model.resize_token_embeddings(inputs, mean_resizing=False)


def _rows_saved(
    model: PreTrainedModel, module: nn.Module, weights: Mapping[str, Tensor]
) -> int | None:
    """Return the rows of a module that an adapter has in place of all; None if it has none."""
    name = next(name for name, candidate in model.named_modules() if candidate is module)
    for suffix in ("weight", "base_layer.weight"):
        saved = weights.get(f"{_PREFIX}{name}.{suffix}")
        if saved is not None:
            return saved.shape[0]
    return None
