"""Which process computes where, and by which way data then goes. What a machine has is
pretended."""

from types import SimpleNamespace

import pytest
import torch

from apbv import HostGroup
from apbv.hosts.devices import choose_device, device_identity, sharing
from apbv.hosts.process_groups import Place, nccl_can_connect


@pytest.fixture
def machine(monkeypatch):
    """A machine with so many GPUs, on which this is torchrun's process number ``local_rank``."""

    def pretend(num_gpus: int, local_rank: int | None = None, current: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local_rank is not None:
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))

    return pretend


# What is wanted, how many GPUs there are, torchrun's number of the process, and the device in use.
CHOICES = {(None, 0, 1, 0): "cpu", (None, 4, 3, 0): "cuda:3", (None, 1, 1, 0): "cuda:0"}
CHOICES |= {(None, 4, None, 2): "cuda:2", ("cuda", 2, 2, 1): "cuda:0", ("cpu", 4, 3, 1): "cpu"}


def test_the_device_of_a_process(machine):
    for (wanted, *others), device in CHOICES.items():
        machine(*others)
        assert choose_device(wanted) == torch.device(device), (wanted, *others)
    machine(2, 0)
    for wanted, message in {"cuda:2": "torch finds 2 GPUs on this machine", "gpu": "'gpu'"}.items():
        with pytest.raises(ValueError, match=message):
            HostGroup.single(wanted)


def test_a_gpu_is_known_by_its_uuid_whatever_a_process_calls_it(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-7")
    )
    first, second = (device_identity(torch.device("cuda", index)) for index in range(2))
    assert first == second and "GPU-7" in first and device_identity(torch.device("cpu")) == "cpu"


def test_processes_that_share_a_gpu():
    assert sharing(["a 0", "cpu", "a 1", "a 0", "cpu", "a 0"]) == [[0, 3, 5]]
    assert sharing(["a 0", "b 0", "cpu", "cpu"]) == []


def test_when_nccl_connects_processes():
    first = Place("a 0", True)
    second = Place("a 1", True)
    other = Place("b 0", True)
    assert nccl_can_connect([first, second, other])
    assert not nccl_can_connect([first, first]) and not nccl_can_connect(
        [first, Place("a 1", False)]
    )


def own_device_job(hosts: HostGroup) -> str:
    """Host 1 wants what there is not."""
    try:
        HostGroup.from_process_group(hosts.process_group, "cuda:9" if hosts.rank == 1 else "cpu")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.skipif(torch.cuda.device_count() > 9, reason="there is such a GPU")
def test_a_device_that_one_host_has_not_ends_all(pool):
    own = (
        "BackendUnavailableError: no such device: cuda:9; torch finds "
        f"{torch.cuda.device_count()} GPUs on this machine"
    )
    assert pool.run(3, own_device_job) == [own] * 3
