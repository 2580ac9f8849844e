"""Checks of the machine: versions, processors, memory, and links between GPUs."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import permutations
from pathlib import Path

import torch

from ..hosts import HostGroup, fair_share_of_cores
from ..stats import free_host_memory_bytes
from .examination import Check, CheckFailed, CheckSkipped, Found

_PACKAGES = ("apbv", "transformers", "triton", "safetensors", "numpy")
_OPTIONAL = (
    *("flash-attn", "flash-attn-3", "fa3-fwd", "flash-attn-4", "ring-flash-attn"),
    *("av", "torchvision"),
    *("starlette", "uvicorn", "pydantic", "prometheus-client"),
)
# Variables that change the behaviour; others are not printed.
_SETTINGS = re.compile(
    r"APBV_|CUDA_|NCCL_|TORCH_NCCL_|GLOO_|OMP_NUM_THREADS$|TRITON_|PYTORCH_|NVIDIA_TF32"
)
_GIBIBYTE = 2**30
# NCCL keeps buffers there for each pair of GPUs that have no other way.
_FEWEST_SHARED_BYTES = 2**28
_TOOL_SECONDS = 20.0


def checks(hosts: HostGroup) -> Iterable[Check]:
    """List what is looked up, which takes no time."""
    yield Check("versions", versions)
    yield Check("optional packages", lambda _: _told(_versions(_OPTIONAL)))
    yield Check("settings", lambda _: settings())
    yield Check("processor", lambda _: processor())
    yield Check("CUDA", lambda _: cuda())
    yield Check("GPU", gpu)


def versions(hosts: HostGroup) -> Found:
    """Look up the versions of what has to be the same on all hosts.

    Raises:
        CheckFailed: this host has others than host 0.
    """
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **_versions(_PACKAGES),
    }
    first, *_ = hosts.gather_json(found)
    if found != first:
        raise CheckFailed(f"{_told(found)[0]}, where host 0 has {_told(first)[0]}")
    return _told(found)


def _versions(packages: Iterable[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _told(found: dict[str, str | None]) -> Found:
    there = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    absent = ", ".join(name for name, number in found.items() if not number)
    return there + (f"; without {absent}" if absent else ""), {"versions": found}


def settings() -> Found:
    """Look for environment variables that change how things work."""
    named = (name for name in sorted(os.environ) if _SETTINGS.match(name))
    found = {
        name: os.environ[name] for name in named if not name.endswith(("KEY", "TOKEN", "SECRET"))
    }
    if not found:
        raise CheckSkipped("no relevant environment variable is set")
    return " ".join(f"{name}={value}" for name, value in found.items()), {"environment": found}


def processor() -> Found:
    """Look up the CPU's cores and memory, and the room for shared memory.

    Raises:
        CheckFailed: there is too little of it for NCCL.
    """
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None
    text = (
        f"{os.cpu_count()} cores, {fair_share_of_cores()} for each host; {torch.get_num_threads()} "
        "threads; "
    )
    text += f"{free_host_memory_bytes() / _GIBIBYTE:.0f} GiB free; {platform.platform()}"
    if shared is not None and shared < _FEWEST_SHARED_BYTES and torch.cuda.device_count() > 1:
        raise CheckFailed(
            f"{text}; /dev/shm has {shared / 2**20:.0f} MiB, too little for NCCL (docker: "
            "--shm-size 1g, or --ipc host)"
        )
    return text, {}


def cuda() -> Found:
    """Find out whether torch can use the GPUs that the driver shows.

    Raises:
        CheckFailed: there are GPUs, and torch cannot use them.
        CheckSkipped: there are none.
    """
    listed = _ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    seen = listed.splitlines() if listed else []
    built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        hidden = seen and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if not seen or hidden:
            raise CheckSkipped(
                f"{'CUDA_VISIBLE_DEVICES hides GPUs' if hidden else 'no GPU is visible'}; {built}"
            )
        raise CheckFailed(f"nvidia-smi sees {len(seen)} GPU(s), and torch sees none; {built}")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    text = (
        f"{torch.cuda.device_count()} GPU(s); {built}, cuDNN {torch.backends.cudnn.version()}, "
        f"NCCL {nccl}"
    )
    return f"{text}; nvidia-smi: {', '.join(seen)}", {"architectures": torch.cuda.get_arch_list()}


def gpu(hosts: HostGroup) -> Found:
    """Look up this host's GPU and which GPUs read each other's memory, and compute something on it.

    Raises:
        CheckFailed: it computes wrongly.
        CheckSkipped: this host computes on a CPU.
    """
    if hosts.device.type != "cuda":
        raise CheckSkipped("this host computes on its CPU")
    properties = torch.cuda.get_device_properties(hosts.device)
    free, total = torch.cuda.mem_get_info(hosts.device)
    ones = torch.ones(256, 256, device=hosts.device)
    if float((ones @ ones).sum()) != 256.0**3:
        raise CheckFailed(f"{properties.name} returns a wrong product of matrices of ones")
    text = (
        f"{properties.name}, capability {properties.major}.{properties.minor}, "
        f"{total / _GIBIBYTE:.1f} GiB"
    )
    pairs = permutations(range(torch.cuda.device_count()), 2)
    blind = [f"{a} of {b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if blind:
        text += f"; exchanges go through host memory for want of direct reads by {', '.join(blind)}"
    return f"{text}, {free / _GIBIBYTE:.1f} GiB free", {
        "topology": _ask("nvidia-smi", "topo", "-m")
    }


def _ask(*command: str) -> str | None:
    """Return the output of a driver tool; None if it is missing or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True
        ).stdout
    return None
