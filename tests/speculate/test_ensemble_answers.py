"""TABED through the engine: answers, captions, and what is refused."""

import copy
import runpy
import threading

import pytest
import torch

from apbv import HostGroup, SpeculativeConfig
from apbv.hosts import HostError
from apbv.speculate.ensemble import EnsembleDrafter

from engines import CAPTION, QUESTION, build_engine
from scripts import INFER


def caption(prompt) -> str:
    """A captioner; it sees the source and the question."""
    assert prompt.videos or prompt.pictures
    assert QUESTION in prompt.text
    return CAPTION


WAYS = [
    {"strategy": "tabed", "ensemble": "MT", "keep_ratio": 0.3},
    {"strategy": "tabed", "ensemble": "MTCP*", "keep": "hippo", "keep_ratio": 0.3},
    {"strategy": "tabed", "ensemble": "MTCP*", "keep": "full", "num_draft_tokens": 3},
]


def answers_job(hosts: HostGroup, family: str, kv: str, ways: list, request: dict, draft_seed: int):
    answers = []
    for way in ways:
        speculate = None if way is None else SpeculativeConfig(keep_losing_draft=True, **way)
        engine = build_engine(hosts, family, kv, speculate, draft_seed, caption)
        answer = engine.generate(QUESTION, max_new_tokens=24, **request)
        answers.append((answer.token_ids, answer.stats["speculation"]))
    return answers


@pytest.mark.parametrize(
    ("family", "num_hosts", "kv"),
    [
        ("qwen2_5_vl", 1, "gathered"),
        pytest.param("qwen2_5_vl", 2, "sharded", marks=pytest.mark.thorough),
        pytest.param("qwen2_5_vl", 3, "gathered", marks=pytest.mark.thorough),
        ("qwen3_vl", 3, "sharded"),
        pytest.param("internvl", 2, "gathered", marks=pytest.mark.thorough),
    ],
)
def test_no_ensemble_changes_an_answer(pool, clip, family, num_hosts, kv):
    request = {"video": str(clip), "num_frames": 12}
    for answers in pool.run(num_hosts, answers_job, family, kv, [None, *WAYS], request, 1):
        plain = answers[0][0]
        assert len(set(plain)) > 3
        for way, (tokens, figures) in zip(WAYS, answers[1:], strict=True):
            assert tokens == plain, way
            assert figures["ensemble"] == way["ensemble"] and figures["num_drafted"] > 0


def test_a_context_that_is_always_right_takes_over(pool, clip):
    """The target itself drafts; one context is its own prompt. Only the first block can be wrong."""
    request = {"video": str(clip), "num_frames": 12}
    way = {"strategy": "tabed", "ensemble": "MT*", "keep": "full", "num_draft_tokens": 2}
    for plain, (tokens, figures) in pool.run(2, answers_job, "qwen2_5_vl", "gathered", [None, way], request, 0):
        assert tokens == plain[0]
        assert figures["num_drafted"] - figures["num_accepted"] <= 2
    request |= {"temperature": 0.9, "top_p": 0.9, "seed": 3}
    way["num_draft_tokens"] = 1
    for ((tokens, figures),) in pool.run(2, answers_job, "qwen2_5_vl", "sharded", [way], request, 0):
        assert len(tokens) == 24 and figures["num_drafted"] - figures["num_accepted"] <= 1


def test_text_prompts_have_one_context_and_need_no_caption(pool):
    context = {"context": "one two three four five six seven eight nine ten " * 3}
    ways = [None, {"strategy": "tabed", "ensemble": "MTCP*"}, {"strategy": "vanilla"}]
    for plain, ensemble, vanilla in pool.run(2, answers_job, "llama", "gathered", ways, context, 1):
        assert ensemble[0] == plain[0]
        assert ensemble[1]["num_accepted"] == vanilla[1]["num_accepted"]


def beside_job(hosts: HostGroup, path: str):
    """The target's first layer waits until the captioner is at work, which waits until the last one is reached."""
    is_captioning, is_at_last = threading.Event(), threading.Event()

    def slow(prompt) -> str:
        is_captioning.set()
        assert is_at_last.wait(60), "the captioner waits in vain for the target"
        return caption(prompt)

    def enter_first(*args) -> None:
        assert hosts.rank or is_captioning.wait(60), "the target waits in vain for the captioner"

    speculate = SpeculativeConfig(strategy="tabed", ensemble="MTCP*", keep_losing_draft=True)
    engine = build_engine(hosts, "qwen2_5_vl", "gathered", speculate, 1, slow)
    layers = engine.model.get_decoder().layers
    layers[0].register_forward_pre_hook(enter_first)
    layers[-1].register_forward_pre_hook(lambda *args: is_at_last.set())
    return [engine.generate(QUESTION, video=path, num_frames=6, max_new_tokens=4).token_ids for _ in range(2)]


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_the_caption_is_made_while_the_target_prefills(pool, clip, num_hosts):
    results = pool.run(num_hosts, beside_job, str(clip))
    assert all(answers == results[0] and answers[0] == answers[1] for answers in results)


def failing(prompt) -> str:
    raise RuntimeError("no such model")


def blank(prompt) -> str:
    return " \n"


def errors_job(hosts: HostGroup, captioner, path: str):
    speculate = SpeculativeConfig(strategy="tabed", ensemble="MTCP*")
    try:
        engine = build_engine(hosts, "qwen2_5_vl", "gathered", speculate, 1, captioner)
        engine.generate(QUESTION, video=path, num_frames=6, max_new_tokens=4)
    except (ValueError, HostError) as error:
        said = str(error)
    engine = build_engine(hosts, "qwen2_5_vl", "gathered", speculate, 1, caption)  # the hosts are as they were
    return said, engine.generate(QUESTION, video=path, num_frames=6, max_new_tokens=4).token_ids


@pytest.mark.parametrize(
    ("captioner", "message"),
    [
        (failing, "the captioner failed: RuntimeError: no such model"),
        (blank, "the captioner returned ' \\n' instead of a caption"),
    ],
)
def test_a_captioner_that_fails_is_one_clear_error_everywhere(pool, clip, captioner, message):
    (first, tokens), (second, others) = pool.run(2, errors_job, captioner, str(clip))
    assert first == message and message in second and "host 0 failed in captioning" in second
    assert tokens == others and len(tokens) == 4


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match=r"ensemble must be different letters of MTCP.*not 'MM'"):
        SpeculativeConfig(strategy="tabed", ensemble="MM")
    hosts = HostGroup.single()
    with pytest.raises(ValueError, match=r"the ensemble MTCP\* drafts from a caption: it needs a captioner"):
        build_engine(hosts, "qwen2_5_vl", "gathered", SpeculativeConfig(strategy="tabed", ensemble="MTCP*"), 1)


def draft_host_job(hosts: HostGroup):
    config = SpeculativeConfig(strategy="tabed", draft_host=True)
    try:
        build_engine(hosts, "qwen2_5_vl", "gathered", config, 1)
    except ValueError as error:
        return str(error)


def test_an_ensemble_does_not_draft_on_a_host_of_its_own(pool):
    for said in pool.run(2, draft_host_job):
        assert said == "tabed learns from every verification before it drafts on: not on a draft host"


@pytest.mark.parametrize("captioner", ["no.such.module:caption", "json:caption"])
def test_the_command_line_names_a_captioner_that_is_not_there(captioner, capsys):
    script = runpy.run_path(str(INFER))
    assert (
        script["main"](["--model", "demo", "--speculate", "tabed", "--ensemble", "MTCP", "--captioner", captioner])
        == 1
    )
    assert f"cannot load {captioner}, which should be MODULE:FUNCTION" in capsys.readouterr().err


def test_contexts_of_several_lengths_are_read_by_the_models_own_attention(clip, monkeypatch):
    """That alone knows of the padding; apbv's is in force around it while an answer is decoded."""
    run, ran = EnsembleDrafter._run_contexts, []

    def recorded(drafter, tokens):
        before = copy.copy(drafter), copy.deepcopy(drafter._cache), list(drafter._cached)
        ran.append((before, tokens, run(drafter, tokens)))
        return ran[-1][-1]

    monkeypatch.setattr(EnsembleDrafter, "_run_contexts", recorded)
    speculate = SpeculativeConfig(strategy="tabed", ensemble="MT", keep_losing_draft=True)
    engine = build_engine(HostGroup.single(), "qwen2_5_vl", "gathered", speculate, 1)
    engine.generate(QUESTION, video=str(clip), num_frames=8, max_new_tokens=12)
    assert len(ran) > 3
    for (drafter, cache, cached), tokens, logits in ran:
        drafter._cache, drafter._cached = cache, cached
        torch.testing.assert_close(logits, run(drafter, tokens))
