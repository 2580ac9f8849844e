"""Drafts of prompts with sound hear all of it, however little they see, and change no token of the answer."""

import audio_files
import pytest
import torch
from omni_prompts import ASKED, FRAMES, embedded, omni_batch
from transformers import DynamicCache

from apbv import Engine, HostGroup, ModelInputs, PrefillConfig, SpeculativeConfig
from apbv.model.parts import inspect_model
from apbv.prefilling.encode import encode_visual
from apbv.speculate.draft_kv import prefill_draft

import families
from families import OMNI
from oracle import as_double
from patience import limit

STEPS = 16


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    path = tmp_path_factory.mktemp("heard") / "a.mkv"
    return audio_files.write(path, [(0, 3)], "flac", audio_files.RATE, video=(0, 3), size=(56, 84))


def kept_job(hosts: HostGroup, batch: dict, kept: torch.Tensor):
    """What a draft has of a prompt of which it sees these visual tokens."""
    parts = inspect_model(families.build_model(OMNI, dtype=torch.float64))
    inputs = ModelInputs.from_processor(parts, batch, hosts)
    rows = encode_visual(parts, inputs.visual)
    cache = prefill_draft(parts, inputs, kept, hosts, rows)
    return cache and [(layer.keys, layer.values) for layer in cache.layers]


@torch.no_grad()
@pytest.mark.parametrize(("num_hosts", "share"), [(1, 0), (2, 3), (3, 2)])
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
    cache = DynamicCache()
    model.get_decoder()(
        inputs_embeds=seen["inputs_embeds"][:, left],
        position_ids=seen["position_ids"][..., left],
        past_key_values=cache,
        use_cache=True,
    )
    first, *others = pool.run(num_hosts, kept_job, batch, kept)
    assert others == [None] * (num_hosts - 1)
    for (keys, values), layer in zip(first, cache.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(values, layer.values, rtol=1e-9, atol=1e-9)


def answer_job(hosts: HostGroup, path: str, speculate: SpeculativeConfig | None, settings: dict):
    model, draft = (families.build_model(OMNI, dtype=torch.float64, seed=seed) for seed in (0, 0))
    if speculate is None or speculate.strategy in ("std", "streaming", "ngram", "layerskip"):
        draft = None
    prefill = PrefillConfig(passing_len=10**6, **settings)
    engine = Engine(model, families.build_processor(OMNI), hosts, prefill, speculate=speculate, draft=draft)
    answer = engine.generate(ASKED, video=path, num_frames=FRAMES, max_new_tokens=STEPS)
    return answer.token_ids, answer.stats


STRATEGIES = {
    "vanilla": {},
    "hippo": {"keep_ratio": 0.5},
    "parallelvlm": {"keep_ratio": 0.5},
    "specvlm": {"keep_ratio": 0.5, "prune": "kv"},
    "tabed": {"ensemble": "MTP"},
    "text_only": {},
    "std": {"keep_ratio": 0.5},
    "streaming": {"keep_ratio": 0.5},
    "ngram": {},
}
USUAL = ("vanilla", "hippo", "tabed")


@pytest.mark.parametrize(
    "strategy", [name if name in USUAL else pytest.param(name, marks=pytest.mark.thorough) for name in STRATEGIES]
)
def test_drafts_change_no_token(pool, heard, strategy):
    plain, _ = pool.run(1, answer_job, heard, None, {})[0]
    speculate = SpeculativeConfig(strategy=strategy, keep_losing_draft=True, **STRATEGIES[strategy])
    for tokens, stats in pool.run(2, answer_job, heard, speculate, {}):
        assert tokens == plain
        assert stats["num_audio_tokens"] == 75
        if strategy == "vanilla":  # the same model: it drafts what the target says
            assert stats["speculation"]["acceptance_rate"] == 1


def test_a_draft_host_hears_by_itself(pool, heard):
    plain, _ = pool.run(1, answer_job, heard, None, {})[0]
    speculate = SpeculativeConfig(
        strategy="hippo", keep_ratio=0.5, draft_host=True, keep_losing_draft=True, draft_timeout=limit(60.0)
    )
    for tokens, _ in pool.run(3, answer_job, heard, speculate, {}):
        assert tokens == plain
