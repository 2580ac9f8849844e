"""Compile what the operators would launch on a GPU, on a machine without one: a JSON line for every kernel.

A script, because it needs a process without TRITON_INTERPRET, with benchmarks/ on its path. A line says

    capability, case, kernel: for which GPU, in which call, and its name;
    registers, spilled: registers and bytes of local memory that a thread has;
    spills_in_loops: how many instructions in loops move what is spilled;
    shared, most_shared: bytes of shared memory that a program has, and can have;
    loads: how many loads from global memory there are of each width in bytes, cp.async among them;
    cp_async: whether any load goes past the registers;
    wgmma, tcgen05: whether Hopper's tensor cores are used, and Blackwell's.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
import triton

from support.compiled_kernels.launches import (
    CALLS,
    SHARED_MEMORY,
    antidiagonals,
    block_sparse,
    compile_launches,
    importance,
    prefill,
    verify,
)
from support.compiled_kernels.listing import disassemble, loops, read, used_memory


def properties(kernel: triton.compiler.CompiledKernel) -> dict:
    ptx = kernel.asm["ptx"]
    # ld.global....v4.b32 {...} and cp.async.cg.shared.global [...], [...], 0x10
    loads = Counter(
        int(count or 1) * int(bits) // 8
        for count, bits in re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", ptx)
    )
    copies = Counter(int(n, 0) for n in re.findall(r"cp\.async\.\w+\.shared\.global[^;]*?\], (\w+)", ptx))
    return {
        **used_memory(kernel),
        "spills_in_loops": sum(loop.spills for loop in loops(read(disassemble(kernel)))),
        "loads": dict(loads + copies),
        "cp_async": bool(copies),
        "wgmma": "wgmma.mma_async" in ptx,
        "tcgen05": "tcgen05.mma" in ptx,
    }


def many_prompts(dim: int) -> None:
    """Lengths that 16 divides and not, a single pair passed on, and other numbers of hosts."""
    for tokens in (640, 1001, 4097, 8192):
        for passed, senders in ((1, 1), (100, 2), (128, 7)):
            prefill(dim, tokens=tokens, passed=passed, senders=senders, anchor=tokens // 7)


def cases() -> dict[int, dict[str, Callable]]:
    """By capability and name."""
    attention = {
        **{f"prefill, D={dim}": partial(prefill, dim) for dim in (128, 256)},
        "tree, kept keys, D=128": partial(verify, 128, 26, tree=True, kept=True),
        "tokens of a batch, D=128": CALLS["tokens of a batch"],
        **{f"listed blocks, D={dim}": partial(block_sparse, dim) for dim in (128, 256)},
        "listed blocks, skipping": CALLS["listed blocks, skipping"],
        "antidiagonals": CALLS["antidiagonals"],
        "means of blocks": CALLS["means of blocks"],
    }
    hopper = {
        **attention,
        **{f"prefill, D={dim}": partial(prefill, dim) for dim in (64, 80)},
        "many prompts, D=128": partial(many_prompts, 128),
        **{f"listed blocks, D={dim}": partial(block_sparse, dim, 128, 128) for dim in (64, 80)},
        "listed blocks of 256 and 32, D=128": partial(block_sparse, 128, 256, 32),
        "antidiagonals, stride 8": partial(antidiagonals, 8),
        "prefill in fp32, D=64": partial(prefill, 64, torch.float32),
        "one token, D=128": partial(verify, 128, 1),
        "tokens in a row, D=128": partial(verify, 128, 8),
        "tokens in a row, kept keys, D=128": partial(verify, 128, 8, kept=True),
        "tree, D=64": partial(verify, 64, 26, tree=True),
        "tree, kept keys, D=256": partial(verify, 256, 26, tree=True, kept=True),
        **{
            case: call
            for case, call in CALLS.items()
            if "token" not in case and case not in ("prefill", "tree, kept keys")
        },
        "importance, peak, given lse": partial(importance, "peak", has_lse=True),
        "importance, softmax": partial(importance, "softmax", has_lse=True),
    }
    blackwell = {"one token, D=128": partial(verify, 128, 1), "merge": CALLS["merge"]}
    # The largest tiles of a GPU that is newer than Hopper, and has less than half of its shared memory.
    small = {
        "prefill, D=256": partial(prefill, 256),
        "listed blocks, D=256": partial(block_sparse, 256),
        "tokens in a row, D=128": partial(verify, 128, 8),
        "tree, kept keys, D=256": partial(verify, 256, 26, tree=True, kept=True),
    }
    return {80: attention, 89: attention, 90: hopper, 100: attention | blackwell, 120: small}


def main() -> None:
    for capability, calls in cases().items():
        for case, call in calls.items():
            for name, kernel in compile_launches(capability, call):
                line = {"capability": capability, "case": case, "kernel": name, **properties(kernel)}
                print(json.dumps(line | {"most_shared": SHARED_MEMORY[capability]}), flush=True)


if __name__ == "__main__":
    main()
