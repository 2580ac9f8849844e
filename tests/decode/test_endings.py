"""Where answers end, by every way to decode: at end tokens, where the caller says, or before they begin."""

import pytest
import torch

from apbv import Engine, HostGroup, PrefillConfig, RequestCancelled, SamplingParams, SpeculativeConfig, demo
from apbv.decode.answer import Answer
from apbv.input.request import Question, Request
from apbv.stats import StageTimer

QUESTION, MOST = "name the letters in order", 12
VIDEO = {"video": demo.video_path(), "num_frames": 16}
WAYS = {"plain": None, "window": {}, "tree": {"strategy": "sd_tree"}, "thread": {"draft_host": True}}
STOPPED = [("plain", 2, "gathered"), ("tree", 2, "sharded"), ("thread", 1, "gathered")]
DRAFTING = {"strategy": "vanilla", "draft_model": "demo", "keep_losing_draft": True}


def engine_of(way: str, hosts: HostGroup, kv: str = "gathered") -> Engine:
    speculate = None if WAYS[way] is None else SpeculativeConfig(**{**DRAFTING, **WAYS[way]})
    prefill = PrefillConfig(kv=kv)
    return Engine.from_pretrained("demo", hosts=hosts, prefill=prefill, speculate=speculate, dtype="float32")


def asked(engine: Engine, **sampling):
    by = SamplingParams(max_new_tokens=MOST, **sampling)
    return engine.answer(Request(Question(QUESTION, **VIDEO), StageTimer(engine.hosts), sampling=by))


@pytest.fixture(scope="module")
def plain() -> Engine:
    return engine_of("plain", HostGroup.single())


@pytest.mark.parametrize("way", WAYS)
def test_every_way_heeds_end_tokens_alike(plain, way):
    engine = plain if way == "plain" else engine_of(way, HostGroup.single())
    usual, ends = asked(plain).token_ids, set(plain.parts.eos_token_ids)
    assert asked(engine).token_ids == usual and len(ends & set(usual)) == 1 and usual[-1] in ends
    # An end token counts, though there may be none behind it.
    assert engine.generate(QUESTION, **VIDEO, max_new_tokens=len(usual)).finish_reason == "stop"
    assert engine.generate(QUESTION, **VIDEO, max_new_tokens=len(usual) - 1).finish_reason == "length"
    for fewest, ignores in ((0, True), (len(usual) + 2, False)):
        options = {"min_tokens": fewest, "ignore_eos": ignores}
        expected, found = asked(plain, **options), asked(engine, **options)
        assert found.token_ids == expected.token_ids and found.finish_reason == expected.finish_reason
        assert len(found.token_ids) >= (MOST if ignores else fewest)
        assert not ends & set(found.token_ids[:fewest])
    if way != "thread":  # none is drawn too early
        tokens = asked(engine, temperature=1.5, min_tokens=MOST - 2).token_ids
        assert len(tokens) >= MOST - 2 and not ends & set(tokens[: MOST - 2])


def test_only_rows_that_come_too_early_are_changed():
    logits = torch.randn(4, 9)
    answer = Answer(None, logits[0], 60, SamplingParams(max_new_tokens=8, min_tokens=2), (3, 5, 10**6))
    allowed = answer.allowed(logits, [61, 62, 60, 63])
    expected = logits.clone()
    expected[0, [3, 5]] = expected[2, [3, 5]] = -torch.inf
    assert torch.equal(allowed, expected)
    assert answer.allowed(logits, [62]) is logits


def stops_job(hosts: HostGroup, way: str, kv: str) -> list:
    """An answer in full, then stopped after one token and after three; and how often host 0 asked."""
    engine, answers = engine_of(way, hosts, kv), []
    for count in (MOST + 1, 1, 3):
        asked, shown = [], []

        def stop(tokens, count=count, asked=asked) -> bool:
            asked.append(list(tokens))
            return len(tokens) == count

        answer = engine.generate(QUESTION, **VIDEO, max_new_tokens=12, stop=stop, on_token=shown.append)
        answers.append((answer.token_ids, answer.finish_reason, shown, asked))
    return answers


@pytest.mark.parametrize(("way", "hosts", "kv"), STOPPED)
def test_an_answer_ends_where_host_0_says(pool, way, hosts, kv):
    for rank, ((full, reason, *_), *answers) in enumerate(pool.run(hosts, stops_job, way, kv)):
        assert len(full) > 3 and reason == "stop"  # an end token
        for count, (tokens, reason, shown, asked) in zip((1, 3), answers, strict=True):
            assert (tokens, reason, shown) == (full[:count], "stop", full[:count])
            before = [[], []]  # before the prompt is read, and after
            assert asked == (before + [full[:length] for length in range(1, count + 1)] if rank == 0 else [])


def ended_early_job(hosts: HostGroup) -> list[str]:
    """What is said of requests that are cancelled before they begin, or whose caller fails when asked."""
    engine, said = engine_of("plain", hosts), []
    for said_first, error in (([True], RequestCancelled), ([False, True], RequestCancelled), ([], Exception)):
        answers = iter(said_first)
        with pytest.raises(error) as ended:
            stop = (lambda tokens, answers=answers: next(answers)) if said_first else (lambda tokens: 1 / 0)
            engine.generate(QUESTION, **VIDEO, max_new_tokens=3, stop=stop)
        assert not hosts.is_broken
        said.append(str(ended.value))
    assert len(engine.generate(QUESTION, **VIDEO, max_new_tokens=3).token_ids) == 3
    return said


def test_a_request_that_is_cancelled_or_whose_caller_fails_ends_on_every_host(pool):
    for first, second, failed in pool.run(2, ended_early_job):
        assert "cancelled before" in first and "cancelled before" in second and "division" in failed
