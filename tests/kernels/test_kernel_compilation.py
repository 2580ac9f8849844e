"""Every Triton kernel compiles for a GPU, into what it was written for; no GPU is needed. See ``compiling``."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from patience import limit
from scripts import HELPERS, ROOT

pytestmark = pytest.mark.thorough  # compiling takes minutes


def obstacle() -> str | None:
    """What keeps Triton from compiling for NVIDIA's GPUs; None: nothing."""
    if find_spec("triton") is None:
        return "triton is not installed"
    from triton import knobs

    try:
        return None if knobs.nvidia.ptxas.path and knobs.nvidia.cuobjdump.path else "no ptxas"
    except RuntimeError as error:
        return f"triton has no tools for NVIDIA's GPUs: {error}"


@pytest.fixture(scope="module")
def kernels() -> list[dict]:
    if reason := obstacle():
        pytest.skip(reason)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(HELPERS / "compiling.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit(600.0))
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def of_case(kernels, *words):
    """Attention kernels of the cases with these words."""
    found = [
        kernel
        for kernel in kernels
        if kernel["kernel"] == "_attend_kernel" and all(word in kernel["case"] for word in words)
    ]
    assert found
    return found


def test_none_is_missing(kernels):
    """Functions that are launched are named so; the others are part of them."""
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("kernels/triton_*.py"))
    assert {kernel["kernel"] for kernel in kernels} == set(
        re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE)
    )
    assert {kernel["capability"] for kernel in of_case(kernels)} == {80, 89, 90}


def test_prompts_of_all_lengths_share_a_kernel(kernels):
    """Compiling takes seconds: a kernel for every length would be no kernel for serving."""
    (one,) = of_case(kernels, "many prompts")
    (usual,) = (kernel for kernel in of_case(kernels, "prefill, D=128") if kernel["capability"] == 90)
    assert one == usual | {"case": one["case"]}


def test_nothing_spills_in_half_precision(kernels):
    for kernel in kernels:
        if "fp32" not in kernel["case"]:
            assert kernel["spilled"] <= (64 if "D=256" in kernel["case"] else 0), kernel


def test_shared_memory_suffices(kernels):
    for kernel in kernels:
        assert kernel["shared"] <= kernel["most_shared"], kernel


def test_rows_are_loaded_by_16_bytes(kernels):
    for kernel in kernels:
        # Heads' scores follow each other without gaps, so that nothing is known of where they start.
        if kernel["kernel"] != "_compact_kernel":
            assert kernel["loads"]["16"] >= 3, kernel
    for kernel in [*of_case(kernels, "prefill"), *of_case(kernels, "one token")]:
        assert set(kernel["loads"]) == {"16"}, kernel


def test_attention_is_pipelined_on_tensor_cores(kernels):
    for kernel in of_case(kernels):
        assert kernel["cp_async"], kernel
    for kernel in of_case(kernels, "prefill, D="):
        assert kernel["wgmma"] == (kernel["capability"] >= 90), kernel
