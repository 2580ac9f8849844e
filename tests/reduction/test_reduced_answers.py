"""Answers to prompts that are reduced before the language model: every way to prefill, to keep KV and to draft."""

import pytest

from apbv import Engine, HostGroup, PrefillConfig, ReduceConfig, ReuseConfig, SpeculativeConfig, demo
from apbv.kv.offers import Offers
from apbv.prefilling.methods import METHODS

from families import build_model, build_processor

QUESTION = "name the letters in order"
NUM_TEXT = 15  # tokens of the prompt around the video
RATIO = 0.4


def engine_of(hosts: HostGroup, reducer: str, speculate: SpeculativeConfig | None = None, **settings) -> Engine:
    reuse = settings.pop("reuse", None)
    prefill = PrefillConfig(reduce=ReduceConfig(method=reducer, ratio=RATIO), **settings)
    return Engine.from_pretrained("demo", prefill=prefill, hosts=hosts, speculate=speculate, reuse=reuse)


def ask(engine: Engine, question: str = QUESTION):
    return engine.generate(question, video=demo.video_path(), num_frames=32, max_new_tokens=6)


def answer_job(hosts: HostGroup, reducer: str, settings: dict):
    answer = ask(engine_of(hosts, reducer, **settings))
    return answer.token_ids, answer.stats


@pytest.mark.parametrize(
    ("method", "reducer", "kv"),
    [("star", "slowfast", "sharded"), ("ulysses", "dycoke", "gathered")],
)
def test_a_reduced_prompt_is_answered_with_its_figures(pool, method, reducer, kv):
    """By an exact method as one host does."""
    settings = {"method": method, "kv": kv, "anchor_len": 20, "passing_len": 24}
    for tokens, stats in pool.run(2, answer_job, reducer, settings):
        assert stats["method"] == method
        figures = stats["reduction"]
        assert (figures["method"], figures["ratio"]) == (reducer, RATIO)
        assert figures["num_video_tokens_before"] == 64
        assert 24 <= figures["num_video_tokens_after"] == stats["num_video_tokens"] <= 26
        assert stats["num_input_tokens"] == NUM_TEXT + stats["num_video_tokens"]
        if METHODS[method].is_exact:
            assert tokens == ask(engine_of(HostGroup.single("cpu"), reducer)).token_ids


def kept_kv_job(hosts: HostGroup):
    engine = engine_of(hosts, "fastvid", method="zigzag_ring", kv="sharded")
    state = engine.prefill(QUESTION, video=demo.video_path(), num_frames=32)
    expected = engine.decode(state, max_new_tokens=8).token_ids
    arguments = state.generate_inputs()
    if arguments:
        generated = engine.model.generate(**arguments, max_new_tokens=8, do_sample=False)
        assert generated[0, state.num_tokens :].tolist() == expected
    return state.num_tokens, state.exact


def test_the_kv_of_a_reduced_prompt_is_decoded_and_generated_from(pool):
    assert pool.run(2, kept_kv_job) == [(NUM_TEXT + round(RATIO * 64), False)] * 2


def test_what_does_not_go_together_is_refused():
    hosts = HostGroup.single("cpu")
    engine = engine_of(hosts, "dycoke")
    with Offers(hosts) as offers:
        for refused in (
            lambda: engine.prefill(QUESTION, video=demo.video_path()).offer(offers),
            engine.handing_over,
        ):
            with pytest.raises(ValueError, match="shortened cannot be handed over"):
                refused()
    with pytest.raises(ValueError, match="chooses visual tokens anew for every prompt"):
        engine_of(hosts, "hippo", reuse=ReuseConfig(mode="kv"))
    with pytest.raises(ValueError, match="leaves some of that out: on a draft host choose another"):
        engine_of(hosts, "hippo", SpeculativeConfig(strategy="hippo", draft_host=True))
    reduce = PrefillConfig(reduce=ReduceConfig(method="hippo"))
    with pytest.raises(ValueError, match="llama models read text only"):
        Engine(build_model("llama"), build_processor("llama"), hosts, reduce)


def reuse_job(hosts: HostGroup):
    engine = engine_of(hosts, "fastvid", reuse=ReuseConfig(mode="exact"), method="ulysses")
    first, second = ask(engine), ask(engine, "how many letters are shown")
    alone = ask(engine_of(hosts, "fastvid", method="ulysses"), "how many letters are shown")
    return [first.stats["reused"], second.stats["reused"]], second.token_ids, alone.token_ids


def test_embeddings_are_kept_whole_and_reduced_for_every_question(pool):
    for reused, tokens, expected in pool.run(2, reuse_job):
        assert reused == [None, "embeddings"] and tokens == expected


# ---- with a draft ----

DRAFTS = [
    {"strategy": "hippo", "prune": "kv"},
    {"strategy": "std"},
    {"strategy": "specvlm", "keep": "similarity", "keep_ratio": 0.3},
]


def draft_job(hosts: HostGroup):
    settings, found = {"anchor_len": 20, "passing_len": 24}, []
    for draft in DRAFTS:
        config = SpeculativeConfig(keep_losing_draft=True, **draft)
        answer = ask(engine_of(hosts, "slowfast", config, **settings))
        found.append((answer.token_ids, answer.stats["speculation"], answer.kept))
    return ask(engine_of(hosts, "slowfast", **settings)).token_ids, found


def test_a_draft_does_not_change_what_the_reduced_model_says(pool):
    """A draft model reads what it keeps of the whole prompt; the target's own drafts see what the target sees."""
    for plain, found in pool.run(2, draft_job):
        for draft, (tokens, figures, kept) in zip(DRAFTS, found, strict=True):
            assert tokens == plain, draft
            assert figures["num_accepted"] > 0
            if kept is not None:
                assert kept.sum() == figures["num_visual_tokens_drafted_from"] and kept.numel() == 64
            assert draft["strategy"] != "specvlm" or kept.sum() == round(0.3 * 64)
