"""Tiny checkpoints in the quantized formats that transformers reads: by its own quantizers, or packed by hand."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

from families import TEXT_FAMILIES

GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# The packages that each format needs; of the last two the kernels are compiled when they are first loaded.
FORMATS = {
    "torchao-int8": ["torchao"],
    "torchao-int8-dynamic": ["torchao"],
    "torchao-fp8": ["torchao"],
    "bitsandbytes-int8": ["bitsandbytes"],
    "bitsandbytes-nf4": ["bitsandbytes"],
    "compressed-tensors-fp8": ["compressed_tensors"],
    "compressed-tensors-int8": ["compressed_tensors"],
    "fp8": [],
    "gptq": ["gptqmodel", "optimum"],
    "awq": ["gptqmodel"],
}


def save_quantized(family: str, base: Path, path: Path, name: str) -> Path:
    """Quantize a checkpoint, its language model at least; skip the test if a package is missing."""
    for package in FORMATS[name]:
        pytest.importorskip(package)
    shutil.copytree(base, path)
    if name.startswith(("torchao", "bitsandbytes")):
        auto = tf.AutoModelForCausalLM if family in TEXT_FAMILIES else tf.AutoModelForImageTextToText
        auto.from_pretrained(base, quantization_config=_own_config(name)).save_pretrained(path)
        return path
    settings, quantize = _by_hand(name)
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": settings}))
    weights = {}
    for key, weight in load_file(path / "model.safetensors").items():
        is_quantized = key.endswith("_proj.weight") and "visual" not in key
        prefix = key.removesuffix("weight")
        weights |= {prefix + part: w for part, w in quantize(weight).items()} if is_quantized else {key: weight}
    save_file(
        {key: weight.contiguous() for key, weight in weights.items()}, path / "model.safetensors", {"format": "pt"}
    )
    return path


def _own_config(name: str):
    if name == "bitsandbytes-int8":
        return tf.BitsAndBytesConfig(load_in_8bit=True)
    if name == "bitsandbytes-nf4":
        small = {"llm_int8_skip_modules": ["model.visual", "lm_head"]}  # rows shorter than a block
        return tf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **small)
    from torchao import quantization

    kind = {"int8": "Int8WeightOnly", "int8-dynamic": "Int8DynamicActivationInt8Weight", "fp8": "Float8WeightOnly"}
    return tf.TorchAoConfig(getattr(quantization, f"{kind[name.removeprefix('torchao-')]}Config")())


def _by_hand(name: str) -> tuple[dict, Callable[[Tensor], dict[str, Tensor]]]:
    """Return a ``quantization_config``, and a function from a weight to what is stored of it, by name."""
    if name == "fp8":
        blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        return blocks, _fp8_block
    if name in ("gptq", "awq"):
        common = {"quant_method": name, "bits": 4, "group_size": GROUP}
        own = {"zero_point": True, "version": "gemm", "modules_to_not_convert": ["model.visual"]}
        own = {"desc_act": False, "sym": True} if name == "gptq" else own
        return common | own, _gptq if name == "gptq" else _awq
    kind = "float" if name.endswith("fp8") else "int"
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": "channel", "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*visual.*"],
        "config_groups": {"group_0": group},
    }
    return settings, _fp8_rows if kind == "float" else _int8_rows


def _fp8_block(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().max() / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale_inv": scale.view(1, 1)}


def _fp8_rows(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _int8_rows(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``[in, out]`` numbers of 0 .. 15, and each group's scale and zero point."""
    weight = weight.T
    scale = weight.view(-1, GROUP, weight.shape[1]).abs().amax(1) / 7
    numbers = (weight / scale.repeat_interleave(GROUP, 0)).round().clamp(-8, 7).long() + 8
    return numbers, scale.half(), torch.full_like(scale, 8).long()


def _packed(numbers: Tensor, order=range(8)) -> Tensor:
    """Pack eight numbers of a row into an int32."""
    words = sum(numbers[:, place::8] << (4 * i) for i, place in enumerate(order))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _gptq(weight: Tensor) -> dict[str, Tensor]:
    numbers, scales, zeros = _int4(weight)
    groups = (torch.arange(len(numbers)) // GROUP).int()
    return {"qweight": _packed(numbers.T).T, "qzeros": _packed(zeros - 1), "scales": scales, "g_idx": groups}


def _awq(weight: Tensor) -> dict[str, Tensor]:
    numbers, scales, zeros = _int4(weight)
    return {"qweight": _packed(numbers, _AWQ_ORDER), "qzeros": _packed(zeros, _AWQ_ORDER), "scales": scales}
