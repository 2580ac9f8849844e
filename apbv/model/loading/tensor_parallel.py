"""Loading a model onto hosts of several processes.

Within each host this is transformers' own tensor parallelism.

Every member of a host holds 1/T of the language model's matrices: of attention its heads, of the
MLP and of every expert its columns, of the embedding and the head its part of the vocabulary. With
expert parallelism it holds 1/T of the experts instead, each of them whole. Of linear attention it
holds some columns of the projections, whose results the members gather: each applies the whole
rule, and has the whole state. If there are fewer KV heads than members, several members have the
same one. The norms and routers are replicated, and so is the vision tower, for which transformers
has no plan: every member encodes what its host has to encode.
"""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import Transpose
from transformers.distributed import DistributedConfig
from transformers.utils import is_accelerate_available

from ...compat.versions import how_to_install, release
from ...errors import BackendUnavailableError, InvalidConfigError, UnsupportedModelError
from ...hosts import HostGroup
from ...layout import can_share_kv_heads, kv_heads_of_member
from ..families import family_of, hybrid_family
from ..linear_attention import is_linear
from ..modules import decoder_layers
from .adapters import merged
from .checkpoints import load_weights
from .quantization import quantization_of, weight_size

FIRST_VERSION = (5, 19)
# Of the plans for experts, joint MLPs, linear attention and replicated KV heads.
FIRST_VERSION_OF_OTHERS = (5, 23)

# How transformers is to share out a decoder layer: styles by the names of modules and of weights
# within it. It has such plans itself, but not for every family.
LAYER_PLAN = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
    # Of each of its two halves some columns, so that no member needs those of others. transformers'
    # own plans gather all columns.
    "mlp.gate_up_proj": "packed_colwise",
    # One expert that computes every token.
    "mlp.shared_expert.gate_proj": "colwise",
    "mlp.shared_expert.up_proj": "colwise",
    "mlp.shared_expert.down_proj": "rowwise",
    "mlp.shared_experts.gate_proj": "colwise",
    "mlp.shared_experts.up_proj": "colwise",
    "mlp.shared_experts.down_proj": "rowwise",
    # Linear attention.
    "linear_attn.in_proj_qkv": "colwise_gather_output",
    "linear_attn.in_proj_z": "colwise_gather_output",
    "linear_attn.in_proj_b": "colwise_gather_output",
    "linear_attn.in_proj_a": "colwise_gather_output",
    "linear_attn.in_proj_qkvz": "colwise_gather_output",
    "linear_attn.in_proj_ba": "colwise_gather_output",
    "linear_attn.out_proj": "colwise_gather_output",
}
# Where a model has fewer KV heads than processes, each process loads the projections of all heads,
# and keeps those of one.
_REPLICATED = "replicate"
_KV_PROJECTIONS = ("self_attn.k_proj", "self_attn.v_proj")
# The experts among which a router chooses: their weights are tensors of three dimensions.
EXPERT_COLUMNS_PLAN = {
    "mlp.experts.gate_up_proj": "packed_colwise",
    "mlp.experts.down_proj": "rowwise",
    "mlp.experts": "moe_tp_experts",
}
WHOLE_EXPERTS_PLAN = {
    "mlp.experts.gate_up_proj": "grouped_gemm",
    "mlp.experts.down_proj": "grouped_gemm",
    "mlp.experts": "ep_dispatch_experts",
}


def load_sharded(
    auto: type[Any],
    path: str | Path,
    config: PreTrainedConfig,
    dtype: str | torch.dtype,
    hosts: HostGroup,
    adapter: str | Path | None = None,
    expert_parallel: bool = False,
) -> PreTrainedModel:
    """Load this process's share of a model, and no more, from the checkpoint.

    Collective within a host.

    Call :func:`require_shardable` before, which needs no other process: an error here leaves the
    group broken.

    Args:
        auto: the class of :mod:`transformers.models.auto` that would load the whole model.
        adapter: merged into the whole model, which every process then has in CPU memory until it
            has its share.
        expert_parallel: whether the process gets whole experts, and not columns of each; see
            :func:`shares_whole_experts`.

    Raises:
        BackendUnavailableError: the checkpoint lacks weights, or the adapter cannot be merged.
    """
    shares_experts = shares_whole_experts(config, expert_parallel)
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

    def load_pretrained_model(model, state_dict, files, load_config, *args, **kwargs):
        _compare_shapes_of_experts(load_config.weight_mapping)
        return kind._load_pretrained_model(model, state_dict, files, load_config, *args, **kwargs)

    attributes = {
        "prepare_distribute_model": classmethod(prepare_distribute_model),
        "_load_pretrained_model": staticmethod(load_pretrained_model),
        "__module__": kind.__module__,
    }
    loading = type(kind.__name__, (kind,), attributes)
    size = hosts.tensor_parallel_size
    plan = DistributedConfig(
        tp_size=size,
        tp_plan=plan_of(whole, size),
        ep_size=size if shares_experts else 1,
        ep_plan=expert_plan_of(whole) if shares_experts else None,
    )
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
    _keep_own_kv_heads(model, hosts.tensor_parallel_rank, size)
    return model


def _keep_own_kv_heads(model: PreTrainedModel, member: int, num_members: int) -> None:
    """Cut the projections of keys and values that were loaded whole to this member's KV heads."""
    sizes = family_of(model.config).sizes
    if sizes.kv_heads >= num_members:
        return
    heads = kv_heads_of_member(sizes.kv_heads, member, num_members)
    rows = slice(heads.start * sizes.head_dim, heads.stop * sizes.head_dim)
    for layer in decoder_layers(model.get_decoder()):
        if is_linear(layer):
            continue
        for name in _KV_PROJECTIONS:
            projection: Any = layer.get_submodule(name)
            for weight_name, weight in list(projection.named_parameters(recurse=False)):
                own = torch.nn.Parameter(weight[rows].clone(), requires_grad=False)
                setattr(projection, weight_name, own)
            projection.out_features = rows.stop - rows.start


class _TransposeOfSome(Transpose):
    """Transposes the weights of some of a layer's experts, unless they have the model's shape.

    transformers' class compares their number, too, which is that of all experts in the model.
    """

    @torch.no_grad()
    def convert(  # type: ignore[override]  # its own base class says lists, and it tensors
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        weight = next(iter(input_dict.values()))
        if isinstance(weight, list):
            weight = weight[0]
        name = self.get_target_pattern(input_dict, source_patterns, target_patterns)
        expected_shape = kwargs["model"].get_parameter(kwargs["full_layer_name"]).shape
        if weight.shape[1:] != expected_shape[1:]:
            weight = weight.transpose(self.dim0, self.dim1).contiguous()
        return {name: weight}


def _compare_shapes_of_experts(conversions: Sequence[Any]) -> None:
    """Let transformers' conversions of a checkpoint's weights work for a share of the experts."""
    for conversion in conversions:
        operations = getattr(conversion, "operations", [])
        for index, operation in enumerate(operations):
            if type(operation) is Transpose and operation.check_dims:
                operations[index] = _TransposeOfSome(operation.dim0, operation.dim1)


def shares_whole_experts(config: PreTrainedConfig, expert_parallel: bool) -> bool:
    """Return whether each of T processes gets whole experts, and not columns of each.

    It does if asked to, and where a checkpoint has their weights transposed: transformers reads the
    wrong columns of these.
    """
    return expert_parallel or family_of(config).row.has_transposed_experts


def plan_of(model: PreTrainedModel, tensor_parallel: int) -> dict[str, str]:
    """Return transformers' sharding plan for a model.

    Args:
        tensor_parallel: T. If the model has fewer KV heads, every process loads all of their
            projections.

    Returns:
        Sharding styles by the names of modules, and of experts' weights; ``*`` stands for the
        number of a layer.
    """
    names = {module: name for name, module in model.named_modules()}
    plan = {
        names[model.get_input_embeddings()]: "embedding_rowwise",
        names[model.get_output_embeddings()]: "colwise_gather_output",
    }
    of_layer = {**LAYER_PLAN, **EXPERT_COLUMNS_PLAN}
    if family_of(model.config).sizes.kv_heads < tensor_parallel:
        of_layer |= dict.fromkeys(_KV_PROJECTIONS, _REPLICATED)
    return plan | _plan_of_layers(model, of_layer)


def expert_plan_of(model: PreTrainedModel) -> dict[str, str]:
    """Return the plan, like :func:`plan_of`'s, that gives each process whole experts."""
    return _plan_of_layers(model, WHOLE_EXPERTS_PLAN)


def _plan_of_layers(model: PreTrainedModel, plan: dict[str, str]) -> dict[str, str]:
    """Return that part of a plan for which the decoder's layers have modules or weights."""
    decoder = model.get_decoder()
    names_in_layers: set[str] = set()
    for layer in decoder_layers(decoder):
        names_in_layers.update(name for name, _ in layer.named_modules())
        names_in_layers.update(name for name, _ in layer.named_parameters())
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    return {
        f"{prefix}.layers.*.{name}": style
        for name, style in plan.items()
        if name in names_in_layers
    }


def require_shardable(
    config: PreTrainedConfig, tensor_parallel: int, expert_parallel: bool = False
) -> None:
    """Reject a model that cannot be loaded by T processes of a host.

    Args:
        expert_parallel: whether each process gets whole experts.

    Raises:
        InvalidConfigError: expert parallelism with one process, or for a model without experts.
        UnsupportedModelError: the model's heads, MLP or experts cannot be shared out evenly.
        BackendUnavailableError: transformers is too old, or accelerate is not installed.
    """
    require_divisible(config, tensor_parallel, expert_parallel)
    if tensor_parallel == 1:
        return
    family = family_of(config)
    is_like_llama = not (family.sizes.experts or family.has_joint_mlp or hybrid_family(config))
    replicates_kv = family.sizes.kv_heads < tensor_parallel
    first_version = FIRST_VERSION_OF_OTHERS
    if is_like_llama and not replicates_kv:
        first_version = FIRST_VERSION
    if release("transformers") < first_version:
        raise BackendUnavailableError(
            f"tensor parallelism of {family.text_type} models needs transformers "
            f"{'.'.join(map(str, first_version))} or later, not {transformers.__version__}"
        )
    if not is_accelerate_available():
        raise BackendUnavailableError(
            f"tensor parallelism needs accelerate: {how_to_install('tp')}"
        )


def require_divisible(
    config: PreTrainedConfig, tensor_parallel: int, expert_parallel: bool = False
) -> None:
    """Reject a language model that T processes cannot share evenly.

    Args:
        expert_parallel: whether each process gets whole experts.

    Raises:
        InvalidConfigError: expert parallelism with one process, or for a model without experts.
        UnsupportedModelError: T does not divide a size; the message names it.
    """
    family = family_of(config)
    sizes = family.sizes
    if expert_parallel and not sizes.experts:
        raise InvalidConfigError(f"{family.name} models have no experts for expert parallelism")
    if expert_parallel and tensor_parallel == 1:
        raise InvalidConfigError(
            "expert parallelism shares out experts over the processes of a host, but each host has "
            "one: give it more by tensor parallelism"
        )
    counts = {
        "attention heads": sizes.heads,
        "columns in its MLP": sizes.dense_width,
        "columns in its shared expert": sizes.shared_width,
    }
    if shares_whole_experts(config, expert_parallel):
        counts["experts"] = sizes.experts
    else:
        counts["columns in each expert"] = sizes.expert_width
    for what, count in counts.items():
        if count % tensor_parallel:
            raise UnsupportedModelError(
                f"the model's {count} {what} cannot be split evenly across {tensor_parallel} "
                "processes"
            )
    if not can_share_kv_heads(sizes.kv_heads, tensor_parallel):
        raise UnsupportedModelError(
            f"the model's {sizes.kv_heads} KV heads can neither be split evenly across "
            f"{tensor_parallel} processes nor be replicated evenly"
        )


def weight_bytes(
    config: PreTrainedConfig, itemsize: int, device: torch.device, tensor_parallel: int = 1
) -> int:
    """Return the bytes of a whole model's weights on one of the T processes of a host.

    Its vision tower is included. With expert parallelism it is as many.

    It builds the model without storage, which takes about a second for one of 7B.

    Args:
        itemsize: bytes per number that is not quantized.
        device: where it will be loaded.
    """
    with torch.device("meta"):
        model = family_of(config).auto_class.from_config(config)
    # Of several modules with the same weight, such as an embedding and a head that are tied, the
    # last counts.
    owner_of_weight: dict[int, tuple[str, str, torch.nn.Module]] = {}
    for name, module in model.named_modules():
        for weight_name, weight in module.named_parameters(recurse=False):
            owner_of_weight[id(weight)] = (name, weight_name, module)
    plan = plan_of(model, tensor_parallel)
    num_kv_heads = family_of(config).sizes.kv_heads
    settings = quantization_of(config)
    count = 0
    for weight in model.parameters():
        name, weight_name, module = owner_of_weight[id(weight)]
        # As in a plan, which names a module or, of experts, a weight.
        of_any_layer = ".".join("*" if part.isdigit() else part for part in name.split("."))
        style = plan.get(f"{of_any_layer}.{weight_name}")
        if style is None and weight.ndim == 2:
            style = plan.get(of_any_layer)
        num_shares = 1
        if style == _REPLICATED:
            num_shares = num_kv_heads
        elif style is not None:
            num_shares = tensor_parallel
        size: float = itemsize
        if weight.ndim == 2 and module is not model.get_output_embeddings():
            size = weight_size(name, module, settings, itemsize, device)
        num_here = ceil(weight.numel() / num_shares)
        count += ceil(num_here * size)
    return count
