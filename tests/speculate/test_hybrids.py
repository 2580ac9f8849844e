"""Drafts for hybrids: states of linear attention that go back to the tokens that stay."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from apbv import HostGroup, PrefillConfig, SamplingParams, prefill
from apbv.config import SpeculativeConfig
from apbv.decode.answer import begin_answer
from apbv.decode.batch import Batch
from apbv.errors import InvalidConfigError
from apbv.model.parts import inspect_model
from apbv.request.request import Question, Request, RequestSettings
from apbv.runner.answer_states import RunStates
from apbv.runner.decoder import Decoder
from apbv.speculate.drafters.draft import Draft, run_prompt
from apbv.speculate.drafters.drafters import ModelDrafter, NgramDrafter
from apbv.speculate.loops.pace import Pace
from apbv.speculate.loops.serial import generate_speculatively
from apbv.speculate.loops.speculative_batch import SpeculativeBatch
from apbv.stats import StageTimer

from apbv_tests import families
from apbv_tests.answers import plain_tokens
from apbv_tests.configs import speculative_config
from apbv_tests.drafters import PATTERNS, ScriptedDrafter
from apbv_tests.engines import QUESTION, build_engine
from apbv_tests.prompts import UNCOMPRESSED, as_inputs, build, text_batch

HOSTS = HostGroup.single()
FAMILY = "qwen3_5_text"
STEPS = 14


@cache
def parts_of(seed: int = 0):
    if seed == 0:
        return inspect_model(build(FAMILY, torch.float64))
    return inspect_model(families.build_model(FAMILY, dtype=torch.float64, seed=seed))


@cache
def prefilled(number: int):
    inputs = as_inputs(FAMILY, text_batch(30 + 7 * number), 20, HOSTS, torch.float64)
    config = PrefillConfig(passing_len=UNCOMPRESSED)
    return prefill(build(FAMILY, torch.float64), inputs, hosts=HOSTS, config=config)


def state_of(number: int):
    """A prompt that nobody else answers."""
    state = prefilled(number)
    kv = state.kv.behind(state.layout)
    kv.states = state.kv.states
    return replace(state, kv=kv)


def decoder_of(number: int) -> Decoder:
    state = state_of(number)
    return Decoder(parts_of(), state.kv, state.next_position, goes_back=True)


@pytest.mark.parametrize("seed", range(4))
def test_states_behind_rejected_tokens_are_those_of_a_model_that_never_read_them(seed):
    """After runs of any length, of which any number of tokens is taken back."""
    chance = random.Random(seed)
    decoder = decoder_of(0)
    stay: list[int] = []
    for _ in range(12):
        new = [chance.randrange(256) for _ in range(chance.choice((1, 1, 2, 5, 70)))]
        decoder.advance(new)
        num_rejected = chance.choice((0, 0, 1, len(new) - 1, len(new)))
        num_kept = len(new) - num_rejected
        decoder.take_back(len(new), range(num_kept))
        stay += new[:num_kept]
    logits = decoder.advance([7])
    fresh = decoder_of(0)
    if stay:
        fresh.advance(stay)
    torch.testing.assert_close(logits, fresh.advance([7]), rtol=1e-4, atol=1e-4)
    for layer, expected in zip(decoder.states.layers, fresh.states.layers, strict=True):
        for state, expected_state in zip(layer.newest, expected.newest, strict=True):
            torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-4)


def asked(state, sampling: SamplingParams) -> Request:
    return Request(Question(), StageTimer(HOSTS), RequestSettings(sampling=sampling))


def model_drafter(number: int, seed: int, sampling: SamplingParams) -> ModelDrafter:
    state = prefilled(number)
    parts = parts_of(seed)
    ids = state.inputs.input_ids
    prompt = run_prompt(parts, ids, torch.arange(ids.shape[1])[None])
    settings = (state.next_position, state.num_tokens, sampling, parts.vocab_size, False, ids)
    return ModelDrafter(parts, prompt, *settings)


class Checked(ModelDrafter):
    """Compares what it proposes with what a drafter without a past would."""

    fresh: Callable[[], ModelDrafter]
    num_checked = 0

    def propose(self, tokens, tree):
        proposed = super().propose(tokens, tree)
        assert proposed == self.fresh().propose(tokens, tree)
        self.num_checked += 1
        return proposed


def test_a_model_drafts_from_the_states_of_what_was_verified():
    """Which does not show in answers, but in how many tokens are accepted."""
    sampling = SamplingParams(max_new_tokens=STEPS)
    drafter = model_drafter(0, 1, sampling)
    drafter.__class__ = Checked
    drafter.fresh = partial(model_drafter, 0, 1, sampling)
    state = state_of(0)
    answer = begin_answer(parts_of(), state, asked(state, sampling), goes_back=True)
    tokens, stats = generate_speculatively(answer, drafter, Pace(3, True))
    assert tokens == plain_tokens(prefilled(0), parts_of(), sampling)
    assert drafter.num_checked > 3 and stats.num_accepted < stats.num_drafted


def draft_of(kind: str, number: int, sampling: SamplingParams) -> Draft | None:
    if kind == "none":
        return None
    if kind == "ngram":
        return Draft(NgramDrafter(prefilled(number).inputs.input_ids[0].tolist()), 0)
    if kind in PATTERNS:
        expected = plain_tokens(prefilled(number), parts_of(), sampling)
        return Draft(ScriptedDrafter(expected, PATTERNS[kind]), 0)
    return Draft(model_drafter(number, {"itself": 0, "another": 1}[kind], sampling), 0)


def test_a_step_that_fails_midway_changes_no_answer(monkeypatch):
    """Some layers have read its tokens then, and others have not."""
    batch = Batch(parts_of())
    sampling = SamplingParams(max_new_tokens=STEPS)
    members = []
    for number in range(2):
        state = state_of(number)
        members.append(batch.join(begin_answer(parts_of(), state, asked(state, sampling))))
    attend = RunStates.attend

    def failing(states, layer, *arguments):
        if layer == 1:
            raise RuntimeError("out of memory")
        return attend(states, layer, *arguments)

    num_failed = 0
    while len(batch):
        with monkeypatch.context() as patch:
            patch.setattr(RunStates, "attend", failing)
            try:
                batch.step()
            except RuntimeError:
                num_failed += 1
        batch.step()
    assert num_failed > 3
    for number, member in enumerate(members):
        assert member.tokens == plain_tokens(prefilled(number), parts_of(), sampling)


@pytest.mark.parametrize("window", [3, "auto"])
def test_answers_with_drafts_come_and_go_in_a_batch(window):
    """Windows of several lengths in one pass, and answers without a draft beside them."""
    config = speculative_config(strategy="ngram", num_draft_tokens=window, keep_losing_draft=True)
    batch = SpeculativeBatch(parts_of(), config)
    kinds = ["alternating", "none", "itself", "another", "ngram", "all", "itself"]
    members = []
    for place, kind in enumerate(kinds):
        number = place % 3
        sampling = SamplingParams(max_new_tokens=STEPS - place)
        state = state_of(number)
        answer = begin_answer(parts_of(), state, asked(state, sampling))
        members.append(batch.join(answer, draft_of(kind, number, sampling)))
        for _ in range(place % 3):
            batch.step()
    while len(batch):
        batch.step()
    for place, (kind, member) in enumerate(zip(kinds, members, strict=True)):
        sampling = SamplingParams(max_new_tokens=STEPS - place)
        assert member.error is None
        assert member.tokens == plain_tokens(prefilled(place % 3), parts_of(), sampling), kind
    stats = dict(zip(kinds, [member.stats for member in members], strict=True))
    assert stats["itself"].num_accepted == stats["itself"].num_drafted > 0
    assert 0 < stats["alternating"].num_accepted < stats["alternating"].num_drafted


@pytest.mark.parametrize("strategy", ["sd_tree", "tabed"])
def test_what_states_cannot_be_kept_for_is_refused(strategy):
    way = SpeculativeConfig(strategy=strategy)
    with pytest.raises(InvalidConfigError, match=r"hybrid|linear attention|states"):
        build_engine(HOSTS, "qwen3_5", speculate=way)


def beside_job(hosts: HostGroup, request: dict, ways: list[dict | None]) -> list[list[int]]:
    answers = []
    for way in ways:
        speculate = None
        if way is not None:
            speculate = speculative_config(draft_host=True, keep_losing_draft=True, **way)
        engine = build_engine(hosts, "qwen3_5", speculate=speculate)
        answers.append(engine.generate(QUESTION, **request).token_ids)
    return answers


def test_a_draft_host_drafts_for_a_hybrid(pool, clip):
    request = {"video": str(clip), "num_frames": 12, "max_new_tokens": 9}
    ways = [{"strategy": "vanilla"}, {"strategy": "hippo", "keep_ratio": 0.3, "prune": "kv"}]
    (plain,) = beside_job(HOSTS, request, [None])
    for answers in pool.run(2, beside_job, request, ways):
        assert answers == [plain, plain]
