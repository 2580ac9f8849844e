"""Counts the bytes that calls of torch move."""

import copy
from collections import Counter

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModel, PreTrainedConfig

from apbv.model.fused import fused_forwards, with_forwards
from apbv.model.linear_attention import with_linear_attention
from apbv.model.parts import DecoderSizes

_PRODUCTS = ("mm", "addmm", "bmm", "linear")
_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "lift_fresh", "_unsafe_view")


class Traffic(TorchDispatchMode):
    """Counts the bytes of this thread's calls, by name."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if name not in _FREE and not is_view:
            # What is written in place is an operand, too: it counts once.
            tensors = {id(x): x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)}
            self.bytes[name] += sum(x.nbytes for x in tensors.values())
        return result


def _rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.addcmul(q, cos, sin), torch.addcmul(k, cos, sin)


class _NoRule:
    """Reads and writes what linear attention does."""

    def convolve(self, layer, mixed, width, function) -> torch.Tensor:
        return mixed.clone()

    def attend(self, layer, inputs, function) -> torch.Tensor:
        for each in inputs[:2]:
            each.sum()
        return inputs[2].clone()


@torch.no_grad()
def element_wise_bytes(config: PreTrainedConfig, num_rows: int, is_fused: bool = True) -> int:
    """Count the bytes of a layer's calls that are neither attention nor matrix products; no kernel runs.

    Of a hybrid it is the mean of its layers, whose rule reads q, k and v and writes its output.

    Args:
        is_fused: whether norms, MLPs and rotary positions are computed by fused kernels.
    """
    AttentionInterface.register("no_attention", lambda _, q, *states, **options: (q.transpose(1, 2), None))
    moved, is_hybrid = [], DecoderSizes.from_config(config).linear is not None
    types = config.get_text_config().layer_types if is_hybrid else ["full_attention"]
    period = types.index("full_attention") + 1
    for num_layers in (period, 2 * period):  # what the second adds is that many layers'
        text = copy.deepcopy(config.get_text_config())
        text.num_hidden_layers, text._attn_implementation = num_layers, "no_attention"
        with torch.device("meta"), Traffic() as traffic:
            model = AutoModel.from_config(text, dtype=torch.bfloat16)
            if is_fused:  # for the kernels stand calls that read and write the same
                calls = (lambda states, weight, _: states * weight, torch.mul, _rotated)
                model = with_forwards(model, fused_forwards(model, *calls))
            options = {"linear": _NoRule()} if is_hybrid else {}
            if is_hybrid:
                model = with_linear_attention(model)
            rows = torch.empty(1, num_rows, text.hidden_size, dtype=torch.bfloat16)
            places, mask = torch.arange(num_rows)[None], torch.empty(1, 1, 1, 1)
            traffic.bytes.clear()
            model(inputs_embeds=rows, attention_mask=mask, position_ids=places, use_cache=False, **options)
        moved.append(sum(size for name, size in traffic.bytes.items() if name not in _PRODUCTS))
    return (moved[1] - moved[0]) // period
