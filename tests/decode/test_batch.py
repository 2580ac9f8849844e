"""Several answers decoded at a time say what each says alone; they come and go as they please."""

import random
import weakref
from dataclasses import replace

import pytest
import torch

from apbv import HostGroup, PrefillConfig, SamplingParams, prefill
from apbv.decode.answer import begin_answer
from apbv.decode.batch import Batch
from apbv.errors import ModelOutputError
from apbv.kv import cache as kv_cache
from apbv.model.parts import inspect_model
from apbv.request.request import Question, Request, RequestSettings
from apbv.request.sink import StopFunction
from apbv.stats import StageTimer

from apbv_tests.answers import plain_tokens
from apbv_tests.families import TEXT_FAMILIES
from apbv_tests.prompts import ALL_FAMILIES, UNCOMPRESSED, as_inputs, build, text_batch, video_batch

STEPS = 10
GREEDY = SamplingParams(max_new_tokens=STEPS)
SAMPLED = [
    SamplingParams(max_new_tokens=STEPS, temperature=1.5, top_p=0.9, seed=seed) for seed in (5, 6)
]
SAMPLED += [SamplingParams(max_new_tokens=STEPS, temperature=0.7, seed=7, top_k=9, min_p=0.01)]
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": -0.2}
SAMPLED += [
    SamplingParams(
        max_new_tokens=STEPS, logit_bias=((3, 0.5), (5, -9.0)), min_tokens=2, **PENALTIES
    )
]
# A token gives way once it came too often: none can be chosen before the one before it is known.
SAMPLED += [
    SamplingParams(
        max_new_tokens=STEPS, logit_bias=((3, 91.0), (5, 90.0), (7, 89.0)), frequency_penalty=2.0
    )
]


def prompt(family: str, number: int) -> tuple[dict, int | None]:
    """One of a family's prompts, no two equally long, and where its question begins if it is a
    text."""
    if family in TEXT_FAMILIES:
        return text_batch(40 + 17 * number), 30
    return video_batch(family, 9 + 8 * number), None


def prefilled(family: str = "llama", number: int = 0, kv: str = "gathered"):
    hosts = HostGroup.single()
    inputs = as_inputs(family, *prompt(family, number), hosts)
    config = PrefillConfig(kv=kv, passing_len=UNCOMPRESSED)
    return prefill(build(family, torch.float32), inputs, hosts=hosts, config=config)


def parts_of(family: str = "llama", eos: tuple[int, ...] = ()):
    """A model's parts; its answers end with these tokens."""
    parts = inspect_model(build(family, torch.float32))
    parts.model.generation_config.eos_token_id = list(eos) or None
    return parts


def asked(state, sampling: SamplingParams = GREEDY, stop=None, **callbacks) -> Request:
    if stop is not None:
        callbacks["sink"] = StopFunction(stop)
    return Request(
        Question(), StageTimer(state.kv.hosts), RequestSettings(sampling=sampling), **callbacks
    )


def run(batch: Batch) -> None:
    while len(batch):
        assert batch.step()


def alone(state, parts, sampling: SamplingParams = GREEDY) -> list[int]:
    return plain_tokens(state, parts, sampling, parts.eos_token_ids)


@pytest.mark.shows("batches")
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_members_that_come_and_go_say_what_each_says_alone(family):
    parts = parts_of(family)
    batch = Batch(parts)
    members = []
    for number, wait in enumerate((0, 3, 1)):
        for _ in range(wait):
            batch.step()
        state = prefilled(family, number)
        request = asked(state, replace(GREEDY, max_new_tokens=STEPS - 2 * number))
        members.append(batch.join(begin_answer(parts, state, request)))
    run(batch)
    for number, member in enumerate(members):
        expected = alone(prefilled(family, number), parts)
        assert len(set(expected)) > 2
        assert member.tokens == expected[: STEPS - 2 * number], number
        assert member.finish_reason == "length" and member.error is None


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_walk_with_every_way_to_choose(is_ahead, monkeypatch):
    """Ahead: as a GPU gets a step before the tokens of the last one are read."""
    monkeypatch.setattr(kv_cache, "GROWTH_ROWS", 3)  # so that buffers are left for new ones
    chance = random.Random(int(is_ahead))
    parts = parts_of()
    choices = [GREEDY, *SAMPLED]
    samplings = [
        replace(chance.choice(choices), max_new_tokens=chance.randint(1, STEPS)) for _ in range(6)
    ]
    stops = [chance.choice([STEPS, chance.randint(1, STEPS)]) for _ in samplings]
    batch = Batch(parts)
    members = []
    left = {}
    batch.runs_ahead = is_ahead
    while len(batch) or len(members) < len(samplings):
        if len(members) < len(samplings) and chance.random() < 0.5:
            state = prefilled("llama", len(members))
            most = stops[len(members)]
            request = asked(
                state, samplings[len(members)], stop=lambda tokens, most=most: len(tokens) == most
            )
            members.append(batch.join(begin_answer(parts, state, request)))
        going = [number for number, member in enumerate(members) if not member.has_ended]
        if going and chance.random() < 0.1:
            number = chance.choice(going)
            left[number] = len(members[number].tokens)
            batch.leave(members[number])
        assert all(member in members for member in batch.step())
    for number, member in enumerate(members):
        assert member.error is None
        expected = alone(prefilled("llama", number), parts, samplings[number])[: stops[number]]
        assert member.tokens == expected[: left.get(number, STEPS)], number
        if number in left:
            assert member.finish_reason is None
        elif len(member.tokens) == samplings[number].max_new_tokens:
            assert member.finish_reason == "length"
        else:
            assert member.finish_reason == "stop"


def test_first_tokens_come_before_anybody_is_decoded_further():
    """And the prompt can be answered again."""
    parts = parts_of()
    one = prefilled()
    other = prefilled("llama", 1)
    batch = Batch(parts)
    first = batch.join(begin_answer(parts, one, asked(one)))
    assert batch.step() == [first] and batch.step() == [first]
    second = batch.join(begin_answer(parts, other, asked(other)))
    assert batch.step() == [second] and batch.step() == [first, second]
    run(batch)
    again = batch.join(begin_answer(parts, one, asked(one)))
    run(batch)
    assert first.tokens == again.tokens == alone(one, parts)


def test_a_step_whose_members_have_all_ended_is_forgotten():
    """It was given ahead; nobody waits for its tokens."""
    state = prefilled()
    batch = Batch(parts_of())
    batch.runs_ahead = True
    ends = batch.join(
        begin_answer(parts_of(), state, asked(state, stop=lambda tokens: len(tokens) == 2))
    )
    assert batch.step() == [ends] and batch.step() == [ends] and ends.has_ended
    other = prefilled("llama", 1)
    goes_on = batch.join(begin_answer(parts_of(), other, asked(other)))
    for count in (1, 2, 3):
        assert batch.step() == [goes_on] and len(goes_on.tokens) == count


def test_end_tokens(request):
    request.addfinalizer(parts_of)
    state = prefilled()
    sampling = SAMPLED[0]
    free = alone(state, parts_of(), sampling)
    parts = parts_of("llama", (free[4], 10**6))
    batch = Batch(parts)
    first = free.index(free[4]) + 1
    options = [{}, {"ignore_eos": True}, {"min_tokens": first}, {"min_tokens": first + 1}]
    by = [replace(sampling, **each) for each in options]
    members = [batch.join(begin_answer(parts, prefilled(), asked(state, each))) for each in by]
    run(batch)
    assert [member.tokens for member in members] == [alone(state, parts, each) for each in by]
    assert [member.finish_reason for member in members[:2]] == ["stop", "length"]
    assert members[0].tokens == free[:first] and members[1].tokens == free
    assert free[4] not in members[3].tokens[: first + 1]


@pytest.mark.parametrize("fails", ["first", "later", "callback"])
def test_a_member_fails_alone(fails):
    parts = parts_of()
    one = prefilled()
    other = prefilled("llama", 1)
    batch = Batch(parts)
    expected = alone(other, parts)
    on_token = (lambda token: 1 / 0) if fails == "callback" else None
    if fails == "first":
        one.logits = one.logits * torch.nan
    broken = batch.join(begin_answer(parts, one, asked(one, on_token=on_token)))
    going = batch.join(begin_answer(parts, other, asked(other)))
    if fails == "later":
        batch.step()
        for layer in one.kv.cache.layers:
            layer.values[:] = torch.nan
    run(batch)
    assert isinstance(broken.error, ZeroDivisionError if fails == "callback" else ModelOutputError)
    assert broken.has_ended and broken.finish_reason is None
    assert going.error is None and going.tokens == expected


@pytest.mark.parametrize("failing", ["forward", "choose_each"])
def test_a_step_that_fails_may_be_taken_again(monkeypatch, failing):
    """In the model, or in sampling; also where an answer has ended in it, for which there was no
    memory."""
    parts = parts_of()
    states = [prefilled("llama", number) for number in range(3)]
    batch = Batch(parts)
    *members, last = [batch.join(begin_answer(parts, state, asked(state))) for state in states]
    for _ in range(3):
        batch.step()
    with monkeypatch.context() as patch:
        # A RuntimeError, as of an allocator.
        patch.setattr(last.kv, "make_room", lambda count: torch.empty(-1))
        owner = "apbv.decode.batch" if failing == "choose_each" else "apbv.runner.batch_steps"
        patch.setattr(f"{owner}.{failing}", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batch.step()
    assert [len(member.tokens) for member in members] == [3, 3] and last.has_ended
    run(batch)
    assert [member.tokens for member in members] == [alone(state, parts) for state in states[:2]]


def test_whoever_ends_lets_go_of_the_kv():
    batch = Batch(parts_of())
    members = []
    kept = []
    for number in range(2):
        state = prefilled("llama", number)
        members.append(
            batch.join(
                begin_answer(
                    parts_of(), state, asked(state, replace(GREEDY, max_new_tokens=2 + number))
                )
            )
        )
        kept.append(weakref.ref(state.kv.cache.layers[-1]))
        del state
    batch.step()
    assert all(layer() is not None for layer in kept)
    batch.step()
    assert members[0].has_ended and kept[0]() is None and kept[1]() is not None
    batch.leave(members[1])
    batch.leave(members[1])  # for nothing
    assert kept[1]() is None and not len(batch) and batch.step() == []


def test_what_is_not_decoded_together(monkeypatch):
    parts = parts_of()
    state = prefilled(kv="sharded")
    with pytest.raises(ValueError, match="gathered on this host"):
        Batch(parts).join(begin_answer(parts, state, asked(state)))
    monkeypatch.setitem(parts.language_model.config.rope_parameters, "rope_type", "dynamic")
    with pytest.raises(
        ValueError, match=r"rotary frequencies depend on the length of a sequence \(dynamic\)"
    ):
        Batch(parts)
    monkeypatch.setitem(vars(parts), "tensor_parallel", (0, 2))
    with pytest.raises(ValueError, match="cannot batch answers: a host"):
        Batch(parts)
