"""What drafts read that do not read all: the text alone, sound and a few frames, or nothing but
n-grams."""

import json
from functools import partial
from unittest.mock import patch

import pytest
import torch
from transformers import DynamicCache

from apbv import Engine, HostGroup, ModelInputs, PrefillConfig
from apbv.config import SamplingParams
from apbv.model.parts import inspect_model
from apbv.prefilling.encoding.vision import encode_visual
from apbv.speculate.drafters.draft import prefill_draft
from apbv.speculate.drafters.drafters import ModelDrafter, NgramDrafter, Proposal, ReadPrompt
from apbv.speculate.drafters.tree import Tree
from apbv.speculate.strategies import builders

from apbv_tests import audio_files, families
from apbv_tests.configs import speculative_config
from apbv_tests.engines import QUESTION, build_engine
from apbv_tests.families import OMNI
from apbv_tests.omni_prompts import ASKED, FRAMES, embedded, omni_batch
from apbv_tests.oracle import as_double
from apbv_tests.patience import HANGING

STEPS = 8


# ---- text ----


def test_lookup_takes_the_latest_longest_match():
    drafter = NgramDrafter([5, 6, 7, 8, 5, 6, 9])
    assert drafter.propose([1, 5, 6], Tree.chain(3)).tokens == [9, 1, 5]
    assert drafter.propose([6, 7], Tree.chain(2)).tokens == [8, 5]
    assert drafter.propose([4], Tree.chain(2)).tokens == []
    # A longer match before a later one.
    assert NgramDrafter([1, 2, 3, 9, 2, 3, 7, 1]).propose([2, 3], Tree.chain(1)).tokens == [9]


def test_a_draft_says_nothing_that_the_target_cannot_read():
    """And reads what it has no token for as something else, instead of failing."""
    model = families.build_model("llama", dtype=torch.float64)
    parts = inspect_model(model)
    cache = model(input_ids=torch.arange(20)[None]).past_key_values
    drafter = ModelDrafter(
        parts, ReadPrompt(cache), 20, 20, SamplingParams(temperature=1.0), vocab_size=12
    )
    proposal = drafter.propose([5, parts.vocab_size + 3], Tree.chain(30))
    assert max(proposal.tokens) < 12 and proposal.q.shape == (30, 12)
    assert cache.get_seq_length() == 20 + 2 + 29


def text_draft_job(hosts: HostGroup, path: str, nodes: int | None):
    """The answer without and with a draft that reads text only; what it read, what it was asked and
    proposed."""
    model = families.build_model("qwen2_5_vl", dtype=torch.float64)
    draft = families.build_model("qwen2", dtype=torch.float64)
    way = speculative_config(strategy="text_only", num_tree_nodes=nodes, keep_losing_draft=True)
    engine = partial(
        Engine, model, families.build_processor("qwen2_5_vl"), hosts, PrefillConfig(kv="sharded")
    )
    propose = ModelDrafter.propose
    asked = []
    request = {"video": path, "num_frames": 8, "max_new_tokens": STEPS}

    def proposing(self, tokens, count):
        asked.append((list(tokens), propose(self, tokens, count).tokens))
        return Proposal(asked[-1][1])

    plain = engine().generate(QUESTION, **request).token_ids
    with (
        patch.object(builders, "run_prompt", wraps=builders.run_prompt) as reading,
        patch.object(ModelDrafter, "propose", proposing),
    ):
        assert engine(speculate=way, draft=draft).generate(QUESTION, **request).token_ids == plain
    return [call.args[1][0].tolist() for call in reading.call_args_list], asked


def test_a_text_only_model_drafts_from_the_text(pool, clip):
    (read,), asked = pool.run(2, text_draft_job, str(clip), None)[0]
    parts = inspect_model(families.build_model("qwen2_5_vl"))
    assert QUESTION in families.build_tokenizer("qwen2_5_vl").decode(read)
    assert parts.video_token_id not in read
    model = families.build_model("qwen2", dtype=torch.float64)
    for tokens, proposed in asked:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*read, *tokens, *proposed]])).logits[0]
        assert proposed == logits[len(read) + len(tokens) - 1 : -1].argmax(dim=-1).tolist()
    pool.run(1, text_draft_job, str(clip), 6)


def test_a_text_only_draft_has_the_targets_tokens(tmp_path):
    families.save_checkpoint("qwen2_5_vl", tmp_path / "target")
    folder = families.save_checkpoint("qwen2", tmp_path / "draft")
    speculate = speculative_config(strategy="text_only", draft_model=str(folder))
    load = partial(
        Engine.from_pretrained, tmp_path / "target", speculate=speculate, hosts=HostGroup.single()
    )
    assert load().draft_model is not None
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["model"]["vocab"] |= {
        "a": saved["model"]["vocab"]["b"],
        "b": saved["model"]["vocab"]["a"],
    }
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(
        ValueError, match=r"vocabulary differs from the target's: \d+ is '[ab]', not '[ab]'"
    ):
        load()


# ---- sound ----


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    path = tmp_path_factory.mktemp("heard") / "a.mkv"
    return audio_files.write(path, [(0, 3)], "flac", audio_files.RATE, video=(0, 3), size=(56, 84))


def kept_job(hosts: HostGroup, batch: dict, kept: torch.Tensor):
    """What a draft has of a prompt of which it sees these visual tokens."""
    parts = inspect_model(families.build_model(OMNI, dtype=torch.float64))
    inputs = ModelInputs.from_processor(parts, batch, hosts)
    prompt = prefill_draft(parts, inputs, kept, hosts, encode_visual(parts, inputs.visual))
    if prompt is None:
        return None
    return [(layer.keys, layer.values) for layer in prompt.cache.layers]


@torch.no_grad()
@pytest.mark.parametrize(("num_hosts", "share"), [(1, 0), (3, 2)])
def test_a_draft_hears_everything_and_sees_what_it_keeps(pool, heard, num_hosts, share):
    """Against the model's own embeddings of the whole prompt, of which some are left out."""
    batch = as_double(omni_batch([heard]))
    model = families.build_model(OMNI, dtype=torch.float64)
    seen = embedded(model, batch)
    ids = batch["input_ids"][0]
    visual = (ids == model.config.video_token_id).nonzero().flatten()
    kept = torch.arange(0, len(visual), share) if share else torch.empty(0, dtype=torch.long)
    left = torch.ones(len(ids), dtype=torch.bool)
    left[visual] = False
    left[visual[kept]] = True
    embeds = seen["inputs_embeds"][:, left]
    positions = seen["position_ids"][..., left]
    cache = DynamicCache()
    model.get_decoder()(
        inputs_embeds=embeds, position_ids=positions, past_key_values=cache, use_cache=True
    )
    first, *others = pool.run(num_hosts, kept_job, batch, kept)
    assert others == [None] * (num_hosts - 1)
    for (keys, values), layer in zip(first, cache.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(values, layer.values, rtol=1e-9, atol=1e-9)


def heard_job(hosts: HostGroup, path: str, way: dict | None):
    speculate = None
    if way is not None:
        speculate = speculative_config(keep_losing_draft=True, **way)
    engine = build_engine(hosts, OMNI, "gathered", speculate, 0, passing_len=10**6)
    answer = engine.generate(ASKED, video=path, num_frames=FRAMES, max_new_tokens=STEPS)
    return answer.token_ids, answer.stats


def test_drafts_that_hear_change_no_token(pool, heard):
    plain, _ = heard_job(HostGroup.single(), heard, None)
    beside = {"strategy": "hippo", "keep_ratio": 0.5, "draft_host": True, "draft_timeout": HANGING}
    for num_hosts, way in ((2, {"strategy": "tabed", "ensemble": "MTP"}), (3, beside)):
        for tokens, stats in pool.run(num_hosts, heard_job, heard, way):
            assert tokens == plain and stats.get("num_audio_tokens", 75) == 75
