"""What a GPU is asked to do at a real size: as docs/records/gpu-operations.md says, and within the
budgets."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version

import pytest
import torch
from torch import Tensor

import apbv
from apbv import HostGroup, ModelInputs, PrefillConfig, SamplingParams
from apbv.decode.answer import begin_answer, generate_tokens
from apbv.decode.batch import Batch
from apbv.hosts import HostLinks, Pending
from apbv.model.parts import inspect_model
from apbv.request.request import Question, Request, RequestSettings
from apbv.testing.random_models import build_model, config_like, text_prompt

from apbv_tests.answers import answer_by, decoder_behind
from apbv_tests.documents import require_table
from apbv_tests.pretend_gpu import Events, Machine, rehearsal, to_gpu
from apbv_tests.scripts import ROOT

TOKENS = 131_072
QUESTION = 40
HOSTS = 8
RANK = 1
ANSWERS = 16
# Launched one by one; the kernels of a graph are launched together.
OUTSIDE = ("kernel", "triton", "replay", "collective", "wait", "to_gpu", "to_host")


def model_of(layers: int, gpu: Machine):
    """Qwen2.5-VL-7B's language model with so many layers, in fp16, without numbers."""
    config = config_like("qwen2.5-vl-7b", {"num_hidden_layers": layers}, {"depth": 1})
    return to_gpu(build_model(config, torch.float16, "meta"), gpu)


class Echo:
    """Stands for exchanges with hosts that are not there: what is sent is what everybody sends."""

    def __init__(self, gpu: Machine, size: int):
        self._gpu = gpu
        self._size = size

    def _begun(self, name: str, nbytes: int, result: Callable):
        if nbytes:
            self._gpu.note("collective", name, nbytes)
        return Pending(result)

    def all_gather(self, tensor: Tensor) -> Pending:
        gathered = tensor.new_empty(self._size, *tensor.shape)
        if not tensor.is_cuda:
            return Pending(lambda: gathered.copy_(tensor.expand_as(gathered)))
        return self._begun("all_gather", gathered.nbytes, lambda: gathered)

    def all_to_all(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Pending:
        received = [tensors[0].new_empty(*shape) for shape in shapes]
        return self._begun("all_to_all", sum(x.nbytes for x in received), lambda: received)

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        return self._begun("broadcast", tensor.nbytes if tensor.is_cuda else 0, lambda: tensor)


def one_of(size: int, rank: int, gpu: Machine) -> HostGroup:
    """One of several hosts, of which the others are not there."""
    links = HostLinks(rank, size, collectives=Echo(gpu, size))
    return HostGroup(device=torch.device("cuda:0"), timeout=0.0, links=links)


@cache
def prefill_events(layers: int, hosts: int, rank: int, method: str = "apbv") -> Events:
    """What a host asks of its GPU to prefill the prompt."""
    with torch.no_grad(), rehearsal(has_numbers=False) as gpu:
        group = one_of(hosts, rank, gpu) if hosts > 1 else HostGroup.single("cuda:0")
        parts = inspect_model(model_of(layers, gpu))
        for _ in range(2):  # the first time, libraries are tried on small problems
            gpu.reset()
            _prefill(parts, group, "sharded", method)
    return gpu.events


def _prefill(parts, hosts: HostGroup, kv: str = "gathered", method: str = "apbv"):
    prompt = text_prompt(parts.model.config, TOKENS, QUESTION)
    inputs = ModelInputs.from_processor(parts, prompt.batch, hosts, query_start=prompt.query_start)
    return apbv.prefill(parts, inputs, hosts=hosts, config=PrefillConfig(method=method, kv=kv))


def _sampling(temperature: float) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=9, temperature=temperature, top_p=0.9 if temperature else 1.0
    )


@cache
def token_events(layers: int, temperature: float) -> Events:
    """What is asked of the one GPU that has the KV, from one token to the next."""
    with torch.no_grad(), rehearsal(has_numbers=False) as gpu:
        parts = inspect_model(model_of(layers, gpu))
        state = _prefill(parts, HostGroup.single("cuda:0"))
        sampling = _sampling(temperature)
        decoder = decoder_behind(state, parts)
        generate_tokens(
            answer_by(decoder, state, sampling, on_token=lambda token: gpu.mark("token"))
        )
    # Behind the first steps, and before those that end the answer.
    return list(gpu.events.between("token"))[-4]


@cache
def batch_events(layers: int, temperature: float) -> Events:
    """What is asked of that GPU from one token of each of several answers to the next."""
    with torch.no_grad(), rehearsal(has_numbers=False) as gpu:
        parts = inspect_model(model_of(layers, gpu))
        state = _prefill(parts, HostGroup.single("cuda:0"))
        batch = Batch(parts)
        for _ in range(ANSWERS):
            batch.join(
                begin_answer(
                    parts,
                    state,
                    Request(
                        Question(), state.timer, RequestSettings(sampling=_sampling(temperature))
                    ),
                )
            )
        while len(batch):
            gpu.mark("step")
            batch.step()
    return list(gpu.events.between("step"))[-4]


def counts(events: Callable[[int], Events], *kinds: str) -> tuple[Counter, Counter]:
    """How often each thing is done in a layer, by the difference that a layer makes, and besides
    the layers."""
    one, two = (Counter(map(_name, events(layers).of(*kinds))) for layers in (1, 2))
    per_layer = Counter({name: two[name] - one[name] for name in two | one})
    return +per_layer, +Counter({name: one[name] - per_layer[name] for name in one | per_layer})


def launches_of_layer(method: str, hosts: int) -> int:
    """How many kernels and exchanges a host asks for in a layer whose MLP is computed in one
    piece."""
    counted, _ = counts(
        lambda layers: prefill_events(layers, hosts, min(1, hosts - 1), method), *OUTSIDE
    )
    total = 0
    for name, number in counted.items():
        if not name.startswith(("synchronization", "copy")):
            total += number
    num_pieces = counted["`silu_product_kernel` (Triton)"]
    if num_pieces > 1:
        # Of each, three products and that of gate and up; its result is then copied.
        total -= 4 * (num_pieces - 1) + num_pieces
    return total


def _name(event) -> str:
    names = {
        "wait": "synchronization",
        "to_gpu": "copy to the GPU",
        "to_host": "copy to the CPU",
        "replay": "graph launch",
        "collective": f"collective: {event.name}",
    }
    if event.kind == "triton" or event.detail == "triton":
        return f"`{event.name}` (Triton)"
    return names.get(event.kind, f"`{event.name}`")


@cache
def columns() -> dict[str, Counter]:
    """The table's columns: what is done how often."""
    prefill, _ = counts(lambda layers: prefill_events(layers, HOSTS, RANK), *OUTSIDE)
    found = {"prefill, per layer": prefill}
    for events, *names in (
        (token_events, "token graph, per layer", "token graph, rest", "token, outside graph"),
        (
            batch_events,
            f"{ANSWERS}-answer graph, per layer",
            f"{ANSWERS}-answer graph, rest",
            f"{ANSWERS} answers, outside graph",
        ),
    ):
        graph = counts(lambda layers, events=events: events(layers, 0.0), "in_graph")
        _, outside = counts(lambda layers, events=events: events(layers, 0.0), *OUTSIDE)
        found |= zip(names, (*graph, outside), strict=True)
    return found


def table() -> str:
    """The table, as it stands in the page."""
    counts = columns()
    all_counts = Counter()
    for column in counts.values():
        all_counts.update(column)
    names = sorted(all_counts, key=lambda name: (-all_counts[name], name))
    lines = [f"| operation | {' | '.join(counts)} |", "|---|" + "---:|" * len(counts)]
    for name in names:
        cells = [str(column[name] or "") for column in counts.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    totals = []
    for column in counts.values():
        total = 0
        for name, number in column.items():
            if not name.startswith(("synchronization", "copy")):
                total += number
        totals.append(f"**{total}**")
    lines.append(f"| **total without copies and synchronizations** | {' | '.join(totals)} |")
    return "\n".join(lines)


def test_the_table_in_the_docs_is_true():
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    for package in ("torch", "transformers"):
        if version(package).split("+")[0] != pinned[package]:
            pytest.skip(f"the counts are those of {package} {pinned[package]}")
    require_table(ROOT / "docs" / "records" / "gpu-operations.md", table())


def test_a_token_of_one_answer_or_of_several_is_waited_for_once():
    one = token_events(1, 0.8)
    several = batch_events(1, 0.8)
    for events, answers in ((one, 1), (several, ANSWERS)):
        assert len(events.of("replay")) == len(events.of("wait")) == 1
        assert max(events.nbytes("to_gpu"), events.nbytes("to_host")) <= answers * 64
    assert several.num_launches <= one.num_launches
    assert len(several.of("in_graph")) < len(one.of("in_graph"))


def test_the_prompt_goes_to_the_gpu_once():
    """Token ids and rotary positions of a host's own tokens, of 8 bytes each; text needs nothing
    else."""
    events = prefill_events(1, 8, 1)
    assert events.nbytes("to_host") == 0
    assert events.nbytes("to_gpu") <= 8 * 4 * 1.02 * (131_072 / 8 + 2048)
