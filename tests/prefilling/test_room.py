"""Prompts that do not fit in memory are refused, or end, with an error that says so on every host."""

import pytest
import torch

from apbv import HostGroup, PrefillConfig, prefill
from apbv.kv.placement import ShardedKV
from apbv.model.parts import inspect_model
from apbv.prefilling import encode, room
from apbv.prefilling.memory import Share, host_memory
from apbv.prefilling.methods import METHODS
from apbv.prefilling.methods.base import PrefillMethod

from fresh_hosts import Store, described, run_fresh
from prompts import build, text_batch, video_batch

TOKENS = 400


def refused_job(hosts: HostGroup, free_bytes: dict[int, int], kv: str) -> tuple[str, str, bool]:
    """How a prompt ends where so little is free on some hosts, and a later one where enough is."""
    model, config = build("llama", torch.float32), PrefillConfig(kv=kv, anchor_len=8, passing_len=8, query_len=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "unused_swap_bytes", lambda: 0)
        patch.setattr(room, "free_memory_bytes", lambda device: free_bytes.get(hosts.rank, 2**40))
        refused = described(lambda: prefill(model, text_batch(TOKENS), hosts=hosts, config=config))
    state = prefill(model, text_batch(TOKENS), hosts=hosts, config=config)
    return refused, state.method, hosts.is_broken


def least(num_hosts: int, host: int, kv: str) -> int:
    parts = inspect_model(build("llama", torch.float32))
    config = PrefillConfig(
        kv=kv, anchor_len=8, passing_len=8, query_len=8, method="apbv" if num_hosts > 1 else "full"
    )
    layout = METHODS[config.method].plan(num_hosts, TOKENS, 0, TOKENS - config.query_len, config)
    return host_memory(Share.of(parts), layout, host, kv).least


@pytest.mark.parametrize(("num_hosts", "short"), [(1, 0), (2, 0), (2, 1)])
def test_what_certainly_does_not_fit_is_refused_on_every_host(pool, num_hosts, short):
    needed = least(num_hosts, short, "sharded")
    for refused, method, is_broken in pool.run(num_hosts, refused_job, {short: needed - 1}, "sharded"):
        assert refused.startswith("NotEnoughMemoryError: a prompt of 400 tokens does not fit in memory: ")
        assert f"host {short} needs at least" in refused and "fewer frames or tokens, or more hosts" in refused
        assert not is_broken and method == ("apbv" if num_hosts > 1 else "full")
    for allowed, *_ in pool.run(num_hosts, refused_job, {short: needed}, "sharded"):
        assert not allowed.startswith("NotEnoughMemoryError")


def test_where_gathering_is_too_much_sharded_kv_is_proposed(pool):
    needed = least(2, 0, "gathered")
    assert needed > least(2, 0, "sharded")
    for refused, *_ in pool.run(2, refused_job, {0: needed - 1}, "gathered"):
        assert "the KV of all hosts" in refused and "kv='sharded'" in refused


def test_what_waits_to_be_collected_counts_as_free(monkeypatch):
    free = iter([1, 2**40])
    monkeypatch.setattr(room, "free_memory_bytes", lambda device: next(free))
    monkeypatch.setattr(room, "unused_swap_bytes", lambda: 0)
    assert prefill(build("llama", torch.float32), text_batch(TOKENS), hosts=HostGroup.single("cpu")).num_tokens


def out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")


def exhausted_job(hosts: HostGroup, stage: str, victim: int) -> str:
    """How a prompt ends if one host's allocator fails in a stage."""
    model, batch = build("qwen2_5_vl", torch.float32), video_batch("qwen2_5_vl")
    with pytest.MonkeyPatch.context() as patch:
        if hosts.rank == victim:
            where = {
                "encoding": (encode, "_features"),
                "prefill": (PrefillMethod, "attend"),
                "handoff": (ShardedKV, "gathered"),
            }
            patch.setattr(*where[stage], out_of_memory)
        return described(lambda: prefill(model, batch, hosts=hosts, config=PrefillConfig(anchor_len=8)))


@pytest.mark.parametrize("stage", ["encoding", "prefill", "handoff"])
def test_an_allocator_that_fails_is_one_clear_error(stage):
    failed = exhausted_job(HostGroup.single("cpu"), stage, 0)
    assert failed.startswith(
        f"NotEnoughMemoryError: host 0 ran out of memory on cpu in the {stage} of a prompt of "
    )
    assert "take" in failed or "chunk_bytes" in failed


@pytest.mark.parametrize("stage", [pytest.param("encoding", marks=pytest.mark.thorough), "prefill"])
def test_an_allocator_that_fails_on_one_host_is_a_clear_error_on_all(tmp_path, stage):
    outcomes = run_fresh(Store(tmp_path), 2, exhausted_job, stage, 1)
    quoting, own = (outcome.result for outcome in outcomes)
    assert own.startswith(f"NotEnoughMemoryError: host 1 ran out of memory on cpu in the {stage} of a prompt of ")
    assert quoting.startswith("HostError: host 1 failed in ") and "out of memory" in quoting
