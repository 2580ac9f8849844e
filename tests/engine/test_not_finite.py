"""Models that give NaN or infinite logits: a draft is dropped, a target is one clear error, hosts
stay usable."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from apbv import Engine, HostError, HostGroup

from apbv_tests.configs import speculative_config
from apbv_tests.engines import QUESTION, build_engine

REQUEST = {"num_frames": 8, "max_new_tokens": 8}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 3}
WAYS = [{"strategy": "vanilla"}, {"strategy": "tabed", "ensemble": "MT"}, {"strategy": "sd_tree"}]
BESIDE = [
    {"strategy": "hippo", "draft_host": True, **way} for way in ({"prune": "kv"}, {"keep": "full"})
]


def engine_of(hosts: HostGroup, way: dict | None, kv: str = "gathered") -> Engine:
    speculate = way and speculative_config(keep_losing_draft=True, **way)
    return build_engine(hosts, "qwen2_5_vl", kv, speculate, 1)


@contextmanager
def broken(model, value: float, after: int) -> Iterator[None]:
    """From the ``after``-th forward pass on all logits are this."""
    passes = []

    def spoil(module, args, output):
        passes.append(1)
        return output if len(passes) <= after else torch.full_like(output, value)

    spoilt = model and model.get_output_embeddings().register_forward_hook(spoil)
    yield
    if spoilt:
        spoilt.remove()


def draft_job(hosts: HostGroup, ways: list, request: dict, value: float, after: int):
    """For each way an answer with a broken draft, what was warned of, and an answer afterwards."""
    found = []
    for way in ways:
        engine = engine_of(hosts, way)
        with (
            broken(engine.draft_model, value, after),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            answer = engine.generate(QUESTION, **request)
        said = [str(w.message) for w in caught if "draft" in str(w.message)]
        again = engine.generate(QUESTION, **request)
        found.append((answer.token_ids, answer.stats, said, again.token_ids, again.stats))
    return found


# In turn, or on a host of its own; it is asked again for the next request.
DRAFTS = [
    (1, WAYS, torch.nan, 0),
    (2, BESIDE, torch.nan, 0),
    pytest.param(3, BESIDE, -torch.inf, 7, marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(
    ("num_hosts", "ways", "value", "after"), DRAFTS, ids=["one host", "beside one", "beside two"]
)
def test_a_draft_without_finite_logits_is_dropped(pool, clip, num_hosts, ways, value, after):
    request = {"video": str(clip), **REQUEST, **SAMPLED}
    plain = engine_of(HostGroup.single(), None).generate(QUESTION, **request).token_ids
    for host, answers in enumerate(pool.run(num_hosts, draft_job, ways, request, value, after)):
        for way, (tokens, stats, said, again, stats_again) in zip(ways, answers, strict=True):
            assert after or tokens == plain, f"host {host}: {way}"
            assert len(tokens) == len(again)
            if stats.get("role") == "draft":
                continue
            assert len(said) == (host == 0), (way, said)
            if host == 0:
                figures = stats["speculation"]
                figures_again = stats_again["speculation"]
                assert "NaN or infinite" in said[0] and "NaN or infinite" in figures["switched_off"]
                assert figures["switched_off_after"] >= 0 and figures_again["switched_off"] is None
                assert figures_again["num_drafted"] > 0


def target_job(hosts: HostGroup, kv: str, ways: list, request: dict, after: int):
    """What a broken target makes every host say; the same engine answers once it is mended."""
    found = []
    for way in ways:
        engine = engine_of(hosts, way, kv)
        with (
            broken(engine.model, torch.nan, after),
            pytest.raises((ValueError, HostError)) as error,
        ):
            engine.generate(QUESTION, **request)
        found.append(f"{error.typename}: {error.value}")
        if not (way and way.get("draft_host") and hosts.size > 1):
            assert len(engine.generate(QUESTION, **request).token_ids) == REQUEST["max_new_tokens"]
    return found


TURNS = [None, {"strategy": "sd_tree"}, {"strategy": "ngram"}]
TARGETS = [(2, "gathered", TURNS[:1], 0), (2, "sharded", TURNS, 2)]
TARGETS += [(2, "gathered", BESIDE[:1], 2), (3, "gathered", BESIDE[:1], 2)]


@pytest.mark.parametrize(("num_hosts", "kv", "ways", "after"), TARGETS)
def test_a_target_without_finite_logits_is_one_error_everywhere(
    pool, clip, num_hosts, kv, ways, after
):
    request = {"video": str(clip), **REQUEST, **(SAMPLED if kv == "sharded" else {})}
    for host, found in enumerate(pool.run(num_hosts, target_job, kv, ways, request, after)):
        if ways[0] and host == num_hosts - 1 > 0:
            assert found == ["HostError: the target's hosts failed"]
            continue
        for said in found:
            assert (
                said.startswith("ModelOutputError")
                and "the model gave NaN or infinite logits" in said
            )
