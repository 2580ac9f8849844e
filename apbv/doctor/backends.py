"""Which back ends of attention work here, which are chosen by themselves, and why the others do not."""

from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec

import torch

from ..hosts import HostGroup
from ..kernels import library_attention, torch_varlen_attention
from ..kernels.backends import LIBRARIES, capability, requested, why_not_triton
from .checks import Check, CheckFailed, CheckSkipped, Finding

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIM, GROUPS = 128, 7  # those of Qwen2.5-VL-7B
BACKENDS = ("torch", "triton", *LIBRARIES)

_MODULES = {"flash_attn": tuple(library_attention.FLASH_MODULES.values()), "flashinfer": ("flashinfer",)}


def checks(hosts: HostGroup, is_quick: bool) -> Iterable[Check]:
    """List the back ends, and who is chosen for what."""
    for name in BACKENDS:
        yield Check(name, partial(back_end, name), is_per_host=True)
    yield Check("towers", vision, is_per_host=True)
    yield Check("chosen", chosen, is_per_host=True)


def obstacle(name: str, device: torch.device, dtype: torch.dtype) -> tuple[str | None, bool]:
    """Return what keeps a back end from computing attention, or None, and whether that is a fault.

    It is a fault where everything that the back end asks for is there, and what it computes is wrong all the same,
    or it cannot even be loaded.
    """
    if name == "torch":
        return None, False
    if name == "triton":
        why = why_not_triton(device, dtype)
        return why, why is not None and why.startswith("its first kernel")
    if device.type == "cuda":
        missing = _MODULES.get(name)
        if missing and not any(find_spec(module.partition(".")[0]) for module in missing):
            return "it is not installed", False
        if name == "flashinfer" and requested() != name:
            return "it compiles for minutes when first used; APBV_BACKEND=flashinfer has it tried", False
        why = library_attention.why_not_library(name, capability(device), dtype, HEAD_DIM)
        if why:
            return why, False
    why = library_attention.usable(name, device, dtype, HEAD_DIM, GROUPS)
    return why, why is not None and device.type == "cuda"


def back_end(name: str, hosts: HostGroup) -> Finding:
    """Try a back end with every dtype.

    Raises:
        CheckFailed: it has a fault.
        CheckSkipped: it cannot be used here.
    """
    found = {dtype_name(dtype): obstacle(name, hosts.device, dtype) for dtype in DTYPES}
    faults = {dtype: why for dtype, (why, is_fault) in found.items() if is_fault}
    if faults:
        raise CheckFailed("; ".join(f"{dtype}: {why}" for dtype, why in faults.items()))
    works = [dtype for dtype, (why, _) in found.items() if why is None]
    if not works:
        raise CheckSkipped(found["bfloat16"][0])
    text = ", ".join(works)
    others = {why for why, _ in found.values() if why is not None}
    return Finding(text + (f"; else {'; '.join(sorted(others))}" if others else ""), {"dtypes": works})


def vision(hosts: HostGroup) -> Finding:
    """Find out by what a vision tower's windows are attended to."""
    if hosts.device.type != "cuda":
        return Finding("one call of torch's attention for each length")
    reasons = []
    for name, called in (("flash_attn", "FlashAttention"), ("torch", "torch's own FlashAttention")):
        why = torch_varlen_attention.usable(name, hosts.device, torch.bfloat16, 80)
        if why is None:
            return Finding(f"{called}, all in one call", {"varlen": name})
        reasons.append(f"{name}: {why}")
    return Finding(f"one call for each length, which is slow ({'; '.join(reasons)})", {"varlen": None})


def chosen(hosts: HostGroup) -> Finding:
    """Find out which back ends run where none is asked for by name."""
    dtype = torch.float32 if hosts.device.type == "cpu" else torch.bfloat16
    kinds = {"a question": 64, "a block of 4k": 4096, "a block of 16k": 16384}
    found = {}
    for kind, queries in kinds.items():
        q = torch.empty(1, GROUPS, queries, HEAD_DIM, device=hosts.device, dtype=dtype)
        found[kind] = library_attention.choose_attention("auto", q, [(q[:, :1], q[:, :1])])
    text = ", ".join(f"{kind}: {name}" for kind, name in found.items())
    return Finding(f"{text} ({dtype_name(dtype)})", {"chosen": found})


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
