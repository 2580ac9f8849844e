"""Checks of collectives between hosts, with known values, and of the demo model's answers."""

import time
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import product

import torch
from torch import Tensor

from .. import demo
from ..config import PrefillConfig, SpeculativeConfig
from ..engine import Engine
from ..errors import HostError
from ..hosts import HostGroup
from ..kernels.backends import choose
from ..model.fused import FusedKind, kind_of
from .examination import Check, CheckFailed, CheckSkipped, Found

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
_COUNTS = (1, 1000, 2**20 + 3)  # numbers in a tensor
_ROUNDS = 5


def exchange_checks(hosts: HostGroup) -> Iterable[Check]:
    """List the checks of collectives, simplest first."""
    if hosts.size == 1:
        return [Check("exchanges", _alone)]
    return [
        Check("all-gather", all_gather, is_collective=True),
        Check("all-to-all", all_to_all, is_collective=True),
        Check("ring", ring, is_collective=True),
        Check("broadcast", broadcast, is_collective=True),
        Check("several at once", several_at_once, is_collective=True),
        Check("a failing host", failing_host),
    ]


def answer_checks(hosts: HostGroup) -> Iterable[Check]:
    """List the checks of answers, also in half precision, in which large models run."""
    yield Check("fused kernels", fused_kernels)
    for method in ("apbv", "full", "zigzag_ring", "ulysses"):
        run = partial(answer, PrefillConfig(method=method), None, "float32")
        yield Check(method, run, is_collective=True)
    draft = SpeculativeConfig(strategy="vanilla")
    run = partial(answer, PrefillConfig(), draft, "float32")
    yield Check("apbv, vanilla draft", run, is_collective=True)
    for dtype in ("bfloat16", "float16"):
        run = partial(answer, PrefillConfig(), None, dtype)
        yield Check(f"apbv, {dtype}", run, is_collective=True)


def fused_kernels(hosts: HostGroup) -> Found:
    """Find out which parts of the demo model's decoder have fused kernels, as on GPUs.

    Raises:
        CheckFailed: a part is not recognized in this version of transformers, or its kernel is not
            used on a GPU.
    """
    alone = HostGroup.single(hosts.device)
    parts = Engine.from_pretrained("demo", hosts=alone).parts
    recognized = {kind_of(module) for module in parts.model.get_decoder().modules()}
    unrecognized = [kind for kind in FusedKind if kind not in recognized]
    if unrecognized:
        names = ", ".join(unrecognized)
        raise CheckFailed(f"transformers {version('transformers')}: {names} are not recognized")
    fused = set()
    for module in parts.language_model.modules():
        if hasattr(module, "is_fused"):
            fused.add(kind_of(module))
    unfused = [kind for kind in FusedKind if kind not in fused]
    weight = parts.embed_tokens.weight
    assert isinstance(weight, Tensor), "embeddings are a matrix"
    if unfused and choose("auto", weight) == "triton":
        raise CheckFailed(f"{', '.join(unfused)} take several kernels each")
    state = "recognized" if unfused else "one kernel each"
    return f"{', '.join(FusedKind)}: {state}", {}


def _alone(hosts: HostGroup) -> Found:
    raise CheckSkipped("needs at least two hosts: torchrun --nproc-per-node N -m apbv.doctor")


def all_gather(hosts: HostGroup) -> Found:
    """Gather tensors of several sizes and dtypes."""
    for dtype, count in product(_DTYPES, _COUNTS):
        gathered = hosts.all_gather(_numbers(hosts, hosts.rank, count, dtype)).wait()
        expected = [_numbers(hosts, host, count, dtype) for host in range(hosts.size)]
        _require_equal(list(gathered), expected, f"{count} numbers in {dtype}")
    return f"{len(_DTYPES)} dtypes, up to {_COUNTS[-1] * 8 / 2**20:.0f} MiB", {}


def all_to_all(hosts: HostGroup) -> Found:
    """Send a tensor of another length to every host, and to one of them nothing."""

    def length(source: int, target: int) -> int:
        return 0 if target == source + 1 else 100 * source + 10 * target + 1

    for dtype in _DTYPES:
        sent = []
        shapes = []
        expected = []
        for host in range(hosts.size):
            sent.append(_numbers(hosts, hosts.rank, length(hosts.rank, host), dtype))
            shapes.append((length(host, hosts.rank),))
            expected.append(_numbers(hosts, host, length(host, hosts.rank), dtype))
        received = hosts.all_to_all(sent, shapes).wait()
        _require_equal(received, expected, f"tensors in {dtype}")
    return f"{len(_DTYPES)} dtypes, uneven and empty pieces", {}


def ring(hosts: HostGroup) -> Found:
    """Pass tensors of different lengths round the ring, until every host has had all of them."""
    numbers = _numbers(hosts, hosts.rank, 1000 + hosts.rank, torch.bfloat16)
    for step in range(1, hosts.size + 1):
        owner = (hosts.rank - step) % hosts.size
        numbers = hosts.shift(numbers, (1000 + owner,)).wait()
        expected = _numbers(hosts, owner, 1000 + owner, torch.bfloat16)
        _require_equal([numbers], [expected], f"what host {owner} sent on")
    return f"{hosts.size} steps", {}


def broadcast(hosts: HostGroup) -> Found:
    """Send tensors from every host in turn."""
    for source, dtype in product(range(hosts.size), _DTYPES):
        received = hosts.broadcast(_numbers(hosts, hosts.rank, 1000, dtype), source)
        expected = _numbers(hosts, source, 1000, dtype)
        _require_equal([received], [expected], f"what host {source} sent in {dtype}")
    return "from every host in turn", {}


def several_at_once(hosts: HostGroup) -> Found:
    """Start exchanges, compute meanwhile, and wait for them in another order.

    The received tensors are used at once.
    """
    for turn in range(_ROUNDS):
        # Start three exchanges, and compute.
        numbers = _numbers(hosts, hosts.rank + turn, 2**18, torch.float32)
        first = hosts.all_gather(numbers)
        second = hosts.shift(numbers + 1, numbers.shape)
        third = hosts.all_gather(numbers[:1000].clone())
        matrix = numbers.view(2**9, 2**9)
        matrix @ matrix

        # Wait for the last one first.
        third_doubled = third.wait() * 2
        second_doubled = second.wait() * 2
        first_doubled = first.wait() * 2

        # Compare.
        numbers_of_hosts = []
        for host in range(hosts.size):
            numbers_of_hosts.append(_numbers(hosts, host + turn, 2**18, torch.float32))
        expected_first = [2 * host_numbers for host_numbers in numbers_of_hosts]
        expected_second = [2 * (numbers_of_hosts[hosts.rank - 1] + 1)]
        expected_third = [2 * host_numbers[:1000] for host_numbers in numbers_of_hosts]
        _require_equal(list(first_doubled), expected_first, "the first of three exchanges")
        _require_equal([second_doubled], expected_second, "the second of three exchanges")
        _require_equal(list(third_doubled), expected_third, "the third of three exchanges")
    return f"three at a time, {_ROUNDS} times", {}


def failing_host(hosts: HostGroup) -> Found:
    """Let the last host fail while the others wait for its tensor, and time the error's way.

    Raises:
        CheckFailed: another host did not get the error or its reason.
    """
    began = time.monotonic()
    planted_error = "this failure is part of the examination"
    received_error = ""
    try:
        with hosts.collective_stage("an exchange that one host does not come to"):
            if hosts.rank == hosts.size - 1:
                raise RuntimeError(planted_error)
            exchange = hosts.all_gather(_numbers(hosts, hosts.rank, 1000, torch.float32))
            float(exchange.wait().sum())
    except (HostError, RuntimeError) as error:
        received_error = str(error)
    seconds = time.monotonic() - began
    if planted_error not in received_error:
        outcome = received_error or "a tensor that was never sent"
        raise CheckFailed(f"the others got {outcome} after {seconds:.1f} s")
    return f"heard of by the others after {seconds:.1f} s", {"seconds": seconds}


def _numbers(hosts: HostGroup, host: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers that a host sends, exact in every dtype used here."""
    return ((torch.arange(count, device=hosts.device) * 7 + 31 * host) % 251).to(dtype)


def _require_equal(received: Sequence[Tensor], expected: Sequence[Tensor], name: str) -> None:
    """Reject tensors that were received incorrectly.

    Raises:
        CheckFailed: shapes, dtypes or numbers differ; says from which host.
    """
    for host, (tensor, expected_tensor) in enumerate(zip(received, expected, strict=True)):
        if tensor.dtype != expected_tensor.dtype or not torch.equal(tensor, expected_tensor):
            raise CheckFailed(f"{name} (no. {host}) arrived wrong")


def answer(
    config: PrefillConfig, speculate: SpeculativeConfig | None, dtype: str, hosts: HostGroup
) -> Found:
    """Ask the demo model for the letters in the bundled clip.

    Raises:
        CheckFailed: the answer is wrong.
    """
    engine = Engine.from_pretrained(
        "demo", prefill=config, speculate=speculate, hosts=hosts, dtype=dtype
    )
    result = engine.generate(demo.ORDERING_QUESTION, video=demo.video_path())
    expected_text = demo.DEMO_LETTERS
    if result.text != expected_text:
        raise CheckFailed(f"answered {result.text!r} instead of {expected_text!r}")
    names = ("ttft_ms", "total_ms", "stages_ms", "speculation")
    figures = {name: result.stats[name] for name in names}
    return f"{result.text}, the first token after {figures['ttft_ms']:.3g} ms", figures
