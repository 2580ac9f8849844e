"""Compile every Triton kernel for GPUs that need not be here, and list what it became.

    python benchmarks/sass.py
    python benchmarks/sass.py --calls prefill "one token" --capabilities 9.0 10.0 --json sass.jsonl

The compilers come with Triton. The operators are called at usual sizes with heads of 128 numbers in bf16; nothing
is computed. Occupancy is the share of a processor's warps that can be there at a time. A row below a kernel is one
of its inner loops: of those that use tensor cores, or where none does, of those that read memory; with the line at
which it begins, and the instructions of a thread in one round, which is one tile.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from support.arguments import add_json_option
from support.records import keep_records, show
from support.tables import markdown_table

CAPABILITIES = {"8.0": 80, "8.9": 89, "9.0": 90, "10.0": 100}
# Of one processor: warps, programs, and bytes of shared memory (CUDA C++ Programming Guide, compute capabilities).
_PROCESSORS = {80: (64, 32, 164), 89: (48, 24, 100), 90: (64, 32, 228), 100: (64, 32, 228)}
_REGISTERS, _WARPS_TOGETHER, _REGISTERS_TOGETHER = 65536, 4, 256  # and in what units they are handed out
_RESERVED_SHARED = 1024  # of every program
_TENSOR_COLUMNS = 512  # of Blackwell's tensor memory


def programs_at_a_time(
    capability: int, *, warps: int, registers: int, shared: int, tensor_columns: int = 0
) -> int:
    """Count how many programs a processor holds at a time.

    Args:
        capability: compute capability, times ten.
        warps: of a program.
        registers: of a thread.
        shared: bytes of a program.
        tensor_columns: of tensor memory, of a program.
    """
    most_warps, most_programs, kibibytes = _PROCESSORS[capability]
    of_warp = -(-registers * 32 // _REGISTERS_TOGETHER) * _REGISTERS_TOGETHER
    warps_by_registers = _REGISTERS // _WARPS_TOGETHER // max(1, of_warp) * _WARPS_TOGETHER
    return min(
        most_programs,
        most_warps // warps,
        warps_by_registers // warps,
        kibibytes * 1024 // (shared + _RESERVED_SHARED),
        _TENSOR_COLUMNS // tensor_columns if tensor_columns else most_programs,
    )


def obstacle() -> str | None:
    """Return what keeps Triton from compiling for NVIDIA's GPUs; None: nothing."""
    try:
        from triton import knobs

        for tool in ("ptxas", "cuobjdump", "nvdisasm"):
            if not getattr(knobs.nvidia, tool).path:
                return f"Triton has no {tool}"
    except ImportError:
        return "triton is not installed"
    except RuntimeError as error:
        return f"Triton has no tools for NVIDIA's GPUs: {error}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "kernels are interpreted (TRITON_INTERPRET=1), and not compiled"
    return None


def listed(options: argparse.Namespace) -> Iterator[dict]:
    """Yield a record of every kernel that the calls launch."""
    from support.compiled_kernels.launches import CALLS, SHARED_MEMORY, compile_launches
    from support.compiled_kernels.listing import disassemble, inner_loops, kernel_source, loops, read, used_memory

    for capability in options.capabilities:
        number = CAPABILITIES[capability]
        for call in options.calls:
            for name, kernel in compile_launches(number, CALLS[call]):
                used = used_memory(kernel)
                instructions = read(disassemble(kernel))
                found = loops(instructions)
                source = kernel_source(kernel)
                text = source.read_text(encoding="utf-8")
                warps = kernel.metadata.num_warps
                programs = programs_at_a_time(
                    number,
                    warps=warps,
                    registers=used["registers"],
                    shared=used["shared"],
                    tensor_columns=getattr(kernel.metadata, "tmem_size", 0) or 0,
                )
                yield {
                    "benchmark": "sass",
                    "capability": capability,
                    "call": call,
                    "kernel": name,
                    "warps": warps,
                    "registers": used["registers"],
                    "spilled_bytes": used["spilled"],
                    "spills_in_loops": sum(loop.spills for loop in found),
                    "shared_bytes": used["shared"],
                    "most_shared_bytes": SHARED_MEMORY[number],
                    "programs_at_a_time": programs,
                    "occupancy": programs * warps / _PROCESSORS[number][0],
                    "instructions": len(instructions),
                    "loops": [
                        {
                            "file": source.name,
                            "line": loop.header(text),
                            "instructions": len(loop.instructions),
                            "kinds": loop.kinds,
                        }
                        for loop in inner_loops(found)
                    ],
                    "triton": version("triton"),
                }


def table(rows: list[dict]) -> str:
    """Format records as a Markdown table: a line for each kernel, and below it one for each of its inner loops."""
    from support.compiled_kernels.listing import KINDS

    header = ["GPU", "call", "kernel, or the line of a loop", "registers", "spilled", "shared", "occupancy"]
    lines = []
    for row in rows:
        memory = [row["registers"], row["spilled_bytes"], row["shared_bytes"], f"{row['occupancy']:.0%}"]
        cells = [row["capability"], row["call"], row["kernel"], *memory, row["instructions"]]
        lines.append(cells + [""] * len(KINDS))
        for loop in row["loops"]:
            counts = [loop["instructions"], *loop["kinds"].values()]
            lines.append(["", "", f"{loop['file']}:{loop['line']}", "", "", "", "", *counts])
    return markdown_table([*header, "instructions", *KINDS], lines)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--capabilities", nargs="+", choices=CAPABILITIES, default=tuple(CAPABILITIES), metavar="X.Y",
        help=f"compute capabilities, of {', '.join(CAPABILITIES)}",
    )  # fmt: skip
    parser.add_argument("--calls", nargs="+", metavar="NAME", help='such as "one token" (default: all)')
    add_json_option(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if reason := obstacle():
        print(f"error: {reason}", file=sys.stderr)
        return 1
    from support.compiled_kernels.launches import CALLS

    options.calls = options.calls or tuple(CALLS)
    if unknown := [call for call in options.calls if call not in CALLS]:
        print(f"error: there is no call {unknown[0]!r}, but {', '.join(CALLS)}", file=sys.stderr)
        return 1
    show(options, keep_records(listed(options), "sass.py", options.json), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
