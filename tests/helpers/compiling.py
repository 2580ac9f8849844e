"""Compile what the operators would launch on a GPU, on a machine without one: a JSON line for every kernel.

A script, because it needs a process without TRITON_INTERPRET:

    python tests/helpers/compiling.py

A line says

    capability, case, kernel: for which GPU, in which call, and its name;
    warps, instructions: how many of a program, and of the whole kernel;
    loops: of the inner loops that use tensor cores (if none does, of those that read memory) the line at which
        each begins, and a thread's instructions per iteration, which is one tile;
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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import triton
from compiled_kernels.launches import CALLS, SHARED_MEMORY, block_sparse, compile_launches, prefill, verify
from compiled_kernels.listing import disassemble, inner_loops, loops, read, used_memory


def properties(kernel: triton.compiler.CompiledKernel) -> dict:
    ptx = kernel.asm["ptx"]
    # ld.global....v4.b32 {...} and cp.async.cg.shared.global [...], [...], 0x10
    found = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", ptx)
    loads = Counter(int(count or 1) * int(bits) // 8 for count, bits in found)
    copies = Counter(int(n, 0) for n in re.findall(r"cp\.async\.\w+\.shared\.global[^;]*?\], (\w+)", ptx))
    instructions, source = read(disassemble(kernel)), Path(kernel.src.fn.fn.__code__.co_filename)
    found_loops, text = loops(instructions), source.read_text(encoding="utf-8")
    return {
        **used_memory(kernel),
        "warps": kernel.metadata.num_warps,
        "instructions": len(instructions),
        "loops": [
            {
                "place": f"{source.name}:{loop.header(text)}",
                "instructions": len(loop.instructions),
                "tensor_core": sum(each.is_tensor_core for each in loop.instructions),
            }
            for loop in inner_loops(found_loops)
        ],
        "spills_in_loops": sum(loop.spills for loop in found_loops),
        "loads": dict(loads + copies),
        "cp_async": bool(copies),
        "wgmma": "wgmma.mma_async" in ptx,
        "tcgen05": "tcgen05.mma" in ptx,
    }


def many_prompts() -> None:
    """Lengths that 16 divides and not, a single pair passed on, and other numbers of hosts."""
    for tokens, passed, senders in ((640, 1, 1), (1001, 100, 2), (8192, 128, 7)):
        prefill(128, tokens=tokens, passed=passed, senders=senders, anchor=tokens // 7)


def cases() -> Iterator[tuple[int, str, Callable]]:
    """Capability, name and call; every kernel for Hopper, attention also for others, with the largest tiles."""
    yield from ((90, case, call) for case, call in CALLS.items())
    yield 90, "many prompts", many_prompts
    yield from ((90, f"tree of {n}", partial(verify, 128, n, tree=True)) for n in (2, 4, 8))
    yield from (
        (100, case, CALLS[case]) for case in ("tokens in a row", "8 tokens in a row", "windows of a batch")
    )
    yield 80, "prefill", CALLS["prefill"]
    yield 89, "fp32, D=256", partial(prefill, 256, torch.float32)
    yield 89, "tree, D=256", partial(verify, 256, 26, tree=True)
    yield 100, "prefill", CALLS["prefill"]
    yield 120, "listed blocks, D=256", partial(block_sparse, 256)


def main() -> None:
    for capability, case, call in cases():
        for name, kernel in compile_launches(capability, call):
            line = {"capability": capability, "case": case, "kernel": name, **properties(kernel)}
            print(json.dumps(line | {"most_shared": SHARED_MEMORY[capability]}), flush=True)


if __name__ == "__main__":
    main()
