"""Loading a model onto hosts of several processes.

Within each host this is transformers' own tensor parallelism.

Every member of a host holds 1/T of the language model's matrices: of attention its heads, of the
MLP its columns, of the embedding and the head its part of the vocabulary. The norms are replicated,
and so is the vision tower, for which transformers has no plan: every member encodes what its host
has to encode.
"""

from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import is_accelerate_available

from ...compat.versions import how_to_install, release
from ...config.refusals import refuse
from ...errors import BackendUnavailableError, UnsupportedModelError
from ...hosts import HostGroup
from ..families import family_of, hybrid_family
from .adapters import merged
from .checkpoints import load_weights
from .quantization import quantization_of, weight_size

FIRST_VERSION = (5, 19)

# How transformers is to share out a decoder layer. It has such plans itself, but not for every
# family.
LAYER_PLAN = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}


def load_sharded(
    auto: type[Any],
    path: str | Path,
    config: PreTrainedConfig,
    dtype: str | torch.dtype,
    hosts: HostGroup,
    adapter: str | Path | None = None,
) -> PreTrainedModel:
    """Load this process's share of a model, and no more, from the checkpoint.

    Collective within a host.

    Call :func:`require_shardable` before, which needs no other process: an error here leaves the
    group broken.

    Args:
        auto: the class of :mod:`transformers.models.auto` that would load the whole model.
        adapter: merged into the whole model, which every process then has in CPU memory until it
            has its share.

    Raises:
        BackendUnavailableError: the checkpoint lacks weights, or the adapter cannot be merged.
    """
    with torch.device("meta"):
        whole = auto.from_config(config)
    kind = type(whole)
    # One host's mesh, whichever transformers asks for: tensor parallelism is all that it does
    # there. Its own must span all processes, and those that it does not split a model over hold
    # sharded replicas (FSDP), which would have to run in step.
    of_host = hosts.tensor_parallel_mesh()
    mesh = SimpleNamespace(get_mesh=lambda dims: of_host)

    # from_pretrained takes no mesh but asks its class for one: so it is called on a class that
    # gives ours, and what it returns is then made what the caller asked for.
    def prepare_distribute_model(cls, distributed_config, device_map=None):
        return distributed_config, hosts.device, mesh

    attributes = {
        "prepare_distribute_model": classmethod(prepare_distribute_model),
        "__module__": kind.__module__,
    }
    loading = type(kind.__name__, (kind,), attributes)
    plan = DistributedConfig(tp_plan=plan_of(whole), tp_size=hosts.tensor_parallel_size)
    if adapter is None:
        model = load_weights(loading, path, dtype=dtype, distributed_config=plan)
    else:
        whole = merged(load_weights(auto, path, config=config, dtype=dtype), adapter)
        model = load_weights(
            loading,
            None,
            config=whole.config,
            state_dict=whole.state_dict(),
            dtype=whole.dtype,
            distributed_config=plan,
        )
        model.generation_config = whole.generation_config
    model.__class__ = kind
    return model


def plan_of(model: PreTrainedModel) -> dict[str, str]:
    """Return transformers' sharding plan for a model: sharding styles by module name."""
    names = {module: name for name, module in model.named_modules()}
    decoder = names[model.get_decoder()]
    return {
        names[model.get_input_embeddings()]: "embedding_rowwise",
        **{f"{decoder}.layers.*.{name}": style for name, style in LAYER_PLAN.items()},
        names[model.get_output_embeddings()]: "colwise_gather_output",
    }


def require_shardable(config: PreTrainedConfig, tensor_parallel: int) -> None:
    """Reject a model that cannot be loaded by T processes of a host.

    Raises:
        UnsupportedModelError: the model's heads or its MLP cannot be shared out evenly.
        BackendUnavailableError: transformers is too old, or accelerate is not installed.
    """
    if tensor_parallel == 1:
        return
    if release("transformers") < FIRST_VERSION:
        raise BackendUnavailableError(
            f"tensor parallelism needs transformers 5.19 or later, not {transformers.__version__}"
        )
    if not is_accelerate_available():
        raise BackendUnavailableError(
            f"tensor parallelism needs accelerate: {how_to_install('tp')}"
        )
    require_divisible(config, tensor_parallel)


def require_divisible(config: PreTrainedConfig, tensor_parallel: int) -> None:
    """Reject a language model that T processes cannot share evenly.

    Raises:
        UnsupportedModelError: T does not divide a size; the message names it.
    """
    family = family_of(config)
    sizes = family.sizes
    refuse(hybrid=hybrid_family(config), tensor_parallel=tensor_parallel > 1)
    if tensor_parallel > 1 and (sizes.experts or family.has_joint_mlp):
        raise UnsupportedModelError(
            f"tensor parallelism does not share out the MLPs of {family.text_type} models"
        )
    counts = {
        "attention heads": sizes.heads,
        "KV heads": sizes.kv_heads,
        "columns in its MLP": sizes.intermediate,
    }
    for what, count in counts.items():
        if count % tensor_parallel:
            raise UnsupportedModelError(
                f"the model's {count} {what} cannot be split evenly across {tensor_parallel} "
                "processes"
            )


def weight_bytes(
    config: PreTrainedConfig, itemsize: int, device: torch.device, tensor_parallel: int = 1
) -> int:
    """Return the bytes of a whole model's weights on one of the T processes of a host.

    Its vision tower is included.

    It builds the model without storage, which takes about a second for one of 7B.

    Args:
        itemsize: bytes per number that is not quantized.
        device: where it will be loaded.
    """
    with torch.device("meta"):
        model = family_of(config).auto_class.from_config(config)
    # Of several modules with the same weight, such as an embedding and a head that are tied, the
    # last counts.
    owner_of_weight: dict[int, tuple[str, torch.nn.Module]] = {}
    for name, module in model.named_modules():
        for weight in module.parameters(recurse=False):
            owner_of_weight[id(weight)] = (name, module)
    shared_out = tuple(plan_of(model))
    settings = quantization_of(config)
    count = 0
    for weight in model.parameters():
        name, module = owner_of_weight[id(weight)]
        # As in a plan.
        of_any_layer = ".".join("*" if part.isdigit() else part for part in name.split("."))
        is_shared_out = weight.ndim == 2 and (name in shared_out or of_any_layer in shared_out)
        size: float = itemsize
        if weight.ndim == 2 and module is not model.get_output_embeddings():
            size = weight_size(name, module, settings, itemsize, device)
        num_here = weight.numel()
        if is_shared_out:
            num_here = ceil(num_here / tensor_parallel)
        count += ceil(num_here * size)
    return count
