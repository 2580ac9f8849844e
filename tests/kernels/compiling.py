"""Compile what the operators would launch on a GPU, on a machine without one: a JSON line for every
kernel.

A script, because it needs a process without TRITON_INTERPRET:

    python tests/kernels/compiling.py

The operators get tensors of usual sizes on the CPU, which are never looked at: a launch is compiled
with the very arguments, constants and options of the call, and not run. A line says

    capability, case, kernel: for which GPU, in which call, and its name;
    warps: how many of a program;
    registers, spilled: registers and bytes of local memory that a thread has;
    shared, most_shared: bytes of shared memory that a program has, and can have;
    loads: how many loads from global memory there are of each width in bytes, cp.async among them;
    cp_async: whether any load goes past the registers;
    wgmma, tcgen05: whether Hopper's tensor cores are used, and Blackwell's.
"""

import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from apbv.kernels import (
    BufferTable,
    ListedBlocks,
    tiles,
    triton_attention,
    triton_batch_attention,
    triton_block_scores,
    triton_block_sparse,
    triton_elementwise,
    triton_importance,
    triton_merging,
)

# Bytes that a program can have: of an A100, an L40, an H100, a B200 and an RTX 5090.
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
_QUERY_HEADS, _KV_HEADS = 28, 4  # of Qwen2.5-VL-7B
_HALF = torch.bfloat16


class AbsentGPU:
    """As much of a Triton driver as compiling asks for.

    Args:
        capability: the GPU's compute capability, times ten.
    """

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        """Return the compilation target."""
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Return a number by which Triton keeps the kernels of each device apart."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        """Return a stream, on which nothing is launched."""
        return 0


def compile_launches(
    capability: int, call: Callable[[], object]
) -> list[tuple[str, CompiledKernel]]:
    """Compile the kernels that a call launches, each once.

    Args:
        capability: compute capability, times ten; a key of ``SHARED_MEMORY``.
        call: calls operators, whose results are then never computed.
    """
    launched = {}
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        launched[kernel.hash] = self.__name__, kernel

    for plan in (triton_attention.plan_verification, triton_attention.plan_segments):
        plan.cache_clear()  # the plans are those of another GPU
    triton.runtime.driver.set_active(AbsentGPU(capability))
    gpu = "none", tiles.kind_of(capability // 10, SHARED_MEMORY[capability]), "any"
    with (
        patch.object(JITFunction, "run", compile_only),
        patch.object(tiles, "gpu_of", lambda _: gpu),
    ):
        call()
    return list(launched.values())


def prefill(
    dim: int,
    dtype: torch.dtype = _HALF,
    tokens: int = 4096,
    passed: int = 512,
    senders: int = 3,
    anchor: int = 128,
) -> None:
    """Attend to passing blocks as two exchanges leave them, and to anchor and block, the anchor to
    itself."""
    heads_of_all = (_QUERY_HEADS, _KV_HEADS, _KV_HEADS)
    q, k, v = (torch.empty(1, heads, tokens, dim, dtype=dtype) for heads in heads_of_all)
    passing = [
        torch.empty(senders, 2, 1, _KV_HEADS, passed + more, dim, dtype=dtype) for more in (0, 128)
    ]
    segments = [(k[:, :, :passed], v[:, :, :passed]) for exchange in passing for k, v in exchange]
    triton_attention.segmented_attention(
        q, [*segments, (k, v)], dim**-0.5, True, num_anchor_queries=anchor
    )


def verify(dim: int, queries: int, *, tree: bool = False) -> None:
    """Attend from a few new tokens to 8,000 rows of a longer buffer."""
    q = torch.empty(1, _QUERY_HEADS, queries, dim, dtype=_HALF)
    k, v = torch.empty(2, 1, _KV_HEADS, 8192, dim, dtype=_HALF)[..., :8000, :]
    visible = torch.ones(queries, queries, dtype=torch.bool) if tree else None
    triton_attention.verify_attention(q, k, v, dim**-0.5, visible=visible)


def batch(dim: int, num_sequences: int = 16, new: int = 1) -> None:
    """Attend from the newest tokens of each of several sequences."""
    heads_of_all = (_QUERY_HEADS, _KV_HEADS, _KV_HEADS)
    projected = (
        torch.empty(1, num_sequences * new, heads, dim, dtype=_HALF) for heads in heads_of_all
    )
    numbers = torch.zeros(4, num_sequences, dtype=torch.int64)
    starts = None if new == 1 else torch.arange(num_sequences + 1) * new
    table = BufferTable(numbers[:3], numbers[3], most_rows=8192, starts=starts, most_new=new)
    triton_batch_attention.batch_decode_attention(
        *(x.transpose(1, 2) for x in projected), table, dim**-0.5
    )


def block_sparse(
    dim: int, query_block: int = 128, key_block: int = 64, skip_below: float | None = None
) -> None:
    """Attend from 8,001 tokens to the blocks that each head lists."""
    q, k, v = (
        torch.empty(1, 8001, heads, dim, dtype=_HALF)
        for heads in (_QUERY_HEADS, _KV_HEADS, _KV_HEADS)
    )
    numbers = [triton.cdiv(q.shape[1], rows) for rows in (query_block, key_block)]
    listed = ListedBlocks.of(
        torch.ones(1, _QUERY_HEADS, *numbers, dtype=torch.bool), query_block, key_block
    )
    operands = (states.transpose(1, 2) for states in (q, k, v))
    out = torch.empty_like(q).transpose(1, 2)
    triton_block_sparse.block_sparse_attention(
        *operands, listed, dim**-0.5, skip_below=skip_below, out=out
    )


def antidiagonals(stride: int) -> None:
    """Score blocks of 8,001 tokens by antidiagonals."""
    q, k = (
        torch.empty(1, 8001, heads, 128, dtype=_HALF).transpose(1, 2)
        for heads in (_QUERY_HEADS, _KV_HEADS)
    )
    triton_block_scores.antidiagonal_scores(q, k, 128**-0.5, stride, 128)


def block_means() -> None:
    """Compute the means of blocks of 8,001 keys."""
    k = torch.empty(1, 8001, _KV_HEADS, 128, dtype=_HALF).transpose(1, 2)
    triton_block_scores.block_means(k, 64, center=torch.empty(1, _KV_HEADS, 128))


def merge() -> None:
    """Merge eight results that lie one after another."""
    outs = torch.empty(8, 1, _QUERY_HEADS, 64, 128, dtype=_HALF)
    triton_merging.merge_states(outs, torch.empty(outs.shape[:-1]))


def merge_separate() -> None:
    """Merge the first block with the anchor, and what the block sees of others, for two prompts."""
    for block, anchor in ((8062, 2048), (1001, 16)):
        rows = (anchor + block, block)
        outs = [
            torch.empty(1, count, _QUERY_HEADS, 128, dtype=_HALF).transpose(1, 2) for count in rows
        ]
        lses = [torch.empty(1, _QUERY_HEADS, count) for count in rows]
        triton_merging.merge_states(outs, lses, out=torch.empty_like(outs[0]))


def importance(reduce: str, *, has_lse: bool = False) -> None:
    """Score 8,192 keys by 40 tokens of a question."""
    lengths = ((_QUERY_HEADS, 40), (_KV_HEADS, 8192))
    q, k = (torch.empty(1, heads, length, 128, dtype=_HALF) for heads, length in lengths)
    lse = torch.empty(q.shape[:-1]) if has_lse else None
    triton_importance.kv_importance(q, k, 128**-0.5, reduce, lse=lse)


def selection() -> None:
    """List the 1,024 highest of 8,192 scores, and gather their rows."""
    k, v = torch.empty(2, 1, _KV_HEADS, 8192, 128, dtype=_HALF)
    indices = triton_importance.kept_indices(torch.empty(1, _KV_HEADS, 8192), 1024)
    triton_importance.gather_rows(
        k, v, indices, torch.empty(2, 1, _KV_HEADS, 1024, 128, dtype=_HALF)
    )


def element_wise() -> None:
    """Normalize, activate and rotate 8,001 tokens."""
    q = torch.empty(1, 8001, _QUERY_HEADS, 128, dtype=_HALF)
    triton_elementwise.rms_norm(q.flatten(2), q[0, 0].flatten(), 1e-6)
    triton_elementwise.silu_product(q, q)
    triton_elementwise.rotated(
        q.transpose(1, 2), q[:, :, :_KV_HEADS].transpose(1, 2), q[:, :, 0], q[:, :, 0]
    )


# By name; together they launch every kernel. 26 tokens, of 7 query heads for each of K and V, are
# more rows than one tile has.
CALLS: dict[str, Callable[[], None]] = {
    "prefill": partial(prefill, 128),
    "one token": partial(verify, 128, 1),
    "tokens in a row": partial(verify, 128, 4),
    "8 tokens in a row": partial(verify, 128, 8),
    "16 tokens in a row": partial(verify, 128, 16),
    "tree": partial(verify, 128, 26, tree=True),
    "tokens of a batch": partial(batch, 128),
    "windows of a batch": partial(batch, 128, new=8),
    "listed blocks": partial(block_sparse, 128),
    "listed blocks, values left out": partial(block_sparse, 128, skip_below=-8.0),
    "antidiagonals": partial(antidiagonals, 16),
    "means of blocks": block_means,
    "merge": merge,
    "merge in a block's place": merge_separate,
    "element-wise": element_wise,
    "importance, peak": partial(importance, "peak"),
    "selection": selection,
}


def properties(kernel: CompiledKernel) -> dict:
    ptx = kernel.asm["ptx"]
    # ld.global....v4.b32 {...} and cp.async.cg.shared.global [...], [...], 0x10
    found = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", ptx)
    loads = Counter(int(count or 1) * int(bits) // 8 for count, bits in found)
    copies = Counter(
        int(n, 0) for n in re.findall(r"cp\.async\.\w+\.shared\.global[^;]*?\], (\w+)", ptx)
    )
    return {
        **used_memory(kernel),
        "warps": kernel.metadata.num_warps,
        "loads": dict(loads + copies),
        "cp_async": bool(copies),
        "wgmma": "wgmma.mma_async" in ptx,
        "tcgen05": "tcgen05.mma" in ptx,
    }


def used_memory(kernel: CompiledKernel) -> dict[str, int]:
    """Return ``registers`` and ``spilled`` bytes of a thread, and ``shared`` bytes of a program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.check_output(command, text=True)
    used = {name: int(count) for name, count in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    spilled = used["STACK"] + used["LOCAL"]
    return {"registers": used["REG"], "spilled": spilled, "shared": kernel.metadata.shared}


def many_prompts() -> None:
    """Lengths that 16 divides and not, a single pair passed on, and other numbers of hosts."""
    for tokens, passed, senders in ((640, 1, 1), (1001, 100, 2), (8192, 128, 7)):
        prefill(128, tokens=tokens, passed=passed, senders=senders, anchor=tokens // 7)


def cases() -> Iterator[tuple[int, str, Callable]]:
    """Capability, name and call; every kernel for Hopper, attention also for others, with the
    largest tiles."""
    yield from ((90, case, call) for case, call in CALLS.items())
    yield 90, "many prompts", many_prompts
    yield from ((90, f"tree of {n}", partial(verify, 128, n, tree=True)) for n in (2, 4, 8))
    yield from (
        (100, case, CALLS[case])
        for case in ("tokens in a row", "8 tokens in a row", "windows of a batch")
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
