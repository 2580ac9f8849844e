"""Which groups carry the data of pretended GPUs: NCCL's where each process has its own, else host
memory."""

import pytest
import torch
import torch.distributed as dist

from apbv import HostGroup

from apbv_tests.pretend_gpu import rehearsal
from apbv_tests.rehearsals import join


def require_exchanges(hosts: HostGroup) -> None:
    """All exchanges of GPU memory give what they should, several at once, and their bytes are
    counted."""
    before = hosts.bytes_received
    device = hosts.device
    gathered = hosts.all_gather(torch.full((3, 2), hosts.rank, device=device))
    parts = [torch.full((h + 1,), float(hosts.rank), device=device) for h in range(hosts.size)]
    swapped = hosts.all_to_all(parts, [(hosts.rank + 1,)] * hosts.size)
    sent = hosts.broadcast(torch.full((5,), hosts.rank, device=device), hosts.size - 1)
    assert sent.device == device and sent.tolist() == [hosts.size - 1] * 5
    assert gathered.wait().device == device
    assert gathered.wait()[:, 0, 0].tolist() == list(range(hosts.size))
    assert [part.tolist() for part in swapped.wait()] == [
        [float(h)] * (hosts.rank + 1) for h in range(hosts.size)
    ]
    others = hosts.size - 1
    broadcast = 5 * 8 if hosts.rank < others else 0
    assert hosts.bytes_received - before == others * (3 * 2 * 8 + 4 * (hosts.rank + 1)) + broadcast
    hosts.barrier()


def exchanges_job(pool_hosts: HostGroup, gpu_of: tuple[int, ...]) -> None:
    with rehearsal() as machine:
        rank = dist.get_rank()
        hosts = join(pool_hosts, f"cuda:{gpu_of[rank]}")
        backend = "cuda:apbv_nccl" if len(set(gpu_of)) == hosts.size else None
        connected = [event.name for event in machine.events.of("collective")]
        assert connected == (["allreduce_"] if backend else []), "at the start"
        some = hosts.subgroup([0, 2])
        connected = len(machine.events.of("collective"))
        link = hosts.subgroup([0, 1], has_data=False)
        assert len(machine.events.of("collective")) == connected, "a link needs no NCCL"
        for group in (hosts, some) if rank in (0, 2) else (hosts,):
            known = backend if group is hosts else None
            assert (group.process_group and dist.get_backend_config(group.process_group)) == known
            require_exchanges(group)
        before = len(machine.events.of("collective"))
        if rank in (0, 1):
            received = link.start_broadcast(torch.tensor([7 - rank]), 0)
            assert received.wait().item() == 7
        hosts.barrier()
        assert len(machine.events.of("collective")) == before and (backend or not before)


@pytest.mark.parametrize("gpu_of", [(0, 1, 2), (0, 1, 0)])
def test_nccl_connects_gpus_of_their_own_and_host_memory_shared_ones(pool, gpu_of):
    pool.run(3, exchanges_job, gpu_of)


def members_job(pool_hosts: HostGroup, gpu_of: tuple[int, ...]) -> bool:
    with rehearsal():
        hosts = join(pool_hosts, f"cuda:{gpu_of[dist.get_rank()]}", tensor_parallel=2)
        total = torch.ones(1, device=hosts.device)
        dist.all_reduce(total, group=hosts.tensor_parallel_mesh().get_group())
        assert total.item() == 2
        require_exchanges(hosts)
        return hosts.process_group is None


def test_members_of_a_host_are_connected_by_nccl(pool):
    for gpu_of, is_staged in (((0, 1, 2, 3), False), ((0, 1, 0, 1), True)):
        assert pool.run(4, members_job, gpu_of) == [is_staged] * 4
