"""Model digests: over what determines the numbers in its KV, and over a sample of all of its
weights."""

import hashlib
import json
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

# Fields that determine the numbers in a KV cache. Others change with versions of transformers.
_CONFIG_FIELDS = (
    *(
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "head_dim",
        "vocab_size",
    ),
    *(
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_act",
        "rms_norm_eps",
        "rope_parameters",
    ),
    *(
        "no_rope_layers",
        "num_local_experts",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
    ),
    *(
        "moe_intermediate_size",
        "first_k_dense_replace",
        "norm_topk_prob",
        "shared_expert_intermediate_size",
    ),
    *(
        f"linear_{name}"
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    ),
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
    """Hash the fields of a transformers configuration that decide the KV of its language model
    (SHA-256)."""
    text = config.get_text_config().to_dict()
    fields = {name: text[name] for name in _CONFIG_FIELDS if text.get(name) is not None}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def weights_digest(rows: Iterable[Tensor]) -> str:
    """Hash a sample of the weights that make KV, which tells models of one architecture apart
    (SHA-256).

    Args:
        rows: layer by layer, the first row of each of :data:`SAMPLED_PROJECTIONS`.
    """
    # Which a GPU is waited for once.
    sample = torch.cat([row.detach().float().flatten() for row in rows])
    return hashlib.sha256(sample.cpu().numpy().tobytes()).hexdigest()


def sample_digest(tensors: Iterable[Tensor]) -> bytes:
    """Hash a few numbers of every weight, to compare the models of several hosts (SHA-256).

    Args:
        tensors: all weights of a model, or this process's shards of them.
    """
    samples = [sample for tensor in tensors for sample in _samples(tensor.detach())]
    # Which a GPU is waited for once.
    whole = torch.cat(samples) if samples else torch.empty(0, dtype=torch.uint8)
    return hashlib.sha256(whole.cpu().numpy().tobytes()).digest()


def _samples(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of a weight's first numbers, and of its last."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if hasattr(
        tensor, "__tensor_flatten__"
    ):  # a quantized weight, which consists of several tensors
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _samples(getattr(tensor, name))
        return
    if (
        not tensor.numel() or tensor.untyped_storage().device.type == "meta"
    ):  # of a model whose memory is measured
        return
    first_row = tensor
    last_row = tensor
    while first_row.dim() > 1:
        first_row = first_row[0]
        last_row = last_row[-1]
    for numbers in (
        first_row.reshape(-1)[:_SAMPLED_NUMBERS],
        last_row.reshape(-1)[-_SAMPLED_NUMBERS:],
    ):
        yield numbers.contiguous().view(torch.uint8)
