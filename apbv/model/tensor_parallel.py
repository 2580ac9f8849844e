"""Loading a model onto hosts of several processes: transformers' own tensor parallelism, within each host.

Every member of a host holds 1/T of the language model's matrices: of attention its heads, of the MLP its columns,
of the embedding and the head its part of the vocabulary. The norms are replicated, and so is the vision tower, for
which transformers has no plan: every member encodes what its host has to encode.
"""

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import is_accelerate_available

from ..hosts import HostGroup
from .parts import ModelParts, UnsupportedModelError

FIRST_VERSION = (5, 19)

# How transformers is to share out a decoder layer. It has such plans itself, but not for every family.
LAYER_PLAN = {
    **{f"self_attn.{name}_proj": "colwise" for name in "qkv"},
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}


class _HostMesh:
    """Gives transformers one host's mesh, whichever it asks for: tensor parallelism is all that it does there.

    transformers' own must span all processes, and those that it does not split a model over hold sharded replicas
    (FSDP), which would have to run in step.
    """

    def __init__(self, hosts: HostGroup):
        self._mesh = hosts.tensor_parallel_mesh()

    def get_mesh(self, dims: str | tuple[str, ...]):
        return self._mesh


def load_sharded(
    auto: type, path: str | Path, config: PreTrainedConfig, dtype: str | torch.dtype, hosts: HostGroup
) -> PreTrainedModel:
    """Load this process's share of a model, and no more, from the checkpoint; collective within a host.

    Args:
        auto: the class of :mod:`transformers.models.auto` that would load the whole model.

    Raises:
        UnsupportedModelError: the model's heads or its MLP cannot be shared out evenly.
        ValueError: the model cannot be loaded, transformers is too old, or accelerate is not installed.
    """
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if version < FIRST_VERSION:
        raise ValueError(f"tensor parallelism needs transformers 5.19 or later, not {transformers.__version__}")
    if not is_accelerate_available():
        raise ValueError("tensor parallelism needs accelerate: pip install 'apbv[tp]'")
    require_divisible(config, hosts.tensor_parallel_size)
    with torch.device("meta"):
        whole = auto.from_config(config)
    kind = type(whole)
    mesh = _HostMesh(hosts)

    # from_pretrained takes no mesh but asks its class for one: so it is called on a class that gives ours, and
    # what it returns is then made what the caller asked for.
    def prepare_distribute_model(cls, distributed_config, device_map=None):
        return distributed_config, hosts.device, mesh

    members = {
        "prepare_distribute_model": classmethod(prepare_distribute_model),
        "__module__": kind.__module__,
    }
    loading = type(kind.__name__, (kind,), members)
    plan = DistributedConfig(tp_plan=plan_of(whole), tp_size=hosts.tensor_parallel_size)
    model = loading.from_pretrained(path, dtype=dtype, distributed_config=plan)
    model.__class__ = kind
    return model


def plan_of(model: PreTrainedModel) -> dict[str, str]:
    """Say how transformers is to share out a model: its sharding styles by the names of modules."""
    names = {module: name for name, module in model.named_modules()}
    decoder = names[model.get_decoder()]
    return {
        names[model.get_input_embeddings()]: "embedding_rowwise",
        **{f"{decoder}.layers.*.{name}": style for name, style in LAYER_PLAN.items()},
        names[model.get_output_embeddings()]: "colwise_gather_output",
    }


def require_divisible(config: PreTrainedConfig, tensor_parallel: int) -> None:
    """Refuse a language model that T processes cannot share evenly.

    Raises:
        UnsupportedModelError: T does not divide a size; the message names it.
    """
    text = config.get_text_config()
    counts = {
        "attention heads": text.num_attention_heads,
        "KV heads": text.num_key_value_heads,
        "columns in its MLP": text.intermediate_size,
    }
    for what, count in counts.items():
        if count % tensor_parallel:
            raise UnsupportedModelError(
                f"the model has {count} {what}, which {tensor_parallel} processes cannot share evenly"
            )


def require_same_sharding(parts: ModelParts, hosts: HostGroup) -> None:
    """Refuse a model that is not shared out among processes as its hosts are.

    Raises:
        ValueError: the model is another share than this process's.
    """
    found, expected = parts.tensor_parallel, (hosts.tensor_parallel_rank, hosts.tensor_parallel_size)
    if found != expected:
        raise ValueError(
            f"the model is share {found[0]} of {found[1]}, but this process is member {expected[0]} of "
            f"{expected[1]} of its host: load the model with Engine.from_pretrained and these hosts"
        )
