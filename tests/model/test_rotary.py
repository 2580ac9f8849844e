"""Rotary frequencies that depend on the length: those of the whole prompt on every host, and then
of the answer."""

import pytest
import torch

import apbv
from apbv import Engine, HostGroup, PrefillConfig, ReuseConfig, SpeculativeConfig

from apbv_tests import families
from apbv_tests.prompts import UNCOMPRESSED, kv_of, processed, relative_error, text_batch

TRAINED = 40  # positions
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
HALF = families.HEAD_DIM // 2
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + number / 10 for number in range(HALF)],
    "long_factor": [2.0 + number / 5 for number in range(HALF)],
    "original_max_position_embeddings": TRAINED,
    "factor": 4.0,
}
# Prompts that end before the trained length, as it ends, and beyond it.
LENGTHS = (TRAINED - 10, TRAINED - 3, TRAINED, TRAINED + 1, 90)
METHODS = ("zigzag_ring", "ulysses", "apbv", "full")


def model_of(family: str, rope: dict):
    """A model that was trained for few positions; a new one, as transformers remembers the longest
    prompt."""
    model = families.build_model(family)
    config = model.config.get_text_config()
    config.max_position_embeddings = 4 * TRAINED if rope["rope_type"] == "longrope" else TRAINED
    config.rope_parameters = {**config.rope_parameters, **rope}
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config)
    return model


def batch_of(family: str, length: int) -> dict:
    if family in families.TEXT_FAMILIES:
        return text_batch(length)
    tokens_per_frame = 16 if family == "internvl" else 4  # with the text before each
    return processed(family, families.synthetic_video(length // tokens_per_frame, 56, 70), "What?")


def prefills_job(hosts: HostGroup, family: str, rope: dict, method: str) -> list:
    """One model for all prompts, the longest first: it must not remember any."""
    model = model_of(family, rope)
    results = []
    config = PrefillConfig(method=method, passing_len=UNCOMPRESSED, anchor_len=8, query_len=6)
    for length in reversed(LENGTHS):
        state = apbv.prefill(model, batch_of(family, length), hosts=hosts, config=config)
        cache = kv_of(state.to_dynamic_cache())
        answer = Engine(model, families.build_processor(family), hosts).decode(
            state, max_new_tokens=6
        )
        results.append((state.logits, cache, answer.token_ids))
    return results


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "rope", "method", "num_hosts"),
    [
        ("llama", DYNAMIC, "zigzag_ring", 3),
        ("llama", LONGROPE, "ulysses", 2),
        ("qwen2", LONGROPE, "zigzag_ring", 2),
        ("internvl", DYNAMIC, "ulysses", 3),
        ("internvl", DYNAMIC, "apbv", 2),
        ("qwen2_5_vl", DYNAMIC, "zigzag_ring", 2),
        ("glm4", DYNAMIC, "full", 2),
        ("qwen3_next", DYNAMIC, "zigzag_ring", 2),
    ],
)
def test_prompts_and_answers_are_transformers(pool, family, rope, method, num_hosts):
    every = pool.run(num_hosts, prefills_job, family, rope, method)
    for length, *results in zip(reversed(LENGTHS), *every, strict=True):
        batch = batch_of(family, length)
        output = model_of(family, rope)(**batch, use_cache=True)
        for host, (logits, cache, _) in enumerate(results):
            assert relative_error(logits, output.logits[:, -1]) < 1e-4
            assert (cache is None) == (host > 0)
        for ours, theirs in zip(results[0][1], kv_of(output.past_key_values), strict=True):
            assert all(relative_error(*pair) < 1e-4 for pair in zip(ours, theirs, strict=True))
        generated = model_of(family, rope).generate(
            **batch, max_new_tokens=6, min_new_tokens=6, do_sample=False
        )
        for *_, tokens in results:
            assert tokens == generated[0, batch["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_a_draft_changes_no_token_of_a_long_answer(rope):
    """The answer grows beyond the trained length; the draft's guesses are verified several at a
    time."""
    hosts = HostGroup.single("cpu")
    processor = families.build_processor("qwen2")
    context = "abcdefgh" * (TRAINED // 10)
    question = {"prompt": "Why?", "context": context, "max_new_tokens": 40}
    alone = Engine(model_of("qwen2", rope), processor, hosts).generate(**question)
    speculate = SpeculativeConfig(strategy="vanilla", num_draft_tokens=4)
    draft = model_of("qwen2", rope)
    drafted = Engine(
        model_of("qwen2", rope), processor, hosts, speculate=speculate, draft=draft
    ).generate(**question)
    assert drafted.token_ids == alone.token_ids
    # The draft is the target: where it has the target's frequencies all that it drafts is accepted.
    speculation = drafted.stats["speculation"]
    assert speculation["num_accepted"] == speculation["num_drafted"] > 0


def test_keys_that_depend_on_the_length_are_neither_reused_nor_handed_to_vllm():
    model = model_of("qwen2", DYNAMIC)
    processor = families.build_processor("qwen2")
    hosts = HostGroup.single("cpu")
    with pytest.raises(ValueError, match="depend on the length of the prompt"):
        Engine(model, processor, hosts, reuse=ReuseConfig(mode="kv"))
    engine = Engine(model, processor, hosts)
    for offer in (
        engine.for_kv_export,
        lambda: engine.prefill("Why?", context="abc" * 9, positions="vllm"),
    ):
        with pytest.raises(ValueError, match="transfers keys to vLLM, whose rotary frequencies"):
            offer()
    assert "rotary frequencies" in engine.batching_obstacle
