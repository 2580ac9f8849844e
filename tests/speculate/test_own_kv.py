"""Drafts by the target itself on a part of its KV: where that lies, and what of the answer it holds."""

import copy
from unittest.mock import patch

import pytest
import torch
from transformers import DynamicCache

from apbv import HostGroup, SpeculativeConfig
from apbv.config import SamplingParams
from apbv.decode.runner import Decoder
from apbv.kv.select import select_kv
from apbv.model.attention import ChosenKV
from apbv.model.parts import inspect_model
from apbv.speculate.drafters import ModelDrafter
from apbv.speculate.tree import Tree

import families
from engines import QUESTION, build_engine

VISIBLE = 7  # the latest visual tokens, which is what "streaming" sees


def test_kept_kv_is_read_where_it_lies_as_if_it_were_copied(monkeypatch):
    """Over tokens that stand and tokens that are taken back; and nothing is read but what is kept."""
    monkeypatch.setenv("APBV_BACKEND", "triton")
    model = families.build_model("llama", layers=2)
    parts = inspect_model(model)
    prompt = model(input_ids=torch.arange(70)[None]).past_key_values
    generator = torch.Generator().manual_seed(0)
    chance = torch.rand(parts.num_layers, parts.num_kv_heads, 70, generator=generator)
    seen = chance.topk(40).indices.sort().values
    copy = select_kv(prompt, seen)
    for layer, rows in zip(prompt.layers, seen, strict=True):
        is_unseen = torch.ones(1, parts.num_kv_heads, 70, 1, dtype=torch.bool).scatter(2, rows[None, ..., None], 0)
        layer.keys.masked_fill_(is_unseen, float("nan"))
        layer.values.masked_fill_(is_unseen, float("nan"))
    chosen = ChosenKV(
        [(layer.keys, layer.values, rows.int()[None]) for layer, rows in zip(prompt.layers, seen, strict=True)]
    )
    own = DynamicCache()
    settings = 70, 70, SamplingParams(temperature=1.0), parts.vocab_size
    with_copy, in_place = ModelDrafter(parts, copy, *settings), ModelDrafter(parts, own, *settings, chosen)
    for tokens in ([5], [5, 9, 11], [6, 2]):
        expected, found = with_copy.propose(tokens, Tree.chain(2)), in_place.propose(tokens, Tree.chain(2))
        assert found.tokens == expected.tokens
        torch.testing.assert_close(found.q, expected.q, rtol=1e-4, atol=1e-7)
        assert own.get_seq_length() == copy.get_seq_length() - 40 == len(tokens) + 1
    with pytest.raises(ValueError, match="does not hold the prompt"):
        in_place.prune_prompt(torch.arange(9))


def verified_job(hosts: HostGroup, kv: str, num_nodes: int | None, request: dict):
    """What was proposed in every round, and what a fresh drafter proposes that begins with all verified KV."""
    proposed = []

    def listened(drafter, tokens, tree, propose=ModelDrafter.propose):
        proposed.append((list(tokens), tree, propose(drafter, tokens, tree)))
        return proposed[-1][2]

    share = VISIBLE / 36  # of 12 frames, merged in pairs, of 2 x 3 tokens
    way = {"strategy": "streaming", "keep_ratio": share, "num_tree_nodes": num_nodes, "keep_losing_draft": True}
    with patch.object(ModelDrafter, "propose", listened):
        engine = build_engine(hosts, "qwen2_5_vl", kv, SpeculativeConfig(**way))
        figures = engine.generate(QUESTION, **request).stats["speculation"]
    if hosts.rank:
        return None
    parts, alone = inspect_model(engine.model), build_engine(HostGroup.single(), "qwen2_5_vl")
    state = alone.prefill(QUESTION, video=request["video"], num_frames=request["num_frames"])
    prompt, expected = state.to_dynamic_cache(), []
    visual = parts.is_visual(state.inputs.input_ids[0]).nonzero().flatten()
    hidden = set(visual[:-VISIBLE].tolist())
    for tokens, tree, _ in proposed:
        cache = copy.deepcopy(prompt)
        if tokens[1:]:
            Decoder(parts, state.kv, state.next_position).advance(tokens[:-1])
            cache = state.kv.cache
        rows = torch.tensor([row for row in range(cache.get_seq_length()) if row not in hidden])
        seen = select_kv(cache, [rows.expand(parts.num_kv_heads, -1)] * parts.num_layers)
        position, length = state.next_position + len(tokens) - 1, state.num_tokens + len(tokens) - 1
        settings = (
            SamplingParams(temperature=request["temperature"], seed=request["seed"]),
            parts.vocab_size,
            None,
            bool(num_nodes),
        )
        fresh = ModelDrafter(parts, seen, position, length, *settings)
        expected.append(fresh.propose(tokens[-1:], tree))
    return figures, [proposal for *_, proposal in proposed], expected


@pytest.mark.parametrize(("kv", "num_nodes", "temperature"), [("gathered", None, 1.0), ("sharded", 8, 0.3)])
def test_what_is_verified_is_seen_with_the_targets_kv(pool, clip, kv, num_nodes, temperature):
    """STD: the verification's dense KV takes the place of what the sparse draft computed of the same tokens."""
    request = {"video": str(clip), "num_frames": 12, "max_new_tokens": 22, "temperature": temperature, "seed": 10}
    figures, proposed, expected = pool.run(2, verified_job, kv, num_nodes, request)[0]
    assert figures["num_visual_tokens_drafted_from"] == VISIBLE
    assert 0 < figures["num_accepted"] < figures["num_drafted"]
    for found, right in zip(proposed, expected, strict=True):
        if num_nodes is None:
            assert found.tokens == right.tokens
            torch.testing.assert_close(found.q, right.q, rtol=1e-4, atol=1e-9)
        else:
            assert found == right
