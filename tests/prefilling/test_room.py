"""Prompts that do not fit in memory are refused, or end, with an error that says so on every
host."""

from contextlib import ExitStack

import pytest
import torch

from apbv import HostGroup, PrefillConfig, ReduceConfig, prefill, stats
from apbv.kv.placement import ShardedKV
from apbv.model.parts import inspect_model
from apbv.prefilling import memory
from apbv.prefilling.encoding import vision
from apbv.prefilling.memory import host_memory
from apbv.prefilling.methods import METHODS, base
from apbv.prefilling.reduction import pruning

from apbv_tests import families
from apbv_tests.fresh_hosts import Store, described, run_fresh
from apbv_tests.prompts import build, text_batch, video_batch

TOKENS = 400
SHORT = {"anchor_len": 8, "passing_len": 8, "query_len": 8, "kv": "sharded"}


def ended_job(
    hosts: HostGroup, is_video: bool, settings: dict, free_bytes: dict[int, int]
) -> tuple:
    """How a prompt ends where so little is free on some hosts, the chunks encoded, and how it ends
    elsewhere."""
    family = "qwen2_5_vl" if is_video else "llama"
    batch = video_batch(family, frames=400) if is_video else text_batch(TOKENS)
    model = build(family, torch.float32)
    settings = {**SHORT, **settings}
    config = PrefillConfig(**settings)
    encoded = []
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if is_video:
            hook = model.model.visual.register_forward_pre_hook(lambda *_: encoded.append(1))
            stack.callback(hook.remove)
        patch.setattr(
            memory, "free_memory_bytes", lambda device, swaps: free_bytes.get(hosts.rank, 2**40)
        )
        ended = described(lambda: prefill(model, batch, hosts=hosts, config=config))
    method = None if is_video else prefill(model, batch, hosts=hosts, config=config).method
    return ended, len(encoded), method


def test_what_certainly_does_not_fit_is_refused_on_every_host(pool):
    parts = inspect_model(build("llama", torch.float32))
    config = PrefillConfig(**SHORT)
    layout = METHODS["apbv"].plan(2, TOKENS, 0, TOKENS - config.query_len, config)
    estimate = host_memory(parts.sizes, layout, 1, "sharded", itemsize=4, device=parts.device)
    needed = estimate.certain["prefill"]
    for refused, _, method in pool.run(2, ended_job, False, {}, {1: needed - 1}):
        assert refused.startswith(
            "NotEnoughMemoryError: a prompt of 400 tokens does not fit in memory: "
        )
        assert "host 1 needs at least" in refused
        assert "fewer frames or tokens, or more hosts" in refused
        assert method == "apbv"
    for allowed, *_ in pool.run(2, ended_job, False, {}, {1: needed}):
        assert not allowed.startswith("NotEnoughMemoryError")


def test_frames_that_do_not_fit_before_a_reduction_are_refused_on_every_host(pool):
    """Each host's 400 embeddings take more than what is left of the prompt."""
    needed = 400 * families.HIDDEN * 4
    settings = {"reduce": ReduceConfig(method="dycoke", ratio=0.01)}
    for refused, num_encoded, _ in pool.run(2, ended_job, True, settings, {1: needed - 1}):
        assert refused.startswith("NotEnoughMemoryError: a prompt of ")
        assert "host 1 needs at least" in refused
        assert "the embeddings of its frames" in refused
        assert "fewer frames, or more hosts" in refused
        assert num_encoded == 0
    results = pool.run(2, ended_job, True, settings, {1: needed})
    assert all(allowed == "nothing raised" for allowed, *_ in results)


def test_what_waits_to_be_collected_counts_as_free(monkeypatch):
    free = iter([1, 2**40])
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device, swaps: next(free))
    assert prefill(
        build("llama", torch.float32), text_batch(TOKENS), hosts=HostGroup.single("cpu")
    ).num_tokens


@pytest.mark.parametrize(
    ("swap", "ended"), [(0, "NotEnoughMemoryError: "), (2**40, "nothing raised")]
)
def test_what_the_machine_can_swap_out_counts_as_free(monkeypatch, swap, ended):
    figures = {"MemAvailable": 1, "SwapFree": swap}
    monkeypatch.setattr(stats, "kernels_figure", lambda name, of="meminfo": figures.get(name))
    model = build("llama", torch.float32)
    batch = text_batch(TOKENS)
    assert described(lambda: prefill(model, batch, hosts=HostGroup.single("cpu"))).startswith(ended)


# Where a fault is planted.
STAGES = {"encoding": (vision, "_features"), "reduction": (pruning, "choose_rows")}
STAGES |= {"prefill": (base, "segmented_attention"), "handoff": (ShardedKV, "gathered")}


def out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")


def exhausted_job(hosts: HostGroup, stage: str, victim: int, reduce: str | None = None) -> str:
    """How a prompt ends if one host's allocator fails in a stage."""
    model = build("qwen2_5_vl", torch.float32)
    batch = video_batch("qwen2_5_vl")
    reduce_config = None if reduce is None else ReduceConfig(method=reduce)
    config = PrefillConfig(anchor_len=8, reduce=reduce_config)
    with pytest.MonkeyPatch.context() as patch:
        if hosts.rank == victim:
            patch.setattr(*STAGES[stage], out_of_memory)
        failure = described(lambda: prefill(model, batch, hosts=hosts, config=config))
    assert model.get_decoder().config._attn_implementation == "sdpa", "the model is left as it was"
    return failure


def test_an_allocator_that_fails_is_one_clear_error():
    for stage, reduce in (
        ("encoding", None),
        ("handoff", None),
        ("reduction", "dycoke"),
        ("prefill", "fastvid"),
    ):
        failed = exhausted_job(HostGroup.single("cpu"), stage, 0, reduce)
        where = f"host 0 ran out of memory on cpu in the {stage} of a prompt of "
        assert failed.startswith(f"NotEnoughMemoryError: {where}")


def test_an_allocator_that_fails_on_one_host_is_a_clear_error_on_all(tmp_path):
    outcomes = run_fresh(Store(tmp_path), 2, exhausted_job, "prefill", 1)
    first, second = (outcome.result for outcome in outcomes)
    assert second.startswith(
        "NotEnoughMemoryError: host 1 ran out of memory on cpu in the prefill of a prompt of "
    )
    assert first == second
