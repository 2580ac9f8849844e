"""Reduced prompts on disk, loaded on any number of hosts."""

import json
from pathlib import Path

import pytest
import torch

import apbv
from apbv import HostGroup, PrefillConfig, ReduceConfig, SamplingParams, StorageError
from apbv.kv.placement import GatheredKV, ShardedKV

from apbv_tests.answers import plain_tokens
from apbv_tests.prompts import as_inputs, build, kv_of, video_batch

FAMILY = "qwen2_5_vl"
GREEDY = SamplingParams(max_new_tokens=6, ignore_eos=True)


def prefilled(hosts: HostGroup, name: str, kv: str) -> apbv.PrefillResult:
    reduce = ReduceConfig(method=name, ratio=0.3)
    inputs = as_inputs(FAMILY, video_batch(FAMILY), None, hosts, torch.float64)
    config = PrefillConfig(kv=kv, reduce=reduce, passing_len=4, anchor_len=21)
    return apbv.prefill(build(FAMILY, torch.float64), inputs, hosts=hosts, config=config)


def facts_of(state: apbv.PrefillResult) -> tuple:
    """All that is to be the same in a state that was saved and loaded, and on host 0 its KV."""
    kv = kv_of(state.to_dynamic_cache())
    tokens = plain_tokens(state, build(FAMILY, torch.float64), GREEDY)
    left = state.reduction.kept.tolist(), state.inputs.num_visual_tokens
    known = (
        state.reduction.figures,
        left,
        state.exact,
        state.method,
        state.num_tokens,
        state.next_position,
    )
    return known, tokens, state.logits, kv


def save_job(hosts: HostGroup, path: Path, name: str, kv: str) -> tuple:
    state = prefilled(hosts, name, kv)
    facts = facts_of(state)
    state.save(path)  # without the answer that has just followed
    return facts


def load_job(hosts: HostGroup, path: Path, kv: str) -> tuple:
    state = apbv.load(path, build(FAMILY, torch.float64), hosts=hosts, kv=kv)
    assert isinstance(state.kv, {"gathered": GatheredKV, "sharded": ShardedKV}[kv])
    again = path.with_name(f"again on {hosts.size}, {kv}")
    state.save(again)
    return facts_of(state), facts_of(apbv.load(again, hosts=hosts, kv=kv))


def assert_same(found: tuple, expected: tuple) -> None:
    (known, tokens, logits, kv) = found
    (their_known, their_tokens, their_logits, their_kv) = expected
    assert known == their_known and tokens == their_tokens and torch.equal(logits, their_logits)
    assert (kv is None) == (their_kv is None)
    for states, their_states in zip(kv or (), their_kv or (), strict=True):
        assert all(
            torch.equal(mine, theirs) for mine, theirs in zip(states, their_states, strict=True)
        )


def test_what_was_saved_is_loaded_bit_for_bit_and_says_what_is_left(pool, tmp_path):
    expected, *_ = pool.run(2, save_job, tmp_path / "kv", "fastvid", "gathered")
    for host, loaded in enumerate(pool.run(3, load_job, tmp_path / "kv", "sharded")):
        there = expected if host == 0 else (*expected[:3], None)
        assert_same(loaded[0], there)
        assert_same(loaded[1], there)


def test_a_reduction_that_does_not_explain_the_tokens_is_refused(tmp_path):
    prefilled(HostGroup.single("cpu"), "fastvid", "gathered").save(tmp_path)
    record = json.loads((tmp_path / "manifest.json").read_text())
    record["reduction"]["kept"][1] = record["reduction"]["kept"][0]
    (tmp_path / "manifest.json").write_text(json.dumps(record))
    with pytest.raises(StorageError, match="that its pruning"):
        apbv.load(tmp_path, hosts=HostGroup.single("cpu"))
