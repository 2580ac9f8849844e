"""Reads what a kernel was compiled into: its memory, and the instructions of its loops."""

import ast
import re
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import pairwise

import networkx
from triton import knobs
from triton.compiler import CompiledKernel

_LOCAL = ("LDL", "STL")  # to and from local memory: what spills
_ENDS = ("EXIT", "RET", "BRA", "JMP", "KILL")


@dataclass(frozen=True)
class Instruction:
    """An Instruction of a listing.

    Attributes:
        place: its index.
        name: with its modifiers, such as ``HMMA.16816.F32.BF16``.
        target: the index of the instruction that it may go on with, besides the next one; None: there is none.
        goes_on: whether it may go on with the next one.
        line: of the kernel's own function in its source; None if that is not known.
    """

    place: int
    name: str
    target: int | None
    goes_on: bool
    line: int | None

    @property
    def is_tensor_core(self) -> bool:
        return self.name.split(".")[0].endswith("MMA")


@dataclass(frozen=True)
class Loop:
    """Loop of a thread's instructions.

    Attributes:
        instructions: of one round, those of loops within it included.
    """

    instructions: tuple[Instruction, ...]

    @property
    def spills(self) -> int:
        """Count the instructions that move what does not fit into registers."""
        return sum(each.name.startswith(_LOCAL) for each in self.instructions)

    def header(self, source: str) -> int | None:
        """Return the line of the innermost ``for`` that most of the instructions with a line lie in.

        Args:
            source: of the file in which the kernel is defined.
        """
        lines = [each.line for each in self.instructions if each.line is not None]
        loops = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For)]
        spans = [range(node.lineno, node.end_lineno + 1) for node in loops]
        return max((s.start for s in spans if 2 * sum(line in s for line in lines) > len(lines)), default=None)


def used_memory(kernel: CompiledKernel) -> dict[str, int]:
    """Return ``registers`` and ``spilled`` bytes of a thread, and ``shared`` bytes of a program."""
    usage = _tool(knobs.nvidia.cuobjdump.path, kernel, "--dump-resource-usage")
    used = {name: int(count) for name, count in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    spilled = used["STACK"] + used["LOCAL"]
    return {"registers": used["REG"], "spilled": spilled, "shared": kernel.metadata.shared}


def disassemble(kernel: CompiledKernel) -> str:
    """Return a kernel's listing (SASS) with labels, and lines of the source where they are known."""
    return _tool(knobs.nvidia.nvdisasm.path, kernel, "-c", "-gi")


def _tool(path: str, kernel: CompiledKernel, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.check_output([path, *options, file.name], text=True)


def read(listing: str) -> list[Instruction]:
    """Read the instructions of a listing, in their order."""
    rows, labels, line = [], {}, None
    for text in listing.splitlines():
        if label := re.match(r"(\.L_\w+):", text):
            labels[label[1]] = len(rows)
        elif source := re.search(r'//## File ".*", line (\d+)$', text):
            # What is inlined stands before the lines that it was inlined at; the last one is the kernel's own.
            line = int(source[1]) if "inlined at" not in text else line
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(@\S+\s+)?([A-Z][A-Z0-9_.]*)([^;]*)", text):
            rows.append((*found.groups(), line))
    instructions = []
    for guard, name, operands, line in rows:
        # A call of a label is a jump that is too far for a branch; subroutines have names.
        jump = re.search(r"(.*)`\((\.L_\w+)\)", operands) if name.startswith(("BRA", "JMP", "CALL")) else None
        is_certain = guard is None and not (jump and jump[1].strip())
        goes_on = not (is_certain and name.split(".")[0] in _ENDS)
        instructions.append(
            Instruction(len(instructions), name, labels.get(jump[2]) if jump else None, goes_on, line)
        )
    return instructions


def loops(instructions: list[Instruction]) -> list[Loop]:
    """Find the natural loops: what leads back to an instruction that nothing in the loop is reached without.

    Code that is far off and jumps back, such as a wait, is therefore not a loop around everything in between.
    """
    graph = networkx.DiGraph()
    graph.add_node(0)
    targets = {each.target for each in instructions}
    # Of a run of instructions that is left and entered nowhere else, the first one stands for all.
    starts = [i for i in range(len(instructions)) if not i or i in targets or _leaves(instructions[i - 1])]
    block = {i: list(range(i, stop)) for i, stop in pairwise([*starts, len(instructions)])}
    for start, members in block.items():
        last = instructions[members[-1]]
        if last.goes_on and members[-1] + 1 in block:
            graph.add_edge(start, members[-1] + 1)
        if last.target in block:
            graph.add_edge(start, last.target)
    graph = graph.subgraph({0} | networkx.descendants(graph, 0))
    dominators = networkx.immediate_dominators(graph, 0)

    bodies: dict[int, set[int]] = {}
    for end, head in graph.edges:
        if _dominates(dominators, head, end):
            rest = graph.subgraph(set(graph) - {head})
            inside = networkx.ancestors(rest, end) | {end} if end != head else set()
            bodies.setdefault(head, {head}).update(inside)
    return [
        Loop(tuple(instructions[i] for start in sorted(body) for i in block[start])) for body in bodies.values()
    ]


def inner_loops(found: list[Loop]) -> list[Loop]:
    """Choose the innermost of the loops that use tensor cores, or of those that read memory where none does.

    What only waits is left out.
    """
    for work in (lambda each: each.is_tensor_core, lambda each: each.name.startswith(("LDG.", "LDS"))):
        working = [loop for loop in found if any(map(work, loop.instructions))]
        if working:
            places = {loop: {each.place for each in loop.instructions} for loop in working}
            inner = [a for a in working if not any(places[b] < places[a] for b in working)]
            return sorted(inner, key=lambda loop: min(places[loop]))
    return []


def _leaves(instruction: Instruction) -> bool:
    return instruction.target is not None or not instruction.goes_on


def _dominates(dominators: dict[int, int | None], head: int, node: int) -> bool:
    """Return whether every path to a node passes the head."""
    while node not in (head, 0):
        node = dominators[node]
    return node == head
