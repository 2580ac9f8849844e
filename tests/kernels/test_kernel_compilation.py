"""Every Triton kernel compiles for a GPU, into what it was written for; no GPU is needed. See
``compiling``."""

import json
import os
import re
import subprocess
import sys
from unittest.mock import patch

import pytest

from apbv_tests.patience import limit
from apbv_tests.scripts import ROOT

pytestmark = [pytest.mark.thorough, pytest.mark.cpu]  # compiling takes minutes
ATTENTION = ("segments_kernel", "verify_kernel", "block_sparse_kernel")
SPILLING = {
    (90, "8 tokens in a row"),
    (90, "16 tokens in a row"),
    (90, "tree"),
    (90, "importance, peak"),
}
SPILLING |= {(100, "prefill")}


def obstacle() -> str | None:
    """Return why Triton cannot compile for NVIDIA's GPUs; None if it can."""
    try:
        from triton import knobs

        tools = [getattr(knobs.nvidia, tool).path for tool in ("ptxas", "cuobjdump")]
    except (ImportError, RuntimeError) as error:
        return f"Triton, or its tools for NVIDIA's GPUs, cannot be used: {error}"
    if not all(tools):
        return "Triton has no ptxas or cuobjdump"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "kernels are interpreted (TRITON_INTERPRET=1), and not compiled"
    return None


@pytest.fixture(scope="module")
def kernels() -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with patch.dict(os.environ, environment, clear=True):
        if reason := obstacle():
            pytest.skip(reason)
    command = [sys.executable, str(ROOT / "tests" / "kernels" / "compiling.py")]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=limit(600.0)
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def of_case(kernels, *words):
    """Attention kernels of the cases with these words."""
    found = [kernel for kernel in kernels if kernel["kernel"] in ATTENTION]
    found = [kernel for kernel in found if all(word in kernel["case"] for word in words)]
    assert found
    return found


def test_none_is_missing(kernels):
    """Functions that are launched are named so; the others are part of them."""
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("kernels/triton_*.py"))
    assert {kernel["kernel"] for kernel in kernels} == set(
        re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE)
    )
    assert {kernel["capability"] for kernel in of_case(kernels)} == {80, 89, 90, 100, 120}


def test_prompts_of_all_lengths_share_a_kernel(kernels):
    """Compiling takes seconds: a kernel for every length would be no kernel for serving."""
    (one,) = of_case(kernels, "many prompts")
    (usual,) = (kernel for kernel in of_case(kernels, "prefill") if kernel["capability"] == 90)
    assert one == usual | {"case": one["case"]}


def test_memory_suffices_and_rows_are_loaded_by_16_bytes(kernels):
    """Nothing spills but a little that is needed behind the loops of a few."""
    for kernel in kernels:
        spills = (kernel["capability"], kernel["case"]) in SPILLING and kernel[
            "kernel"
        ] in ATTENTION
        assert kernel["shared"] <= kernel["most_shared"] and kernel["spilled"] <= 160 * spills, (
            kernel
        )
        # Heads' scores follow each other without gaps, so that nothing is known of where they
        # start.
        assert kernel["kernel"] == "_select_kernel" or kernel["loads"]["16"] >= 3, kernel
    for kernel in [*of_case(kernels, "prefill"), *of_case(kernels, "one token")]:
        assert set(kernel["loads"]) == {"16"}, kernel


def test_attention_is_pipelined_on_tensor_cores(kernels):
    for kernel in of_case(kernels):
        assert kernel["cp_async"], kernel
    for kernel in [*of_case(kernels, "prefill"), *of_case(kernels, "listed blocks")]:
        assert kernel["wgmma"] == (kernel["capability"] == 90), kernel
        assert kernel["tcgen05"] == (kernel["capability"] == 100), kernel


def test_windows_of_tokens_keep_enough_loads_in_flight(kernels):
    """Two programs fit a processor, or one of eight warps; from 64 rows on they use the newer
    tensor cores."""
    windows = [kernel for kernel in kernels if re.search("token|window|tree of", kernel["case"])]
    windows = [
        kernel for kernel in windows if kernel["kernel"] in ("verify_kernel", "batch_decode_kernel")
    ]
    assert len(windows) >= 10
    for kernel in windows:
        fits_twice = 2 * 32 * kernel["warps"] * kernel["registers"] <= 2**16
        fits_twice &= 2 * (kernel["shared"] + 1024) <= 228 * 1024
        assert fits_twice or kernel["warps"] == 8, kernel
        is_few = re.search("one token|tokens in a row|tokens of|tree of [24]", kernel["case"])
        if not is_few or re.search("8|16", kernel["case"]):
            assert kernel["wgmma"] or kernel["tcgen05"], kernel
