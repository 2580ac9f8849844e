"""How long the CPU takes to launch a prefill layer's kernels, without a GPU: nothing is computed.

    PYTHONPATH=benchmarks python tests/helpers/launch_times.py

Triton looks its kernels up, compiled for Hopper, as in a launch, and does not launch them; matrix products and the
other hosts' data are memory that nobody fills. What a GPU's driver takes for each launch, a few microseconds, is
left out. It needs a process without TRITON_INTERPRET.
"""

import statistics
from contextlib import ExitStack
from unittest.mock import patch

import torch
import triton
from compiled_kernels.launches import AbsentGPU
from torch import Tensor
from torch.nn import functional
from triton.runtime.jit import JITFunction

import apbv
from apbv import HostGroup, ModelInputs, PrefillConfig
from apbv.hosts import Exchange
from apbv.kernels import backends, library_attention, triton_attention
from apbv.model import fused
from apbv.model.parts import ModelParts, inspect_model
from apbv.stats import StageTimer

from support.workloads import build_model, qwen_vl_config, text_prompt

LAYERS, TOKENS, HOSTS, PROCESSORS = 28, 2048, 8, 132


class Echo:
    """Stands for exchanges with hosts that are not there, whose data is as this host's, or is never read."""

    def all_gather(self, tensor: Tensor) -> Exchange:
        gathered = tensor.new_empty(HOSTS, *tensor.shape)
        # Statuses are compared; states are not.
        return Exchange(lambda: gathered.copy_(tensor.expand_as(gathered)) if tensor.dim() < 3 else gathered)

    def all_to_all(self, tensors: list[Tensor], shapes: list[tuple[int, ...]]) -> Exchange:
        return Exchange(lambda: [tensors[0].new_empty(*shape) for shape in shapes])

    def broadcast(self, tensor: Tensor, source: int) -> Exchange:
        return Exchange(lambda: tensor)


def one_of_several() -> HostGroup:
    """The second host of several that are not there."""
    hosts = HostGroup.single("cpu")
    hosts._take_place(1, HOSTS)
    hosts._data = hosts._control = Echo()
    return hosts


def milliseconds(parts: ModelParts, method: str) -> float:
    """The time of a prefill's layers on one host, by the layer."""
    hosts = one_of_several()
    prompt, timer = text_prompt(parts.model.config, TOKENS, 40), StageTimer(hosts)
    inputs = ModelInputs.from_processor(parts, prompt.batch, hosts, query_start=prompt.query_start)
    config = PrefillConfig(method=method, kv="sharded", anchor_len=16, passing_len=16, backend="triton")
    apbv.prefill(parts, inputs, hosts=hosts, config=config, timer=timer)
    return sum(span.seconds for span in timer.spans if span.name == "prefill") * 1e3 / LAYERS


def nothing_computed(stack: ExitStack) -> None:
    """Let kernels be looked up and not run, until the stack is closed."""
    run = JITFunction.run

    def look_up(self, *args, grid, warmup, **kwargs):
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    triton.runtime.driver.set_active(AbsentGPU(90))
    for where, name, value in (
        (JITFunction, "run", look_up),
        (functional, "linear", linear),
        (backends, "why_not_triton", lambda *_: None),
        (library_attention, "why_not_triton", lambda *_: None),
        (triton_attention, "num_processors", lambda _: PROCESSORS),
        (fused, "_mistake", lambda *_: None),
    ):
        stack.enter_context(patch.object(where, name, value))


def main(rounds: int = 7) -> None:
    torch.set_num_threads(1)
    model = build_model(
        qwen_vl_config(LAYERS, 256, 128, 4, 2, vocab=1024, vision=(1, 64, 1)), torch.bfloat16, "cpu"
    )
    with ExitStack() as stack:
        nothing_computed(stack)
        parts = inspect_model(model, "triton")
        for method in ("zigzag_ring", "apbv"):
            milliseconds(parts, method)  # compiles
            each = [milliseconds(parts, method) for _ in range(rounds)]
            print(f"{method}, {HOSTS} hosts: {statistics.median(each):.2f} ms a layer")


if __name__ == "__main__":
    main()
