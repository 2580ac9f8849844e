"""Quantized checkpoints: whether they can be loaded here, loading them, and the size of their
weights."""

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .checkpoints import load_weights, named

# Scale and zero point of a group of weights, or of a row.
_SCALE_BYTES = 4


def quantization_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return how a model's checkpoint is quantized, as its config says; None: it is not."""
    found = (
        getattr(each, "quantization_config", None) for each in (config, config.get_text_config())
    )
    found = next((each for each in found if each is not None), None)
    if not found:
        return None
    settings = found if isinstance(found, dict) else found.to_dict()
    method = settings.get("quant_method", "bitsandbytes")  # whose older configs do not say so
    return settings | {"quant_method": getattr(method, "value", method)}


def require_quantization(config: PreTrainedConfig, device: torch.device) -> None:
    """Reject a quantized checkpoint that cannot be loaded on this device.

    Raises:
        ValueError: a package is missing, or there are no kernels; the message names it.
    """
    settings = quantization_of(config)
    if settings is None:
        return
    from transformers.quantizers.auto import (
        AutoHfQuantizer,
    )  # takes seconds, as it imports the packages

    try:
        AutoHfQuantizer.from_config(deepcopy(settings)).validate_environment(
            device_map=None, weights_only=True
        )
        _alone(settings)  # which older releases lack
        if device.type == "cpu" and "'Int4WeightOnlyConfig'" in str(settings):
            raise ValueError("its int4 weights need a GPU")
    except Exception as error:  # of many types, by method
        method = settings["quant_method"]
        raise ValueError(
            f"cannot load weights quantized by {method} on {device}: {error}"
        ) from error


def load_quantized(
    auto: type,
    path: str | Path,
    config: PreTrainedConfig,
    dtype: str | torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """Load a quantized checkpoint onto a device, for which its kernels are chosen."""
    settings = quantization_of(config)
    with _alone(settings):
        model = load_weights(auto, path, config=config, dtype=dtype, device_map={"": device})
        if hasattr(
            model, "ct_decompress_hook"
        ):  # of the whole model's forward, which apbv does not call
            model.hf_quantizer.compressor.decompress_model(model)
    if is_made_dense(settings, device):
        _require_scales(path)
        # What the scales made of the weights may have another dtype than the layers around them.
        model.to(model.config.dtype)
    return model


def _require_scales(path: str | Path) -> None:
    """Reject an fp8 checkpoint without scales, whose weights transformers would take for plain
    numbers.

    Raises:
        ValueError: scales are missing; the message names them.
    """
    folder = Path(path)
    if not folder.is_dir():  # a hub id, which is in the cache now
        folder = Path(
            snapshot_download(str(path), allow_patterns="*.safetensors", local_files_only=True)
        )
    names: set[str] = set()
    in_fp8: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            in_file = list(tensors.keys())
            names.update(in_file)
            in_fp8 += [
                name for name in in_file if tensors.get_slice(name).get_dtype().startswith("F8")
            ]
    missing = [f"{name}_scale_inv" for name in in_fp8 if f"{name}_scale_inv" not in names]
    if missing:
        raise ValueError(f"the checkpoint lacks weights of the model: {named(missing)}")


def is_made_dense(settings: dict[str, Any], device: torch.device) -> bool:
    """Return whether transformers makes plain weights of a checkpoint, as there are no kernels for
    it on a device."""
    return settings["quant_method"] == "fp8" and device.type == "cpu"


def _alone(settings: dict[str, Any]) -> AbstractContextManager:
    """Keep compressed-tensors from sharing its work among all processes, of which not all may load
    this model."""
    if settings["quant_method"] != "compressed-tensors":
        return nullcontext()
    from compressed_tensors.offload import as_single_threaded

    return as_single_threaded()


def weight_size(
    name: str,
    module: nn.Module,
    settings: dict[str, Any] | None,
    itemsize: int,
    device: torch.device,
) -> float:
    """Return the bytes per number of a module's weight matrix, scales included.

    Args:
        name: the module's.
        settings: as :func:`quantization_of` returns.
        itemsize: bytes per number if it is not quantized.
    """
    if not settings or not isinstance(module, nn.Linear):
        return itemsize
    from transformers.quantizers.quantizers_utils import should_convert_module

    skipped = settings.get("modules_to_not_convert") or settings.get("llm_int8_skip_modules") or []
    if not should_convert_module(name, skipped):
        return itemsize
    row = module.in_features
    dense = (8 * itemsize, module.in_features)
    packed = settings.get("bits"), settings.get("group_size")
    # Which compressed-tensors makes of all.
    bits, group = {
        "bitsandbytes": (4, 64) if settings.get("load_in_4bit") else (8, row),
        "torchao": (4, 32) if "Int4" in str(settings) else (8, row),
        "gptq": packed,
        "awq": packed,
        "fp8": dense if is_made_dense(settings, device) else (8, row),
    }.get(settings["quant_method"], dense)
    return bits / 8 + _SCALE_BYTES / (group if group > 0 else row)
