"""ring-flash-attn is tried before it is trusted: right and wrong stand-ins for it, over real
hosts."""

import sys
import warnings
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist

from apbv import HostGroup
from apbv.kernels import reference
from apbv.prefilling.methods import ring_library

CPU = torch.device("cpu")
PROBLEM = (CPU, torch.bfloat16, 16, 2)


def gathered_ring(q, k, v, *, softmax_scale, causal, group):
    """What ring-flash-attn computes, by gathering all chunks."""
    size = dist.get_world_size(group)
    rank = dist.get_rank(group)
    whole = []
    for states in (q, k, v):
        parts = [torch.empty_like(states) for _ in range(size)]
        dist.all_gather(parts, states, group=group)
        early = []
        late = []
        for part in parts:
            first, second = part.chunk(2, dim=1)
            early.append(first)
            late.insert(0, second)
        whole.append(torch.cat(early + late, dim=1).transpose(1, 2).double())
    q, k, v = whole
    out = reference.segmented_attention(q, [(k, v)], softmax_scale, causal)[0].transpose(1, 2)
    chunks = out.chunk(2 * size, dim=1)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim=1).to(torch.bfloat16)


def not_causal(*states, causal, **options):
    return gathered_ring(*states, causal=False, **options)


def wrong_on_host_1(*states, group, **options):
    out = gathered_ring(*states, group=group, **options)
    return out + 1 if dist.get_rank(group) == 1 else out


def raising(*states, **options):
    raise RuntimeError("no kernel image is available\nfor execution on the device")


def choosing_job(hosts: HostGroup, installed: list) -> tuple[str | None, list[str]]:
    """The function that is used, by name, and the warnings: ``installed`` says what each host
    has."""
    ring = installed[hosts.rank]
    modules = {}
    if ring is not None:
        modules["ring_flash_attn"] = SimpleNamespace(
            zigzag_ring_flash_attn_func=ring, __spec__=SimpleNamespace()
        )
    ring_library.usable_ring.cache_clear()
    with patch.dict(sys.modules, modules), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        used = ring_library.usable_ring(hosts, *PROBLEM)
    ring_library.usable_ring.cache_clear()
    name = None if used is None else used.__name__
    return name, [str(warning.message) for warning in caught]


def test_all_hosts_use_it_or_none(pool):
    for installed, used, warning in (
        ([gathered_ring] * 2, "gathered_ring", None),
        ([None] * 2, None, None),
        ([None, gathered_ring], None, "on host 0 it is not installed"),
        ([wrong_on_host_1] * 2, None, "on host 1 it is off by"),
        ([not_causal] * 2, None, "on host 0 it is off by"),
        ([raising] * 2, None, "on host 0 it raised RuntimeError: no kernel image is available"),
    ):
        for name, messages in pool.run(2, choosing_job, installed):
            assert name == used
            assert len(messages) == (warning is not None)
            assert not messages or f"ring-flash-attn is not used, because {warning}" in messages[0]
