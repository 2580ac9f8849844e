"""Digests of a model: of what determines the numbers in its KV, and of a sample of its weights."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

# Fields that determine the numbers in a KV cache. Others change with versions of transformers.
_CONFIG_FIELDS = (
    # The decoder.
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "head_dim",
    "vocab_size",
    # Attention.
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "no_rope_layers",
    # Experts.
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "norm_topk_prob",
    "shared_expert_intermediate_size",
    # Linear attention.
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)

# The matrices of a decoder layer whose first row lies whole on the first process of a host.
SAMPLED_PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
# What a layer's MLP has instead, in checkpoints: gate and up in one; a router, and the first
# expert, which may be part of a tensor of all experts.
_OTHER_MLPS = (
    "mlp.gate_up_proj",
    "mlp.gate",
    "mlp.experts.0.gate_proj",
    "mlp.experts.gate_up_proj",
)
_SAMPLED_IN_FILES = (*SAMPLED_PROJECTIONS, *_OTHER_MLPS)
_NAMES = "|".join(map(re.escape, _SAMPLED_IN_FILES))
_WEIGHT = re.compile(rf".*\.layers\.(?P<layer>\d+)\.(?P<name>{_NAMES})(\.weight)?")

# Of a row of weights: enough to tell random numbers apart from trained ones, and one training from
# another.
_SAMPLED_NUMBERS = 4


def config_digest(config) -> str:
    """Hash the fields of a transformers config that decide its language model's KV (SHA-256)."""
    text = config.get_text_config().to_dict()
    fields = {}
    for name in _CONFIG_FIELDS:
        if text.get(name) is not None:
            fields[name] = text[name]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def weights_digest(rows: Iterable[Tensor]) -> str:
    """Hash a sample of the weights that make KV (SHA-256).

    It tells models of one architecture apart.

    Args:
        rows: layer by layer, the first row of each of :data:`SAMPLED_PROJECTIONS`.
    """
    # All in one tensor, so that the GPU is waited for once.
    sample = torch.cat([row.detach().float().flatten() for row in rows])
    return hashlib.sha256(sample.cpu().numpy().tobytes()).hexdigest()


def rows_of_checkpoint(folder: Path, num_layers: int, dtype: torch.dtype) -> list[Tensor]:
    """Read the argument of :func:`weights_digest` from a checkpoint, without a model.

    Args:
        folder: has safetensors files, in which the weights may be in any order.
        num_layers: the decoder's layers; a checkpoint may have drafting layers behind them.
        dtype: in which the model computes.

    Returns:
        The first row of each sampled weight, by layers; none: there are no such weights.
    """
    rows = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                match = _WEIGHT.fullmatch(name)
                if match is None or "vision" in name or int(match["layer"]) >= num_layers:
                    continue
                weight = tensors.get_slice(name)
                if len(weight.get_shape()) == 3:  # of all experts
                    row = weight[:1, :1]
                else:
                    row = weight[:1]
                place = _SAMPLED_IN_FILES.index(match["name"])
                rows[int(match["layer"]), place] = row.to(dtype)
    return [rows[key] for key in sorted(rows)]


def sample_digest(tensors: Iterable[Tensor]) -> bytes:
    """Hash a few numbers of every weight, to compare the models of several hosts (SHA-256).

    Args:
        tensors: all weights of a model, or this process's shards of them.
    """
    samples: list[Tensor] = []
    for tensor in tensors:
        samples.extend(_samples(tensor.detach()))
    # All in one tensor, so that the GPU is waited for once.
    whole = torch.cat(samples) if samples else torch.empty(0, dtype=torch.uint8)
    return hashlib.sha256(whole.cpu().numpy().tobytes()).digest()


def _samples(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of a weight's first numbers, and of its last."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if hasattr(tensor, "__tensor_flatten__"):
        # A quantized weight, which consists of several tensors.
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _samples(getattr(tensor, name))
        return
    if not tensor.numel():
        return
    if tensor.untyped_storage().device.type == "meta":  # of a model whose memory is measured
        return
    first_row = tensor
    last_row = tensor
    while first_row.dim() > 1:
        first_row = first_row[0]
        last_row = last_row[-1]
    first_numbers = first_row.reshape(-1)[:_SAMPLED_NUMBERS]
    last_numbers = last_row.reshape(-1)[-_SAMPLED_NUMBERS:]
    yield first_numbers.contiguous().view(torch.uint8)
    yield last_numbers.contiguous().view(torch.uint8)
