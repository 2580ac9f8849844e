"""Tries ring-flash-attn, an extra for CUDA, on a small problem before it computes a prompt."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from ...device.copies import to_device
from ...errors import HostError
from ...hosts import HostGroup
from ...kernels import reference
from ...kernels.backends import drawn_numbers, mistake_of
from ...reporting import warn_caller

# Called with q [1, S, Hq, D], k and v [1, S, Hkv, D] of this host's two chunks, and with
# softmax_scale, causal and group; returns out [1, S, Hq, D].
Ring = Callable[..., Tensor]

_CHUNK = 37  # rows of a chunk of the small problem; no multiple of a kernel's tile
_MISSING = "it is not installed"


@cache
def usable_ring(
    hosts: HostGroup, device: torch.device, dtype: torch.dtype, head_dim: int, groups: int
) -> Ring | None:
    """Return ring-flash-attn's function if it is correct on all hosts; else warn with the reason.

    Collective. It is tried once: all hosts call this with the same arguments, so all cache the same
    result. None without a warning if no host has it installed.

    Args:
        hosts: a group of processes.
        device, dtype: the device and dtype of q, k and v.
        head_dim: D.
        groups: query heads per KV head.
    """
    # Import it on every host.
    ring = None
    obstacle: str | None = _MISSING
    if find_spec("ring_flash_attn") is not None:
        try:
            ring = import_module("ring_flash_attn").zigzag_ring_flash_attn_func
            obstacle = None
        except Exception as error:  # a package built for another torch fails in many ways
            obstacle = f"{type(error).__name__}: {error}".splitlines()[0]
    obstacles = hosts.gather_json(obstacle)  # of every process
    if all(reason == _MISSING for reason in obstacles):
        return None

    # Try it if every host could import it.
    if not any(obstacles):
        assert ring is not None  # every host could import it
        mistake = why_wrong(ring, hosts, device, dtype, head_dim, groups)
        obstacles = hosts.gather_json(mistake)
    for process, reason in enumerate(obstacles):
        if reason is not None:
            warn_caller(
                f"ring-flash-attn is not used, because on {hosts.name_of(process)} {reason}"
            )
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
    """Run a ring on a small problem with all hosts; return its mistake on this host, or None.

    Args:
        ring: the function, which exchanges data within the hosts' process group.
        hosts, device, dtype, head_dim, groups: as for :func:`usable_ring`.

    Raises:
        HostError: another host failed or did not answer during the ring's exchanges.
    """
    # Draw the whole problem, the same on every host.
    num_kv_heads = 2
    num_chunks = 2 * hosts.size
    num_rows = num_chunks * _CHUNK
    scale = head_dim**-0.5
    draw = drawn_numbers(device, dtype)
    q = draw(1, num_rows, num_kv_heads * groups, head_dim)
    k = draw(1, num_rows, num_kv_heads, head_dim)
    v = draw(1, num_rows, num_kv_heads, head_dim)

    # This host's rows: an early chunk and a late one (zigzag).
    chunks = torch.arange(num_rows).view(num_chunks, _CHUNK)
    early_rows = chunks[hosts.rank]
    late_rows = chunks[num_chunks - 1 - hosts.rank]
    local_rows = to_device(torch.cat([early_rows, late_rows]), device)

    # Run the ring.
    try:
        local_q = q[:, local_rows].contiguous()
        local_k = k[:, local_rows].contiguous()
        local_v = v[:, local_rows].contiguous()
        group = hosts.process_group
        out = ring(local_q, local_k, local_v, softmax_scale=scale, causal=True, group=group)
        # A host on which the ring raises sends nothing, and CUDA would wait for it without end.
        hosts.settle()
    except HostError:
        raise
    except Exception as error:  # an installation that does not fit the machine may raise anything
        return f"it raised {type(error).__name__}: {error}".splitlines()[0]

    # Compare with the reference, which takes [1, H, S, D].
    wide_q = q.transpose(1, 2).double()
    wide_k = k.transpose(1, 2).double()
    wide_v = v.transpose(1, 2).double()
    exact, _ = reference.segmented_attention(wide_q, [(wide_k, wide_v)], scale, causal_last=True)
    local_exact = exact[:, :, local_rows].transpose(1, 2)
    # The output averages numbers of about 1, so rounding to `dtype` costs about its epsilon.
    return mistake_of(lambda: [out], [local_exact], [4 * torch.finfo(dtype).eps])
