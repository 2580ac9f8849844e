"""The draft begins while the target prefills: shown by the order of events, never by times."""

import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig
from apbv.speculate.link import Link
from apbv.speculate.pair import Pair

import families
from engines import QUESTION

FAMILY = "qwen2_5_vl"
PATIENCE = 120.0  # seconds; only a test that fails waits so long
UV_PRUNE = {"strategy": "parallelvlm", "uv_layer": 1, "keep_ratio": 0.3}


def wait_until(has_come, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not has_come():
        assert time.monotonic() < deadline, f"the target waits in vain for {what}"
        time.sleep(0.01)


def prefill_job(hosts: HostGroup, way: dict, settings: dict, path: str, folder: str, layer: int, call: int):
    """Tokens of two requests; the target's host 0 enters a layer only when the draft has written a first token.

    Args:
        layer, call: which one it stands still before, and in which of its calls since the request began.
    """
    is_alone, has_begun = hosts.size == 1, Path(folder, "begun")
    is_draft = hosts.rank == hosts.size - 1 and not is_alone
    model = None if is_draft else families.build_model(FAMILY, dtype=torch.float64)
    draft = families.build_model(FAMILY, dtype=torch.float64, seed=1) if is_draft or is_alone else None
    engine = Engine(
        model,
        families.build_processor(FAMILY),
        hosts,
        PrefillConfig(passing_len=4, **settings),
        speculate=SpeculativeConfig(draft_host=True, **way),
        draft=draft,
    )
    calls = []

    def stand_still(module, *args) -> None:
        calls.append(layer)
        if len(calls) == call:
            wait_until(has_begun.exists, "the draft")

    if model is not None and hosts.rank == 0:
        layers = model.get_decoder().layers
        layers[layer].register_forward_pre_hook(stand_still, with_kwargs=True)
        # The draft has read the request, too, before the target begins.
        layers[0].register_forward_pre_hook(
            lambda *args: wait_until(engine._way._pair.link.other_has_answered, "its answer")
        )
    send_first = Link.send_first

    def noted(self, *args) -> None:
        send_first(self, *args)
        has_begun.touch()

    answers = []
    with patch.object(Link, "send_first", noted):
        for _ in range(2):
            answers.append(engine.generate(QUESTION, video=path, num_frames=8, max_new_tokens=10).token_ids)
    return answers


def run(pool, num_hosts: int, *arguments) -> list:
    """On hosts of which the last drafts; on a single one, a thread."""
    return (
        pool.run(num_hosts, prefill_job, *arguments)
        if num_hosts > 1
        else [prefill_job(HostGroup.single(), *arguments)]
    )


@pytest.mark.parametrize(
    ("num_hosts", "settings", "call"),
    [
        (1, {}, 1),
        (2, {}, 1),
        pytest.param(3, {}, 1, marks=pytest.mark.thorough),
        (4, {"kv": "sharded"}, 1),
        pytest.param(4, {"method": "full"}, 1, marks=pytest.mark.thorough),
        # With a query pass of its own the question reaches layer L in the second pass.
        (3, {"method": "apb"}, 2),
        (4, {"fused_query": False}, 2),
    ],
    ids=str,
)
def test_uv_prunes_draft_begins_before_the_targets_last_layer(pool, clip, tmp_path, num_hosts, settings, call):
    results = run(pool, num_hosts, UV_PRUNE, settings, str(clip), str(tmp_path), 2, call)
    assert all(answers == results[0] and answers[0] == answers[1] for answers in results)


@pytest.mark.parametrize("num_hosts", [1, 2, 3])
def test_hippo_by_vision_alone_waits_for_nothing_of_the_target(pool, clip, tmp_path, num_hosts):
    way = {"strategy": "hippo", "hippo_terms": ("time", "space"), "keep_ratio": 0.3}
    results = run(pool, num_hosts, way, {}, str(clip), str(tmp_path), 0, 1)
    assert all(answers == results[0] for answers in results)


def late_job(hosts: HostGroup, path: str, way: dict, times: int):
    """The scores that the draft received, and the tokens, where it seems not to have answered so many times."""
    is_draft, received, asked = hosts.rank == hosts.size - 1, [], []
    model = None if is_draft else families.build_model(FAMILY, dtype=torch.float64)
    draft = families.build_model(FAMILY, dtype=torch.float64, seed=1) if is_draft else None
    speculate = SpeculativeConfig(draft_host=True, **way)
    engine = Engine(model, families.build_processor(FAMILY), hosts, speculate=speculate, draft=draft)
    offer_scores, receive = Pair.offer_scores, Link.receive

    def offer(self, scores) -> bool:
        asked.append(len(asked))
        return len(asked) > times and offer_scores(self, scores)

    def noted(self, *args):
        received.append(receive(self, *args))
        return received[-1]

    with patch.object(Pair, "offer_scores", offer), patch.object(Link, "receive", noted):
        tokens = engine.generate(QUESTION, video=path, num_frames=8, max_new_tokens=10).token_ids
    return tokens, received, len(asked)


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_scores_leave_when_the_draft_is_there(pool, clip, num_hosts):
    """At layer L, in a later one, or after the prefill: once, and the same."""
    found = [pool.run(num_hosts, late_job, str(clip), UV_PRUNE, times) for times in (0, 1, 99)]
    for results in found:
        *_, (tokens, (scores,), _) = results
        assert all(said == found[0][0][0] for said, *_ in results) and tokens == found[0][0][0]
        torch.testing.assert_close(scores, found[0][-1][1][0])
    assert [results[0][2] for results in found] == [1, 2, 2]
