"""The engine with attention by Triton, interpreted: tokens, logits and KV as by definition."""

from dataclasses import replace

import pytest
import torch

from apbv import HostGroup, PrefillConfig, SamplingConfig, prefill
from apbv.decode.answer import generate_tokens
from apbv.model.parts import inspect_model
from apbv.speculate.pace import Pace
from apbv.speculate.tree import Tree
from apbv.speculate.tree_decoding import generate_by_tree
from apbv.speculate.tree_drafter import TreeDrafter

from answers import answer_by, decoder_behind
from oracle import oracle_of, run_oracle
from prompts import as_inputs, build, relative_error, reset_rope, text_batch

STEPS = 5
TRITON = PrefillConfig(backend="triton", on_single_host=True)


def compressed_job(hosts: HostGroup, batch: dict, query_start: int, settings: dict):
    inputs = as_inputs("qwen2", batch, query_start, hosts)
    state = prefill(build("qwen2", torch.float32), inputs, hosts=hosts, config=replace(TRITON, **settings))
    cache = state.to_dynamic_cache()
    return state.logits, None if cache is None else [(layer.keys, layer.values) for layer in cache.layers]


def test_compressed_equals_dense_oracle(pool):
    length, settings = 35, {"passing_len": 3, "anchor_len": 7}
    results = pool.run(2, compressed_job, text_batch(length), length - 6, settings)
    oracle = oracle_of(settings, 2, length - 6, prefix=0)
    expected = run_oracle(build("qwen2", torch.float32), text_batch(length), oracle)
    for layer, (keys, values) in enumerate(results[0][1]):
        assert relative_error(keys, oracle.keys[layer]) < 1e-4
        assert relative_error(values, oracle.values[layer]) < 1e-4
    assert all(relative_error(logits, expected) < 1e-4 for logits, _ in results)


def continuation_job(hosts: HostGroup, batch: dict) -> dict[str, list[int]]:
    """Greedy tokens by gathered and by sharded decoding, one at a time and by trees."""
    model, continued = build("llama", torch.float32), {}
    parts = inspect_model(model, "triton")
    greedy = SamplingConfig(max_new_tokens=STEPS)
    for kv in ("gathered", "sharded"):
        for way in ("tokens", "trees"):
            state = prefill(model, batch, hosts=hosts, config=replace(TRITON, method="zigzag_ring", kv=kv))
            answer = answer_by(decoder_behind(state, parts), state, greedy)
            continued[f"{kv} {way}"] = generate_tokens(answer) if way == "tokens" else None
            if way == "trees":
                cache = state.to_dynamic_cache()
                drafter = cache and TreeDrafter(parts, cache, state.next_position, parts.vocab_size)
                continued[f"{kv} {way}"], stats = generate_by_tree(answer, drafter, Tree.of(6, 3), Pace(3))
                assert stats.num_accepted > 0
    return continued


@pytest.mark.thorough
def test_continuations_equal_hugging_face_generate(pool):
    batch = text_batch(60)
    model = build("llama", torch.float32)
    reset_rope(model)
    expected = model.generate(**batch, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False)[0, 60:]
    for continued in pool.run(2, continuation_job, batch):
        assert len(continued) == 4 and all(tokens == expected.tolist() for tokens in continued.values())
