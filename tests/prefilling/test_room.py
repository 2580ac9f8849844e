"""Prompts that do not fit in memory are refused, or end, with an error that says so on every host."""

import pytest
import torch

from apbv import HostGroup, PrefillConfig, ReduceConfig, prefill
from apbv.kv.placement import ShardedKV
from apbv.model.parts import inspect_model
from apbv.prefilling import encode, room
from apbv.prefilling.memory import LayerRun, Share, host_memory
from apbv.prefilling.methods import METHODS
from apbv.prefilling.methods.base import PrefillMethod
from apbv.prefilling.reduction import early
from apbv.prefilling.reduction.forecast import Forecast
from apbv.prefilling.reduction.shape import PromptShape

import families
from fresh_hosts import Store, described, run_fresh
from prompts import as_inputs, build, text_batch, video_batch

TOKENS = 400


def refused_job(hosts: HostGroup, free_bytes: dict[int, int]) -> tuple[str, str, bool]:
    """How a prompt ends where so little is free on some hosts, and a later one where enough is."""
    model, config = (
        build("llama", torch.float32),
        PrefillConfig(kv="sharded", anchor_len=8, passing_len=8, query_len=8),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "unused_swap_bytes", lambda: 0)
        patch.setattr(room, "free_memory_bytes", lambda device: free_bytes.get(hosts.rank, 2**40))
        refused = described(lambda: prefill(model, text_batch(TOKENS), hosts=hosts, config=config))
    state = prefill(model, text_batch(TOKENS), hosts=hosts, config=config)
    return refused, state.method, hosts.is_broken


def least(num_hosts: int, host: int) -> int:
    parts, method = inspect_model(build("llama", torch.float32)), "apbv" if num_hosts > 1 else "full"
    config = PrefillConfig(anchor_len=8, passing_len=8, query_len=8, method=method)
    layout = METHODS[method].plan(num_hosts, TOKENS, 0, TOKENS - config.query_len, config)
    return host_memory(Share.of(parts), [LayerRun(parts.num_layers, layout)], host, "sharded").least


def test_what_certainly_does_not_fit_is_refused_on_every_host(pool):
    num_hosts, short = 2, 1
    needed = least(num_hosts, short)
    for refused, method, is_broken in pool.run(num_hosts, refused_job, {short: needed - 1}):
        assert refused.startswith("NotEnoughMemoryError: a prompt of 400 tokens does not fit in memory: ")
        assert f"host {short} needs at least" in refused and "fewer frames or tokens, or more hosts" in refused
        assert not is_broken and method == ("apbv" if num_hosts > 1 else "full")
    for allowed, *_ in pool.run(num_hosts, refused_job, {short: needed}):
        assert not allowed.startswith("NotEnoughMemoryError")


def reduced_job(hosts: HostGroup, free_bytes: dict[int, int], reduce: dict, kv="sharded") -> tuple[str, int]:
    """How a prompt of 800 visual tokens ends where so little is free on some hosts, and the chunks encoded."""
    model, batch, encoded = build("qwen2_5_vl", torch.float32), video_batch("qwen2_5_vl", frames=400), []
    config = PrefillConfig(kv=kv, anchor_len=8, reduce=ReduceConfig(**reduce))
    features = encode._features
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "_features", lambda *args: encoded.append(1) or features(*args))
        patch.setattr(room, "unused_swap_bytes", lambda: 0)
        patch.setattr(room, "free_memory_bytes", lambda device: free_bytes.get(hosts.rank, 2**40))
        return described(lambda: prefill(model, batch, hosts=hosts, config=config)), len(encoded)


def test_frames_that_do_not_fit_before_a_reduction_are_refused_on_every_host(pool):
    """Each host's 400 embeddings take more than what is left of the prompt."""
    needed, reduce = 400 * families.HIDDEN * 4, {"method": "hippo", "ratio": 0.01}
    for refused, num_encoded in pool.run(2, reduced_job, {1: needed - 1}, reduce):
        assert refused.startswith("NotEnoughMemoryError: a prompt of ") and "host 1 needs at least" in refused
        assert "the embeddings of its frames" in refused and "fewer frames, or more hosts" in refused
        assert num_encoded == 0
    assert all(allowed == "nothing raised" for allowed, _ in pool.run(2, reduced_job, {1: needed}, reduce))


def test_what_sparsevlm_may_leave_out_is_not_asked_for(pool):
    """How many tokens it leaves depends on a rank, of which the highest is not certain."""
    parts = inspect_model(build("qwen2_5_vl", torch.float32))
    reduce = {"method": "sparsevlm", "ratio": 0.3, "layer": 1}
    config = PrefillConfig(anchor_len=8, reduce=ReduceConfig(**reduce))
    inputs = as_inputs("qwen2_5_vl", video_batch("qwen2_5_vl", frames=400), None, HostGroup.single("cpu"))
    share, shape = Share.of(parts), PromptShape.of(parts, inputs, config.reduce)
    forecast = Forecast.of_shape(config, share.sizes, 2, shape)
    most, fewest = (host_memory(share, runs, 0, "gathered").least for runs in (forecast.most, forecast.fewest))
    assert fewest < most
    for free, outcome in ((fewest, "nothing raised"), (fewest - 1, "NotEnoughMemoryError")):
        for ended, _ in pool.run(2, reduced_job, {0: free}, reduce, "gathered"):
            assert ended.startswith(outcome) and ("kv='sharded'" in ended) == (free < fewest)


def test_what_waits_to_be_collected_counts_as_free(monkeypatch):
    free = iter([1, 2**40])
    monkeypatch.setattr(room, "free_memory_bytes", lambda device: next(free))
    monkeypatch.setattr(room, "unused_swap_bytes", lambda: 0)
    assert prefill(build("llama", torch.float32), text_batch(TOKENS), hosts=HostGroup.single("cpu")).num_tokens


def out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")


def exhausted_job(hosts: HostGroup, stage: str, victim: int, reduce: str | None = None) -> str:
    """How a prompt ends if one host's allocator fails in a stage."""
    model, batch = build("qwen2_5_vl", torch.float32), video_batch("qwen2_5_vl")
    config = PrefillConfig(anchor_len=8, reduce=reduce and ReduceConfig(method=reduce))
    with pytest.MonkeyPatch.context() as patch:
        if hosts.rank == victim:
            where = {
                "encoding": (encode, "_features"),
                "reduction": (early, "choose_rows"),
                "prefill": (PrefillMethod, "attend"),
                "handoff": (ShardedKV, "gathered"),
            }
            patch.setattr(*where[stage], out_of_memory)
        return described(lambda: prefill(model, batch, hosts=hosts, config=config))


def test_an_allocator_that_fails_is_one_clear_error():
    stages = [("encoding", None), ("prefill", None), ("handoff", None)]
    for stage, reduce in [*stages, ("encoding", "hippo"), ("reduction", "hippo"), ("prefill", "fastv")]:
        failed = exhausted_job(HostGroup.single("cpu"), stage, 0, reduce)
        where = f"host 0 ran out of memory on cpu in the {stage} of a prompt of "
        assert failed.startswith(f"NotEnoughMemoryError: {where}")


def test_an_allocator_that_fails_on_one_host_is_a_clear_error_on_all(tmp_path):
    outcomes = run_fresh(Store(tmp_path), 2, exhausted_job, "prefill", 1)
    quoting, own = (outcome.result for outcome in outcomes)
    assert own.startswith("NotEnoughMemoryError: host 1 ran out of memory on cpu in the prefill of a prompt of ")
    assert quoting.startswith("HostError: host 1 failed in ") and "out of memory" in quoting
