"""Cross-compile every Triton kernel for GPUs, present or not, and list its instructions.

    python benchmarks/sass.py
    python benchmarks/sass.py --calls prefill "one token" --capabilities 9.0 10.0 --json sass.jsonl

The compilers come with Triton. The operators are called at typical sizes with head_dim 128 in bf16; nothing is
computed. Listed are the inner loops that use tensor cores or, if none does, those that read memory: the line at
which each begins, and a thread's instructions per iteration, which is one tile.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from support.arguments import add_shared
from support.records import report

CAPABILITIES = {"8.0": 80, "8.9": 89, "9.0": 90, "10.0": 100}


def obstacle() -> str | None:
    """Return why Triton cannot compile for NVIDIA's GPUs; None if it can."""
    try:
        from triton import knobs

        tools = [getattr(knobs.nvidia, tool).path for tool in ("ptxas", "cuobjdump", "nvdisasm")]
    except (ImportError, RuntimeError) as error:
        return f"Triton, or its tools for NVIDIA's GPUs, cannot be used: {error}"
    if not all(tools):
        return "Triton has no ptxas, cuobjdump or nvdisasm"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "kernels are interpreted (TRITON_INTERPRET=1), and not compiled"
    return None


def listed(options: argparse.Namespace) -> Iterator[dict]:
    """Yield a record of every kernel that the calls launch."""
    from support.compiled_kernels.launches import CALLS, SHARED_MEMORY, compile_launches
    from support.compiled_kernels.listing import disassemble, inner_loops, loops, read, used_memory

    for capability, call in itertools.product(options.capabilities, options.calls or CALLS):
        number = CAPABILITIES[capability]
        for name, kernel in compile_launches(number, CALLS[call]):
            used, instructions = used_memory(kernel), read(disassemble(kernel))
            found, source = loops(instructions), Path(kernel.src.fn.fn.__code__.co_filename)
            text = source.read_text(encoding="utf-8")
            yield {
                "benchmark": "sass",
                "capability": capability,
                "call": call,
                "kernel": name,
                "warps": kernel.metadata.num_warps,
                "registers": used["registers"],
                "spilled_bytes": used["spilled"],
                "spills_in_loops": sum(loop.spills for loop in found),
                "shared_bytes": used["shared"],
                "most_shared_bytes": SHARED_MEMORY[number],
                "instructions": len(instructions),
                "loops": [
                    {
                        "place": f"{source.name}:{loop.header(text)}",
                        "instructions": len(loop.instructions),
                        "tensor_core": sum(each.is_tensor_core for each in loop.instructions),
                    }
                    for loop in inner_loops(found)
                ],
                "triton": version("triton"),
            }


def _loops(row: dict) -> str:
    return "; ".join(f"{loop['place']} {loop['instructions']} ({loop['tensor_core']})" for loop in row["loops"])


COLUMNS = {
    "GPU": "{capability}",
    "call": "{call}",
    "kernel": "{kernel}",
    "warps": "{warps}",
    "registers": "{registers}",
    "spilled": "{spilled_bytes}",
    "shared": "{shared_bytes}",
    "instructions": "{instructions}",
    "of inner loops (tensor core)": _loops,
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choices = {"choices": CAPABILITIES, "default": tuple(CAPABILITIES), "help": "compute capabilities"}
    parser.add_argument("--capabilities", nargs="+", metavar="X.Y", **choices)
    parser.add_argument("--calls", nargs="+", metavar="NAME", help='calls, such as "one token" (default: all)')
    add_shared(parser, "json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if reason := obstacle():
        print(f"error: {reason}", file=sys.stderr)
        return 1
    try:
        report(options, listed(options), COLUMNS)
    except KeyError as unknown:
        print(f"error: there is no call {unknown}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
