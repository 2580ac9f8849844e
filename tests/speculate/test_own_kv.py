"""Drafts by the target itself on a part of its KV, and what of the answer that holds."""

import copy
from unittest.mock import patch

import pytest
import torch

from apbv import HostGroup
from apbv.config import SamplingParams
from apbv.kv.placement import GatheredKV, ShardedKV
from apbv.kv.select import select_kv
from apbv.model.parts import inspect_model
from apbv.runner.decoder import Decoder
from apbv.speculate.drafters.drafters import ModelDrafter, ReadPrompt

from apbv_tests.configs import speculative_config
from apbv_tests.engines import QUESTION, build_engine

VISIBLE = 7  # visual tokens that each layer and KV head of the draft sees


def verified_job(hosts: HostGroup, strategy: str, kv: str, num_nodes: int | None, request: dict):
    """What was proposed in every round, and what a fresh drafter proposes that begins with all
    verified KV."""
    proposed = []
    chosen = []
    placed = GatheredKV if kv == "gathered" else ShardedKV

    def listened(drafter, tokens, tree, propose=ModelDrafter.propose):
        proposed.append((list(tokens), tree, propose(drafter, tokens, tree)))
        return proposed[-1][2]

    def noted(state, tokens, select=placed.select):
        chosen.extend(tokens)
        return select(state, tokens)

    share = VISIBLE / 36  # of 12 frames, merged in pairs, of 2 x 3 tokens
    way = {
        "strategy": strategy,
        "keep_ratio": share,
        "num_tree_nodes": num_nodes,
        "keep_losing_draft": True,
    }
    with patch.object(ModelDrafter, "propose", listened), patch.object(placed, "select", noted):
        engine = build_engine(hosts, "qwen2_5_vl", kv, speculative_config(**way))
        figures = engine.generate(QUESTION, **request).stats["speculation"]
    if hosts.rank:
        return None
    parts = inspect_model(engine.model)
    alone = build_engine(HostGroup.single(), "qwen2_5_vl")
    state = alone.prefill(QUESTION, video=request["video"], num_frames=request["num_frames"])
    prompt = state.to_dynamic_cache()
    expected = []
    assert len(chosen) == parts.num_layers
    for tokens, tree, _ in proposed:
        cache = copy.deepcopy(prompt)
        if tokens[1:]:
            Decoder(parts, state.kv, state.next_position).advance(tokens[:-1])
            cache = state.kv.cache
        new = torch.arange(state.num_tokens, cache.get_seq_length()).expand(parts.num_kv_heads, -1)
        seen = select_kv(cache, [torch.cat([of_layer, new], dim=1) for of_layer in chosen])
        position = state.next_position + len(tokens) - 1
        length = state.num_tokens + len(tokens) - 1
        settings = (
            SamplingParams(temperature=request["temperature"], seed=request["seed"]),
            parts.vocab_size,
            bool(num_nodes),
        )
        fresh = ModelDrafter(parts, ReadPrompt(seen), position, length, *settings)
        expected.append(fresh.propose(tokens[-1:], tree))
    return figures, [proposal for *_, proposal in proposed], expected


@pytest.mark.parametrize(
    ("strategy", "kv", "num_nodes", "temperature"),
    [
        ("std", "gathered", None, 1.0),
        ("std", "sharded", 8, 0.3),
        ("streaming", "sharded", None, 1.0),
        ("streaming", "gathered", 8, 0.3),
    ],
)
def test_what_is_verified_is_seen_with_the_targets_kv(
    pool, clip, strategy, kv, num_nodes, temperature
):
    """STD and Streaming: the verification's dense KV takes the place of what the sparse draft
    computed of the same tokens."""
    request = {
        "video": str(clip),
        "num_frames": 12,
        "max_new_tokens": 22,
        "temperature": temperature,
        "seed": 10,
    }
    figures, proposed, expected = pool.run(2, verified_job, strategy, kv, num_nodes, request)[0]
    assert figures["num_visual_tokens_drafted_from"] == VISIBLE
    assert 0 < figures["num_accepted"] < figures["num_drafted"]
    for found, right in zip(proposed, expected, strict=True):
        if num_nodes is None:
            assert found.tokens == right.tokens
            torch.testing.assert_close(found.q, right.q, rtol=1e-4, atol=1e-9)
        else:
            assert found == right
