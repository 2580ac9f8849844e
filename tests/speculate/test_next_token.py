"""Drafts by the multi-token prediction layer of a checkpoint."""

import random
from functools import cache
from shutil import copytree
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from apbv import Engine, HostGroup, PrefillConfig, ReduceConfig, SamplingParams
from apbv.kv.cache import appending_in_place, growing_layers
from apbv.runner.batch_steps import OwnKV
from apbv.runner.outputs import TokenOutputs
from apbv.speculate.drafters.next_token import NextTokenDrafter, NextTokenKV
from apbv.speculate.loops.speculative_batch import SpeculativeBatch

from apbv_tests import families
from apbv_tests.configs import speculative_config
from apbv_tests.engines import QUESTION
from apbv_tests.fresh_hosts import described
from apbv_tests.next_token import WEIGHTS, PlainNextToken, save_with_next_token
from apbv_tests.prompts import by_processor, sampled

SENTENCE = "the quick brown fox jumps over the lazy dog. "
STEPS = 12
FRAMES = 13
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # fp32 sums in another order
WITH_LAYER = {"strategy": "mtp", "num_draft_tokens": 3, "keep_losing_draft": True}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of families with such a layer, made when first asked for."""
    folder = tmp_path_factory.mktemp("next_token")

    def get(family: str) -> str:
        path = folder / family
        if not path.exists():
            save_with_next_token(family, path)
        return str(path)

    return get


def answers_job(
    hosts: HostGroup, path: str, settings: dict, request: dict, way: dict | None, **sampling
) -> dict:
    """An answer, its statistics, and what was drafted behind which tokens."""
    speculate = None if way is None else speculative_config(**way)
    engine = Engine.from_pretrained(
        path, hosts=hosts, prefill=PrefillConfig(**settings), speculate=speculate
    )
    drafts = []
    values = []
    propose = NextTokenDrafter.propose

    def recorded(self, tokens, tree):
        if not values:  # of the prompt alone, [n - 1, Hkv * D]
            values.append(self.cache.layers[0].values[0].transpose(0, 1).flatten(1).clone())
        proposal = propose(self, tokens, tree)
        drafts.append((list(tokens), proposal.tokens))
        return proposal

    with patch.object(NextTokenDrafter, "propose", recorded):
        answer = engine.generate(QUESTION, max_new_tokens=STEPS, **request, **sampling)
    return {
        "tokens": answer.token_ids,
        "stats": answer.stats.get("speculation"),
        "drafts": drafts,
        "values": values,
    }


def prompt_job(hosts: HostGroup, path: str, request: dict) -> torch.Tensor:
    return Engine.from_pretrained(path, hosts=hosts).prefill(QUESTION, **request).inputs.input_ids


def plain_rule(path: str, family: str, clip, input_ids) -> PlainNextToken:
    """The plain rule behind this prompt."""
    with torch.random.fork_rng(devices=[]):
        model = Engine.from_pretrained(path, hosts=HostGroup.single("cpu")).model
    inputs = {"input_ids": input_ids}
    if family in families.VISION_FAMILIES:
        content = [{"type": "video"}, {"type": "text", "text": QUESTION}]
        processor = families.build_processor(family)
        inputs = by_processor(processor, content, [sampled(clip, FRAMES)])
        assert torch.equal(inputs["input_ids"], input_ids)
    return PlainNextToken(path, model, inputs)


TEXT = {"context": SENTENCE * 6}
CASES = [
    ("qwen3_next", 1, {}),
    ("qwen3_5_text", 2, {"kv": "sharded"}),
    ("qwen3_5_moe", 3, {}),
    ("qwen3_5", 2, {"method": "zigzag_ring"}),
    ("qwen3_5", 4, {"kv": "sharded", "anchor_len": 8}),
    ("glm_ocr", 1, {}),
    ("glm4v_moe", 2, {"kv": "sharded"}),
    ("glm4", 2, {}),
]


@pytest.mark.shows("drafts")
@pytest.mark.parametrize(("family", "num_hosts", "settings"), CASES)
def test_it_drafts_by_the_rule_and_changes_no_answer(
    on_hosts, saved, clip, family, num_hosts, settings
):
    """Uncompressed, the target's hidden states are those of full attention."""
    path = saved(family)
    request = TEXT
    if family in families.VISION_FAMILIES:
        request = {"video": str(clip), "num_frames": FRAMES}
    (alone,) = on_hosts(1, answers_job, path, {}, request, None)
    exact = {"passing_len": 10_000, **settings}
    first, *others = on_hosts(num_hosts, answers_job, path, exact, request, WITH_LAYER)
    assert first["tokens"] == alone["tokens"]
    assert all(other["tokens"] == first["tokens"] for other in others)
    assert len(first["drafts"]) > 2
    (prompt,) = on_hosts(1, prompt_job, path, request)
    rule = plain_rule(path, family, clip, prompt)
    torch.testing.assert_close(first["values"][0], rule.values_of_prompt(), **CLOSE)
    for tokens, drafted in first["drafts"]:
        assert drafted == rule.draft(tokens, len(drafted))
    # Some drafted tokens were right: what was computed for them is replaced then.
    assert 0 < first["stats"]["num_accepted"] < first["stats"]["num_drafted"]


def test_sampled_drafts_are_verified_and_few_tokens_are_drafted_for_the_end(on_hosts, saved):
    """The answer has as many tokens as are asked for, whatever the window."""
    sampling = {"temperature": 1.0, "seed": 3, "top_p": 0.9}

    def sampled_job(hosts: HostGroup) -> dict:
        return answers_job(hosts, saved("qwen3_next"), {}, TEXT, WITH_LAYER, **sampling)

    first = sampled_job(HostGroup.single("cpu"))
    assert len(first["tokens"]) == STEPS
    assert 0 < first["stats"]["num_accepted"] < first["stats"]["num_drafted"]
    assert all(len(drafted) <= 3 for _, drafted in first["drafts"])


def without(folder, source: str, *dropped: str, added: dict | None = None) -> str:
    """A copy of a checkpoint without the weights whose names have these beginnings."""
    copytree(source, folder)
    weights = load_file(folder / WEIGHTS)
    left = {name: weight for name, weight in weights.items() if not name.startswith(dropped)}
    save_file({**left, **(added or {})}, folder / WEIGHTS, metadata={"format": "pt"})
    return str(folder)


def test_a_checkpoint_without_the_layer_is_refused(tmp_path, saved):
    """Before its other weights are read, where the files are here."""
    path = saved("qwen3_next")
    width = load_file(f"{path}/{WEIGHTS}")["mtp.norm.weight"].shape[0]
    more = {"mtp.layers.1.input_layernorm.weight": torch.ones(width)}
    expected = {
        "none": ((("mtp.",), None), "has no multi-token prediction layer"),
        "two": (((), more), "has 2 multi-token prediction layers that follow one another"),
        "few": ((("mtp.fc.",), None), "cannot be used: it lacks join.projection.weight"),
        "more": (((), {"mtp.odd.weight": torch.ones(2)}), "cannot be used: it also has odd.weight"),
        "wide": (
            (("mtp.norm.",), {"mtp.norm.weight": torch.ones(width + 1)}),
            "cannot be used: size mismatch for norm.weight",
        ),
    }
    hosts = HostGroup.single("cpu")
    config = speculative_config(**WITH_LAYER)
    for name, ((dropped, added), message) in expected.items():
        changed = without(tmp_path / name, path, *dropped, added=added)
        error = described(
            lambda changed=changed: Engine.from_pretrained(changed, hosts=hosts, speculate=config)
        )
        assert error.startswith("UnsupportedModelError"), error
        assert message in error
    with patch("apbv.engine.load_model") as load:
        described(
            lambda: Engine.from_pretrained(str(tmp_path / "none"), hosts=hosts, speculate=config)
        )
    assert not load.called


@cache
def rule_of(path: str, num_words: int) -> PlainNextToken:
    """The plain rule behind a text of so many words."""
    hosts = HostGroup.single("cpu")
    prompt = prompt_job(hosts, path, {"context": text_of(num_words)})
    return plain_rule(path, "", None, prompt)


def text_of(num_words: int) -> str:
    return " ".join(f"word {number}" for number in range(num_words))


LENGTHS = (5, 9, 14, 20, 30)


@pytest.mark.shows("batches")
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text", "glm4"])
def test_answers_in_a_batch_are_those_alone_and_drafts_follow_the_rule(saved, family):
    """Answers join one after the other; each drafts from its own hidden states."""
    path = saved(family)
    engine = Engine.from_pretrained(
        path, hosts=HostGroup.single("cpu"), speculate=speculative_config(**WITH_LAYER)
    )
    questions = [{"prompt": QUESTION, "context": text_of(words)} for words in LENGTHS]
    sampling = SamplingParams(max_new_tokens=STEPS)
    drafts = []
    draft_together = SpeculativeBatch._draft

    def recorded(self, windows):
        drafted = draft_together(self, windows)
        for member, of_member in drafted.items():
            prompt = member.answer.prompt_ids
            drafts.append((prompt, list(member.tokens), of_member.tokens.tolist()))
        return drafted

    with patch.object(SpeculativeBatch, "_draft", recorded):
        together = dict(engine.generate_all(questions, sampling=sampling, max_together=3))
    plain = Engine.from_pretrained(path, hosts=HostGroup.single("cpu"))
    for number, words in enumerate(LENGTHS):
        alone = plain.generate(QUESTION, context=text_of(words), max_new_tokens=STEPS)
        assert together[number].token_ids == alone.token_ids
    words_of_prompt = {
        prompt_job(HostGroup.single("cpu"), path, {"context": text_of(words)}).shape[1]: words
        for words in LENGTHS
    }
    assert len(drafts) > 2 * len(LENGTHS)
    for prompt, tokens, drafted in drafts:
        rule = rule_of(path, words_of_prompt[len(prompt)])
        assert drafted == rule.draft(tokens, len(drafted))
    accepted = [answer.stats["speculation"]["num_accepted"] for answer in together.values()]
    assert sum(accepted) > 0


def test_after_a_round_that_failed_the_same_hidden_states_are_there():
    """Of tokens that were run none was added to the answer, or the layer has not run them."""
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2), 0)
    layers = growing_layers(appending_in_place(cache))
    target = OwnKV(layers, 4)
    target.outputs = TokenOutputs()
    kv = NextTokenKV(layers, 3)
    behind_prompt = torch.tensor([[-1.0]])
    kv.prepare(1, behind_prompt, target)
    assert (kv.num_run, kv.hidden.flatten().tolist()) == (0, [-1.0])
    kv.num_verified = 1  # as after a run

    # The target verifies token 0 and two drafted ones: one is accepted.
    target.outputs.write(0, torch.tensor([[0.0], [1.0], [9.0]]))
    for _ in range(3):
        kv.prepare(3, behind_prompt, target)
        assert (kv.num_run, kv.hidden.flatten().tolist()) == (1, [0.0, 1.0])
        # This round fails in the target, which has run tokens 2 and 3.
        target.outputs.write(2, torch.tensor([[2.0], [8.0]]))
        kv.num_run = 5
    # Now the layer has run all.
    kv.num_verified = 3
    for _ in range(2):
        kv.prepare(3, behind_prompt, target)
        assert (kv.num_run, kv.hidden.flatten().tolist()) == (2, [1.0])
    kv.prepare(4, behind_prompt, target)
    assert (kv.num_run, kv.hidden.flatten().tolist()) == (3, [2.0])


def test_a_model_that_was_loaded_elsewhere_reads_the_layer_from_its_checkpoint(saved):
    path = saved("qwen3_next")
    config = speculative_config(**WITH_LAYER)
    hosts = HostGroup.single("cpu")
    loaded = Engine.from_pretrained(path, hosts=hosts, speculate=config)
    own = Engine(loaded.model, loaded.processor, hosts, speculate=config)
    answers = [engine.generate(QUESTION, max_new_tokens=5, **TEXT) for engine in (loaded, own)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].stats["speculation"]["num_drafted"] > 0


NUM_PROMPTS = 30


def many_job(hosts: HostGroup, path: str, clip: str, way: dict | None, together: bool) -> list:
    """Answers to prompts of many lengths, about a text or about some frames."""
    speculate = None if way is None else speculative_config(**way)
    engine = Engine.from_pretrained(
        path, hosts=hosts, prefill=PrefillConfig(passing_len=10_000), speculate=speculate
    )
    chance = random.Random(3)
    questions = []
    for number in range(NUM_PROMPTS):
        question = {"prompt": QUESTION, "context": text_of(chance.randint(2, 60))}
        if engine.parts.sees_video and number % 2:
            frames = chance.randint(2, 16)
            question = {"prompt": QUESTION, "video": clip, "num_frames": frames}
        sampling = SamplingParams(max_new_tokens=chance.randint(1, 14))
        questions.append({**question, "sampling": sampling})
    if together:
        answers = dict(engine.generate_all(questions, max_together=5))
        return [answers[number].token_ids for number in range(NUM_PROMPTS)]
    return [engine.generate(**question).token_ids for question in questions]


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "glm_ocr"])
def test_many_answers_stay_the_same(pool, saved, clip, family):
    path = saved(family)
    (plain,) = pool.run(1, many_job, path, str(clip), None, False)
    for num_hosts, together in ((1, False), (2, True), (4, False)):
        for answers in pool.run(num_hosts, many_job, path, str(clip), WITH_LAYER, together):
            assert answers == plain


def reduced_job(hosts: HostGroup, path: str, clip: str, way: dict | None) -> list[int]:
    reduce = ReduceConfig(method="fastvid", ratio=0.5)
    speculate = None if way is None else speculative_config(**way)
    config = PrefillConfig(passing_len=10_000, reduce=reduce)
    engine = Engine.from_pretrained(path, hosts=hosts, prefill=config, speculate=speculate)
    request = {"video": clip, "num_frames": FRAMES, "max_new_tokens": STEPS}
    return engine.generate(QUESTION, **request).token_ids


def test_a_prompt_without_pruned_tokens_is_the_layers_too(pool, saved, clip):
    path = saved("qwen3_5")
    plain, _ = pool.run(2, reduced_job, path, str(clip), None)
    for tokens in pool.run(2, reduced_job, path, str(clip), WITH_LAYER):
        assert tokens == plain
