"""Reads the multi-token prediction layer of a checkpoint, which transformers leaves out."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ...errors import UnsupportedModelError
from ..families import family_of
from ..fused import StandIn
from ..linear_attention import is_linear
from ..modules import decoder_layers, final_norm
from ..next_token import NextTokenInput, NextTokenModel
from ..parts import ModelParts
from .checkpoints import named

_INDEX = "model.safetensors.index.json"

# The weights' names in checkpoints of Qwen, behind "mtp.", and of GLM, behind those of a layer that
# follows the decoder's last one. The rest of the latter is of the decoder layer itself.
_QWEN_NAMES = {
    "pre_fc_norm_embedding.weight": "join.embedding_norm.weight",
    "pre_fc_norm_hidden.weight": "join.hidden_norm.weight",
    "fc.weight": "join.projection.weight",
    "norm.weight": "norm.weight",
}
_GLM_NAMES = {
    "enorm.weight": "join.embedding_norm.weight",
    "hnorm.weight": "join.hidden_norm.weight",
    "eh_proj.weight": "join.projection.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "head.weight",
}
# Copies of the target's own, which some checkpoints have there, too.
_SHARED = ("embed_tokens.weight", "lm_head.weight")
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<name>\w+)\.weight")


def load_next_token_model(target: ModelParts) -> NextTokenModel:
    """Read the layer from the checkpoint that a model was loaded from, and put it beside the model.

    Raises:
        UnsupportedModelError: the checkpoint has none, or several that follow one another, or lacks
            some of its weights.
    """
    path = target.family.checkpoint
    stored = _read(path, target.num_layers)
    is_qwen = any(name.startswith("mtp.") for name in stored)
    weights: dict[str, Tensor] = {}
    for name, weight in stored.items():
        own_name = _qwen_name(name) if is_qwen else _glm_name(name)
        if own_name is not None:
            weights[own_name] = weight
    weights = _with_joint_experts(weights)

    # The modules.
    sample = next(
        layer for layer in reversed(decoder_layers(target.language_model)) if not is_linear(layer)
    )
    index = list(decoder_layers(target.language_model)).index(sample)
    modules = _NextTokenModules(target, sample, index, has_head="head.weight" in weights)
    dtypes = {f"layer.{name}": weight.dtype for name, weight in sample.state_dict().items()}
    for name, weight in weights.items():
        weights[name] = weight.to(target.device, dtypes.get(name, target.dtype))
    try:
        modules.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        expected = modules.state_dict().keys()
        missing = expected - weights.keys()
        unknown = weights.keys() - expected
        reason = str(error).splitlines()[-1].strip()
        if missing:
            reason = f"it lacks {named(missing)}"
        elif unknown:
            reason = f"it also has {named(unknown)}"
        raise UnsupportedModelError(
            f"the multi-token prediction layer of {path} cannot be used: {reason}"
        ) from error
    modules.requires_grad_(False).eval()
    modules.layer.self_attn.layer_idx = 0
    return NextTokenModel.beside(
        target,
        modules.layer,
        modules.norm,
        modules.join,
        getattr(modules, "head", None),
        feeds_normed=is_qwen,
    )


def require_next_token_weights(path: str | Path, config: PreTrainedConfig) -> None:
    """Reject a checkpoint on this machine that has no multi-token prediction layer.

    One that is still to be loaded from the hub is looked at when it is there.

    Raises:
        UnsupportedModelError: it has none, or several.
    """
    if Path(path).is_dir():
        _require_one(path, _names(Path(path)), family_of(config).sizes.layers)


class _NextTokenModules(nn.Module):
    """The modules that a checkpoint has weights of, without storage."""

    def __init__(self, target: ModelParts, sample: Any, index: int, has_head: bool):
        super().__init__()
        norm = final_norm(target.language_model)
        eps = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", 1e-6)
        width = target.hidden_size
        norm_class = _own_class(norm)
        with torch.device("meta"):
            self.join = NextTokenInput(
                norm_class(width, eps=eps),
                norm_class(width, eps=eps),
                nn.Linear(2 * width, width, bias=False),
            )
            # Its number decides between experts and an MLP, and between kinds of attention.
            self.layer = _own_class(sample)(sample.self_attn.config, index)
            self.norm = norm_class(width, eps=eps)
            if has_head:
                self.head = nn.Linear(width, target.vocab_size, bias=False)


def _own_class(module: nn.Module) -> type[Any]:
    """Return the class of transformers of a module, for which another may stand in."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, StandIn))


def _qwen_name(name: str) -> str | None:
    """Return the name of a weight here; None: it is not of the layer."""
    own_name = name.removeprefix("mtp.")
    if own_name in _SHARED:
        return None
    if own_name.startswith("layers.0."):
        return own_name.replace("layers.0.", "layer.", 1)
    return _QWEN_NAMES.get(own_name, own_name)


def _glm_name(name: str) -> str | None:
    """Return the name of a weight here; None: it is not of the layer."""
    _, _, own_name = name.partition(".layers.")
    own_name = own_name.partition(".")[2]
    if own_name in _SHARED:
        return None
    return _GLM_NAMES.get(own_name, f"layer.{own_name}")


def _with_joint_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with those of experts, each of which may have its own, in one tensor."""
    joint: dict[str, Tensor] = {}
    of_experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, weight in weights.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            joint[name] = weight
            continue
        expert = of_experts.setdefault(match["experts"], {}).setdefault(int(match["number"]), {})
        expert[match["name"]] = weight
    for name, experts in of_experts.items():
        in_order = [experts[number] for number in sorted(experts)]
        try:
            gates = [torch.cat([each["gate_proj"], each["up_proj"]]) for each in in_order]
            joint[f"{name}.gate_up_proj"] = torch.stack(gates)
            joint[f"{name}.down_proj"] = torch.stack([each["down_proj"] for each in in_order])
        except (KeyError, RuntimeError):
            continue  # reported as missing
    return joint


def _read(path: str, num_layers: int) -> dict[str, Tensor]:
    """Read the stored weights of the layer by their names in the checkpoint."""
    folder = Path(path)
    if not folder.is_dir():
        # The model was loaded from these files.
        patterns = ["*.safetensors", _INDEX]
        folder = Path(snapshot_download(path, allow_patterns=patterns, local_files_only=True))
    names = _names(folder)
    wanted = _require_one(path, names, num_layers)
    weights = {}
    for file in sorted({names[name] for name in wanted}):
        with safe_open(folder / file, "pt") as tensors:
            for name in wanted:
                if names[name] == file:
                    weights[name] = tensors.get_tensor(name)
    return weights


def _names(folder: Path) -> dict[str, str]:
    """Return in which file of a checkpoint each of its weights is."""
    index = folder / _INDEX
    if index.is_file():
        return json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    names = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                names[name] = file.name
    return names


def _require_one(path: str | Path, names: Mapping[str, str], num_layers: int) -> list[str]:
    """Return the names of the weights of a checkpoint's multi-token prediction layer.

    Args:
        num_layers: the decoder's layers.

    Raises:
        UnsupportedModelError: there is none, or there are several.
    """
    wanted = [name for name in names if name.startswith("mtp.")]
    numbers = {name.split(".")[2] for name in wanted if name.startswith("mtp.layers.")}
    if not wanted:
        of_layers = [(name, number) for name, number in _layers(names) if number >= num_layers]
        wanted = [name for name, _ in of_layers]
        numbers = {str(number) for _, number in of_layers}
    if not wanted:
        raise UnsupportedModelError(
            f"{path} has no multi-token prediction layer: no weights are named mtp.*, or are of a "
            f"layer behind the {num_layers} of its decoder"
        )
    if len(numbers) > 1:
        raise UnsupportedModelError(
            f"{path} has {len(numbers)} multi-token prediction layers that follow one another; "
            "apbv drafts with one"
        )
    return wanted


def _layers(names: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the weights of a checkpoint's language model that are of numbered layers."""
    for name in names:
        match = re.match(r"(model\.)?(language_model\.)?(model\.)?layers\.(\d+)\.", name)
        if match is not None:
            yield name, int(match[4])
