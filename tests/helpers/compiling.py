"""Compile what the operators would launch on a GPU, on a machine without one: a JSON line for every kernel.

A script, because it needs a process without TRITON_INTERPRET. The operators get tensors of usual sizes on the CPU,
which are never looked at: a launch is compiled with the very arguments, constants and options of the call, and not
run. A line says of a kernel

    capability, case, kernel: for which GPU, in which call, and its name;
    registers, spilled: registers and bytes of local memory that a thread has;
    shared, most_shared: bytes of shared memory that a program has, and can have;
    loads: how many loads from global memory there are of each width in bytes, cp.async among them;
    cp_async, wgmma: whether any load goes past the registers, and whether Hopper's tensor cores are used.
"""

import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from apbv.kernels import triton_attention, triton_importance, triton_merging, triton_visual_scores

# Bytes that a program can have: of an A100, an L40 and an H100.
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
QUERY_HEADS, KV_HEADS = 28, 4
HALF = torch.bfloat16


class AbsentGPU:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps the kernels of each device apart by its number

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches(capability: int, call: Callable) -> list[dict]:
    """The kernels that a call launches, each once: compiled instead."""
    launched = {}
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        launched[kernel.hash] = self.__name__, kernel

    def shared_memory(device: torch.device) -> int:
        return SHARED_MEMORY[capability]

    triton.runtime.driver.set_active(AbsentGPU(capability))
    with (
        patch.object(JITFunction, "run", compile_only),
        patch.object(triton_attention, "_shared_memory", shared_memory),
    ):
        call()
    most = SHARED_MEMORY[capability]
    return [{"kernel": name, "most_shared": most, **properties(kernel)} for name, kernel in launched.values()]


def properties(kernel: triton.compiler.CompiledKernel) -> dict:
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.check_output(command, text=True)
    used = {name: int(count) for name, count in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    # ld.global....v4.b32 {...} and cp.async.cg.shared.global [...], [...], 0x10
    loads = Counter(
        int(count or 1) * int(bits) // 8
        for count, bits in re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", ptx)
    )
    copies = Counter(int(n, 0) for n in re.findall(r"cp\.async\.\w+\.shared\.global[^;]*?\], (\w+)", ptx))
    return {
        "registers": used["REG"],
        "spilled": used["STACK"] + used["LOCAL"],
        "shared": kernel.metadata.shared,
        "loads": dict(loads + copies),
        "cp_async": bool(copies),
        "wgmma": "wgmma.mma_async" in ptx,
    }


def prefill(
    dim: int, dtype: torch.dtype = HALF, tokens: int = 4096, passed: int = 512, senders: int = 3, anchor: int = 128
) -> None:
    """Passing blocks as two exchanges leave them, and anchor and block, of which the anchor sees only itself."""
    q, k, v = (torch.empty(1, heads, tokens, dim, dtype=dtype) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS))
    passing = [torch.empty(senders, 2, 1, KV_HEADS, passed + more, dim, dtype=dtype) for more in (0, 128)]
    segments = [(k[:, :, :passed], v[:, :, :passed]) for exchange in passing for k, v in exchange]
    triton_attention.segmented_attention(q, [*segments, (k, v)], dim**-0.5, True, rows_alone=anchor)


def many_prompts(dim: int) -> None:
    """Lengths that 16 divides and not, a single pair passed on, and other numbers of hosts."""
    for tokens in (640, 1001, 4097, 8192):
        for passed, senders in ((1, 1), (100, 2), (128, 7)):
            prefill(dim, tokens=tokens, passed=passed, senders=senders, anchor=tokens // 7)


def verify(dim: int, queries: int, *, tree: bool = False, kept: bool = False) -> None:
    q = torch.empty(1, QUERY_HEADS, queries, dim, dtype=HALF)
    k, v = torch.empty(2, 1, KV_HEADS, 8192, dim, dtype=HALF)[..., :8000, :]
    visible = torch.ones(queries, queries, dtype=torch.bool) if tree else None
    rows = torch.zeros(1, KV_HEADS, 4096, dtype=torch.int32) if kept else None
    triton_attention.verify_attention(q, k, v, dim**-0.5, visible=visible, kept=rows)


def merge() -> None:
    outs = torch.empty(8, 1, QUERY_HEADS, 64, 128, dtype=HALF)
    triton_merging.merge_states(outs, torch.empty(outs.shape[:-1]))


def importance(reduce: str, *, has_lse: bool = False) -> None:
    q, k = (
        torch.empty(1, heads, length, 128, dtype=HALF) for heads, length in ((QUERY_HEADS, 40), (KV_HEADS, 8192))
    )
    lse = torch.empty(q.shape[:-1]) if has_lse else None
    triton_importance.kv_importance(q, k, 128**-0.5, reduce, lse=lse)


def selection() -> None:
    k, v = torch.empty(2, 1, KV_HEADS, 8192, 128, dtype=HALF)
    scores, lowest = torch.empty(1, KV_HEADS, 8192), torch.empty(1, KV_HEADS, 1)
    indices = triton_importance.kept_indices(scores, lowest, torch.zeros(lowest.shape, dtype=torch.int64), 1024)
    triton_importance.gather_rows(k, v, indices, torch.empty(2, 1, KV_HEADS, 1024, 128, dtype=HALF))


def temporal_change() -> None:
    frames = torch.empty(18, 196, 3584, dtype=HALF)
    triton_visual_scores.temporal_change(frames[1:-1], frames[0], frames[-1])


def spatial_variety() -> None:
    triton_visual_scores.spatial_variety(torch.empty(16, 196, 3584, dtype=HALF), 14, 14, 5)


def similarity_to() -> None:
    triton_visual_scores.similarity_to(torch.empty(3136, 3584, dtype=HALF), torch.empty(3584))


def cases() -> dict[int, dict[str, Callable]]:
    """By capability and name. 26 tokens, of 7 query heads for each of K and V, are more rows than one tile has."""
    attention = {
        **{f"prefill, D={dim}": partial(prefill, dim) for dim in (128, 256)},
        "tree, kept keys, D=128": partial(verify, 128, 26, tree=True, kept=True),
    }
    hopper = {
        **attention,
        **{f"prefill, D={dim}": partial(prefill, dim) for dim in (64, 80)},
        "many prompts, D=128": partial(many_prompts, 128),
        "prefill in fp32, D=64": partial(prefill, 64, torch.float32),
        "one token, D=128": partial(verify, 128, 1),
        "tokens in a row, D=128": partial(verify, 128, 8),
        "tokens in a row, kept keys, D=128": partial(verify, 128, 8, kept=True),
        "tree, D=64": partial(verify, 64, 26, tree=True),
        "tree, kept keys, D=256": partial(verify, 256, 26, tree=True, kept=True),
        "merge": merge,
        "importance, peak": partial(importance, "peak"),
        "importance, peak, given lse": partial(importance, "peak", has_lse=True),
        "importance, softmax": partial(importance, "softmax", has_lse=True),
        "importance, dot": partial(importance, "dot"),
        "selection": selection,
        "temporal change": temporal_change,
        "spatial variety": spatial_variety,
        "similarity": similarity_to,
    }
    return {80: attention, 89: attention, 90: hopper}


def is_writable(folder: str) -> bool:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        if not is_writable(triton.knobs.cache.dir):
            os.environ["TRITON_CACHE_DIR"] = folder
        for capability, calls in cases().items():
            for case, call in calls.items():
                for kernel in compile_launches(capability, call):
                    print(json.dumps({"capability": capability, "case": case, **kernel}), flush=True)


if __name__ == "__main__":
    main()
