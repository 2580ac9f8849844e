"""Quantized checkpoints: whether they can be loaded, loading them, and their weights' size."""

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import UnsupportedModelError
from .checkpoints import load_weights, named

# Scale and zero point of a group of weights, or of a row.
_SCALE_BYTES = 4


def quantization_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return how a model's checkpoint is quantized, as its config says; None: it is not."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        settings = getattr(config.get_text_config(), "quantization_config", None)
    if not settings:
        return None
    if not isinstance(settings, dict):
        settings = settings.to_dict()
    method = settings.get("quant_method", "bitsandbytes")  # whose older configs do not say so
    return settings | {"quant_method": getattr(method, "value", method)}


def require_quantization(config: PreTrainedConfig, device: torch.device) -> None:
    """Reject a quantized checkpoint that cannot be loaded on this device.

    Raises:
        UnsupportedModelError: a package is missing, or there are no kernels; the message names it.
    """
    settings = quantization_of(config)
    if settings is None:
        return
    # The import takes seconds, as it imports the packages.
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        quantizer = AutoHfQuantizer.from_config(deepcopy(settings))
        quantizer.validate_environment(device_map=None, weights_only=True)
        _alone(settings)  # which older releases lack
        if device.type == "cpu" and "'Int4WeightOnlyConfig'" in str(settings):
            raise UnsupportedModelError("its int4 weights need a GPU")
    except Exception as error:  # of many types, by method
        method = settings["quant_method"]
        raise UnsupportedModelError(
            f"cannot load weights quantized by {method} on {device}: {error}"
        ) from error


def load_quantized(
    auto: type[Any],
    path: str | Path,
    config: PreTrainedConfig,
    dtype: str | torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """Load a quantized checkpoint onto a device, for which its kernels are chosen."""
    settings = quantization_of(config)
    assert settings is not None  # it is quantized
    with _alone(settings):
        model: Any = load_weights(auto, path, config=config, dtype=dtype, device_map={"": device})
        if hasattr(model, "ct_decompress_hook"):
            # The hook is one of the whole model's forward, which apbv does not call.
            model.hf_quantizer.compressor.decompress_model(model)
    if is_made_dense(settings, device):
        _require_scales(path)
        # What the scales made of the weights may have another dtype than the layers around them.
        model.to(model.config.dtype)
    return model


def _require_scales(path: str | Path) -> None:
    """Reject an fp8 checkpoint without scales.

    Transformers would take its weights for plain numbers.

    Raises:
        UnsupportedModelError: scales are missing; the message names them.
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
        raise UnsupportedModelError(f"the checkpoint lacks weights of the model: {named(missing)}")


def is_made_dense(settings: dict[str, Any], device: torch.device) -> bool:
    """Return whether transformers makes plain weights, as a device has no kernels for quantized."""
    return settings["quant_method"] == "fp8" and device.type == "cpu"


def _alone(settings: dict[str, Any]) -> AbstractContextManager:
    """Keep compressed-tensors from sharing its work among all processes.

    Some of them may not load this model.
    """
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
    # Bits per number, and numbers per scale.
    row = module.in_features
    method = settings["quant_method"]
    if method == "bitsandbytes" and settings.get("load_in_4bit"):
        bits = 4
        group = 64
    elif method == "torchao" and "Int4" in str(settings):
        bits = 4
        group = 32
    elif method in ("gptq", "awq"):
        bits = settings["bits"]
        group = settings["group_size"]
    elif method in ("bitsandbytes", "torchao", "fp8") and not is_made_dense(settings, device):
        bits = 8
        group = row
    else:  # made dense, as compressed-tensors does with all
        bits = 8 * itemsize
        group = row
    if group <= 0:
        group = row
    return bits / 8 + _SCALE_BYTES / group
