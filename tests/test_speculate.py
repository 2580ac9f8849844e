"""Speculative decoding says what autoregressive decoding says, and leaves the cache it would leave."""

import pytest
import torch
from test_prefill import UNCOMPRESSED, as_inputs, build, text_batch, video_batch

from apbv import HostGroup, PrefillConfig, prefill
from apbv.config import SamplingConfig
from apbv.decode.decoder import GatheredDecoder, ShardedDecoder, generate_tokens
from apbv.model.parts import inspect_model
from apbv.speculate.drafters import Proposal
from apbv.speculate.serial import generate_speculatively

STEPS = 40
VOCABULARY = 250

# Of every window: which drafted tokens are the right ones.
PATTERNS = {
    "none": lambda place: False,
    "all": lambda place: True,
    "alternating": lambda place: place % 2 == 0,
    "all but the first": lambda place: place > 0,
    "all but the last": lambda place: place % 5 != 4,
}


class ScriptedDrafter:
    """Knows the answer, and errs where it is told to."""

    def __init__(self, answer: list[int], pattern):
        self.answer, self.pattern = answer, pattern

    def propose(self, tokens, count):
        assert tokens == self.answer[: len(tokens)]
        right = self.answer[len(tokens) :][:count]
        return Proposal([t if self.pattern(place) else (t + 1) % VOCABULARY for place, t in enumerate(right)])


def decoders(model, hosts: HostGroup, batch: dict, query_start, kv: str):
    """A decoder after a fresh prefill, the prefill, and a look at the whole KV on host 0."""
    parts = inspect_model(model)
    inputs = as_inputs(model.config.model_type, batch, query_start, hosts, torch.float64)
    config = PrefillConfig(kv=kv, passing_len=UNCOMPRESSED, on_single_host=True)
    state = prefill(model, inputs, hosts=hosts, config=config)
    if kv == "sharded":
        decoder = ShardedDecoder(parts, state.shards, state.next_position, hosts)
        return decoder, state, lambda: state.shards.gather(hosts)
    cache = state.to_dynamic_cache()
    return GatheredDecoder(parts, cache, state.next_position, hosts), state, lambda: cache


def scripted_job(hosts: HostGroup, family: str, batch: dict, query_start, kv: str):
    model = build(family, torch.float64)
    decoder, state, _ = decoders(model, hosts, batch, query_start, kv)
    greedy = SamplingConfig(max_new_tokens=STEPS)
    plain = generate_tokens(decoder, state.logits[0], state.num_tokens, hosts, greedy, ())
    seen = {}

    def speculate(pattern: str, gamma: int, end: tuple[int, ...] = (), most: int = STEPS):
        decoder, state, look = decoders(model, hosts, batch, query_start, kv)
        drafter = ScriptedDrafter(plain, PATTERNS[pattern]) if hosts.rank == 0 else None
        shown = []
        tokens, stats = generate_speculatively(
            decoder,
            drafter,
            state.logits[0],
            state.num_tokens,
            hosts,
            SamplingConfig(max_new_tokens=most),
            end,
            gamma,
            shown.append,
        )
        assert shown == tokens
        cache = look()
        return tokens, stats, None if cache is None else [(layer.keys, layer.values) for layer in cache.layers]

    for pattern in PATTERNS:
        for gamma in (1, 2, 5, 13):
            tokens, stats, _ = speculate(pattern, gamma)
            assert tokens == plain, f"{pattern}, γ = {gamma}"
            seen[pattern, gamma] = stats
    assert seen["all", 5].num_target_forwards == -(-(STEPS - 1) // 6) and seen["none", 5].num_accepted == 0
    assert seen["all", 5].num_accepted == seen["all", 5].num_drafted
    for most in range(1, 16):  # every offset in a window
        assert speculate("all but the last", 5, most=most)[0] == plain[:most]
    ends = []
    for place in range(1, 16):
        if plain[place] in plain[:place]:
            continue
        ends.append(place)
        tokens, _, kv_states = speculate("all but the last", 5, end=(plain[place],))
        assert tokens == plain[: place + 1]
    assert len(ends) > 5
    return tokens, kv_states


@pytest.mark.parametrize("kv", ["gathered", "sharded"])
@pytest.mark.parametrize(("family", "num_hosts"), [("llama", 1), ("qwen2_5_vl", 2), ("llama", 3)])
def test_greedy_speculation_changes_no_token_and_leaves_the_right_kv(pool, family, num_hosts, kv):
    batch = text_batch(60) if family == "llama" else video_batch(family, frames=12)
    query_start = 48 if family == "llama" else None
    (tokens, states), *others = pool.run(num_hosts, scripted_job, family, batch, query_start, kv)
    assert all(said == tokens and kept is None for said, kept in others)
    # The KV of a prefill of the same tokens, the last one aside, by the model itself.
    model = build(family, torch.float64)
    inputs = as_inputs(family, batch, query_start, HostGroup.single(), torch.float64)
    state = prefill(model, inputs, hosts=HostGroup.single())
    decoder = GatheredDecoder(
        inspect_model(model), fresh := state.to_dynamic_cache(), state.next_position, HostGroup.single()
    )
    decoder.advance(tokens[:-1])
    for (keys, values), layer in zip(states, fresh.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(values, layer.values, rtol=1e-9, atol=1e-9)
