"""A LLaVA model drafted by a smaller one behind a tower of the same kind: no token changes."""

from functools import cache

import make_llava
import pytest
import torch
from transformers import AutoTokenizer

from apbv import Engine, HostGroup, PrefillConfig, SamplingParams, demo

from apbv_tests import families
from apbv_tests.configs import speculative_config
from apbv_tests.engines import CAPTION, QUESTION
from apbv_tests.prompts import UNCOMPRESSED

STEPS = 12
PAIRS = ("llava", "llava_next")
# By name: a way to draft; None for decoding without a draft.
WAYS = {
    "alone": None,
    "vanilla": {"strategy": "vanilla"},
    "pruned": {"strategy": "specvlm", "keep_ratio": 0.4},
    "pruned KV": {"strategy": "specvlm", "keep_ratio": 0.4, "prune": "kv"},
    "text only": {"strategy": "text_only"},
    "own KV": {"strategy": "std", "keep_ratio": 0.4},
    "own layers": {"strategy": "layerskip", "layer_ratio": 0.3},
    "a tree": {"strategy": "sd_tree"},
    "MT*": {"strategy": "tabed", "ensemble": "MT*"},
    "P": {"strategy": "tabed", "ensemble": "P"},
    "MTCP*": {"strategy": "tabed", "ensemble": "MTCP*"},
}
IN_BATCHES = ("vanilla", "pruned", "own KV")


@cache
def pair_of(family: str):
    """A target, its draft and their processor, in fp64."""
    tokenizer = AutoTokenizer.from_pretrained(demo.model_path())
    target = make_llava.build_target(family, tokenizer, share=0.1, attention=0.3)
    processor = make_llava.build_processor(family, tokenizer)
    return target.double(), make_llava.draft_of(target).double(), processor


def engine_of(hosts: HostGroup, family: str, way: str, kv: str = "gathered") -> Engine:
    target, draft, processor = pair_of(family)
    config = None
    if WAYS[way] is not None:
        config = speculative_config(keep_losing_draft=True, **WAYS[way])
    needs_draft = config is not None and config.strategy not in ("std", "layerskip")
    return Engine(
        target,
        processor,
        hosts,
        PrefillConfig(method="apbv", kv=kv, anchor_len=16, passing_len=UNCOMPRESSED),
        speculate=config,
        draft=draft if needs_draft else None,
        captioner=lambda prompt: CAPTION,
    )


def images(count: int, seed: int = 0) -> list:
    sizes = [(84, 112), (56, 140), (168, 56)]
    return [families.synthetic_image(*sizes[n % 3], seed=seed + n) for n in range(count)]


def answers_job(hosts: HostGroup, family: str, kv: str) -> dict:
    """Of each way the tokens of an answer about two images, and its speculation's figures."""
    found = {}
    for way in WAYS:
        engine = engine_of(hosts, family, way, kv)
        answer = engine.generate(QUESTION, images=images(2), max_new_tokens=STEPS)
        found[way] = answer.token_ids, answer.stats["speculation"]
    return found


@torch.no_grad()
def by_transformers(family: str, shown: list, steps: int) -> list[int]:
    """The answer of the target's own ``generate``."""
    target, _, processor = pair_of(family)
    content = [{"type": "image"}] * len(shown) + [{"type": "text", "text": QUESTION}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    batch = processor(text=[text], images=shown, return_tensors="pt")
    batch["pixel_values"] = batch["pixel_values"].double()
    output = target.generate(**batch, max_new_tokens=steps, do_sample=False)
    return output[0, batch["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize(("num_hosts", "kv"), [(1, "gathered"), (2, "sharded")])
@pytest.mark.parametrize("family", PAIRS)
def test_no_draft_changes_an_answer_about_images(pool, family, num_hosts, kv):
    expected = by_transformers(family, images(2), STEPS)
    assert len(set(expected)) > 3
    for found in pool.run(num_hosts, answers_job, family, kv):
        for way, (tokens, figures) in found.items():
            assert tokens == expected, way
            assert way == "alone" or figures["num_drafted"] > 0
        # The pair agrees often, but not always: so both acceptance and rejection are tried.
        figures = found["vanilla"][1]
        assert 0 < figures["num_accepted"] < figures["num_drafted"]


def beside_job(hosts: HostGroup, family: str) -> tuple:
    """The tokens of an answer that the last host drafts."""
    target, draft, processor = pair_of(family)
    is_draft = hosts.rank == hosts.size - 1
    engine = Engine(
        None if is_draft else target,
        processor,
        hosts,
        speculate=speculative_config(strategy="vanilla", draft_host=True),
        draft=draft if is_draft else None,
    )
    answer = engine.generate(QUESTION, images=images(2), max_new_tokens=STEPS)
    return answer.token_ids, answer.stats.get("speculation")


@pytest.mark.parametrize("family", PAIRS)
def test_a_draft_host_changes_no_answer_about_images(pool, family):
    expected = by_transformers(family, images(2), STEPS)
    (tokens, figures), (also, _) = pool.run(2, beside_job, family)
    assert tokens == also == expected and figures["num_drafted"] > 0


def sampled_job(hosts: HostGroup, family: str) -> tuple:
    """Tokens that were drawn, twice by the same seed, with a draft."""
    engine = engine_of(hosts, family, "MTCP*")
    request = {"images": images(1), "max_new_tokens": STEPS, "temperature": 0.8, "seed": 3}
    return tuple(engine.generate(QUESTION, **request).token_ids for _ in range(2))


def test_a_drawn_answer_depends_on_the_seed_alone(pool):
    (first, second), *others = pool.run(2, sampled_job, "llava")
    assert first == second and all(tokens == (first, first) for tokens in others)


def batch_job(hosts: HostGroup, family: str) -> dict:
    """Of each way the tokens of answers that are decoded together."""
    questions = [
        {"prompt": QUESTION, "images": images(1 + number, seed=number)} for number in range(3)
    ]
    questions.append({"prompt": "What is a llama?"})
    found = {}
    for way in ("alone", *IN_BATCHES):
        engine = engine_of(hosts, family, way)
        assert engine.batching_obstacle is None
        answers = dict(
            engine.generate_all(questions, sampling=SamplingParams(max_new_tokens=STEPS))
        )
        found[way] = [answers[number].token_ids for number in range(len(questions))]
    return found


@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("family", PAIRS)
def test_answers_decoded_together_are_those_of_each_alone(pool, family, num_hosts):
    expected = [by_transformers(family, images(1 + n, seed=n), STEPS) for n in range(3)]
    for found in pool.run(num_hosts, batch_job, family):
        assert found["alone"][:3] == expected
        for way in IN_BATCHES:
            assert found[way] == found["alone"], way
