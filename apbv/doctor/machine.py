"""What this machine has: versions, processors, memory, and links between GPUs."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from itertools import permutations
from pathlib import Path

import torch

from ..hosts import HostGroup, fair_share_of_cores
from ..stats import free_host_memory_bytes
from .examination import Check, CheckFailed, CheckSkipped, Finding

# By distribution; those of a line are shown together.
_PACKAGES = ("apbv", "torch", "transformers", "triton", "safetensors", "numpy")
_ATTENTION = ("flash-attn", "flash-attn-3", "flash-attn-4", "flashinfer-python")
_VIDEO = ("av", "torchcodec", "torchvision")
_SERVING = ("starlette", "uvicorn", "pydantic", "prometheus-client", "opentelemetry-sdk", "nixl")
# What changes how any of them works; the values of others are nobody's business.
_SETTINGS = re.compile(r"APBV_|CUDA_|NCCL_|TORCH_NCCL_|GLOO_|OMP_NUM_THREADS$|TRITON_|PYTORCH_|NVIDIA_TF32")
_GIBIBYTE = 2**30
_FEWEST_SHARED_BYTES = 2**28  # NCCL keeps buffers there for each pair of GPUs that have no other way
_TOOL_SECONDS = 20.0


def checks(hosts: HostGroup) -> Iterable[Check]:
    """List what is looked up, which takes no time."""
    yield Check("versions", lambda _: _versions(_PACKAGES), must_agree=True)
    yield Check("attention", lambda _: _versions(_ATTENTION), is_per_host=True)
    yield Check("video", lambda _: _versions(_VIDEO), is_per_host=True)
    yield Check("serving", lambda _: _versions(_SERVING), is_per_host=True)
    yield Check("settings", lambda _: settings(), is_per_host=True)
    yield Check("processor", lambda _: processor(), is_per_host=True)
    yield Check("CUDA", lambda _: cuda(), is_per_host=True)
    yield Check("GPU", gpu, is_per_host=True)
    yield Check("links", links, is_per_host=True)


def _versions(packages: Iterable[str]) -> Finding:
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if "torch" in found:
        found = {"python": platform.python_version(), **found, "torch": torch.__version__}
    there = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    absent = ", ".join(name for name, number in found.items() if not number)
    return Finding(there + (f"{'; ' if there else ''}without {absent}" if absent else ""), {"versions": found})


def settings() -> Finding:
    """Look for environment variables that change how things work."""
    named = (name for name in sorted(os.environ) if _SETTINGS.match(name))
    found = {name: os.environ[name] for name in named if not name.endswith(("KEY", "TOKEN", "SECRET"))}
    if not found:
        raise CheckSkipped("no environment variable is set that changes anything here")
    return Finding(" ".join(f"{name}={value}" for name, value in found.items()), {"environment": found})


def processor() -> Finding:
    """Look up the CPU's cores and memory, and the room for shared memory.

    Raises:
        CheckFailed: there is too little of it for NCCL.
    """
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None
    figures = {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "cores_per_host": fair_share_of_cores(),
        "threads": torch.get_num_threads(),
        "free_bytes": free_host_memory_bytes(),
        "shared_memory_bytes": shared,
    }
    text = "{cores} cores, {cores_per_host} for each host; {threads} threads".format(**figures)
    text += f"; {figures['free_bytes'] / _GIBIBYTE:.0f} GiB free"
    if shared is not None and shared < _FEWEST_SHARED_BYTES and torch.cuda.device_count() > 1:
        raise CheckFailed(
            f"{text}; /dev/shm has {shared / 2**20:.0f} MiB, too little for NCCL (docker: --shm-size 1g, or "
            "--ipc host)"
        )
    return Finding(text, figures)


def cuda() -> Finding:
    """Find out whether torch can use the GPUs that the driver shows.

    Raises:
        CheckFailed: there are GPUs, and torch cannot use them.
        CheckSkipped: there are none.
    """
    listed = _ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    seen = listed.splitlines() if listed else []
    if not torch.version.cuda:
        if seen:
            raise CheckFailed(
                f"nvidia-smi sees {len(seen)} GPU(s), and torch {torch.__version__} is built without CUDA: "
                "install one that is built with it (pytorch.org says how)"
            )
        raise CheckSkipped(f"torch {torch.__version__} is built without CUDA, and there is no GPU to be seen")
    if not torch.cuda.is_available():
        if not seen:
            raise CheckSkipped(f"torch is built for CUDA {torch.version.cuda}, and there is no GPU to be seen")
        torch.cuda.init()  # which says why not
        raise CheckFailed("nvidia-smi sees a GPU, and torch does not (CUDA_VISIBLE_DEVICES?)")
    figures = {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": seen[0].rsplit(",", 1)[-1].strip() if seen else None,
        "architectures": torch.cuda.get_arch_list(),
    }
    text = ", ".join(f"{name} {figures[name]}" for name in ("cuda", "cudnn", "nccl", "driver") if figures[name])
    return Finding(f"{text}; {torch.cuda.device_count()} GPU(s)", figures)


def gpu(hosts: HostGroup) -> Finding:
    """Look up this host's GPU, and compute something on it.

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
        raise CheckFailed(f"{properties.name} multiplies matrices of ones wrongly")
    figures = {"name": properties.name, "capability": [properties.major, properties.minor]}
    figures |= {"memory_bytes": total, "free_bytes": free}
    text = f"{properties.name}, capability {properties.major}.{properties.minor}, {total / _GIBIBYTE:.1f} GiB"
    return Finding(f"{text}, {free / _GIBIBYTE:.1f} GiB free", figures)


def links(hosts: HostGroup) -> Finding:
    """Look up which GPUs of this machine reach each other's memory, and how they are connected.

    Raises:
        CheckSkipped: this machine has fewer than two GPUs.
    """
    count = torch.cuda.device_count() if hosts.device.type == "cuda" else 0
    if count < 2:
        raise CheckSkipped("there are no two GPUs on this machine")
    pairs = [
        f"{a} of {b}" for a, b in permutations(range(count), 2) if not torch.cuda.can_device_access_peer(a, b)
    ]
    figures = {"without_peer_access": pairs, "topology": _ask("nvidia-smi", "topo", "-m")}
    if not pairs:
        return Finding("every GPU reads every other's memory", figures)
    first = ", ".join(pairs[:6]) + (", …" if len(pairs) > 6 else "")
    return Finding(f"no direct reads by {first}: exchanges go through host memory", figures)


def _ask(*command: str) -> str | None:
    """Return what a tool of the driver says; None where there is none, or it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    # It underlines its headings on any output.
    return re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
