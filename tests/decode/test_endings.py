"""Where answers end, by every way to decode: at end tokens, where the caller says, or before they
begin."""

import pytest
import torch

from apbv import (
    Engine,
    HostError,
    HostGroup,
    PrefillConfig,
    SamplingParams,
    demo,
)
from apbv.config import VideoConfig
from apbv.decode.answer import Answer
from apbv.request.request import Question, Request, RequestSettings
from apbv.stats import StageTimer

from apbv_tests.configs import speculative_config

QUESTION = "name the letters in order"
MOST = 12
VIDEO = {"video": demo.video_path(), "num_frames": 16}
WAYS = {
    "plain": None,
    "window": {},
    "tree": {"strategy": "sd_tree"},
    "beside": {"draft_host": True},
}
STOPPED = [("plain", 2, "gathered"), ("tree", 2, "sharded"), ("beside", 2, "gathered")]
DRAFTING = {"strategy": "vanilla", "draft_model": "demo", "keep_losing_draft": True}


def engine_of(way: str, hosts: HostGroup, kv: str = "gathered") -> Engine:
    speculate = None
    if WAYS[way] is not None:
        settings = {**DRAFTING, **WAYS[way]}
        speculate = speculative_config(**settings)
    prefill = PrefillConfig(kv=kv)
    return Engine.from_pretrained(
        "demo", hosts=hosts, prefill=prefill, speculate=speculate, dtype="float32"
    )


def asked(engine: Engine, **sampling):
    by = SamplingParams(max_new_tokens=MOST, **sampling)
    return engine.answer(
        Request(Question(QUESTION, **VIDEO), StageTimer(engine.hosts), RequestSettings(sampling=by))
    )


@pytest.fixture(scope="module")
def plain() -> Engine:
    return engine_of("plain", HostGroup.single())


@pytest.mark.parametrize("way", ["plain", "window", "tree"])
def test_every_way_heeds_end_tokens_alike(plain, way):
    engine = plain if way == "plain" else engine_of(way, HostGroup.single())
    usual = asked(plain).token_ids
    ends = set(plain.parts.eos_token_ids)
    assert asked(engine).token_ids == usual and len(ends & set(usual)) == 1 and usual[-1] in ends
    # An end token counts, though there may be none behind it.
    assert engine.generate(QUESTION, **VIDEO, max_new_tokens=len(usual)).finish_reason == "stop"
    assert (
        engine.generate(QUESTION, **VIDEO, max_new_tokens=len(usual) - 1).finish_reason == "length"
    )
    for fewest, ignores in ((0, True), (len(usual) + 2, False)):
        options = {"min_tokens": fewest, "ignore_eos": ignores}
        expected = asked(plain, **options)
        found = asked(engine, **options)
        assert found.token_ids == expected.token_ids
        assert found.finish_reason == expected.finish_reason
        assert len(found.token_ids) >= (MOST if ignores else fewest)
        assert not ends & set(found.token_ids[:fewest])
    # None is drawn too early.
    tokens = asked(engine, temperature=1.5, min_tokens=MOST - 2).token_ids
    assert len(tokens) >= MOST - 2 and not ends & set(tokens[: MOST - 2])


def test_only_rows_that_come_too_early_are_changed():
    logits = torch.randn(4, 9)
    answer = Answer(
        None, logits[0], 60, SamplingParams(max_new_tokens=8, min_tokens=2), (3, 5, 10**6)
    )
    allowed = answer.allowed(logits, [61, 62, 60, 63])
    expected = logits.clone()
    expected[0, [3, 5]] = expected[2, [3, 5]] = -torch.inf
    assert torch.equal(allowed, expected)
    assert answer.allowed(logits, [62]) is logits


def stops_job(hosts: HostGroup, way: str, kv: str) -> list:
    """An answer in full, then stopped after one token and after three; and how often host 0
    asked."""
    engine = engine_of(way, hosts, kv)
    answers = []
    for count in (MOST + 1, 1, 3):
        asked = []
        shown = []

        def stop(tokens, count=count, asked=asked) -> bool:
            asked.append(list(tokens))
            return len(tokens) == count

        answer = engine.generate(
            QUESTION, **VIDEO, max_new_tokens=12, stop=stop, on_token=shown.append
        )
        answers.append((answer.token_ids, answer.finish_reason, shown, asked))
    return answers


@pytest.mark.parametrize(("way", "hosts", "kv"), STOPPED)
def test_an_answer_ends_where_host_0_says(pool, way, hosts, kv):
    for rank, ((full, reason, *_), *answers) in enumerate(pool.run(hosts, stops_job, way, kv)):
        assert len(full) > 3 and reason == "stop"  # an end token
        for count, (tokens, reason, shown, asked) in zip((1, 3), answers, strict=True):
            assert (tokens, reason, shown) == (full[:count], "stop", full[:count])
            decoding = [tokens for tokens in asked if tokens]  # before, it is asked without any
            assert decoding == (
                [full[:length] for length in range(1, count + 1)] if rank == 0 else []
            )


def ended_early_job(hosts: HostGroup, fails: bool) -> list[str]:
    """What is raised where the caller cancels, or fails, when it is asked for the first, second,
    ... time."""
    prefill = PrefillConfig(video=VideoConfig(chunk_bytes=2**20))
    raised = []
    engine = Engine.from_pretrained("demo", hosts=hosts, prefill=prefill, dtype="float32")
    while True:
        number_asked = iter(range(100))

        def stop(tokens, number_asked=number_asked):
            is_now = not tokens and next(number_asked) == len(raised)
            if is_now and fails:
                raise ZeroDivisionError
            return is_now

        try:
            answer = engine.generate(QUESTION, **VIDEO, max_new_tokens=3, stop=stop)
            assert len(answer.token_ids) == 3
            return raised
        except Exception as error:
            assert not hosts.is_broken
            raised.append(type(error).__name__)


@pytest.mark.parametrize(("hosts", "fails"), [(1, False), (2, False), (2, True)])
def test_a_request_ends_on_every_host_between_chunks_and_layers(pool, hosts, fails):
    """As often as it is asked: before and after reading, before each of host 0's chunks and of four
    layers."""
    raised, *others = pool.run(hosts, ended_early_job, fails)
    chunks = 8 // hosts
    cancelled = "RequestCancelled"
    assert raised == ["ZeroDivisionError" if fails else cancelled] * (2 + chunks + 4)
    assert all(names == [cancelled] * len(raised) for names in others)


def fails_at_token_job(hosts: HostGroup, way: str, rank: int) -> tuple:
    """What is raised where a callback fails on one host at its second token, how many it heard, and
    how many came."""
    engine = engine_of(way, hosts)
    heard = []

    def on_token(token: int) -> None:
        heard.append(token)
        if len(heard) == 2 and hosts.rank == rank:
            raise KeyError("of the caller")

    with pytest.raises((KeyError, HostError), match="of the caller") as raised:
        engine.generate(QUESTION, **VIDEO, on_token=on_token)
    assert not hosts.is_broken
    return raised.type.__name__, len(heard), len(engine.generate(QUESTION, **VIDEO).token_ids)


@pytest.mark.parametrize(("way", "hosts", "rank"), [("plain", 2, 0), ("tree", 2, 1)])
def test_a_callback_that_fails_ends_its_answer_and_no_more(pool, way, hosts, rank):
    found = pool.run(hosts, fails_at_token_job, way, rank)
    assert [name for name, *_ in found] == [
        "KeyError" if host == rank else "HostError" for host in range(hosts)
    ]
    assert found[rank][1] == 2
    if rank == 0:  # which says where an answer ends
        assert all(num_heard < num_tokens for _, num_heard, num_tokens in found)
