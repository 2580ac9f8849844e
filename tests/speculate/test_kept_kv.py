"""Drafts on the target's own KV: what is kept of it is read where it lies."""

from unittest.mock import patch

import pytest
import torch
from transformers import DynamicCache

from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig
from apbv.config import SamplingConfig
from apbv.kv import placement
from apbv.kv.select import select_kv
from apbv.model.attention import ChosenKV
from apbv.model.parts import inspect_model
from apbv.speculate import builders
from apbv.speculate.drafters import ModelDrafter

import families
from engines import QUESTION


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
    settings = 70, 70, SamplingConfig(temperature=1.0), parts.vocab_size
    with_copy, in_place = ModelDrafter(parts, copy, *settings), ModelDrafter(parts, own, *settings, chosen)
    for tokens in ([5], [5, 9, 11, 13], [6], [6, 2]):
        expected, found = with_copy.propose(tokens, 3), in_place.propose(tokens, 3)
        assert found.tokens == expected.tokens
        torch.testing.assert_close(found.q, expected.q, rtol=1e-4, atol=1e-7)
        assert own.get_seq_length() == copy.get_seq_length() - 40 == len(tokens) + 2
    with pytest.raises(ValueError, match="does not hold the prompt"):
        in_place.prune_prompt(torch.arange(9))


def in_place_job(hosts: HostGroup, ways: list, request: dict):
    """The plain answer; each way with a back end that reads the kept KV in place, and with one that copies it."""
    model, processor = families.build_model("qwen2_5_vl", layers=2), families.build_processor("qwen2_5_vl")
    continued, propose = placement.GatheredKV.continued, ModelDrafter.propose
    results = []
    for way, backend in ((way, backend) for way in ways for backend in ("triton", "torch")):
        prefill, places, proposed = PrefillConfig(passing_len=5, backend=backend), [], []

        def located(kv, places=places):
            cache = continued(kv)
            places.append(None if cache is None else [layer.keys.data_ptr() for layer in cache.layers])
            return cache

        def listened(drafter, tokens, count, proposed=proposed):
            proposed.append(propose(drafter, tokens, count))
            return proposed[-1]

        with (
            patch.object(placement.GatheredKV, "continued", located),
            patch.object(ModelDrafter, "propose", listened),
            patch.object(placement, "select_kv", wraps=select_kv) as copy,
            patch.object(builders, "ChosenKV", wraps=ChosenKV) as read,
        ):
            engine = Engine(
                model, processor, hosts, prefill, speculate=SpeculativeConfig(keep_losing_draft=True, **way)
            )
            answer = engine.generate(QUESTION, **request)
        if read.called:
            places.append([keys.data_ptr() for keys, _, _ in read.call_args.args[0]])
        figures = [answer.stats["speculation"][name] for name in ("num_drafted", "num_accepted", "rounds")]
        drafted = [proposal.tokens for proposal in proposed], figures
        # All that the target and the draft were given of the prompt's KV lies at one place.
        is_shared = all(place == places[0] for place in places)
        results.append((answer.token_ids, drafted, is_shared, (read.call_count, copy.call_count)))
    plain = Engine(model, processor, hosts, PrefillConfig(passing_len=5)).generate(QUESTION, **request)
    return plain.token_ids, results


@pytest.mark.parametrize("num_hosts", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_where_triton_computes_a_draft_on_the_targets_kv_copies_none_of_it(pool, clip, num_hosts):
    """A chain, that is: a tree is drafted on a copy."""
    ways = [{"strategy": "std"}, {"strategy": "streaming"}, {"strategy": "streaming", "num_tree_nodes": 4}]
    ways = ways if num_hosts == 1 else [{"strategy": "std_apbv"}]
    ways = [{**way, "num_draft_tokens": 3, "keep_ratio": 0.6} for way in ways]
    request = {"video": str(clip), "num_frames": 8, "max_new_tokens": 7}
    for host, (plain, results) in enumerate(pool.run(num_hosts, in_place_job, ways, request)):
        assert len(set(plain)) > 3
        for way, in_place, copied in zip(ways, results[::2], results[1::2], strict=True):
            assert in_place[:2] == copied[:2] and in_place[0] == plain, way
            assert in_place[2] and copied[2], way
            if host == 0:
                assert in_place[3] == ((0, 1) if "num_tree_nodes" in way else (1, 0)) and copied[3] == (0, 1), way
