"""Builds the ways to decode that are compared, and turns their answers into records."""

import argparse
import copy
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from transformers import PreTrainedModel

from apbv import Engine, HostGroup, PrefillConfig, SamplingParams, SpeculativeConfig, demo
from apbv.decode.batch import Batch
from apbv.input.rendering import RenderedPrompt
from apbv.input.request import Question, Request
from apbv.input.video import probe
from apbv.speculate import STRATEGIES
from apbv.speculate.strategies import draft_tree
from apbv.stats import StageTimer

from . import clips


@dataclass
class Way:
    """One way to decode, and its answers.

    Attributes:
        label: its name in tables.
        config: its speculation; None for autoregressive decoding.
        engine: None on a host that takes no part.
        stats: the answers' figures, by task.
    """

    label: str
    config: SpeculativeConfig | None
    engine: Engine | None
    stats: dict[str, list[dict]] = field(default_factory=dict)


def scale_model(model: PreTrainedModel, times: int) -> PreTrainedModel:
    """Build a slower model with `times` as many decoder layers that computes the same.

    Before every decoder layer come copies of it whose two output projections are zero. A copy reads and writes the
    KV cache and does the work of a layer, but adds nothing to the hidden states, so logits are bit-equal to the
    original's while the time per token grows with their number. Its input is that of the layer after it, and so
    are its attention probabilities: means over layers, by which visual tokens are ranked, are the original's, too.

    Args:
        model: a Qwen2.5-VL model, which is left as it is.
        times: layers for each layer, at least 1.

    Raises:
        ValueError: `times` is less than 1.
    """
    if times < 1:
        raise ValueError(f"a model can be scaled by 1 or more, not by {times}")
    config = copy.deepcopy(model.config)
    config.text_config.num_hidden_layers *= times
    config.text_config.layer_types = None  # filled in again, for the new number of layers
    config = type(config).from_dict(config.to_dict())
    scaled = type(model)(config).to(model.device, model.dtype).eval()
    weights = {}
    for name, value in model.state_dict().items():
        prefix, found, rest = name.partition("language_model.layers.")
        if not found:
            weights[name] = value
            continue
        layer, _, parameter = rest.partition(".")
        silent = parameter in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
        for number in range(times):
            copied = torch.zeros_like(value) if silent and number < times - 1 else value
            weights[f"{prefix}{found}{int(layer) * times + number}.{parameter}"] = copied
    scaled.load_state_dict(weights)
    scaled.generation_config = model.generation_config
    return scaled


def build_ways(
    options: argparse.Namespace, configs: Mapping[str, SpeculativeConfig], hosts: HostGroup
) -> list[Way]:
    """Build the ways to decode, on one target and one draft; autoregressive decoding comes first."""
    prefill = PrefillConfig(method=options.method, kv=options.kv)
    # A layer of the target lies --scale times as deep in the scaled one.
    wanted = {label: replace(each, uv_layer=options.scale * each.uv_layer) for label, each in configs.items()}
    if options.draft_host and options.preset is None:
        for label, config in list(wanted.items()):
            strategy = STRATEGIES[config.strategy]
            if strategy.needs_draft_model and not strategy.needs_verdicts and draft_tree(config) is None:
                wanted[f"{label}, draft host"] = replace(config, draft_host=True)
    needs_draft = options.draft_host or any(STRATEGIES[c.strategy].needs_draft_model for c in wanted.values())
    last = hosts.size - 1
    if options.draft_host and not last:
        raise ValueError("a draft host needs at least two hosts: start them with torchrun")
    targets = hosts.subgroup(range(last)) if options.draft_host else hosts
    model = draft = None
    if targets is not None:
        loaded = Engine.from_pretrained(options.model, hosts=targets, dtype=options.dtype)
        model = scale_model(loaded.model, options.scale) if options.scale > 1 else loaded.model
    with hosts.local_stage("loading the draft"):
        if needs_draft:
            if options.draft_model is None and options.model != "demo":
                raise ValueError("these strategies need a --draft-model")
            path = options.draft_model or demo.draft_path()
            drafting = Engine.from_pretrained(path, hosts=HostGroup.single(hosts.device), dtype=options.dtype)
            draft = drafting.model
        processor = (drafting if targets is None else loaded).processor

    def caption(prompt: RenderedPrompt) -> str:
        """Let the draft answer a short question, because a captioner must be cheap."""
        (video,) = prompt.videos
        return drafting.generate(clips.ORDERING_QUESTION, video=video, num_frames=probe(video).num_frames).text

    def way(label: str, config: SpeculativeConfig | None) -> Way:
        beside = config is not None and config.draft_host
        group = hosts if beside else targets
        if group is None:
            return Way(label, config, None)
        own = draft if not beside or hosts.rank == last else None
        return Way(label, config, Engine(model, processor, group, prefill, options.model, config, own, caption))

    return [way("autoregressive", None), *(way(label, config) for label, config in wanted.items())]


class Together(NamedTuple):
    """Answers that were decoded in one batch: their tokens, their drafts' metrics, and the seconds of decoding."""

    prompt_lens: list[int]
    tokens: list[list[int]]
    figures: list[dict | None]
    seconds: float


def decode_together(engine: Engine, batch: Batch, questions: Sequence[dict], max_new_tokens: int) -> Together:
    """Prefill questions, and decode their answers in a batch, on host 0; collective."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    begun = [
        engine.begin(Request(Question(**given), StageTimer(engine.hosts), sampling=sampling))
        for given in questions
    ]
    began = time.perf_counter()
    with engine.attention():
        members = [
            batch.join(state, read.request, *draft) for read, state, draft in begun if engine.hosts.is_leader
        ]
        prompt_lens = [member.answer.prompt_len for member in members]
        while len(batch):
            batch.step()
    seconds = time.perf_counter() - began
    return Together(prompt_lens, [each.tokens for each in members], [each.summary() for each in members], seconds)


def batch_records(options: argparse.Namespace, ways: Sequence[Way], questions: Sequence[dict]) -> Iterator[dict]:
    """Answer questions in one batch, in all ways in turn, after a warm-up; yield a record per way, on host 0."""
    engines = [(way.engine, way.engine.batch()) for way in ways]
    rounds = [
        [decode_together(*each, questions, options.max_new_tokens) for each in engines]
        for _ in range(1 + options.rounds)
    ]
    measured = list(zip(*rounds[1:], strict=True)) if engines[0][0].hosts.is_leader else []
    for way, runs in zip(ways, measured, strict=False):
        figures = [each for run in runs for each in run.figures if each]
        drafted, seconds = sum(each["num_drafted"] for each in figures), sum(run.seconds for run in runs)
        new_tokens = sum(len(tokens) for run in runs for tokens in run.tokens)
        yield {
            "benchmark": "batch_speculative",
            "label": way.label,
            "model": options.model,
            "scale": options.scale,
            "dtype": options.dtype,
            "num_input_tokens": statistics.mean(runs[0].prompt_lens),
            "answers": len(questions),
            "new_tokens": new_tokens,
            "identical": [run.tokens for run in runs] == [run.tokens for run in measured[0]],
            "acceptance_rate": sum(each["num_accepted"] for each in figures) / drafted if drafted else None,
            "drafted_per_token": drafted / new_tokens,
            "tokens_per_s": new_tokens / seconds,
            "speedup": sum(run.seconds for run in measured[0]) / seconds,
            "samples": {"seconds": [run.seconds for run in runs]},
        }


def records(options: argparse.Namespace, ways: list[Way]) -> Iterator[dict]:
    """Yield a record per task and way; speedups are ratios of sums over the same questions."""
    for task, alone in ways[0].stats.items():
        new_tokens = sum(len(stats["token_ids"]) for stats in alone)
        forwards = new_tokens - len(alone)  # the first token of every answer comes out of the prefill
        decode_ms, total_ms = sum(s["stages_ms"]["decode"] for s in alone), sum(s["total_ms"] for s in alone)
        target_ms = decode_ms / max(1, forwards)
        for way in ways:
            runs = way.stats[task]
            identical = all(a["token_ids"] == b["token_ids"] for a, b in zip(runs, alone, strict=True))
            times = {
                "decode_ms": [stats["stages_ms"]["decode"] for stats in runs],
                "draft_prefill_ms": [stats["stages_ms"]["draft"] for stats in runs],
                "total_ms": [stats["total_ms"] for stats in runs],
            }
            figures = None if way.config is None else speculation(way.config, runs, target_ms, forwards)
            yield {
                "benchmark": "speculative",
                "preset": options.preset,
                "label": way.label,
                "task": task,
                "model": options.model,
                "scale": options.scale,
                "hosts": runs[0]["hosts"],
                "kv": options.kv,
                "method": runs[0]["method"],
                "num_input_tokens": statistics.mean(stats["num_input_tokens"] for stats in runs),
                "answers": len(runs),
                "new_tokens": new_tokens,
                "identical": identical,
                **times,
                "target_ms_per_token": target_ms,
                "decode_speedup": decode_ms / sum(times["decode_ms"]) if identical else None,
                "end_to_end_speedup": total_ms / sum(times["total_ms"]) if identical else None,
                "speculation": figures,
                "dtype": runs[0]["dtype"],
            }


def speculation(config: SpeculativeConfig, runs: list[dict], target_ms: float, num_tokens: int) -> dict:
    """Return drafted and accepted tokens, the costs on both sides, and the predicted speedup.

    Args:
        target_ms: of a target's pass over one token.
        num_tokens: of all answers, but their first.
    """

    def total(name: str) -> float | None:
        values = [stats["speculation"][name] for stats in runs]
        return None if None in values else sum(values)

    drafted, accepted, rounds = (total(name) for name in ("num_drafted", "num_accepted", "rounds"))
    # A draft host writes more tokens than are ever verified.
    written, seconds = total("num_written") if config.draft_host else drafted, total("draft_seconds")
    draft_ms = None if seconds is None else 1e3 * seconds / max(1, written)
    ratio = target_ms / draft_ms if draft_ms else None
    in_a_row = accepted / (total("num_rejections") + len(runs))
    per_forward = num_tokens / max(1, total("num_target_forwards"))
    gamma = drafted / max(1, rounds)  # a lookup may find fewer tokens than requested
    predicted = None
    if ratio and config.draft_host:  # Theorem 6 takes the chance that one more token is accepted
        predicted = beside_speedup(gamma, ratio, accepted / max(1, accepted + total("num_rejections")))
    elif ratio:  # Theorem 4 the share of accepted tokens
        predicted = in_turn_speedup(gamma, ratio, accepted / max(1, drafted))
    return {
        "config": asdict(config),
        "acceptance_rate": accepted / max(1, drafted),
        "tokens_per_target_forward": per_forward,
        "mean_accepted_tokens": in_a_row if config.draft_host else per_forward,
        "accepted_in_a_row": in_a_row,
        "draft_ms_per_token": draft_ms,
        "verify_ms_per_round": 1e3 * total("verify_seconds") / max(1, rounds),
        "cost_ratio": ratio,
        "predicted_decode_speedup": predicted,
    }


def in_turn_speedup(gamma: float, c: float, tau: float) -> float:
    """Predict what drafting and verifying in turn gains over autoregressive decoding (ParallelVLM, Theorem 4).

    Args:
        gamma: tokens drafted per round.
        c: T_p / T_q, how many tokens the draft drafts during one pass of the target.
        tau: the acceptance rate.
    """
    return c * (tau * gamma + 1) / (gamma + c)


def beside_speedup(gamma: float, c: float, tau: float) -> float:
    """Predict what drafting while verifying gains, with the rounds that rejections cost (Theorem 6, Lemma 1)."""
    accepted = gamma if tau == 1 else tau * (1 - tau**gamma) / (1 - tau)
    return c * (1 + tau**gamma) * accepted / (2 * max(gamma, c))
