"""Speculative decoding says what autoregressive decoding says, and leaves the cache it would leave."""

import pytest
import torch

from apbv import HostGroup, prefill
from apbv.config import SamplingConfig
from apbv.decode.answer import generate_tokens
from apbv.speculate.pace import Pace
from apbv.speculate.serial import generate_speculatively

from answers import answer_by, decoder_behind
from drafters import PATTERNS, STEPS, ScriptedDrafter, decoders
from prompts import as_inputs, build, text_batch, video_batch

# Every pattern of errors, and every length of a window, among them those whose figures are known.
WINDOWS = [("none", 5), ("all", 5), ("none", 1), ("alternating", 2), ("alternating", 13), ("all but the first", 5)]
WINDOWS += [("all", 1), ("all but the last", 13), ("all but the last", 2)]


def scripted_job(hosts: HostGroup, family: str, batch: dict, query_start, kv: str):
    model = build(family, torch.float64)
    decoder, state, _ = decoders(model, hosts, batch, query_start, kv)
    greedy = SamplingConfig(max_new_tokens=STEPS)
    plain = generate_tokens(answer_by(decoder, state, greedy))
    seen = {}

    def speculate(pattern: str, gamma: int, end: tuple[int, ...] = (), most: int = STEPS):
        decoder, state, look = decoders(model, hosts, batch, query_start, kv)
        drafter = ScriptedDrafter(plain, PATTERNS[pattern]) if hosts.rank == 0 else None
        shown = []
        tokens, stats = generate_speculatively(
            answer_by(decoder, state, SamplingConfig(max_new_tokens=most), end, shown.append), drafter, Pace(gamma)
        )
        assert shown == tokens
        cache = look()
        return tokens, stats, None if cache is None else [(layer.keys, layer.values) for layer in cache.layers]

    for pattern, gamma in WINDOWS:
        tokens, stats, _ = speculate(pattern, gamma)
        assert tokens == plain, f"{pattern}, γ = {gamma}"
        seen[pattern, gamma] = stats
    assert seen["all", 5].num_target_forwards == -(-(STEPS - 1) // 6) and seen["none", 5].num_accepted == 0
    assert seen["all", 5].num_accepted == seen["all", 5].num_drafted
    for most in range(1, 9):  # every offset in a window
        assert speculate("all but the last", 5, most=most)[0] == plain[:most]
    ends = []
    for place in range(1, 12):
        if plain[place] in plain[:place]:
            continue
        ends.append(place)
        tokens, _, kv_states = speculate("all but the last", 5, end=(plain[place],))
        assert tokens == plain[: place + 1]
    assert len(ends) > 5
    return tokens, kv_states


@pytest.mark.parametrize(
    ("family", "num_hosts", "kv"),
    [
        ("llama", 1, "gathered"),
        ("qwen2_5_vl", 2, "sharded"),
        pytest.param("qwen2_5_vl", 2, "gathered", marks=pytest.mark.thorough),
        pytest.param("llama", 1, "sharded", marks=pytest.mark.thorough),
        pytest.param("llama", 3, "sharded", marks=pytest.mark.thorough),
        ("llama", 3, "gathered"),
    ],
)
def test_greedy_speculation_changes_no_token_and_leaves_the_right_kv(pool, family, num_hosts, kv):
    batch = text_batch(60) if family == "llama" else video_batch(family, frames=12)
    query_start = 48 if family == "llama" else None
    (tokens, states), *others = pool.run(num_hosts, scripted_job, family, batch, query_start, kv)
    assert all(said == tokens and kept is None for said, kept in others)
    # The KV of a prefill of the same tokens, the last one aside, by the model itself.
    model = build(family, torch.float64)
    inputs = as_inputs(family, batch, query_start, HostGroup.single(), torch.float64)
    state = prefill(model, inputs, hosts=HostGroup.single())
    decoder_behind(state, model).advance(tokens[:-1])
    for (keys, values), layer in zip(states, state.kv.cache.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(values, layer.values, rtol=1e-9, atol=1e-9)
