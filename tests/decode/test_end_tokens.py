"""End tokens that are ignored, or not allowed yet, by every way to decode."""

import pytest
import torch

from apbv import Engine, HostGroup, SamplingConfig, SpeculativeConfig, demo
from apbv.decode.answer import Answer
from apbv.input.request import Question, Request
from apbv.stats import StageTimer

QUESTION, FRAMES, MOST = "name the letters in order", 24, 14
WAYS = {
    "plain": None,
    "window": SpeculativeConfig(strategy="vanilla", draft_model="demo", keep_losing_draft=True),
    "tree": SpeculativeConfig(strategy="sd_tree", draft_model="demo", keep_losing_draft=True),
    "thread": SpeculativeConfig(strategy="vanilla", draft_model="demo", draft_host=True, keep_losing_draft=True),
}


def asked(engine: Engine, **sampling):
    question = Question(QUESTION, video=demo.video_path(), num_frames=FRAMES)
    by = SamplingConfig(max_new_tokens=MOST, **sampling)
    return engine.answer(Request(question, StageTimer(engine.hosts), sampling=by))


def engine_of(way: str) -> Engine:
    return Engine.from_pretrained("demo", dtype="float32", speculate=WAYS[way], hosts=HostGroup.single())


@pytest.fixture(scope="module")
def plain() -> Engine:
    return engine_of("plain")


@pytest.mark.parametrize("way", WAYS)
def test_every_way_says_the_same(plain, way):
    engine = engine_of(way)
    (usual,) = {tuple(asked(each).token_ids) for each in (plain, engine)}
    (end,) = {token for token in plain.parts.eos_token_ids if token in usual}
    fewest = len(usual) + 2
    assert usual[-1] == end and fewest < MOST
    for options in ({"ignore_eos": True}, {"min_tokens": fewest}, {"min_tokens": fewest, "ignore_eos": True}):
        expected, found = asked(plain, **options), asked(engine, **options)
        assert found.token_ids == expected.token_ids and found.finish_reason == expected.finish_reason
        assert found.token_ids[: len(usual) - 1] == list(usual[:-1])
        assert len(found.token_ids) >= fewest
        if options.get("ignore_eos"):
            assert len(found.token_ids) == MOST and found.finish_reason == "length"
        if "min_tokens" in options:
            assert not set(plain.parts.eos_token_ids) & set(found.token_ids[:fewest])
        else:
            assert found.token_ids[len(usual) - 1] == end


@pytest.mark.parametrize("way", ["plain", "window", "tree"])
def test_none_is_drawn_too_early(way):
    engine = engine_of(way)
    for seed in range(3):
        tokens = asked(engine, temperature=1.5, seed=seed, min_tokens=MOST - 2).token_ids
        assert len(tokens) >= MOST - 2
        assert not set(engine.parts.eos_token_ids) & set(tokens[: MOST - 2])


def test_only_rows_that_come_too_early_are_changed():
    logits = torch.randn(4, 9)
    answer = Answer(None, logits[0], 60, SamplingConfig(max_new_tokens=8, min_tokens=2), (3, 5, 10**6))
    allowed = answer.allowed(logits, [61, 62, 60, 63])
    expected = logits.clone()
    expected[0, [3, 5]] = expected[2, [3, 5]] = -torch.inf
    assert torch.equal(allowed, expected)
    assert answer.allowed(logits, [62]) is logits


@pytest.mark.parametrize("given", [{"min_tokens": -1}, {"min_tokens": 9}, {"min_tokens": 1.5}, {"ignore_eos": 1}])
def test_what_is_refused(given):
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=rf"^{name} must .* not {value!r}$"):
        SamplingConfig(max_new_tokens=8, **given)
