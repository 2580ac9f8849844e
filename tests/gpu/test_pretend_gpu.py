"""The pretended GPU itself: each of its rules, tried by breaking it."""

import threading
from contextlib import suppress
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from apbv.kernels import merge_states

from patience import GROUP_TIMEOUT
from pretend_gpu import GpuError, GpuTensor, assert_same_order, rehearsal
from rehearsals import on_gpus

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu():
    with rehearsal() as machine:
        yield machine
        machine.faults.clear()  # those that a test has seen


def refused(gpu, call, because: str) -> None:
    with pytest.raises((GpuError, TypeError), match=because):
        call()


def test_operands_on_two_devices_are_refused(gpu):
    here, there = torch.ones(2), torch.ones(2, device=GPU)
    refused(gpu, lambda: here + there, "two devices")
    refused(gpu, lambda: there + torch.ones(2, device="cuda:1"), "several GPUs")
    refused(gpu, lambda: torch.cat([there, here]), "two devices")
    refused(gpu, lambda: there.numpy(), "host memory")
    assert torch.equal((there + torch.tensor(1.0)).cpu(), torch.full((2,), 2.0))  # a single number is an argument


def test_waits_are_counted_where_they_are(gpu):
    x = torch.arange(6, device=GPU)
    for wait in (x[0].item, x.tolist, x.cpu, x.nonzero, lambda: x[x > 3], lambda: torch.tensor([1], device=GPU)):
        before = sum(gpu.events.waits.values())
        wait()
        assert sum(gpu.events.waits.values()) == before + 1
    before = sum(gpu.events.waits.values())
    x[2:4].add_(1), x.float().softmax(0), torch.zeros(3, device=GPU), x.repeat_interleave(2), x.to(torch.half)
    assert sum(gpu.events.waits.values()) == before


def test_a_hidden_fault_fails_the_rehearsal():
    with pytest.raises(GpuError, match="two devices"), rehearsal(), suppress(GpuError):
        torch.ones(2) + torch.ones(2, device=GPU)


def test_memory_of_two_streams_needs_an_event(gpu):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        made = torch.ones(4, device=GPU) * 2
        ready = side.record_event()
    unordered = made + 1
    assert "may still write" in gpu.faults.pop()
    torch.cuda.current_stream().wait_event(ready)
    made.add_(unordered)
    assert not gpu.faults
    with torch.cuda.stream(side):  # which the default stream may still write
        made.add_(1)
    assert "may still use" in gpu.faults.pop()


def test_a_copy_that_does_not_block_is_there_after_its_event(gpu):
    numbers = torch.arange(3, device=GPU)
    copy = numbers.to("cpu", non_blocking=True)
    pinned = torch.empty(3, dtype=torch.long).pin_memory()
    pinned.copy_(numbers, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    numbers.zero_()
    assert copy.tolist() != [0, 1, 2] and pinned.tolist() != [0, 1, 2]
    done.synchronize()
    assert copy.tolist() == pinned.tolist() == [0, 1, 2]
    assert gpu.events.names("wait") == {"event": 1}


def test_pinned_memory_may_not_be_written_while_it_is_copied(gpu):
    pinned = torch.ones(3).pin_memory()
    pinned.to(GPU, non_blocking=True)
    pinned.fill_(2)
    assert "may still read" in gpu.faults.pop()
    torch.cuda.synchronize()
    pinned.fill_(3)
    assert not gpu.faults


def test_triton_takes_memory_of_the_current_gpu(gpu):
    outs, lses = torch.ones(2, 1, 1, 1, 16, device="cuda:1"), torch.ones(2, 1, 1, 1, device="cuda:1")
    with torch.cuda.device(1):
        merged, _ = merge_states(outs, lses, backend="triton")
        assert merged.device == torch.device("cuda", 1) and gpu.events.names("triton") == {"_merge_kernel": 1}
        assert merged.flatten().tolist() == [1] * 16
        refused(gpu, lambda: merge_states(outs, lses.cpu(), backend="triton"), "host memory|two devices")


# Graphs


def captured(function):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


def test_a_graph_runs_again_on_the_same_memory(gpu):
    x, total = torch.ones(3, device=GPU), torch.zeros(3, device=GPU)

    def step():
        total.add_(x)
        return x * 2 + torch.ones_like(x), x.argmax()

    graph, (out, best) = captured(step)
    assert total.tolist() == [0, 0, 0] and np.isnan(out.tolist()).all()  # nothing has run
    x.copy_(torch.tensor([1.0, 5.0, 3.0]))
    gpu.reset()
    graph.replay()
    graph.replay()
    assert gpu.events.names("replay") == {"graph": 2} and gpu.events.num_launches == 2
    assert not gpu.events.waits and gpu.events.names("in_graph")["add_"] == 2
    assert (out.tolist(), best.tolist(), total.tolist()) == ([3, 11, 7], 1, [2, 10, 6])


def test_a_graph_runs_triton_kernels_that_ran_before(gpu):
    outs, lses = torch.ones(2, 1, 1, 1, 16, device=GPU), torch.ones(2, 1, 1, 1, device=GPU)

    def merge():
        return merge_states(outs, lses, backend="triton")[0]

    merge()
    graph, merged = captured(merge)
    outs.fill_(4)
    graph.replay()
    assert merged.flatten().tolist() == [4] * 16


def test_a_graph_holds_no_memory_from_outside(gpu):
    graph, _ = captured(partial(torch.add, torch.ones(3, device=GPU), 1))
    refused(gpu, graph.replay, "freed")


FORBIDDEN = {
    "item": (lambda x: x.sum().item(), "waits"),
    "copy to the host": (lambda x: x.cpu(), "host memory"),
    "copy from the host": (lambda x: torch.tensor([1.0], device=GPU), "from host memory"),
    "pinned": (lambda x: torch.ones(1).pin_memory().to(GPU, non_blocking=True), "from host memory"),
    "synchronize": (lambda x: torch.cuda.synchronize(), "waits"),
    "mask": (lambda x: x[x > 0], "waits"),
    "first launch": (lambda x: merge_states(x[None, None], x[None, 0, None], backend="triton"), "first time"),
}


@pytest.mark.parametrize("forbidden", FORBIDDEN)
def test_capture_forbids(gpu, forbidden):
    x, (call, because) = torch.ones(1, 1, 1, device=GPU), FORBIDDEN[forbidden]
    with pytest.raises(GpuError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        refused(gpu, lambda: call(x), because)
        assert because in gpu.faults[-1]


def test_capture_needs_a_stream_and_no_other_thread(gpu):
    refused(gpu, torch.cuda.CUDAGraph().capture_begin, "default stream")
    for mode, expected in (("global", 1), ("thread_local", 0)):
        gpu.faults.clear()
        with suppress(GpuError), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
            thread = threading.Thread(target=_allocate)
            thread.start()
            thread.join()
        assert any("another thread" in fault for fault in gpu.faults) == expected


def _allocate() -> None:
    with suppress(GpuError):
        torch.zeros(3, device=GPU)


# Exchanges


def exchange_job(hosts, plant: str) -> tuple[list[str], list]:
    """Two exchanges of GPU memory, with a mistake in them; the faults that were found, and the events."""
    found = []
    with suppress(GpuError), rehearsal() as gpu:
        ours = on_gpus(hosts)
        sent = torch.full((4,), float(hosts.rank), device=ours.device)
        exchange = ours.all_gather(sent)
        if plant == "written":
            sent.add_(1)
        elif plant == "host":
            with suppress(GpuError):
                dist.all_reduce(torch.ones(2), group=nccl_only(hosts))
        elif plant == "thread":
            other = threading.Thread(target=lambda: ours.all_gather(sent).wait())
            other.start()
            other.join()
        elif plant == "read":
            _received(gpu).sum()
        gathered = exchange.wait()
        assert gathered.tolist() == [[0.0] * 4, [1.0] * 4] or plant == "written"
        found += gpu.faults
    return found, gpu.events


def _received(gpu):
    """The buffer that an exchange under way receives, as code would have it that does not wait."""
    transfer = next(t for t in gpu.transfers._under_way if t.receives)
    return GpuTensor(transfer.keeps, torch.cuda.current_device(), gpu)


def nccl_only(hosts):
    ranks = dist.get_process_group_ranks(hosts.process_group)
    return dist.new_group(
        ranks, backend="nccl", timeout=timedelta(seconds=GROUP_TIMEOUT), use_local_synchronization=True
    )


RULES = {
    "nothing": None,
    "written": "writes a buffer that is sent",
    "read": "reads a buffer that receives",
    "host": "host tensors in a group that has NCCL only",
    "thread": "another thread's exchange",
}


@pytest.mark.parametrize("plant", RULES)
def test_exchanges_have_rules(pool, plant):
    outcomes, because = pool.run(2, exchange_job, plant), RULES[plant]
    for faults, _ in outcomes:
        assert (because is None and not faults) or any(because in fault for fault in faults)
    assert_same_order([events for _, events in outcomes])


def order_job(hosts):
    """Exchanges in two groups, which host 1 begins in another order."""
    with rehearsal() as gpu:
        groups = [on_gpus(hosts), on_gpus(hosts)]
        gpu.reset()
        sent = torch.ones(4, device=groups[0].device)
        exchanges = [group.all_gather(sent) for group in (groups if hosts.rank == 0 else reversed(groups))]
        for exchange in exchanges:
            exchange.wait()
    return gpu.events


def test_another_order_on_another_rank_is_found(pool):
    ranks = pool.run(2, order_job)
    with pytest.raises(AssertionError, match="ranks 0 and 1"):
        assert_same_order(ranks)
