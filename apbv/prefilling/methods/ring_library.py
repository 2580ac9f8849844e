"""Tries ring-flash-attn, an extra for CUDA, on a small problem before it computes a prompt."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from ...device_copy import to_device
from ...errors import HostError
from ...hosts import HostGroup
from ...kernels import reference
from ...kernels.backends import drawn_numbers, mistake_of
from ...reporting import warn_caller

# Takes q, k and v [1, S, H, D] of this host's two chunks, softmax_scale, causal and group; returns
# out.
Ring = Callable[..., Tensor]

_CHUNK = 37  # rows; of no tile a multiple
_MISSING = "it is not installed"


@cache
def usable_ring(
    hosts: HostGroup, device: torch.device, dtype: torch.dtype, head_dim: int, groups: int
) -> Ring | None:
    """Return ring-flash-attn's function if it is correct on all hosts; else warn with the reason.

    Collective, and tried once: all hosts call it with the same arguments, so all cache the same
    result.

    Args:
        hosts: a group of processes.
        device, dtype: those of q, k and v.
        head_dim: D.
        groups: query heads per KV head.
    """
    ring = None
    obstacle = _MISSING
    if find_spec("ring_flash_attn") is not None:
        try:
            ring = import_module("ring_flash_attn").zigzag_ring_flash_attn_func
            obstacle = None
        except Exception as error:  # a package built for another torch fails in many ways
            obstacle = f"{type(error).__name__}: {error}".splitlines()[0]
    obstacles = hosts.gather_json(obstacle)
    if set(obstacles) == {_MISSING}:
        return None
    if not any(obstacles):
        obstacles = hosts.gather_json(why_wrong(ring, hosts, device, dtype, head_dim, groups))
    failed = [
        f"on {hosts.name_of(number)} {reason}" for number, reason in enumerate(obstacles) if reason
    ]
    if failed:
        warn_caller(f"ring-flash-attn is not used, because {failed[0]}")
        return None
    return ring


@torch.no_grad()
def why_wrong(
    ring: Ring,
    hosts: HostGroup,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    groups: int,
) -> str | None:
    """Run a ring on a small problem with all hosts, and return its error on this host.

    None if there is none.

    Args:
        ring: the function, which exchanges data with the hosts' process group.
        hosts, device, dtype, head_dim, groups: as for :func:`usable_ring`.

    Raises:
        HostError: another host did not come to the ring.
    """
    # Every host draws the whole problem.
    heads, scale, randn = (2, head_dim**-0.5, drawn_numbers(device, dtype))
    rows = 2 * hosts.size * _CHUNK
    q, k, v = (randn(1, rows, count, head_dim) for count in (heads * groups, heads, heads))
    chunks = (hosts.rank, 2 * hosts.size - 1 - hosts.rank)
    mine = to_device(
        torch.cat([torch.arange(chunk * _CHUNK, (chunk + 1) * _CHUNK) for chunk in chunks]), device
    )
    try:
        own = (states[:, mine].contiguous() for states in (q, k, v))
        out = ring(*own, softmax_scale=scale, causal=True, group=hosts.process_group)
        # A host on which the ring raises sends nothing, and CUDA would wait for it without end.
        hosts.settle()
    except HostError:
        raise
    except Exception as error:  # an installation that does not fit the machine may raise anything
        return f"it raised {type(error).__name__}: {error}".splitlines()[0]
    q, k, v = (states.transpose(1, 2).double() for states in (q, k, v))
    exact = reference.segmented_attention(q, [(k, v)], scale, True)[0][:, :, mine].transpose(1, 2)
    # Out averages numbers of about 1, so that rounding to `dtype` costs about its epsilon.
    return mistake_of(lambda: [out], [exact], [4 * torch.finfo(dtype).eps])
