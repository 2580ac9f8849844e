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
from ..hosts import HostError, HostGroup
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
    collective = {
        "all-gather": all_gather,
        "all-to-all": all_to_all,
        "ring": ring,
        "broadcast": broadcast,
        "several at once": several_at_once,
    }
    checks = [Check(name, run, is_collective=True) for name, run in collective.items()]
    return [*checks, Check("a failing host", failing_host)]


def answer_checks(hosts: HostGroup) -> Iterable[Check]:
    """List the checks of answers, also in half precision, in which large models run."""
    yield Check("fused kernels", fused_kernels)
    for method in ("apbv", "full", "zigzag_ring", "ulysses"):
        yield Check(
            method,
            partial(answer, PrefillConfig(method=method), None, "float32"),
            is_collective=True,
        )
    draft = SpeculativeConfig(strategy="vanilla")
    yield Check(
        "apbv, vanilla draft",
        partial(answer, PrefillConfig(), draft, "float32"),
        is_collective=True,
    )
    for dtype in ("bfloat16", "float16"):
        yield Check(
            f"apbv, {dtype}", partial(answer, PrefillConfig(), None, dtype), is_collective=True
        )


def fused_kernels(hosts: HostGroup) -> Found:
    """Find out which parts of the demo model's decoder have fused kernels, which are for GPUs.

    Raises:
        CheckFailed: a part is not recognized in this version of transformers, or its kernel is not
            used on a GPU.
    """
    alone = HostGroup.single(hosts.device)
    parts = Engine.from_pretrained("demo", hosts=alone).parts
    found = {kind_of(module) for module in parts.model.get_decoder().modules()}
    if unknown := [kind for kind in FusedKind if kind not in found]:
        raise CheckFailed(
            f"transformers {version('transformers')}: {', '.join(unknown)} are not recognized"
        )
    fused = {
        kind_of(module) for module in parts.language_model.modules() if hasattr(module, "is_fused")
    }
    left_out = [kind for kind in FusedKind if kind not in fused]
    if left_out and choose("auto", parts.embed_tokens.weight) == "triton":
        raise CheckFailed(f"{', '.join(left_out)} take several kernels each")
    return f"{', '.join(FusedKind)}: {'recognized' if left_out else 'one kernel each'}", {}


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
        sent = [
            _numbers(hosts, hosts.rank, length(hosts.rank, to), dtype) for to in range(hosts.size)
        ]
        lengths = [length(source, hosts.rank) for source in range(hosts.size)]
        received = hosts.all_to_all(sent, [(length,) for length in lengths]).wait()
        expected = [_numbers(hosts, source, length, dtype) for source, length in enumerate(lengths)]
        _require_equal(received, expected, f"tensors in {dtype}")
    return f"{len(_DTYPES)} dtypes, uneven and empty pieces", {}


def ring(hosts: HostGroup) -> Found:
    """Pass tensors of different lengths once round the ring, until every host has had all of
    them."""
    held = _numbers(hosts, hosts.rank, 1000 + hosts.rank, torch.bfloat16)
    for step in range(1, hosts.size + 1):
        owner = (hosts.rank - step) % hosts.size
        held = hosts.shift(held, (1000 + owner,)).wait()
        expected = _numbers(hosts, owner, 1000 + owner, torch.bfloat16)
        _require_equal([held], [expected], f"what host {owner} sent on")
    return f"{hosts.size} steps", {}


def broadcast(hosts: HostGroup) -> Found:
    """Send tensors from every host in turn."""
    for source, dtype in product(range(hosts.size), _DTYPES):
        sent = hosts.broadcast(_numbers(hosts, hosts.rank, 1000, dtype), source)
        _require_equal(
            [sent], [_numbers(hosts, source, 1000, dtype)], f"what host {source} sent in {dtype}"
        )
    return "from every host in turn", {}


def several_at_once(hosts: HostGroup) -> Found:
    """Start exchanges, compute meanwhile, wait for them in another order, and compute at once with
    what came."""
    for turn in range(_ROUNDS):
        mine = _numbers(hosts, hosts.rank + turn, 2**18, torch.float32)
        first = hosts.all_gather(mine)
        second = hosts.shift(mine + 1, mine.shape)
        third = hosts.all_gather(mine[:1000].clone())
        busy = mine.view(2**9, 2**9)
        busy @ busy
        small = third.wait() * 2
        moved = second.wait() * 2
        large = first.wait() * 2
        theirs = [_numbers(hosts, host + turn, 2**18, torch.float32) for host in range(hosts.size)]
        _require_equal(list(large), [2 * each for each in theirs], "the first of three exchanges")
        _require_equal([moved], [2 * (theirs[hosts.rank - 1] + 1)], "the second of three exchanges")
        _require_equal(
            list(small), [2 * each[:1000] for each in theirs], "the third of three exchanges"
        )
    return f"three at a time, {_ROUNDS} times", {}


def failing_host(hosts: HostGroup) -> Found:
    """Let the last host fail while the others wait for its tensor on the device, and time the
    error's propagation.

    Raises:
        CheckFailed: another host did not get the error or its reason.
    """
    began = time.monotonic()
    planted = "this failure is part of the examination"
    heard = ""
    try:
        with hosts.collective_stage("an exchange that one host does not come to"):
            if hosts.rank == hosts.size - 1:
                raise RuntimeError(planted)
            exchange = hosts.all_gather(_numbers(hosts, hosts.rank, 1000, torch.float32))
            float(exchange.wait().sum())
    except (HostError, RuntimeError) as error:
        heard = str(error)
    seconds = time.monotonic() - began
    if planted not in heard:
        raise CheckFailed(
            f"the others got {heard or 'a tensor that was never sent'} after {seconds:.1f} s"
        )
    return f"heard of by the others after {seconds:.1f} s", {"seconds": seconds}


def _numbers(hosts: HostGroup, host: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers that a host sends, exact in every dtype used here."""
    return ((torch.arange(count, device=hosts.device) * 7 + 31 * host) % 251).to(dtype)


def _require_equal(found: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    """Reject tensors that were received incorrectly.

    Raises:
        CheckFailed: shapes, dtypes or numbers differ; says from which host.
    """
    for host, (ours, its) in enumerate(zip(found, expected, strict=True)):
        if ours.dtype != its.dtype or not torch.equal(ours, its):
            raise CheckFailed(f"{what} (no. {host}) arrived wrong")


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
    answer = engine.generate(demo.ORDERING_QUESTION, video=demo.video_path())
    right = demo.DEMO_LETTERS
    if answer.text != right:
        raise CheckFailed(f"answered {answer.text!r} instead of {right!r}")
    figures = {
        name: answer.stats[name] for name in ("ttft_ms", "total_ms", "stages_ms", "speculation")
    }
    return f"{answer.text}, the first token after {figures['ttft_ms']:.3g} ms", figures
