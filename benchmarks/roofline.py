"""Predict GPU times of operators, of a whole prefill and of drafts with a roofline model.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --tokens 32768 --hosts 4 --gpus H100 H200
    python benchmarks/roofline.py --prefill qwen2.5-vl-7b --gpus H200
    python benchmarks/roofline.py --prefill qwen2.5-vl-7b --gpus H200 --hosts 64 \
        --machine-hosts 8 --kv sharded
    python benchmarks/roofline.py --draft qwen2.5-vl-3b --target qwen2.5-vl-7b \
        --acceptance 0.8 --gpus H200

Nothing runs. Operators are those of operators.py in bf16, with the heads of Qwen2.5-VL-7B, at
data-sheet peaks (of the fastest GPU of that name). No kernel reaches them, so measured times are
longer. The prefill
is of a text prompt, with ``full`` on one GPU and the other methods on all hosts, at assumed shares
of the peaks. Its parts follow one another; what attention can hide of the exchanges is a line of
its own. ``APBV_BACKEND=torch`` assumes no fused kernels outside attention and matrix products.
With a draft: the speedup of decoding a batch, where a pass reads all weights and each answer's KV
once, and the window is the best one of up to 16 tokens.
"""

import argparse
import copy
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

# isort: split
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModel, PreTrainedConfig

from apbv import PrefillConfig
from apbv.kernels.backends import requested
from apbv.layout import ContextLayout
from apbv.model.attention import apbv_attention
from apbv.model.families import DecoderSizes
from apbv.model.fused import ElementwiseKernels, fused_stand_ins, with_stand_ins
from apbv.model.linear_attention import with_linear_attention
from apbv.testing.random_models import config_of

from support.arguments import parser_of, presets_of
from support.cost_model import ATTENTION, HostCost, Shape, cost_of_prompt
from support.operator_cases import cases, sizes_of
from support.records import fields_of, markdown_table

GPUS = presets_of("roofline")
PEAKS = GPUS["peaks"]  # by GPU: FLOP/s, and bytes/s of its memory and its link
NETWORK = GPUS["network"]  # by GPU: bytes/s of its network adapter
REACHED = GPUS["reached"]  # shares of the peaks
LAUNCHES = GPUS["launches"]  # kernels per layer, by method
MEASURED_BY = GPUS["measured_by"]
KV_TRANSFER = "KV transfer after the layers"
# Exchanges in which every host gets the same from all others: all-gathers.
ALL_GATHERS = ("passing", "anchor", "query_merge", "states")

# Calls of torch that count elsewhere.
_PRODUCTS = ("mm", "addmm", "bmm", "linear")
# Calls that move nothing.
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
        if name not in _FREE and not _is_view(func):
            # What is written in place is an operand, too: it counts once.
            num_bytes = {}
            for operand in tree_leaves((args, kwargs, result)):
                if isinstance(operand, torch.Tensor):
                    num_bytes[id(operand)] = operand.nbytes
            self.bytes[name] += sum(num_bytes.values())
        return result


def _is_view(func) -> bool:
    """Return whether a call's result is a view of an operand, which it does not write."""
    for returned in func._schema.returns:
        if returned.alias_info is not None and not returned.alias_info.is_write:
            return True
    return False


# Calls that read and write what attention and fused kernels do.


def _no_attention(q: torch.Tensor, *states_and_scale) -> torch.Tensor:
    return q


def _norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return states * weight


def _rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return torch.addcmul(q, cos, sin), torch.addcmul(k, cos, sin)


class _NoRule:
    """Reads and writes what linear attention does."""

    def convolve(self, layer, mixed, convolution) -> torch.Tensor:
        return mixed.clone()

    def attend(self, layer, inputs, rule) -> torch.Tensor:
        inputs[0].sum()
        inputs[1].sum()
        return inputs[2].clone()


def element_wise_bytes(config: PreTrainedConfig, num_rows: int, is_fused: bool = True) -> int:
    """Count the bytes of a layer's calls that are neither attention nor matrix products.

    Of a hybrid it is the mean of its layers, whose rule reads q, k and v and writes its output. No
    kernel runs.

    Args:
        is_fused: whether norms, MLPs and rotary positions are computed by fused kernels.
    """
    period = 1
    if DecoderSizes.from_config(config).linear is not None:
        period = config.get_text_config().layer_types.index("full_attention") + 1
    # Twice as many layers move as much more as these layers do.
    once = _bytes_of_layers(config, period, num_rows, is_fused)
    twice = _bytes_of_layers(config, 2 * period, num_rows, is_fused)
    return (twice - once) // period


@torch.no_grad()
def _bytes_of_layers(
    config: PreTrainedConfig, num_layers: int, num_rows: int, is_fused: bool
) -> int:
    """Count the element-wise bytes of a whole decoder with a number of layers."""
    text_config = copy.deepcopy(config.get_text_config())
    text_config.num_hidden_layers = num_layers
    with torch.device("meta"), Traffic() as traffic:
        model = AutoModel.from_config(text_config, dtype=torch.bfloat16)
        if is_fused:
            kernels = ElementwiseKernels(_norm, torch.mul, _rotated)
            model = with_stand_ins(model, fused_stand_ins(model), kernels=kernels)
        options = {}
        if DecoderSizes.from_config(config).linear is not None:
            model = with_linear_attention(model)
            options["linear"] = _NoRule()
        rows = torch.empty(1, num_rows, text_config.hidden_size, dtype=torch.bfloat16)
        places = torch.arange(num_rows)[None]
        # What making them has moved does not count.
        traffic.bytes.clear()
        with apbv_attention(model):
            model(
                inputs_embeds=rows,
                position_ids=places,
                use_cache=False,
                apbv=_no_attention,
                **options,
            )
    return sum(count for name, count in traffic.bytes.items() if name not in _PRODUCTS)


def operators(options: argparse.Namespace) -> str:
    """Format the least time of every operator on every GPU."""
    lines = []
    sizes = replace(sizes_of("h200"), hosts=options.hosts)
    for case in cases(sizes, [options.tokens]):
        num_bytes = case.bytes(torch.bfloat16)
        line = [case.op, case.label, f"{case.flops / 1e9:.3g}", f"{num_bytes / 1e6:.3g}"]
        for gpu in options.gpus:
            flops, bandwidth, _ = PEAKS[gpu]
            arithmetic_ms = 1e3 * (case.flops / flops)
            memory_ms = 1e3 * (num_bytes / bandwidth)
            if arithmetic_ms > memory_ms:
                line.append(f"{arithmetic_ms:.3g} ms (arithmetic)")
            else:
                line.append(f"{memory_ms:.3g} ms (memory)")
        lines.append(line)
    return markdown_table(["operator", "case", "GFLOP", "MB", *options.gpus], lines)


class Links:
    """The links between GPUs: fast within a machine, and the network between machines.

    Args:
        gpu: the kind of GPU.
        num_hosts: the number of hosts.
        machine_hosts: the number of hosts on a machine, which all have a network adapter.
    """

    def __init__(self, gpu: str, num_hosts: int, machine_hosts: int):
        _, _, link = PEAKS[gpu]
        self._num_hosts = num_hosts
        self._machine_hosts = machine_hosts
        # Bytes per millisecond.
        self._link = REACHED["links"] * link / 1e3
        self._network = REACHED["links"] * NETWORK[gpu] / 1e3

    @property
    def _share_from_other_machines(self) -> float:
        """The share of what a host gets from all others that comes from other machines."""
        num_elsewhere = max(0, self._num_hosts - self._machine_hosts)
        return num_elsewhere / max(1, self._num_hosts - 1)

    def round_the_ring(self, num_bytes: float) -> float:
        """Return the milliseconds to get bytes from a neighbour.

        All hosts wait for the pair at a machine's border, which has one adapter on each side.
        """
        if self._num_hosts > self._machine_hosts:
            return num_bytes / min(self._link, self._network)
        return num_bytes / self._link

    def gathered_by_all(self, num_bytes: float) -> float:
        """Return the milliseconds until all hosts have bytes of all others.

        NCCL sends them round a ring for each adapter, so that they enter a machine once, by all its
        adapters together. A gather on two levels would send as much between machines.
        """
        entering = num_bytes * self._share_from_other_machines
        adapters = self._machine_hosts * self._network
        return max(num_bytes / self._link, entering / adapters)

    def to_one(self, num_bytes: float) -> float:
        """Return the milliseconds for one host to get bytes of its own from all others."""
        entering = num_bytes * self._share_from_other_machines
        return max((num_bytes - entering) / self._link, entering / self._network)

    def exchanges(self, received: Counter) -> float:
        """Return the milliseconds of what a host receives during the layers."""
        total = 0.0
        for kind, num_bytes in received.items():
            if kind == "ring":
                total += self.round_the_ring(num_bytes)
            elif kind in ALL_GATHERS:
                total += self.gathered_by_all(num_bytes)
            else:
                total += self.to_one(num_bytes)
        return total


def milliseconds(
    cost: HostCost, gpu: str, element_wise: float, links: Links, kv_of_layers: list[float]
) -> dict[str, float]:
    """Predict a prefill on one host, by parts that follow one another.

    Args:
        element_wise: the bytes of all layers' calls that are neither attention nor matrix products.
        links: those between the hosts.
        kv_of_layers: the bytes of every layer's KV on other hosts, which host 0 gets; none, if it
            stays there. They are sent while later layers run.
    """
    # Per millisecond.
    peak_flops, peak_bandwidth, _ = (per_second / 1e3 for per_second in PEAKS[gpu])
    products = REACHED["products"] * peak_flops
    attention = REACHED["attention"] * peak_flops
    linear_attention = REACHED["linear"] * peak_flops
    bandwidth = REACHED["memory"] * peak_bandwidth

    flops = cost.flops
    parts = {
        "attention": sum(flops[part] for part in ATTENTION) / attention,
        "selection of passing KV": flops["scoring"] / attention,
        "projections": flops["projections"] / products,
    }
    if flops["linear"]:
        parts["linear attention"] = flops["linear"] / linear_attention
    parts["MLP"] = (flops["mlp"] + flops["query_pass"] + flops["lm_head"]) / products
    parts["element-wise"] = element_wise / bandwidth
    parts["collectives"] = links.exchanges(cost.received)
    # The last layer's, or what the layers' time does not suffice for.
    last_layer = links.to_one(kv_of_layers[-1]) if kv_of_layers else 0.0
    left = links.to_one(sum(kv_of_layers)) - sum(parts.values())
    parts[KV_TRANSFER] = max(last_layer, left)
    return parts


def cost_of_text(
    shape: Shape, num_tokens: int, method: str, hosts: int, **lengths: Any
) -> tuple[ContextLayout, list[HostCost]]:
    """Return the layout of a text's prefill, with a question of 40 tokens, and its cost."""
    prompt = (num_tokens, 0, num_tokens - 40, None)
    return cost_of_prompt(shape, hosts, prompt, PrefillConfig(method=method, **lengths))


def prefill_parts(
    config: PreTrainedConfig,
    num_tokens: int,
    method: str,
    hosts: int,
    gpu: str,
    machine_hosts: int | None = None,
    kv: str = "gathered",
    **lengths: Any,
) -> dict[str, float]:
    """Predict the milliseconds of a text's prefill on the busiest host, by parts.

    Args:
        machine_hosts: hosts on a machine; None: all.
        kv: where the KV is after the prefill.
    """
    shape = Shape.from_config(config)
    layout, costs = cost_of_text(shape, num_tokens, method, hosts, **lengths)
    totals = [host_cost.flops.total() for host_cost in costs]
    busiest = totals.index(max(totals))
    rows = sum(len(span) for span in layout.local_spans(busiest))
    is_fused = requested() != "torch"
    element_wise = shape.layers * element_wise_bytes(config, rows, is_fused)
    kv_of_layers = []
    if kv == "gathered":
        others = sum(host_cost.kv_bytes for host_cost in costs[1:])
        kv_of_layers = [others / shape.kv_layers] * shape.kv_layers
    links = Links(gpu, hosts, machine_hosts or hosts)
    return milliseconds(costs[busiest], gpu, element_wise, links, kv_of_layers)


def launches_of_layer(method: str, hosts: int, splits_anchor: bool = False) -> int:
    """Count what the CPU launches for a layer: kernels and exchanges."""
    num_launches = LAUNCHES[method]
    if method == "zigzag_ring":
        # Attention, the merge of its results, and a transfer.
        num_launches += (hosts - 1) * GPUS["launches_of_ring_step"]
    if splits_anchor:
        num_launches += GPUS["launches_of_split_anchor"]
    return num_launches


def launching_ms(
    config: PreTrainedConfig, method: str, hosts: int, splits_anchor: bool = False
) -> float:
    """Predict the milliseconds in which the CPU launches a prefill's kernels.

    Meanwhile the GPU works.
    """
    num_layers = config.get_text_config().num_hidden_layers
    num_launches = launches_of_layer(method, hosts, splits_anchor)
    return 1e3 * num_layers * num_launches * GPUS["seconds_per_launch"]


def prefill(options: argparse.Namespace, gpu: str) -> str:
    """Format the predicted times of a prefill's parts, for every method."""
    config = config_of(options.prefill)
    lengths = fields_of(
        options, "passing_len", "early_passing_len", "passing_budget", "passing_weights"
    )

    # A column for each method: the parts' times, and the CPU's time for launches.
    header = [f"ms on {gpu}, {options.prefill}"]
    columns: list[dict[str, float]] = []
    launching = []
    for method, hosts in (("full", 1), ("zigzag_ring", options.hosts), ("apbv", options.hosts)):
        header.append(f"`{method}`, {hosts}")
        parts = prefill_parts(
            config,
            options.tokens,
            method,
            hosts,
            gpu,
            options.machine_hosts,
            options.kv,
            **lengths,
        )
        columns.append(parts)
        layout, _ = cost_of_text(
            Shape.from_config(config), options.tokens, method, hosts, **lengths
        )
        launching.append(launching_ms(config, method, hosts, layout.splits_anchor))
    header.append("measured by")

    # A line for each part, and sums.
    lines = []
    for part in columns[0]:
        times = [f"{column[part]:.1f}" for column in columns]
        lines.append([part, *times, MEASURED_BY.get(part, "")])
    busy = [sum(column.values()) for column in columns]
    lines.append(["total of the GPU", *_rounded(busy), "throughput.py --profile"])
    hidden = [min(column["attention"], column["collectives"]) for column in columns]
    lines.append(["of these, exchanges that attention can hide", *_rounded(hidden), ""])
    lines.append(["launches by the CPU", *_rounded(launching), "throughput.py, `busy_ms`"])
    totals = []
    for gpu_ms, cpu_ms in zip(busy, launching, strict=True):
        totals.append(max(gpu_ms, cpu_ms))
    lines.append(["prefill: the larger", *_rounded(totals), "throughput.py"])
    apbv_ms = totals[-1]
    relative = [f"{total / apbv_ms:.2f}x" for total in totals]
    lines.append(["time relative to `apbv`", *relative, ""])
    return markdown_table(header, lines)


def _rounded(times: list[float]) -> list[str]:
    return [f"{ms:.0f}" for ms in times]


def step_seconds(shape: Shape, gpu: str, answers: int, rows: int, pairs: float) -> float:
    """Predict a decoding step's seconds.

    A step reads all weights, and each answer's pairs of keys and values, once.

    Args:
        rows: new tokens of all answers together.
        pairs: of one answer.
    """
    peak_flops, peak_bandwidth, _ = PEAKS[gpu]
    flops = REACHED["products"] * peak_flops
    bandwidth = REACHED["memory"] * peak_bandwidth
    weights = sum(shape.token_weights.values()) + shape.hidden * shape.vocab
    num_bytes = shape.bytes_per_number * weights + answers * pairs * shape.kv_bytes
    return max(num_bytes / bandwidth, 2 * weights * rows / flops)


def drafts(options: argparse.Namespace, gpu: str) -> str:
    """Format how much faster drafts make batches; the same share of tokens is accepted of all."""
    target = Shape.from_config(config_of(options.target))
    draft = Shape.from_config(config_of(options.draft))
    lines = []
    for num_tokens, answers in product((1024, 8192, 32768, 131072), (1, 4, 16)):
        plain_seconds = step_seconds(target, gpu, answers, answers, num_tokens)
        # What drafts a token, and with how many pairs of KV; a lookup takes no time.
        drafting_seconds = [
            step_seconds(draft, gpu, answers, answers, num_tokens),
            step_seconds(draft, gpu, answers, answers, num_tokens / 10),
            step_seconds(target, gpu, answers, answers, min(1024, num_tokens)),
            0.0,
        ]
        line = [num_tokens, answers, f"{1e3 * plain_seconds:.1f}"]
        for draft_seconds in drafting_seconds:
            speedups = []
            # Of a round: the target's own token, and the drafted ones that are accepted.
            num_tokens_of_round = 1.0
            for gamma in range(1, 17):
                num_tokens_of_round += options.acceptance**gamma
                rows = answers * (1 + gamma)
                verify_seconds = step_seconds(target, gpu, answers, rows, num_tokens)
                round_seconds = gamma * draft_seconds + verify_seconds
                speedups.append((num_tokens_of_round * plain_seconds / round_seconds, gamma))
            speedup, gamma = max(speedups)
            line.append(f"{speedup:.2f} × (γ = {gamma})")
        lines.append(line)
    header = [
        "context",
        "answers",
        f"ms per step, {gpu}",
        "`vanilla`",
        "a tenth of the draft's KV",
        "`std`, 1,024 pairs",
        "`ngram`",
    ]
    return markdown_table(header, lines)


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
    if options.draft:
        tables = [drafts(options, gpu) for gpu in options.gpus]
    elif options.prefill:
        tables = [prefill(options, gpu) for gpu in options.gpus]
    else:
        tables = [operators(options)]
    print("\n\n".join(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
