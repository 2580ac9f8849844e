"""Predict GPU times of operators, of a whole prefill and of drafts with a roofline model. Nothing
runs.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --tokens 32768 --hosts 4 --gpus H100 H200
    python benchmarks/roofline.py --prefill qwen2.5-vl-7b --gpus H200
    python benchmarks/roofline.py --draft qwen2.5-vl-3b --target qwen2.5-vl-7b \
        --acceptance 0.8 --gpus H200

Operators are those of operators.py in bf16, with the heads of Qwen2.5-VL-7B, at data-sheet peaks
(of the fastest GPU of that name). No kernel reaches them, so measured times are longer. The prefill
is of a text prompt, with ``full`` on one GPU and the other methods on all hosts, at assumed shares
of the peaks. ``APBV_BACKEND=torch`` assumes no fused kernels outside attention and matrix products.
With a draft: the speedup of decoding a batch, where a pass reads all weights and each answer's KV
once, and the window is the best one of up to 16 tokens.
"""

import argparse
import copy
import sys
from collections import Counter
from dataclasses import replace
from itertools import product

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModel, PreTrainedConfig

from apbv import PrefillConfig
from apbv.kernels.backends import requested
from apbv.model.fused import fused_forwards, with_forwards
from apbv.model.linear_attention import with_linear_attention
from apbv.model.parts import DecoderSizes

from support.arguments import parser_of, presets_of
from support.cost_model import ATTENTION, HostCost, Shape, cost_of_prompt
from support.operator_cases import cases, sizes_of
from support.records import fields_of, markdown_table
from support.workloads import config_of

GPUS = presets_of("roofline")
PEAKS, REACHED, LAUNCHES, MEASURED_BY = (
    GPUS[name] for name in ("peaks", "reached", "launches", "measured_by")
)


# Calls of torch that count elsewhere, and those that move nothing.
_PRODUCTS = ("mm", "addmm", "bmm", "linear")
_FREE = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "detach",
    "lift_fresh",
    "_unsafe_view",
)


class Traffic(TorchDispatchMode):
    """Counts the bytes of this thread's calls, by name."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        is_view = any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        )
        if name not in _FREE and not is_view:
            # What is written in place is an operand, too: it counts once.
            tensors = {
                id(x): x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)
            }
            self.bytes[name] += sum(x.nbytes for x in tensors.values())
        return result


def _rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, ...]:
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
    """Count the bytes of a layer's calls that are neither attention nor matrix products; no kernel
    runs.

    Of a hybrid it is the mean of its layers, whose rule reads q, k and v and writes its output.

    Args:
        is_fused: whether norms, MLPs and rotary positions are computed by fused kernels.
    """
    AttentionInterface.register(
        "no_attention", lambda _, q, *states, **options: (q.transpose(1, 2), None)
    )
    moved = []
    is_hybrid = DecoderSizes.from_config(config).linear is not None
    types = config.get_text_config().layer_types if is_hybrid else ["full_attention"]
    period = types.index("full_attention") + 1
    for num_layers in (period, 2 * period):  # what the second adds is that many layers'
        text = copy.deepcopy(config.get_text_config())
        text.num_hidden_layers = num_layers
        text._attn_implementation = "no_attention"
        with torch.device("meta"), Traffic() as traffic:
            model = AutoModel.from_config(text, dtype=torch.bfloat16)
            if is_fused:  # for the kernels stand calls that read and write the same
                calls = (lambda states, weight, _: states * weight, torch.mul, _rotated)
                model = with_forwards(model, fused_forwards(model, *calls))
            options = {"linear": _NoRule()} if is_hybrid else {}
            if is_hybrid:
                model = with_linear_attention(model)
            rows = torch.empty(1, num_rows, text.hidden_size, dtype=torch.bfloat16)
            places = torch.arange(num_rows)[None]
            mask = torch.empty(1, 1, 1, 1)
            traffic.bytes.clear()
            model(
                inputs_embeds=rows,
                attention_mask=mask,
                position_ids=places,
                use_cache=False,
                **options,
            )
        moved.append(sum(size for name, size in traffic.bytes.items() if name not in _PRODUCTS))
    return (moved[1] - moved[0]) // period


def operators(options: argparse.Namespace) -> str:
    """Format the least time of every operator on every GPU."""
    lines = []
    for case in cases(replace(sizes_of("h200"), hosts=options.hosts), [options.tokens]):
        num_bytes = case.bytes(torch.bfloat16)
        times = []
        for gpu in options.gpus:
            flops, bandwidth, _ = PEAKS[gpu]
            least, bound = max(
                (case.flops / flops, "arithmetic"), (num_bytes / bandwidth, "memory")
            )
            times.append(f"{1e3 * least:.3g} ms ({bound})")
        lines.append(
            [case.op, case.label, f"{case.flops / 1e9:.3g}", f"{num_bytes / 1e6:.3g}", *times]
        )
    return markdown_table(["operator", "case", "GFLOP", "MB", *options.gpus], lines)


def milliseconds(cost: HostCost, gpu: str, element_wise: float, others: float) -> dict[str, float]:
    """Predict a prefill on one host, by parts that follow one another.

    Args:
        element_wise: the bytes of all layers' calls that are neither attention nor matrix products.
        others: the bytes of the last layer's KV on other hosts, which host 0 gets; the other
            layers' are there.
    """
    flops, bandwidth, link = (each / 1e3 for each in PEAKS[gpu])
    products = REACHED["products"] * flops
    attention = REACHED["attention"] * flops
    return {
        "attention": sum(cost.flops[part] for part in ATTENTION) / attention,
        "selection of passing KV": cost.flops["scoring"] / attention,
        "projections": cost.flops["projections"] / products,
        **(
            {"linear attention": linear / (REACHED["linear"] * flops)}
            if (linear := cost.flops["linear"])
            else {}
        ),
        "MLP": (cost.flops["mlp"] + cost.flops["query_pass"] + cost.flops["lm_head"]) / products,
        "element-wise": element_wise / (REACHED["memory"] * bandwidth),
        "collectives": cost.received.total() / (REACHED["links"] * link),
        "KV transfer of the last layer": others / (REACHED["links"] * link),
    }


def prefill_parts(
    config: PreTrainedConfig,
    num_tokens: int,
    method: str,
    hosts: int,
    gpu: str,
    **lengths: int | None,
) -> dict[str, float]:
    """Predict the milliseconds of a text's prefill on the busiest host, by parts."""
    shape = Shape.from_config(config)
    prompt = (num_tokens, 0, num_tokens - 40, None)
    layout, costs = cost_of_prompt(shape, hosts, prompt, PrefillConfig(method=method, **lengths))
    host = max(range(hosts), key=lambda each: costs[each].flops.total())
    rows = sum(map(len, layout.local_spans(host)))
    moved = shape.layers * element_wise_bytes(config, rows, requested() != "torch")
    others = sum(each.kv_bytes for each in costs[1:]) / shape.kv_layers
    return milliseconds(costs[host], gpu, moved, others)


def launching_ms(config: PreTrainedConfig, method: str) -> float:
    """Predict the milliseconds in which the CPU launches a prefill's kernels, while the GPU
    works."""
    return (
        1e3
        * config.get_text_config().num_hidden_layers
        * LAUNCHES[method]
        * GPUS["seconds_per_launch"]
    )


def prefill(options: argparse.Namespace, gpu: str) -> str:
    """Format the predicted times of a prefill's parts, for every method."""
    config = config_of(options.prefill)
    columns = {}
    launching = []
    lengths = fields_of(options, "passing_len", "early_passing_len")
    for method, hosts in (("full", 1), ("zigzag_ring", options.hosts), ("apbv", options.hosts)):
        what = config, options.tokens, method, hosts, gpu
        columns[f"`{method}`, {hosts}"] = prefill_parts(*what, **lengths)
        launching.append(launching_ms(config, method))
    busy = [sum(parts.values()) for parts in columns.values()]
    totals = list(map(max, busy, launching))
    parts = zip(*(parts.items() for parts in columns.values()), strict=True)
    lines = [
        [row[0][0], *(f"{ms:.1f}" for _, ms in row), MEASURED_BY.get(row[0][0], "")]
        for row in parts
    ]
    lines.append(
        ["total of the GPU", *(f"{total:.0f}" for total in busy), "throughput.py --profile"]
    )
    lines.append(
        [
            "launches by the CPU",
            *(f"{total:.0f}" for total in launching),
            "throughput.py, `busy_ms`",
        ]
    )
    lines.append(["prefill: the larger", *(f"{total:.0f}" for total in totals), "throughput.py"])
    lines.append(
        ["time relative to `apbv`", *(f"{total / totals[-1]:.2f}x" for total in totals), ""]
    )
    return markdown_table([f"ms on {gpu}, {options.prefill}", *columns, "measured by"], lines)


def step_seconds(shape: Shape, gpu: str, answers: int, rows: int, pairs: float) -> float:
    """Predict a decoding step's seconds: it reads all weights, and each answer's pairs of keys and
    values, once.

    Args:
        rows: new tokens of all answers together.
    """
    flops = REACHED["products"] * PEAKS[gpu][0]
    bandwidth = REACHED["memory"] * PEAKS[gpu][1]
    weights = sum(shape.token_weights.values()) + shape.hidden * shape.vocab
    num_bytes = shape.bytes_per_number * weights + answers * pairs * shape.kv_bytes
    return max(num_bytes / bandwidth, 2 * weights * rows / flops)


def drafts(options: argparse.Namespace, gpu: str) -> str:
    """Format how much faster drafts make batches; the same share of tokens is accepted of all."""
    target, draft = (Shape.from_config(config_of(name)) for name in (options.target, options.draft))
    lines = []
    alpha = options.acceptance
    for num_tokens, answers in product((1024, 8192, 32768, 131072), (1, 4, 16)):
        # What reads how much KV to draft a token.
        kinds = (draft, num_tokens), (draft, num_tokens / 10), (target, 1024), (None, 0)
        plain = step_seconds(target, gpu, answers, answers, num_tokens)
        cells = []
        for shape, pairs in kinds:
            cost = (
                step_seconds(shape, gpu, answers, answers, min(pairs, num_tokens)) if shape else 0.0
            )
            tokens = 1.0
            speeds = []
            for gamma in range(1, 17):
                tokens += alpha**gamma
                verifying = step_seconds(target, gpu, answers, answers * (1 + gamma), num_tokens)
                speeds.append((tokens * plain / (gamma * cost + verifying), gamma))
            cells.append("{:.2f} × (γ = {})".format(*max(speeds)))
        lines.append([num_tokens, answers, f"{1e3 * plain:.1f}", *cells])
    names = ["`vanilla`", "a tenth of the draft's KV", "`std`, 1,024 pairs", "`ngram`"]
    return markdown_table(["context", "answers", f"ms per step, {gpu}", *names], lines)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    usual = sizes_of("h200")
    parser = parser_of("roofline", __doc__, {"gpus": PEAKS})
    parser.set_defaults(tokens=usual.tokens, hosts=usual.hosts)
    options = parser.parse_args(arguments)
    if options.tokens < 64 * options.hosts:
        parser.error("--tokens must be at least 64 per host, so that no block is empty")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    predict = drafts if options.draft else prefill if options.prefill else None
    print(
        "\n\n".join(predict(options, gpu) for gpu in options.gpus)
        if predict
        else operators(options)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
