"""What drafts read that do not read all: the text alone, sound and a few frames, or nothing but n-grams."""

import audio_files
import pytest
import torch
from omni_prompts import ASKED, FRAMES, embedded, omni_batch
from transformers import DynamicCache

from apbv import HostGroup, ModelInputs, SpeculativeConfig
from apbv.config import SamplingParams
from apbv.model.parts import inspect_model
from apbv.prefilling.encode import encode_visual
from apbv.speculate.draft import prefill_draft
from apbv.speculate.drafters import ModelDrafter, NgramDrafter
from apbv.speculate.tree import Tree

import families
from engines import build_engine
from families import OMNI
from oracle import as_double
from patience import HANGING

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
    drafter = ModelDrafter(parts, cache, 20, 20, SamplingParams(temperature=1.0), vocab_size=12)
    proposal = drafter.propose([5, parts.vocab_size + 3], Tree.chain(30))
    assert max(proposal.tokens) < 12 and proposal.q.shape == (30, 12)
    assert cache.get_seq_length() == 20 + 2 + 29


# ---- sound ----


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    path = tmp_path_factory.mktemp("heard") / "a.mkv"
    return audio_files.write(path, [(0, 3)], "flac", audio_files.RATE, video=(0, 3), size=(56, 84))


def kept_job(hosts: HostGroup, batch: dict, kept: torch.Tensor):
    """What a draft has of a prompt of which it sees these visual tokens."""
    parts = inspect_model(families.build_model(OMNI, dtype=torch.float64))
    inputs = ModelInputs.from_processor(parts, batch, hosts)
    cache = prefill_draft(parts, inputs, kept, hosts, encode_visual(parts, inputs.visual))
    return cache and [(layer.keys, layer.values) for layer in cache.layers]


@torch.no_grad()
@pytest.mark.parametrize(("num_hosts", "share"), [(1, 0), (3, 2)])
def test_a_draft_hears_everything_and_sees_what_it_keeps(pool, heard, num_hosts, share):
    """Against the model's own embeddings of the whole prompt, of which some are left out."""
    batch = as_double(omni_batch([heard]))
    model = families.build_model(OMNI, dtype=torch.float64)
    seen, ids = embedded(model, batch), batch["input_ids"][0]
    visual = (ids == model.config.video_token_id).nonzero().flatten()
    kept = torch.arange(0, len(visual), share) if share else torch.empty(0, dtype=torch.long)
    left = torch.ones(len(ids), dtype=torch.bool)
    left[visual] = False
    left[visual[kept]] = True
    embeds, positions = seen["inputs_embeds"][:, left], seen["position_ids"][..., left]
    cache = DynamicCache()
    model.get_decoder()(inputs_embeds=embeds, position_ids=positions, past_key_values=cache, use_cache=True)
    first, *others = pool.run(num_hosts, kept_job, batch, kept)
    assert others == [None] * (num_hosts - 1)
    for (keys, values), layer in zip(first, cache.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(values, layer.values, rtol=1e-9, atol=1e-9)


def heard_job(hosts: HostGroup, path: str, way: dict | None):
    speculate = way and SpeculativeConfig(keep_losing_draft=True, **way)
    engine = build_engine(hosts, OMNI, "gathered", speculate, 0, passing_len=10**6)
    answer = engine.generate(ASKED, video=path, num_frames=FRAMES, max_new_tokens=STEPS)
    return answer.token_ids, answer.stats


def test_drafts_that_hear_change_no_token(pool, heard):
    plain, _ = heard_job(HostGroup.single(), heard, None)
    beside = {"strategy": "hippo", "keep_ratio": 0.5, "draft_host": True, "draft_timeout": HANGING}
    for num_hosts, way in ((2, {"strategy": "vanilla"}), (3, beside)):
        for tokens, stats in pool.run(num_hosts, heard_job, heard, way):
            assert tokens == plain and stats.get("num_audio_tokens", 75) == 75
