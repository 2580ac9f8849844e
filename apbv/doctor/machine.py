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
    "flash-attn",
    "flash-attn-3",
    "fa3-fwd",
    "flash-attn-4",
    "ring-flash-attn",
    "av",
    "torchvision",
    "starlette",
    "uvicorn",
    "pydantic",
    "prometheus-client",
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
    """List the checks, which take no time."""
    yield Check("versions", versions)
    yield Check("optional packages", lambda _: _listed(_versions(_OPTIONAL)))
    yield Check("settings", lambda _: settings())
    yield Check("processor", lambda _: processor())
    yield Check("CUDA", lambda _: cuda())
    yield Check("GPU", gpu)


def versions(hosts: HostGroup) -> Found:
    """Look up the versions that have to be the same on all hosts.

    Raises:
        CheckFailed: this host has others than host 0.
    """
    own_versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **_versions(_PACKAGES),
    }
    first_versions = hosts.gather_json(own_versions)[0]
    text, figures = _listed(own_versions)
    if own_versions != first_versions:
        first_text, _ = _listed(first_versions)
        raise CheckFailed(f"{text}, where host 0 has {first_text}")
    return text, figures


def _versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return packages' versions; None: it is not installed."""
    versions_of: dict[str, str | None] = {}
    for package in packages:
        try:
            versions_of[package] = version(package)
        except PackageNotFoundError:
            versions_of[package] = None
    return versions_of


def _listed(versions_of: dict[str, str | None]) -> Found:
    """Return packages' versions as a check's result."""
    present = [f"{name} {number}" for name, number in versions_of.items() if number]
    absent = [name for name, number in versions_of.items() if not number]
    text = ", ".join(present)
    if absent:
        text += f"; without {', '.join(absent)}"
    return text, {"versions": versions_of}


def settings() -> Found:
    """Look for environment variables that change how things work."""
    variables = {}
    for name in sorted(os.environ):
        is_secret = name.endswith(("KEY", "TOKEN", "SECRET"))
        if _SETTINGS.match(name) and not is_secret:
            variables[name] = os.environ[name]
    if not variables:
        raise CheckSkipped("no relevant environment variable is set")
    text = " ".join(f"{name}={value}" for name, value in variables.items())
    return text, {"environment": variables}


def processor() -> Found:
    """Look up the CPU's cores and memory, and the room for shared memory.

    Raises:
        CheckFailed: there is too little shared memory for NCCL.
    """
    text = (
        f"{os.cpu_count()} cores, {fair_share_of_cores()} for each host; {torch.get_num_threads()} "
        f"threads; {free_host_memory_bytes() / _GIBIBYTE:.0f} GiB free; {platform.platform()}"
    )
    if Path("/dev/shm").is_dir() and torch.cuda.device_count() > 1:
        shared_bytes = shutil.disk_usage("/dev/shm").total
        if shared_bytes < _FEWEST_SHARED_BYTES:
            raise CheckFailed(
                f"{text}; /dev/shm has {shared_bytes / 2**20:.0f} MiB, too little for NCCL "
                "(docker: --shm-size 1g, or --ipc host)"
            )
    return text, {}


def cuda() -> Found:
    """Find out whether torch can use the GPUs that the driver shows.

    Raises:
        CheckFailed: there are GPUs, and torch cannot use them.
        CheckSkipped: there are none.
    """
    output = _ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    driver_gpus = output.splitlines() if output else []
    build = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        if not driver_gpus:
            raise CheckSkipped(f"no GPU is visible; {build}")
        if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            raise CheckSkipped(f"CUDA_VISIBLE_DEVICES hides GPUs; {build}")
        raise CheckFailed(
            f"nvidia-smi sees {len(driver_gpus)} GPU(s), and torch sees none; {build}"
        )
    nccl = ".".join(str(number) for number in torch.cuda.nccl.version())
    text = (
        f"{torch.cuda.device_count()} GPU(s); {build}, cuDNN {torch.backends.cudnn.version()}, "
        f"NCCL {nccl}; nvidia-smi: {', '.join(driver_gpus)}"
    )
    return text, {"architectures": torch.cuda.get_arch_list()}


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
    unlinked_pairs = []
    for reader, owner in permutations(range(torch.cuda.device_count()), 2):
        if not torch.cuda.can_device_access_peer(reader, owner):
            unlinked_pairs.append(f"{reader} of {owner}")
    if unlinked_pairs:
        pairs = ", ".join(unlinked_pairs)
        text += f"; exchanges go through host memory for want of direct reads by {pairs}"
    text += f", {free / _GIBIBYTE:.1f} GiB free"
    return text, {"topology": _ask("nvidia-smi", "topo", "-m")}


def _ask(*command: str) -> str | None:
    """Return the output of a driver tool; None if it is missing or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True
        ).stdout
    return None
