"""Models that give NaN or infinite logits: a draft is dropped, a target is one clear error, hosts stay usable."""

import warnings

import pytest
import torch

from apbv import Engine, HostError, HostGroup, PrefillConfig, SpeculativeConfig
from apbv.speculate import STRATEGIES

import families
from engines import QUESTION

FAMILY, STEPS = "qwen2_5_vl", 12
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 3}
BREAKS = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


def break_logits(model, value: str, after: int = 0):
    """From the ``after``-th forward pass on all logits are this; returns what mends the model."""
    passes = 0

    def hook(module, args, output):
        nonlocal passes
        passes += 1
        return output if passes <= after else torch.full_like(output, BREAKS[value])

    return model.get_output_embeddings().register_forward_hook(hook).remove


def build_models(hosts: HostGroup, way: dict | None) -> tuple:
    """The target and the draft where this host has them."""
    beside = way and way.get("draft_host") and hosts.size > 1
    is_draft = beside and hosts.rank == hosts.size - 1
    needs_draft = way and STRATEGIES[way["strategy"]].needs_draft_model and (is_draft or not beside)
    model = None if is_draft else families.build_model(FAMILY, dtype=torch.float64)
    return model, families.build_model(FAMILY, dtype=torch.float64, seed=1) if needs_draft else None


def engine_of(hosts: HostGroup, models: tuple, way: dict | None, kv: str) -> Engine:
    speculate = None if way is None else SpeculativeConfig(keep_losing_draft=True, **way)
    processor = families.build_processor(FAMILY)
    return Engine(models[0], processor, hosts, PrefillConfig(kv=kv), speculate=speculate, draft=models[1])


WAYS = [
    {"strategy": "vanilla"},
    {"strategy": "specvlm", "num_draft_tokens": "auto"},
    {"strategy": "tabed", "ensemble": "MT"},
    {"strategy": "sd_tree"},
]
BESIDE = [
    {"strategy": "vanilla", "draft_host": True},
    {"strategy": "hippo", "draft_host": True, "prune": "kv"},
    {"strategy": "hippo", "draft_host": True, "vision_first": True},
]


def draft_job(hosts: HostGroup, kv: str, ways: list, path: str, sampled: dict, value: str, after: int):
    """For each way an answer with a broken draft, its figures, what was warned of, and an answer afterwards."""
    request = {"video": path, "num_frames": 8, "max_new_tokens": STEPS, **sampled}
    found = []
    for way in ways:
        models = build_models(hosts, way)
        engine = engine_of(hosts, models, way, kv)
        mend = break_logits(models[1], value, after) if models[1] is not None else lambda: None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answer = engine.generate(QUESTION, **request)
        mend()
        said = [str(w.message) for w in caught if "draft" in str(w.message)]
        found.append(
            (answer.token_ids, answer.stats.get("speculation"), said, engine.generate(QUESTION, **request))
        )
    return [
        (tokens, figures, said, again.token_ids, again.stats.get("speculation"))
        for tokens, figures, said, again in found
    ]


def check_drafts(results: list, ways: list, plain: list[int], sampled: dict, from_the_start: bool) -> None:
    for host, answers in enumerate(results):
        for way, (tokens, figures, said, again, figures_again) in zip(ways, answers, strict=True):
            if from_the_start or not sampled or way["strategy"] == "sd_tree":
                assert tokens == plain, f"host {host}: {way}"
            if not sampled:
                assert again == plain
            assert len(tokens) == len(again)
            is_draft_host = way.get("draft_host") and len(results) > 1 and host == len(results) - 1
            if is_draft_host:
                continue
            assert len(said) == (host == 0), (way, said)
            if host == 0:
                assert "NaN or infinite" in said[0] and "NaN or infinite" in figures["switched_off"]
                assert figures["switched_off_after"] >= 0 and figures_again["switched_off"] is None
                assert figures_again["num_drafted"] > 0


def plain_tokens(clip, sampled: dict) -> list[int]:
    engine = engine_of(HostGroup.single(), build_models(HostGroup.single(), None), None, "gathered")
    return engine.generate(QUESTION, video=str(clip), num_frames=8, max_new_tokens=STEPS, **sampled).token_ids


@pytest.mark.parametrize(
    ("num_hosts", "value", "after", "sampled"), [(1, "nan", 0, SAMPLED), (2, "inf", 4, {})], ids=str
)
def test_a_draft_without_finite_logits_is_dropped(pool, clip, num_hosts, value, after, sampled):
    kv = "gathered" if num_hosts == 1 else "sharded"
    results = pool.run(num_hosts, draft_job, kv, WAYS, str(clip), sampled, value, after)
    check_drafts(results, WAYS, plain_tokens(clip, sampled), sampled, from_the_start=not after)


@pytest.mark.parametrize(
    ("num_hosts", "after", "sampled"), [(1, 1, {}), (2, 0, SAMPLED), (3, 7, SAMPLED)], ids=str
)
def test_beside_the_target_too(pool, clip, num_hosts, after, sampled):
    """On a host of its own, or on a thread; it is asked again for the next request."""
    results = pool.run(num_hosts, draft_job, "gathered", BESIDE, str(clip), sampled, "nan", after)
    check_drafts(results, BESIDE, plain_tokens(clip, sampled), sampled, from_the_start=not after)


def target_job(hosts: HostGroup, kv: str, ways: list, path: str, sampled: dict, after: int):
    """What a broken target makes every host say, and the answer of the same engine once it is mended."""
    request = {"video": path, "num_frames": 8, "max_new_tokens": STEPS, **sampled}
    found = []
    for way in ways:
        models = build_models(hosts, way)
        engine = engine_of(hosts, models, way, kv)
        mend = break_logits(models[0], "nan", after) if models[0] is not None else lambda: None
        try:
            engine.generate(QUESTION, **request)
            said = None
        except (ValueError, HostError) as error:
            said = type(error).__name__, str(error)
        mend()
        beside = way and way.get("draft_host") and hosts.size > 1
        again = [] if beside else engine.generate(QUESTION, **request).token_ids
        found.append((said, again))
    return found


@pytest.mark.parametrize(
    ("num_hosts", "kv", "after", "sampled"),
    [(2, "gathered", 0, SAMPLED), (2, "gathered", 2, {}), (3, "sharded", 2, SAMPLED)],
    ids=str,
)
def test_a_target_without_finite_logits_is_one_error_everywhere(pool, clip, num_hosts, kv, after, sampled):
    ways = [None, {"strategy": "vanilla"}, {"strategy": "sd_tree"}, {"strategy": "ngram"}]
    for host, results in enumerate(pool.run(num_hosts, target_job, kv, ways, str(clip), sampled, after)):
        for way, (said, again) in zip(ways, results, strict=True):
            # With gathered KV the other hosts run the head once, in the prefill.
            kind, message = said
            assert kind == "AgreedError" and "the model gave NaN or infinite logits" in message, (host, way)
            assert len(again) == STEPS


@pytest.mark.parametrize("num_hosts", [1, 3])
def test_a_target_beside_a_draft_too(pool, clip, num_hosts):
    ways = [{"strategy": "vanilla", "draft_host": True}]
    results = pool.run(num_hosts, target_job, "gathered", ways, str(clip), {}, 2)
    for host, ((said, _),) in enumerate(results):
        if num_hosts > 1 and host == num_hosts - 1:
            assert said == ("HostError", "the target's hosts failed")
        else:
            assert said[0] == "AgreedError" and "the model gave NaN or infinite logits" in said[1]
