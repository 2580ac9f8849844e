"""Short benchmarks: attention beside the best library here, memory, exchanges, and a file's road to a first token.

The sizes follow from what the device does in a moment, so that a laptop and a large GPU take about as long.
"""

import statistics
from collections.abc import Callable, Iterable
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import demo
from ..config import PrefillConfig
from ..demo.clips import ORDERING_QUESTION
from ..engine import Engine
from ..hosts import HostGroup
from ..kernels import segmented_attention, verify_attention
from ..kernels.backends import choose, is_interpreted
from ..kernels.library_attention import choose_attention
from ..kernels.roofline import cost_of, predicted_seconds
from ..stats import device_name
from .backends import BACKENDS, dtype_name, obstacle
from .checks import Check, CheckSkipped, Finding
from .peaks import Peak, published
from .timing import Stopwatch

_HEADS, _KV_HEADS, _HEAD_DIM = 28, 4, 128  # of Qwen2.5-VL-7B
_SCALE = _HEAD_DIM**-0.5
_CALL_SECONDS = {"cpu": 0.1, "cuda": 0.005}  # about what one call of attention is to take
_ROUNDS = 5
_LATENCY_ROUNDS = 50
_MEASURED_BY = {"arithmetic": "a matrix product", "memory": "a copy"}
_SLOW = 0.8  # of the fastest host's speed: worth a word


def checks(hosts: HostGroup, is_quick: bool) -> Iterable[Check]:
    """List the benchmarks; what they have in common is measured by the first that needs it."""
    device = Device(hosts.device)
    yield Check("device", device.finding, is_collective=True)
    yield Check("attention, whole prompt", lambda _: prompt_attention(device))
    yield Check("attention, block behind passed KV", lambda _: block_attention(device))
    yield Check("attention, one new token", lambda _: decoding_attention(device))
    yield Check("all-gather", all_gather, is_collective=True)
    for method in ("full", "apbv") if hosts.size > 1 else ("full",):
        yield Check(f"file to first token, {method}", partial(first_token, method), is_collective=True)


class Device:
    """A Device says how fast this host's GPU or CPU is, in the dtype that a model has there."""

    def __init__(self, device: torch.device):
        self.device = device
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.peak: Peak | None = published(device_name(device))

    @cached_property
    def stopwatch(self) -> Stopwatch:
        return Stopwatch(self.device, _ROUNDS)

    @cached_property
    def flops(self) -> float:
        return self.stopwatch.flops(self.dtype)

    def finding(self, hosts: HostGroup) -> Finding:
        """Measure the ceilings, beside the published ones and those of the slowest host."""
        figures = {
            "dtype": dtype_name(self.dtype),
            "tflops": self.flops / 1e12,
            "gigabytes_per_s": self.stopwatch.bandwidth / 1e9,
            "published": None,
        }
        text = f"matrix products in {figures['dtype']} {_ceilings(figures)}"
        if self.peak is not None:
            published = {"tflops": self.peak.flops / 1e12, "gigabytes_per_s": self.peak.bandwidth / 1e9}
            figures["published"] = published
            text += f" (published: {_ceilings(published)})"
        everybody = hosts.gather_json({name: figures[name] for name in ("tflops", "gigabytes_per_s")})
        slowest = min(range(hosts.size), key=lambda host: everybody[host]["tflops"])
        if everybody[slowest]["tflops"] < _SLOW * max(each["tflops"] for each in everybody):
            text += f"; {hosts.name_of(slowest)} is the slowest: {_ceilings(everybody[slowest])}"
        return Finding(text, figures)

    def states(self, heads: int, rows: int) -> Tensor:
        """Draw ``[1, H, S, D]`` as a projection leaves it."""
        shape = (1, rows, heads, _HEAD_DIM)
        return torch.randn(shape, device=self.device, dtype=self.dtype).transpose(1, 2)

    def num_tokens(self, keys: Callable[[int], tuple[int, int]]) -> int:
        """Return the highest power of two of queries with so many operations as a call is to have.

        Args:
            keys: returns, of a number of queries, that of keys and how many of them are causal.
        """
        budget = _CALL_SECONDS[self.device.type] * 0.5 * self.flops
        counts = (2**power for power in range(8, 18))
        return max((n for n in counts if self.cost("segmented_attention", n, *keys(n))[0] <= budget), default=256)

    def cost(self, operator: str, queries: int, keys: int, causal: int) -> tuple[int, int]:
        """Count the operations and bytes of a call; see :func:`apbv.kernels.roofline.cost_of`."""
        heads = {"heads": _HEADS, "kv_heads": _KV_HEADS, "dim": _HEAD_DIM}
        return cost_of(operator, heads | {"queries": queries, "keys": keys, "causal": causal}, self.dtype)


def _ceilings(figures: dict) -> str:
    return f"{figures['tflops']:.3g} TFLOP/s, copies {figures['gigabytes_per_s']:.3g} GB/s"


def prompt_attention(device: Device) -> Finding:
    """Time causal attention of a whole prompt to itself."""
    tokens = device.num_tokens(lambda n: (n, n))
    q, k, v = (device.states(heads, tokens) for heads in (_HEADS, _KV_HEADS, _KV_HEADS))
    ways = _segmented_ways(device, q, [(k, v)], is_causal=True)
    ways["SDPA"] = partial(scaled_dot_product_attention, q, k, v, is_causal=True, scale=_SCALE, enable_gqa=True)
    finding = _compared(device, ways, choose_attention("auto", q, [(k, v)]), f"{tokens} tokens")
    return _with_ceiling(device, finding, device.cost("segmented_attention", tokens, tokens, tokens))


def block_attention(device: Device) -> Finding:
    """Time attention of a block to an anchor, to seven passed blocks of an eighth, and causally to itself."""
    tokens = device.num_tokens(lambda n: (2 * n, n))
    q = device.states(_HEADS, tokens)
    rows = [*[tokens // 8] * 8, tokens]
    segments = [(device.states(_KV_HEADS, count), device.states(_KV_HEADS, count)) for count in rows]
    ways = _segmented_ways(device, q, segments, is_causal=True)
    size = f"{tokens} queries, {len(rows)} segments"
    finding = _compared(device, ways, choose_attention("auto", q, segments), size)
    return _with_ceiling(device, finding, device.cost("segmented_attention", tokens, sum(rows), tokens))


def decoding_attention(device: Device) -> Finding:
    """Time attention of one new token to a long past, and compare what it reads with what a copy moves."""
    tokens = 131072 if device.device.type == "cuda" else 16384
    q = device.states(_HEADS, 1)
    k, v = torch.randn(2, 1, _KV_HEADS, tokens, _HEAD_DIM, device=device.device, dtype=device.dtype)
    ways = _segmented_ways(device, q, [(k, v)], is_causal=False)
    chosen = choose("auto", q)
    ways[chosen] = partial(verify_attention, q, k, v, _SCALE)
    ways["SDPA"] = partial(scaled_dot_product_attention, q, k, v, scale=_SCALE, enable_gqa=True)
    finding = _compared(device, ways, chosen, f"{tokens} keys")
    return _with_ceiling(device, finding, device.cost("verify_attention", 1, tokens, 0))


def _segmented_ways(
    device: Device, q: Tensor, segments: list[tuple[Tensor, Tensor]], is_causal: bool
) -> dict[str, Callable]:
    """Return segmented attention by every back end that works here, and is worth being timed."""
    return {
        name: partial(segmented_attention, q, segments, _SCALE, is_causal, backend=name)
        for name in BACKENDS
        if obstacle(name, device.device, device.dtype)[0] is None and not (name == "triton" and is_interpreted())
    }


def _compared(device: Device, ways: dict[str, Callable], chosen: str, size: str) -> Finding:
    """Time several ways to compute the same, and compare the chosen one with the fastest.

    Raises:
        CheckSkipped: the chosen one is interpreted.
    """
    if chosen not in ways:
        raise CheckSkipped(f"{chosen} is interpreted (TRITON_INTERPRET=1), and not timed")
    ms = {name: device.stopwatch(way) for name, way in ways.items()}
    best = min(ms, key=ms.get)
    text = f"{size}: {chosen} {ms[chosen]:.3g} ms, "
    text += "the fastest here" if best == chosen else f"{best} {ms[best]:.3g} ms"
    return Finding(text, {"size": size, "chosen": chosen, "fastest": best, "ms": ms})


def _with_ceiling(device: Device, finding: Finding, cost: tuple[int, int]) -> Finding:
    """Add how near the chosen way comes to what the device can do: to its arithmetic, or to its memory."""
    least, bound = predicted_seconds(cost, device.flops, device.stopwatch.bandwidth)
    share = least * 1e3 / finding.figures["ms"][finding.figures["chosen"]]
    figures = {**finding.figures, "flops": cost[0], "bytes": cost[1], "bound": bound, "share": share}
    text = f"{finding.detail}; {share:.0%} of the speed of {_MEASURED_BY[bound]}"
    figures["predicted_ms"] = None
    if device.peak is not None:
        figures["predicted_ms"] = 1e3 * predicted_seconds(cost, device.peak.flops, device.peak.bandwidth)[0]
        text += f"; predicted of the published peak: {figures['predicted_ms']:.3g} ms"
    return Finding(text, figures)


def all_gather(hosts: HostGroup) -> Finding:
    """Time gathering a little, and much."""
    if hosts.size == 1:
        raise CheckSkipped("one host has nobody to exchange with")
    num_bytes = 2**26 if hosts.device.type == "cuda" else 2**22
    small = _gathering(hosts, 1024, _LATENCY_ROUNDS)
    large = _gathering(hosts, num_bytes, _ROUNDS)
    speed = (hosts.size - 1) * num_bytes / large
    figures = {"latency_us": small * 1e6, "bytes": num_bytes, "gigabytes_per_s": speed / 1e9}
    text = f"1 KiB {small * 1e6:.0f} µs; {num_bytes / 2**20:.0f} MiB of each host {large * 1e3:.3g} ms"
    return Finding(f"{text}, {speed / 1e9:.3g} GB/s received", figures)


def _gathering(hosts: HostGroup, num_bytes: int, rounds: int) -> float:
    """Return the median seconds until a tensor of every host is here."""
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=hosts.device)
    taken = []
    for _ in range(rounds + 2):
        hosts.barrier()
        began = hosts.clock()
        hosts.all_gather(tensor).wait()
        if hosts.device.type == "cuda":
            torch.cuda.synchronize(hosts.device)
        taken.append(hosts.clock() - began)
    return statistics.median(taken[2:])


def first_token(method: str, hosts: HostGroup) -> Finding:
    """Time the packaged clip's road from its file to the first token, stage by stage."""
    engine = Engine.from_pretrained("demo", prefill=PrefillConfig(method=method), hosts=hosts)
    answers = [engine.generate(ORDERING_QUESTION, video=demo.video_path()) for _ in range(_ROUNDS + 1)][1:]
    middle = sorted(answers, key=lambda each: each.stats["ttft_ms"])[len(answers) // 2].stats
    stages = {name: ms for name, ms in middle["stages_ms"].items() if ms and name not in ("decode", "draft")}
    text = ", ".join(f"{name} {ms:.3g}" for name, ms in stages.items())
    figures = {"ttft_ms": middle["ttft_ms"], "stages_ms": middle["stages_ms"]}
    figures["output_throughput"] = middle["output_throughput"]
    return Finding(f"{middle['ttft_ms']:.3g} ms: {text}", figures)
