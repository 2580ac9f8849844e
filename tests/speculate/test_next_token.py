"""Drafts by the multi-token prediction layer of a checkpoint."""

from shutil import copytree
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from apbv import Engine, HostGroup, PrefillConfig
from apbv.speculate.drafters.next_token import NextTokenDrafter

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


def test_answers_are_decoded_one_after_another(saved):
    config = speculative_config(**WITH_LAYER)
    engine = Engine.from_pretrained(
        saved("qwen3_next"), hosts=HostGroup.single("cpu"), speculate=config
    )
    assert "reads the target's hidden states" in described(engine.batch)


def test_a_model_that_was_loaded_elsewhere_reads_the_layer_from_its_checkpoint(saved):
    path = saved("qwen3_next")
    config = speculative_config(**WITH_LAYER)
    hosts = HostGroup.single("cpu")
    loaded = Engine.from_pretrained(path, hosts=hosts, speculate=config)
    own = Engine(loaded.model, loaded.processor, hosts, speculate=config)
    answers = [engine.generate(QUESTION, max_new_tokens=5, **TEXT) for engine in (loaded, own)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].stats["speculation"]["num_drafted"] > 0
