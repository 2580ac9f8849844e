"""Digests of a model: of what determines the numbers in its KV, and of a sample of its weights."""

import hashlib
import json
from collections.abc import Iterable, Iterator

import torch
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
