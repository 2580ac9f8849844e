"""The time to first token: all that is done until the caller gets it, and nothing after it."""

from unittest import mock

import pytest

import apbv
from apbv import Engine, HostGroup, ReuseConfig
from apbv.kv.placement import ShardedKV
from apbv.kv.storage import SavedKV

from apbv_tests.configs import speculative_config
from apbv_tests.engines import QUESTION, build_engine

AFTERWARDS = 1000.0


class Clock:
    """Seconds that pass when a stage begins (1) and after each token (1000); also counts the
    stages."""

    def __init__(self, engine: Engine):
        self.now = 0.0
        self.stages = []
        self.stages_before_a_token = []
        engine.hosts.clock = lambda: self.now

    def on_stage(self, stage: str) -> None:
        self.stages.append(stage)
        self.now += 1.0

    def on_token(self, token: int) -> None:
        self.stages_before_a_token.append([*self.stages])
        self.now += AFTERWARDS


def build(hosts: HostGroup, config: dict, speculate: dict | None = None) -> Engine:
    settings = speculate and speculative_config(keep_losing_draft=True, **speculate)
    return build_engine(
        hosts, "qwen2_5_vl", speculate=settings, passing_len=4, anchor_len=12, **config
    )


def first_token_job(
    hosts: HostGroup, clip: str, config: dict, speculate: dict | None, reuse: str | None
):
    """The stages that began before the first token, and the figures; with ``reuse`` of a second
    question."""
    engine = build(hosts, config | ({"reuse": ReuseConfig(mode=reuse)} if reuse else {}), speculate)
    for _ in range(2 if reuse else 1):
        clock = Clock(engine)
        called = {"on_token": clock.on_token, "on_stage": clock.on_stage}
        answer = engine.generate(QUESTION, video=clip, num_frames=12, max_new_tokens=3, **called)
    return clock.stages_before_a_token[0], answer.stats


VANILLA = {"strategy": "vanilla"}
BESIDE = {**VANILLA, "draft_host": True}
CASES = [(2, {"kv": "sharded"}, VANILLA, None), (3, {}, BESIDE, None), (2, {}, None, "kv")]


@pytest.mark.parametrize(("hosts", "config", "speculate", "reuse"), CASES, ids=str)
def test_it_ends_just_before_the_caller_gets_the_token(pool, clip, hosts, config, speculate, reuse):
    for stages, figures in pool.run(hosts, first_token_job, str(clip), config, speculate, reuse):
        assert figures["ttft_ms"] == len(stages) * 1e3
        assert figures["total_ms"] >= (len(stages) + AFTERWARDS) * 1e3
        if figures.get("role") != "draft":
            assert "decode" in stages
            assert ("handoff" in stages) == (figures["kv"] == "gathered" and reuse != "kv")


def stored_job(hosts: HostGroup, clip: str, path: str) -> list[dict]:
    """The figures of a prefill, of two answers to it, of the prefill again, and of an answer to it
    when loaded."""
    engine = build(hosts, {})
    clock = Clock(engine)

    def taking(seconds: float, call):
        def timed(*args):
            clock.now += seconds
            return call(*args)

        return timed

    engine.model.get_decoder().layers[0].register_forward_hook(taking(5.0, lambda *_: None))
    with mock.patch.object(ShardedKV, "gathered", taking(2.0, ShardedKV.gathered)):
        state = engine.prefill(QUESTION, video=clip, num_frames=12)
    figures = [state.timer.summary()]
    for _ in range(2):
        clock.now += 100.0  # the caller's own time
        figures.append(engine.decode(state, max_new_tokens=2, on_token=clock.on_token).stats)
    figures.append(state.timer.summary())
    state.save(path)
    with mock.patch.object(SavedKV, "prompt", taking(3.0, SavedKV.prompt)):
        loaded = apbv.load(path, engine.model, hosts=hosts)
    figures.append(engine.decode(loaded, max_new_tokens=2, on_token=clock.on_token).stats)
    return figures


def test_answers_to_a_stored_prefill_have_figures_of_their_own(pool, clip, tmp_path):
    """Neither the prefill's time is in them, nor what the caller did in between."""
    decoding = (2 * AFTERWARDS + 5.0) * 1e3
    for prefill, *answers, again, loaded in pool.run(
        2, stored_job, str(clip), str(tmp_path / "kv")
    ):
        assert prefill["ttft_ms"] == again["ttft_ms"] == 7e3
        assert prefill["stages_ms"]["prefill"] == 5e3 and prefill["stages_ms"]["handoff"] == 2e3
        assert again["stages_ms"]["decode"] == 0
        for answer in (*answers, loaded):
            assert answer["ttft_ms"] == answer["stages_ms"]["prefill"] == 0
            assert answer["stages_ms"]["decode"] == answer["total_ms"] == decoding
