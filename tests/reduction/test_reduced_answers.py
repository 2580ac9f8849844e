"""Answers to reduced prompts: every way to prefill, to keep KV and to draft."""

import pytest

from apbv import (
    Engine,
    HostGroup,
    PrefillConfig,
    ReduceConfig,
    ReuseConfig,
    SpeculativeConfig,
    demo,
)
from apbv.kv.offers import Offers
from apbv.prefilling.methods import METHODS

from apbv_tests.configs import speculative_config
from apbv_tests.families import build_model, build_processor

QUESTION = "name the letters in order"
NUM_TEXT = 15  # tokens of the prompt around the video
RATIO = 0.4


def engine_of(
    hosts: HostGroup, reducer: str, speculate: SpeculativeConfig | None = None, **settings
) -> Engine:
    reuse = settings.pop("reuse", None)
    prefill = PrefillConfig(reduce=ReduceConfig(method=reducer, ratio=RATIO), **settings)
    return Engine.from_pretrained(
        "demo", prefill=prefill, hosts=hosts, speculate=speculate, reuse=reuse
    )


def ask(engine: Engine, question: str = QUESTION):
    return engine.generate(question, video=demo.video_path(), num_frames=32, max_new_tokens=6)


def answer_job(hosts: HostGroup, reducer: str, settings: dict):
    """And the model's own ``generate`` says the same from the KV that is left."""
    engine = engine_of(hosts, reducer, **settings)
    answer = ask(engine)
    state = engine.prefill(QUESTION, video=demo.video_path(), num_frames=32)
    if arguments := state.generate_inputs():
        generated = engine.model.generate(**arguments, max_new_tokens=6, do_sample=False)
        assert generated[0, state.num_tokens :].tolist() == answer.token_ids
    return answer.token_ids, answer.stats, state.exact


@pytest.mark.parametrize(
    ("method", "reducer", "kv"),
    [
        ("star", "slowfast", "sharded"),
        ("ulysses", "dycoke", "gathered"),
        ("zigzag_ring", "fastvid", "sharded"),
    ],
)
def test_a_reduced_prompt_is_answered_with_its_figures(pool, method, reducer, kv):
    """By an exact method as one host does."""
    settings = {"method": method, "kv": kv, "anchor_len": 20, "passing_len": 24}
    for tokens, stats, exact in pool.run(2, answer_job, reducer, settings):
        assert stats["method"] == method and not exact
        figures = stats["reduction"]
        assert (figures["method"], figures["ratio"]) == (reducer, RATIO)
        assert figures["num_video_tokens_before"] == 64
        assert 24 <= figures["num_video_tokens_after"] == stats["num_video_tokens"] <= 26
        assert stats["num_input_tokens"] == NUM_TEXT + stats["num_video_tokens"]
        if METHODS[method].facts.is_exact:
            assert tokens == ask(engine_of(HostGroup.single("cpu"), reducer)).token_ids


def test_what_does_not_go_together_is_refused():
    hosts = HostGroup.single("cpu")
    engine = engine_of(hosts, "dycoke")
    beside = speculative_config(strategy="hippo", draft_host=True)
    with Offers(hosts) as offers:
        reduce = PrefillConfig(reduce=ReduceConfig(method="dycoke"))
        for message, refused in (
            (
                "transfers whole prompts",
                lambda: engine.prefill(QUESTION, video=demo.video_path()).offer(offers),
            ),
            ("transfers whole prompts", engine.for_kv_export),
            (
                "anew for every prompt",
                lambda: engine_of(hosts, "dycoke", reuse=ReuseConfig(mode="kv")),
            ),
            ("on a draft host choose another", lambda: engine_of(hosts, "dycoke", beside)),
            (
                "llama models",
                lambda: Engine(build_model("llama"), build_processor("llama"), hosts, reduce),
            ),
        ):
            with pytest.raises(ValueError, match=message):
                refused()


def reuse_job(hosts: HostGroup):
    engine = engine_of(hosts, "fastvid", reuse=ReuseConfig(mode="exact"), method="ulysses")
    first = ask(engine)
    second = ask(engine, "how many letters are shown")
    alone = ask(engine_of(hosts, "fastvid", method="ulysses"), "how many letters are shown")
    return [first.stats["reused"], second.stats["reused"]], second.token_ids, alone.token_ids


def test_embeddings_are_kept_whole_and_reduced_for_every_question(pool):
    for reused, tokens, expected in pool.run(2, reuse_job):
        assert reused == [None, "embeddings"] and tokens == expected


# ---- with a draft ----

DRAFTS = [{"strategy": "hippo", "prune": "kv"}, {"strategy": "std"}]
DRAFTS += [{"strategy": "specvlm", "keep": "uv_prune", "keep_ratio": 0.3}]


def draft_job(hosts: HostGroup):
    settings = {"anchor_len": 20, "passing_len": 24}
    found = []
    for draft in DRAFTS:
        config = speculative_config(keep_losing_draft=True, **draft)
        answer = ask(engine_of(hosts, "slowfast", config, **settings))
        found.append((answer.token_ids, answer.stats["speculation"]))
    return ask(engine_of(hosts, "slowfast", **settings)).token_ids, found


@pytest.mark.thorough
def test_a_draft_does_not_change_what_the_reduced_model_says(pool):
    """A draft model reads what it keeps of the whole prompt; the target's own drafts see what the
    target sees."""
    for plain, found in pool.run(2, draft_job):
        for draft, (tokens, figures) in zip(DRAFTS, found, strict=True):
            assert tokens == plain, draft
            assert figures["num_accepted"] > 0
            num_seen = figures["num_visual_tokens_drafted_from"]
            assert draft["strategy"] != "specvlm" or num_seen == round(0.3 * 64)
