"""The pretended GPU itself: each of its rules, tried by breaking it."""

import threading
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch

from apbv_tests.pretend_gpu import GpuError, GpuTensor, assert_same_order, rehearsal
from apbv_tests.rehearsals import on_gpus

GPU = torch.device("cuda", 0)


def ones(*shape: int, device=GPU) -> torch.Tensor:
    return torch.ones(shape, device=device)


def captured(function, priority: int = 0):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=priority)):
        function()
    return graph


def in_a_side_stream(function):
    with torch.cuda.stream(torch.cuda.Stream()):
        return function()


def overwrite_what_is_copied() -> None:
    pinned = torch.ones(3).pin_memory()
    pinned.to(GPU, non_blocking=True)
    pinned.fill_(2)


def free_what_another_stream_uses(told: bool = False) -> None:
    lent = ones(4)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        lent.sum()
    if told:
        lent.record_stream(side)
    del lent
    ones(4)


def launch_beside_a_capture() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        other = threading.Thread(target=lambda: torch.cuda.set_stream(stream) or ones(4))
        other.start()
        other.join()


def take_every_stream() -> None:
    captured(lambda: None)
    for _ in range(32):
        torch.cuda.Stream()


def let_a_quick_stream_wait() -> None:
    quick = torch.cuda.Stream(priority=-1)
    work = ones(4)
    quick.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(quick):
        work.record_stream(quick)
        work.sum()


PLANTS = {
    "an operand in host memory": (lambda: ones(2) + torch.ones(2), "two devices"),
    "a read before its event": (
        lambda: in_a_side_stream(lambda: ones(4) * 2) + 1,
        "may still write",
    ),
    "a write before its event": (lambda: in_a_side_stream((ones(4) * 2).zero_), "may still use"),
    "memory that was freed": (lambda: captured(partial(torch.add, ones(3), 1)).replay(), "freed"),
    "a wait in a graph": (lambda: captured(ones(2).sum().item), "waits"),
    "a copy from the host in a graph": (
        lambda: captured(lambda: torch.tensor([1.0], device=GPU)),
        "from host",
    ),
    "what is copied to a GPU is written": (overwrite_what_is_copied, "may still read"),
    "a replay at another priority": (
        lambda: captured(lambda: None, priority=-1).replay(),
        "of priority 0",
    ),
    "memory that is freed under another stream": (free_what_another_stream_uses, "record_stream"),
    "a launch in a stream that is being captured": (
        launch_beside_a_capture,
        "another thread captures",
    ),
    "a quick stream that waits for others": (let_a_quick_stream_wait, "far from done"),
    "more streams than there are": (take_every_stream, "handed out again"),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_what_a_gpu_refuses_or_does_wrong_fails_the_rehearsal(plant):
    call, because = PLANTS[plant]
    with pytest.raises(GpuError, match=because), rehearsal(), suppress(GpuError):
        call()


def test_memory_that_the_allocator_knows_to_be_in_use_may_be_freed():
    with rehearsal():
        free_what_another_stream_uses(told=True)


def test_a_copy_that_does_not_block_is_there_after_its_event():
    with rehearsal():
        numbers = torch.arange(3, device=GPU)
        copy = numbers.to("cpu", non_blocking=True)
        done = torch.cuda.current_stream().record_event()
        numbers.zero_()
        assert copy.tolist() != [0, 1, 2]
        done.synchronize()
        assert copy.tolist() == [0, 1, 2]


# Exchanges


def exchange_job(hosts, plant: str) -> tuple[str, list]:
    """Two exchanges of GPU memory, with a mistake in them: what the rehearsal says, and the
    events."""
    said = ""
    try:
        with rehearsal() as gpu:
            groups = [on_gpus(hosts), on_gpus(hosts)]
            gpu.reset()
            sent = ones(4, device=groups[0].device)
            if plant == "order" and hosts.rank:
                groups.reverse()
            exchanges = [group.all_gather(sent) for group in groups]
            if plant == "written":
                sent.add_(1)
            elif (
                plant == "read"
            ):  # the buffer that is received, as code would have it that does not wait
                received = next(
                    transfer.keeps for transfer in gpu.transfers.under_way if transfer.receives
                )
                GpuTensor(received, torch.cuda.current_device(), gpu).sum()
            for exchange in exchanges:
                exchange.wait()
    except GpuError as error:
        said = str(error)
    return said, gpu.events


@pytest.mark.parametrize(
    ("plant", "because"), [("order", ""), ("written", "is sent"), ("read", "receives")]
)
def test_exchanges_have_rules(pool, plant, because):
    outcomes = pool.run(2, exchange_job, plant)
    assert all(because in said and bool(said) == bool(because) for said, _ in outcomes)
    with nullcontext() if because else pytest.raises(AssertionError, match="ranks 0 and 1"):
        assert_same_order([events for _, events in outcomes])
