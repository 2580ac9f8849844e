"""Drafts by the target itself on less of its KV: what of the answer is verified it sees as the target does."""

import copy
from unittest.mock import patch

import pytest
import torch

from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig
from apbv.config import SamplingConfig
from apbv.decode.decoder import Decoder
from apbv.kv.select import select_kv
from apbv.model.parts import inspect_model
from apbv.speculate.drafters import ModelDrafter
from apbv.speculate.tree_drafter import TreeDrafter

import families
from engines import QUESTION

SAMPLING = {"temperature": 1.0, "seed": 5}
VISIBLE = 7  # the latest visual tokens, which is what "streaming" sees


def verified_job(hosts: HostGroup, kv: str, backend: str, num_nodes: int | None, request: dict, seed: int):
    """What was proposed in every round, and what a fresh drafter proposes that begins with all verified KV."""
    model = families.build_model("qwen2_5_vl", dtype=torch.float64 if backend == "torch" else torch.float32)
    processor, kind = families.build_processor("qwen2_5_vl"), ModelDrafter if num_nodes is None else TreeDrafter
    parts, proposed, sampling = inspect_model(model), [], {**SAMPLING, "seed": seed}

    def listened(drafter, tokens, count, propose=kind.propose):
        proposed.append((list(tokens), count, propose(drafter, tokens, count)))
        return proposed[-1][2]

    prefill = PrefillConfig(kv=kv, backend=backend)
    share = VISIBLE / 36  # of 12 frames, merged in pairs, of 2 x 3 tokens
    speculate = SpeculativeConfig(
        strategy="streaming", keep_ratio=share, num_tree_nodes=num_nodes, keep_losing_draft=True
    )
    with patch.object(kind, "propose", listened):
        engine = Engine(model, processor, hosts, prefill, speculate=speculate)
        answer = engine.generate(QUESTION, **request, **sampling)
    if hosts.rank:
        return None
    alone = Engine(model, processor, HostGroup.single())
    state = alone.prefill(QUESTION, **{name: request[name] for name in ("video", "num_frames")})
    prompt, expected = state.to_dynamic_cache(), []
    for tokens, count, _ in proposed:
        cache = copy.deepcopy(prompt)
        if tokens[1:]:
            Decoder(parts, state.kv, state.next_position).advance(tokens[:-1])
            cache = state.kv.cache
        is_visual = parts.is_visual(state.inputs.input_ids[0])
        hidden = is_visual.nonzero().flatten()[:-VISIBLE]
        rows = torch.tensor([row for row in range(cache.get_seq_length()) if row not in set(hidden.tolist())])
        seen = select_kv(cache, [rows.expand(parts.num_kv_heads, -1)] * parts.num_layers)
        before = len(tokens) - 1
        position, length = state.next_position + before, state.num_tokens + before
        if num_nodes is None:
            fresh = ModelDrafter(parts, seen, position, length, SamplingConfig(**sampling), parts.vocab_size)
        else:
            fresh = TreeDrafter(parts, seen, position, parts.vocab_size)
        expected.append(fresh.propose(tokens[-1:], count))
    return answer.stats["speculation"], [proposal for *_, proposal in proposed], expected


@pytest.mark.parametrize("way", [{"strategy": "std"}, {"strategy": "streaming"}, {"strategy": "specvlm"}], ids=str)
def test_a_number_of_tokens_is_text_and_what_fits_of_the_video(clip, way):
    """STD's K + m_t; never less than one visual token, and never more than there are."""
    model, processor = families.build_model("qwen2_5_vl", layers=2), families.build_processor("qwen2_5_vl")
    draft = model if way["strategy"] == "specvlm" else None
    num_text = 0
    for beyond_text in (1, 6, 10_000):
        asked = num_text + beyond_text
        speculate = SpeculativeConfig(**way, keep_tokens=asked)
        engine = Engine(model, processor, HostGroup.single(), speculate=speculate, draft=draft)
        stats = engine.generate(QUESTION, video=str(clip), num_frames=12, max_new_tokens=3).stats
        num_text = stats["num_input_tokens"] - stats["num_video_tokens"]
        found = stats["speculation"]["num_visual_tokens_drafted_from"]
        assert num_text > 6 and found == {1: 1, 6: 6, 10_000: stats["num_video_tokens"]}[beyond_text]
        assert stats["speculation"]["keep_tokens"] == asked and stats["speculation"]["keep_ratio"] is None


@pytest.mark.parametrize(
    ("num_hosts", "kv", "backend", "num_nodes"),
    [
        pytest.param(1, "gathered", "torch", None, marks=pytest.mark.thorough),
        (2, "gathered", "torch", None),
        pytest.param(2, "sharded", "torch", None, marks=pytest.mark.thorough),
        (1, "gathered", "triton", None),
        pytest.param(1, "gathered", "torch", 8, marks=pytest.mark.thorough),
        (2, "sharded", "torch", 8),
    ],
)
def test_what_is_verified_is_seen_with_the_targets_kv(pool, clip, num_hosts, kv, backend, num_nodes):
    """STD: the verification's dense KV takes the place of what the sparse draft computed of the same tokens."""
    request = {"video": str(clip), "num_frames": 12, "max_new_tokens": 24 if backend == "torch" else 9}
    num_accepted = num_drafted = 0
    # A tree of this model's guesses is seldom right: several answers, so that one of them accepts something.
    for seed in range(5, 6 if num_nodes is None else 10):
        stats, proposed, expected = pool.run(num_hosts, verified_job, kv, backend, num_nodes, request, seed)[0]
        assert stats["num_visual_tokens_drafted_from"] == VISIBLE
        num_accepted, num_drafted = num_accepted + stats["num_accepted"], num_drafted + stats["num_drafted"]
        for found, right in zip(proposed, expected, strict=True):
            if num_nodes is None:
                assert found.tokens == right.tokens
                torch.testing.assert_close(found.q, right.q, rtol=1e-4, atol=1e-6 if backend == "triton" else 1e-9)
            else:
                assert found == right
    assert 0 < num_accepted < num_drafted
