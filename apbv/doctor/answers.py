"""The demo model's answers on this device: by several methods, in several dtypes, with a draft."""

from collections.abc import Iterable
from functools import partial

import torch

from .. import demo
from ..config import PrefillConfig, SpeculativeConfig
from ..demo.clips import ORDERING_QUESTION, make_clip, questions
from ..engine import Engine
from ..hosts import HostGroup
from .checks import Check, CheckFailed, CheckSkipped, Finding

# Relative to the largest logit, in epsilons of the dtype.
_LOGIT_TOLERANCE = 2000.0


def checks(hosts: HostGroup, is_quick: bool) -> Iterable[Check]:
    """List the ways to the answer; those in half precision are what large models run in."""
    ways = {
        "apbv": (PrefillConfig(), None, "float32"),
        "apbv, vanilla draft": (PrefillConfig(), SpeculativeConfig(strategy="vanilla"), "float32"),
        "full": (PrefillConfig(method="full"), None, "float32"),
        "zigzag_ring": (PrefillConfig(method="zigzag_ring"), None, "float32"),
        "ulysses": (PrefillConfig(method="ulysses"), None, "float32"),
        "apbv, KV where it is": (PrefillConfig(kv="sharded"), None, "float32"),
        "apbv, specvlm draft": (PrefillConfig(), SpeculativeConfig(strategy="specvlm"), "float32"),
        "apbv, bfloat16": (PrefillConfig(), None, "bfloat16"),
        "apbv, float16": (PrefillConfig(), None, "float16"),
        "zigzag_ring, bfloat16": (PrefillConfig(method="zigzag_ring"), None, "bfloat16"),
    }
    for name, way in list(ways.items())[: 2 if is_quick else None]:
        yield Check(name, partial(answer, *way), is_collective=True)
    yield Check("logits", logits)


def known_answer() -> str:
    """Return the right answer to the question that is asked about the packaged clip."""
    asked = questions(make_clip(*demo.DEMO_CLIP))
    return next(answer for _, question, answer in asked if question == ORDERING_QUESTION)


def answer(config: PrefillConfig, speculate: SpeculativeConfig | None, dtype: str, hosts: HostGroup) -> Finding:
    """Ask the demo model for the letters in the packaged clip.

    Raises:
        CheckFailed: the answer is wrong.
    """
    engine = Engine.from_pretrained("demo", prefill=config, speculate=speculate, hosts=hosts, dtype=dtype)
    answer = engine.generate(ORDERING_QUESTION, video=demo.video_path())
    if answer.text != known_answer():
        raise CheckFailed(f"answered {answer.text!r} in place of {known_answer()!r}")
    figures = {"text": answer.text, "ttft_ms": answer.stats["ttft_ms"], "total_ms": answer.stats["total_ms"]}
    text = answer.text
    if speculation := answer.stats["speculation"]:
        figures["tokens_per_target_forward"] = speculation["tokens_per_target_forward"]
        text = f"{answer.text} ({speculation['tokens_per_target_forward']:.1f} tokens per pass)"
    return Finding(text, figures)


def logits(hosts: HostGroup) -> Finding:
    """Compare the last token's logits with the CPU's, each host by itself.

    Raises:
        CheckFailed: they differ by more than rounding explains.
        CheckSkipped: this host computes on its CPU.
    """
    if hosts.device.type == "cpu":
        raise CheckSkipped("this host computes on its CPU")
    found = []
    for device in (hosts.device, torch.device("cpu")):
        config = PrefillConfig(method="full")
        engine = Engine.from_pretrained("demo", prefill=config, hosts=HostGroup.single(device), dtype="float32")
        found.append(engine.prefill(ORDERING_QUESTION, video=demo.video_path()).logits.double().cpu())
    ours, its = found
    off = float((ours - its).abs().max() / its.abs().max()) / torch.finfo(torch.float32).eps
    if not off <= _LOGIT_TOLERANCE:
        raise CheckFailed(f"they differ from the CPU's by {off:.0f} epsilons of the largest")
    return Finding(f"those of the CPU, but for {off:.0f} epsilons of the largest", {"epsilons": off})
