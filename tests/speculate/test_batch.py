"""Answers that draft in one batch: those of each alone, and the target's distribution."""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from apbv import HostGroup, PrefillConfig, SamplingParams, prefill
from apbv.decode.answer import begin_answer
from apbv.kv import cache as kv_cache
from apbv.kv.select import select_kv
from apbv.model.parts import inspect_model
from apbv.request.request import Question, Request, RequestSettings
from apbv.request.sink import StopFunction
from apbv.speculate.drafters.draft import Draft
from apbv.speculate.drafters.drafters import ModelDrafter, NgramDrafter, ReadPrompt
from apbv.speculate.loops.pace import Pace
from apbv.speculate.loops.serial import generate_speculatively
from apbv.speculate.loops.speculative_batch import SpeculativeBatch
from apbv.stats import StageTimer

from apbv_tests import families
from apbv_tests.answers import answer_by, decoder_behind, plain_tokens
from apbv_tests.configs import speculative_config
from apbv_tests.drafters import PATTERNS, ScriptedDrafter
from apbv_tests.prompts import UNCOMPRESSED, as_inputs, build, text_batch
from apbv_tests.table_model import NUM_SAMPLES, TableModel, surprise_of, tables

STEPS = 8
GAMMA = 3
HOSTS = HostGroup.single()
SAMPLINGS = [SamplingParams(max_new_tokens=STEPS)] * 3
SAMPLINGS += [
    SamplingParams(max_new_tokens=STEPS, temperature=1.1, top_p=0.9, seed=seed) for seed in (5, 6)
]
SAMPLINGS += [SamplingParams(max_new_tokens=STEPS, logprobs=2, min_tokens=4)]
SAMPLINGS += [SamplingParams(max_new_tokens=STEPS, presence_penalty=0.5)]
SAMPLINGS += [replace(SAMPLINGS[4], repetition_penalty=1.3, frequency_penalty=0.4)]
FIXED = speculative_config(strategy="ngram", num_draft_tokens=GAMMA, keep_losing_draft=True)
AUTO = speculative_config(strategy="ngram", num_draft_tokens="auto")
NUM_PROMPTS = 3
NUM_BATCHES = 100


@cache
def parts_of(kind: str = "target"):
    """The target; itself with noise, which errs now and then; a model that gives NaN."""
    target = inspect_model(build("llama", torch.float64))
    if kind == "noisy":
        model = families.build_model("llama", dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            weight.data += 0.03 * weight.std() * torch.randn(weight.shape, generator=generator)
        return inspect_model(model)
    if kind == "layerskip":
        return target.with_first_layers(1)
    if kind == "nan":
        model = families.build_model("llama", dtype=torch.float64)
        model.lm_head.weight.data *= torch.nan
        return inspect_model(model)
    return target


@cache
def prefilled(number: int):
    inputs = as_inputs("llama", text_batch(30 + 7 * number), 20, HOSTS, torch.float64)
    model = build("llama", torch.float64)
    return prefill(model, inputs, hosts=HOSTS, config=PrefillConfig(passing_len=UNCOMPRESSED))


def state_of(number: int):
    """A prompt that nobody else answers."""
    state = prefilled(number)
    return replace(state, kv=state.kv.behind(state.layout))


@cache
def draft_prompt(kind: str, number: int) -> DynamicCache:
    """What a draft model makes of the prompt; of the target itself every other token."""
    state = prefilled(number)
    if kind in ("noisy", "nan"):
        cache = DynamicCache()
        parts_of(kind).language_model(input_ids=state.inputs.input_ids, past_key_values=cache)
        return cache
    if kind == "layerskip":
        return state.kv.first_layers(1)
    parts = parts_of()
    rows = torch.arange(state.num_tokens)
    if kind == "own KV":
        rows = rows[1::2]
    return select_kv(state.kv.whole, [rows.expand(parts.num_kv_heads, -1)] * parts.num_layers)


class Broken(NgramDrafter):
    model = None

    def propose(self, tokens, tree):
        raise RuntimeError("no memory")


def draft_of(kind: str, number: int, sampling: SamplingParams) -> Draft | None:
    if kind == "none":
        return None
    if kind == "ngram":
        return Draft(NgramDrafter(prefilled(number).inputs.input_ids[0].tolist()), 0)
    if kind == "broken":
        return Draft(Broken([]), 0)
    if kind in PATTERNS:
        return Draft(ScriptedDrafter(expected(number, sampling), PATTERNS[kind]), 0)
    parts = parts_of() if kind == "own KV" else parts_of(kind)
    state = prefilled(number)
    cache = DynamicCache()
    for index, layer in enumerate(draft_prompt(kind, number).layers):
        cache.update(layer.keys, layer.values, index)
    settings = (
        state.next_position,
        state.num_tokens,
        sampling,
        250 if kind in ("noisy", "nan") else parts.vocab_size,
        False,
        state.inputs.input_ids,
    )
    return Draft(ModelDrafter(parts, ReadPrompt(cache), *settings), 0)


@cache
def expected(number: int, sampling: SamplingParams) -> list[int]:
    return plain_tokens(prefilled(number), parts_of(), sampling)


@cache
def alone(kind: str, number: int, sampling: SamplingParams) -> list[int]:
    """The tokens of the same draft for this answer only."""
    answer = answer_by(decoder_behind(state_of(number), parts_of()), prefilled(number), sampling)
    draft = draft_of(kind, number, sampling)
    if kind == "own KV":
        draft.drafter.target = answer.decoder
    return generate_speculatively(answer, draft.drafter, Pace(GAMMA))[0]


def asked(sampling: SamplingParams, stop=None, **callbacks) -> Request:
    if stop is not None:
        callbacks["sink"] = StopFunction(stop)
    return Request(Question(), StageTimer(HOSTS), RequestSettings(sampling=sampling), **callbacks)


def out_of_memory(*_):
    raise MemoryError


MODELS = ["nan", "target", "noisy", "own KV", "layerskip"]


@pytest.mark.filterwarnings("ignore:decoding continues without the draft")
@pytest.mark.parametrize("config", [FIXED, AUTO])
def test_answers_that_come_and_go_are_those_of_each_alone(config, monkeypatch):
    """Sampled ones too, where the same windows draw with the same numbers."""
    monkeypatch.setattr(kv_cache, "GROWTH_ROWS", 3)  # so that buffers are left for new ones
    chance = random.Random(config.num_draft_tokens == "auto")
    accepted = 0
    is_fixed = config is FIXED
    for _ in range(NUM_BATCHES // 2):
        models = chance.sample(MODELS, 2)
        kinds = ["none", "ngram", "broken", *models * 2, *PATTERNS]
        batch = SpeculativeBatch(parts_of(), config)
        waiting = chance.randint(1, 4)
        going = {}
        left = {}
        batch.runs_ahead = chance.random() < 0.3
        if rests := not is_fixed and chance.random() < 0.1:
            batch.pace = lambda size: SimpleNamespace(windows=lambda rates: None)
        while waiting or len(batch):
            if waiting and (not len(batch) or chance.random() < 0.6):
                waiting -= 1
                kind = chance.choice(kinds)
                number = chance.randrange(NUM_PROMPTS)
                sampling = chance.choice(SAMPLINGS if is_fixed else SAMPLINGS[:1])
                if kind in PATTERNS and sampling.temperature:
                    kind = models[0]
                sampling = replace(
                    sampling, max_new_tokens=chance.randint(max(1, sampling.min_tokens), STEPS)
                )
                stop = chance.choice([STEPS, chance.randint(1, STEPS)])
                request = asked(sampling, stop=lambda tokens, stop=stop: len(tokens) == stop)
                member = batch.join(
                    begin_answer(parts_of(), state_of(number), request),
                    draft_of(kind, number, sampling),
                )
                going[member] = kind, number, sampling, stop, member.logprobs
            if chance.random() < 0.1:  # a fault: a pass that fails may be taken again
                with suppress(MemoryError), monkeypatch.context() as patch:
                    failing = chance.choice([batch._runner, *batch._draft_runners.values()])
                    patch.setattr(failing, "run", out_of_memory)
                    batch.step()
            batch.step()
            if going and chance.random() < 0.05:
                member = chance.choice(list(going))
                left[member] = len(member.tokens)
                batch.leave(member)
        for member, (kind, number, sampling, stop, logprobs) in going.items():
            assert member.error is None
            if sampling.temperature == 0 or kind in ("none", "broken", "nan"):
                tokens = expected(number, sampling)
            else:  # behind a draft, sampling uses other numbers than without one
                tokens = alone(kind, number, sampling)
            if member in left and not member.finish_reason:
                assert member.tokens == tokens[: left[member]]
            else:
                assert member.tokens == tokens[:stop], (kind, number, sampling)
            assert kind != "broken" or not member.stats.num_drafted
            assert not (rests and member.stats.rounds)
            assert member.stats.rounds <= member.stats.num_target_forwards
            if kind == "nan" and member.stats.num_drafted:
                assert "NaN" in member.stats.switched_off and member.stats.num_drafted <= 4
            if sampling.logprobs is not None:
                assert [each.top[0][0] for each in logprobs] == member.tokens  # greedy
                assert all(each.logprob == each.top[0][1] for each in logprobs)
            accepted += member.stats.num_accepted
    assert accepted > 40, accepted


def test_an_answer_whose_kv_cannot_be_taken_in_fails_alone(monkeypatch):
    """Also where the others draft in the same step."""

    def no_memory(*_):
        raise RuntimeError("no memory")

    batch = SpeculativeBatch(parts_of(), FIXED)
    sampling = SAMPLINGS[0]
    first = batch.join(
        begin_answer(parts_of(), state_of(0), asked(sampling)), draft_of("ngram", 0, sampling)
    )
    batch.step()
    second = batch.join(begin_answer(parts_of(), state_of(1), asked(sampling)))
    with monkeypatch.context() as patch:
        patch.setattr(batch, "_own", no_memory)
        batch.step()
    assert str(second.error) == "no memory"
    while len(batch):
        batch.step()
    assert first.error is None
    assert first.tokens == expected(0, sampling)


@pytest.mark.parametrize(("kind", "is_good"), [("target", True), ("own KV", False)])
def test_a_new_draft_is_expected_to_be_as_good_as_the_others(kind, is_good):
    """But not so bad that it would never be tried."""
    batch = SpeculativeBatch(parts_of(), FIXED)
    sampling = SAMPLINGS[0]
    rates = []
    for number in (0, 1):
        member = batch.join(
            begin_answer(parts_of(), state_of(number), asked(sampling)),
            draft_of(kind, number, sampling),
        )
        rates.append(member.acceptance.rate)
        while len(batch):
            batch.step()
    assert rates[0] == 0.5 and (0.7 < rates[1] < 1 if is_good else rates[1] == 0.5)


class TableKV:
    """KV of a model that depends on the last token only."""

    num_run = 0

    def __init__(self, layers, position, states):
        pass

    def make_room(self, count: int) -> None:
        pass


class TableRunner:
    """Runs a model whose logits are the rows of a table."""

    def __init__(self, parts):
        self.table = tables(4)

    def run(self, ids, kvs, counts=None, follows_drafted=False) -> torch.Tensor:
        return self.table[torch.as_tensor(ids)]


class TablePrompt(TableModel):
    """Begins an answer that a table gives; drafts with a model of its own for each seed."""

    prunes = False
    prompt_states = None

    def require_cache(self) -> DynamicCache:
        return self.cache

    def begin(self, sampling: SamplingParams):
        self.cache = DynamicCache()
        self.next_position = 0
        self.seed = sampling.seed
        return self.answer(sampling)


@pytest.mark.thorough
def test_sampled_answers_are_distributed_as_the_targets_own(monkeypatch):
    """Of windows that depend on the members' acceptance, while others come and go."""
    chance = random.Random(0)
    said = Counter()
    monkeypatch.setattr("apbv.decode.batch.BatchRunner", TableRunner)
    monkeypatch.setattr("apbv.decode.batch.OwnKV", TableKV)
    batch = SpeculativeBatch(parts_of(), replace(FIXED, num_draft_tokens="auto"))
    learn = Pace.learn
    monkeypatch.setattr(
        Pace, "learn", lambda pace, count, *_: learn(pace, count, 0.0, 1 + 0.2 * count)
    )
    members = set()
    seed = 0
    while members or seed < 2 * NUM_SAMPLES:
        while seed < 2 * NUM_SAMPLES and len(members) < 12 and chance.random() < 0.8:
            # A better draft, whose windows are longer, and one with a smaller vocabulary.
            q = tables(4) + tables(4, 1) / 3 if seed % 4 == 0 else tables(4, 1)[:, :3]
            prompt = TablePrompt(tables(4), q)
            sampling = SamplingParams(max_new_tokens=3, temperature=1.0, seed=seed)
            draft = Draft(prompt, 0) if seed % 5 else None
            members.add(batch.join(prompt.begin(sampling), draft))
            seed += 1
        batch.step()
        said.update(tuple(member.tokens) for member in members if member.has_ended)
        members = {member for member in members if not member.has_ended}
    assert surprise_of(said, TableModel(tables(4), tables(4))) < 4


def test_windows_of_the_highest_goodput():
    """Against all windows of three answers; a draft that pays for one answer is dropped for
    many."""

    def goodput(rates, windows, plain, cost):
        tokens = len(rates)
        for rate, window in zip(rates, windows, strict=True):
            tokens += sum(rate**place for place in range(1, window + 1))
        return tokens / (plain + cost * sum(windows))

    chance = random.Random(0)
    kinds = Counter()
    for _ in range(60):
        rates = [chance.random() for _ in range(3)]
        cost = chance.choice([0.05, 0.2, 0.6])
        pace = Pace(4, keep_losing_draft=False, size=3)
        for count in (12, 0, 0, 0, 12, 12, 12):
            pace.learn(count, 0.0, 1 + cost * count)
        found = pace.windows(rates)
        best = max(product(range(5), repeat=3), key=lambda each: goodput(rates, each, 1, cost))
        assert goodput(rates, found or [0] * 3, 1, cost) == pytest.approx(
            goodput(rates, best, 1, cost)
        )
        kinds[found is None, len(set(found or [0]))] += 1
    assert len(kinds) >= 3


def test_a_draft_is_dropped_at_a_batch_size_and_comes_back_at_a_smaller_one_or_later():
    batch = SpeculativeBatch(parts_of(), AUTO)
    pace = batch.pace
    seconds = {1: lambda count: 1 + 0.1 * count, 4: lambda count: 1 + 0.5 * count}

    def rounds(size, number):
        drafted = []
        for _ in range(number):
            windows = pace(size).windows([0.7] * size)
            if windows is None:
                return drafted, None
            drafted.append(sum(windows))
            pace(size).learn(drafted[-1], 0.0, seconds[size](drafted[-1]))
        return drafted, windows

    assert rounds(1, 9)[1] == [4]
    drafted, last = rounds(4, 9)
    assert last is None and drafted == [16, 0, 0, 0, 16, 16, 16]
    assert rounds(1, 9)[1] == [4]
    # Now the target is slower, whose contexts have grown.
    seconds[4] = lambda count: 4 + 0.5 * count
    assert any(pace(4).windows([0.7] * 4) for _ in range(2000)) and any(rounds(4, 9)[1])
    assert Pace(3, size=2).windows([0.1, 0.1]) == [3, 3]


def test_one_slow_round_drops_no_draft():
    """Nor do two, the first of which is slow everywhere."""
    pace = Pace("auto", keep_losing_draft=False, size=4)
    for count, seconds in ((16, 1000), (0, 1), (0, 1), (0, 1), (16, 1000)):
        pace.learn(count, 0.0, seconds)
    assert pace.windows([0.7] * 4) == [4] * 4
    for _ in range(2):
        pace.learn(16, 0.0, 1 + 0.1 * 16)
    assert any(pace.windows([0.7] * 4))
