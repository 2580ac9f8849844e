"""Every operator by every back end, against its definition in fp64, on this device."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..hosts import HostGroup
from ..kernels import (
    BackendError,
    ListedBlocks,
    PackedSequences,
    SequenceBuffers,
    reference,
    torch_varlen_attention,
)
from .backends import BACKENDS, DTYPES, dtype_name, obstacle
from .checks import Check, CheckFailed, CheckSkipped, Finding

# What a result may be off by, relative to the largest number in it, in units of an epsilon. Of attention in half
# precision the weights are rounded, too, and so is the result of each segment; sums in fp32 lose a few digits.
_ATTENTION = {torch.float32: 32.0, torch.bfloat16: 4.0, torch.float16: 4.0}  # of the operands' dtype
_IN_FP32 = 256.0  # of fp32, for what is handed out in fp32
_EXACT = 0.0

_HEADS, _KV_HEADS, _HEAD_DIM = 14, 2, 128
_SCALE = _HEAD_DIM**-0.5
_TOWER_HEAD_DIM = 80


@dataclass(frozen=True)
class Problem:
    """A Problem is an operator with operands of one size.

    Attributes:
        label: what distinguishes it from the operator's others.
        operands, settings: the operator's positional and keyword arguments.
        units: for each result, how far it may be off, in epsilons; None: see ``_ATTENTION``.
    """

    operator: str
    label: str
    operands: tuple
    settings: dict[str, Any] = field(default_factory=dict)
    units: tuple[float | None, ...] = (_IN_FP32,)


class Draw:
    """A Draw makes the same random operands on every host and device."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        numbers = torch.randn(shape, generator=self._generator, device="cpu")
        return numbers.to(self.device, dtype or self.dtype)

    def queries(self, rows: int) -> Tensor:
        """Draw ``[1, Hq, S, D]`` as a projection leaves it."""
        return self(1, rows, _HEADS, _HEAD_DIM).transpose(1, 2)

    def keys_and_values(self, rows: int) -> tuple[Tensor, Tensor]:
        """Draw K and V as rows of a longer buffer, whose rest must not be read."""
        buffers = torch.full(
            (2, 1, _KV_HEADS, rows + 7, _HEAD_DIM), torch.nan, device=self.device, dtype=self.dtype
        )
        buffers[:, :, :, 3 : 3 + rows] = self(2, 1, _KV_HEADS, rows, _HEAD_DIM)
        return tuple(buffers[:, :, :, 3 : 3 + rows])


def checks(hosts: HostGroup, is_quick: bool) -> Iterable[Check]:
    """List every operator with every back end that may have it."""
    for backend in BACKENDS:
        for operator in PROBLEMS:
            if backend in _has(operator):
                yield Check(f"{operator} by {backend}", partial(compare, operator, backend))


def _has(operator: str) -> tuple[str, ...]:
    """Return the back ends that compute an operator."""
    if operator == "segmented_attention":
        return BACKENDS
    return ("torch", "flash_attn") if operator == "varlen_attention" else ("torch", "triton")


def _why_not(operator: str, backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if (operator, backend) == ("varlen_attention", "flash_attn"):  # another of its functions, with other limits
        return torch_varlen_attention.usable(backend, device, dtype, _TOWER_HEAD_DIM)
    return obstacle(backend, device, dtype)[0]


def compare(operator: str, backend: str, hosts: HostGroup) -> Finding:
    """Solve an operator's problems in every dtype, and compare with fp64.

    Raises:
        CheckFailed: a result is off by more than its dtype allows, or the back end raises something.
        CheckSkipped: the back end works with none of the dtypes.
    """
    errors: dict[str, float] = {}
    wrong, obstacles = [], []
    for dtype in DTYPES:
        why = _why_not(operator, backend, hosts.device, dtype)
        if why is not None:
            obstacles.append(why)
            continue
        worst = 0.0
        for problem in PROBLEMS[operator](Draw(hosts.device, dtype)):
            try:
                off = error_of(problem, backend, dtype)
            except BackendError as reason:
                raise CheckSkipped(str(reason)) from reason
            if not off <= 1:
                wrong.append(f"{problem.label} in {dtype_name(dtype)} is off by {off:.3g} times what is allowed")
            worst = max(worst, off)
        errors[dtype_name(dtype)] = worst
    if wrong:
        raise CheckFailed("; ".join(wrong))
    if not errors:
        raise CheckSkipped(obstacles[0])
    return Finding(", ".join(f"{name} {error:.2f}" for name, error in errors.items()), {"errors": errors})


def error_of(problem: Problem, backend: str, dtype: torch.dtype) -> float:
    """Return how far the worst number of an operator's results is off, in units of what is allowed."""
    results = getattr(kernels, problem.operator)(*problem.operands, **problem.settings, backend=backend)
    wide = (_widened(problem.operands), _widened(problem.settings))
    exact = getattr(reference, problem.operator)(*wide[0], **wide[1])
    if isinstance(results, Tensor):
        results, exact = (results,), (exact,)
    wanted = problem.settings.get("out")
    if wanted is not None and wanted.data_ptr() != results[0].data_ptr():
        return float("inf")
    worst = 0.0
    for ours, its, units in zip(results, exact, problem.units, strict=True):
        if ours.shape != its.shape:
            return float("inf")
        off = (ours.double() - its.double()).abs().nan_to_num(nan=float("inf")).max().item()
        epsilon = torch.finfo(torch.float32 if units is not None else dtype).eps
        allowed = (_ATTENTION[dtype] if units is None else units) * epsilon * max(1e-30, its.abs().max().item())
        worst = max(worst, off / allowed if allowed else (float("inf") if off else 0.0))
    return worst


def _widened(value: Any) -> Any:
    """Return arguments with every floating-point tensor in fp64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, list | tuple):
        return type(value)(_widened(each) for each in value)
    if isinstance(value, dict):
        return {name: _widened(each) for name, each in value.items()}
    if isinstance(value, SequenceBuffers):
        return SequenceBuffers(_widened(value.keys), _widened(value.values), value.lengths)
    return value


def _segmented(draw: Draw) -> list[Problem]:
    """Make a block behind passing blocks, one with its anchor, and a question; no length fills a tile."""
    anchor_and_block = draw.queries(37 + 163)
    passed = [draw.keys_and_values(rows) for rows in (37, 40, 40)]
    own = draw.keys_and_values(200)
    question = draw.queries(21), [draw.keys_and_values(64), draw.keys_and_values(300)]
    units = (None, _IN_FP32 if draw.dtype == torch.float32 else 8 * _IN_FP32)

    # A layer's output is laid out as its input: the heads of a token side by side.
    given = draw.queries(200).fill_(torch.nan)

    def problem(label: str, q: Tensor, segments: list, causal: bool, **settings: Any) -> Problem:
        return Problem("segmented_attention", label, (q, segments, _SCALE, causal), settings, units)

    return [
        problem("a block behind passing blocks", draw.queries(163), [*passed, draw.keys_and_values(163)], True),
        problem("an anchor with its block", anchor_and_block, [*passed[1:], own], True, rows_alone=37, out=given),
        problem("a question", *question, False),
        problem("one row", draw.queries(1), [draw.keys_and_values(700)], False),
    ]


def _verify(draw: Draw) -> list[Problem]:
    """Make a token, a token over a part of a buffer, a tree of tokens, and tokens over chosen rows."""
    k, v = draw.keys_and_values(611)
    k[:, :, 555:], v[:, :, 555:] = torch.nan, torch.nan
    num_keys = torch.tensor([555], dtype=torch.int32)
    tree = torch.eye(9, dtype=torch.bool)
    for node in range(1, 9):
        tree[node] |= tree[(node - 1) // 2]
    kept = torch.stack([torch.arange(start, start + 550, 5) for start in range(_KV_HEADS)])[None]
    units = (None, _IN_FP32 if draw.dtype == torch.float32 else 8 * _IN_FP32)

    def problem(label: str, rows: int, num_rows: int = 555, **settings: Tensor) -> Problem:
        moved = {name: value.to(draw.device) for name, value in settings.items()}
        operands = draw.queries(rows), k[:, :, :num_rows], v[:, :, :num_rows], _SCALE
        return Problem("verify_attention", label, operands, moved, units)

    return [
        problem("one token", 1),
        problem("one token over a part of a buffer", 1, 611, num_keys=num_keys),
        problem("a tree", 9, visible=tree),
        problem("chosen rows", 4, kept=kept),
    ]


def _batch(draw: Draw) -> list[Problem]:
    """Make the newest tokens of sequences of several lengths, of which one has no other."""
    lengths = [700, 0, 129, 256]
    newest = draw(2, 1, _KV_HEADS, len(lengths), _HEAD_DIM)
    keys, values = [], []
    for length in lengths:
        buffers = torch.full(
            (2, 1, _KV_HEADS, length + 9, _HEAD_DIM), torch.nan, device=draw.device, dtype=draw.dtype
        )
        buffers[:, :, :, :length] = draw(2, 1, _KV_HEADS, length, _HEAD_DIM)
        keys.append(buffers[0])
        values.append(buffers[1])
    operands = draw.queries(len(lengths)), *newest, SequenceBuffers(keys, values, lengths), _SCALE
    return [Problem("batch_decode_attention", "several sequences", operands, units=(None,))]


def _varlen(draw: Draw) -> list[Problem]:
    """Make the windows of a vision tower."""
    lengths = torch.tensor([0, 64, 64, 63, 1, 129])
    sequences = PackedSequences(lengths.cumsum(0).int().to(draw.device), 129)
    q, k, v = draw(3, int(lengths.sum()), 4, _TOWER_HEAD_DIM)
    return [Problem("varlen_attention", "windows", (q, k, v, sequences, _TOWER_HEAD_DIM**-0.5), units=(None,))]


def _block_sparse(draw: Draw) -> list[Problem]:
    """Make tokens whose heads list other blocks; the last block is a short one."""
    q, (k, v) = draw.queries(333), draw.keys_and_values(333)
    kept = draw(1, _HEADS, 3, 6, dtype=torch.float32) > 0
    operands = q, k, v, ListedBlocks.of(kept, 128, 64), _SCALE
    units = (None, _IN_FP32 if draw.dtype == torch.float32 else 8 * _IN_FP32)

    def problem(label: str, *operands: Any, **settings: float) -> Problem:
        # The definition fills what it is given.
        given = {"out": draw.queries(333).fill_(torch.nan), **settings}
        return Problem("block_sparse_attention", label, operands, given, units)

    # For all queries every second 64 keys are 2 behind: nothing that a back end's tiles or rounding decide.
    faint = [0.1 * states for states in (q, k)]
    faint[0][..., 0], faint[1][..., 0] = 1, 0
    faint[1][:, :, torch.arange(333, device=q.device) // 64 % 2 == 1, 0] = -2 / _SCALE
    return [
        problem("listed blocks", *operands),
        problem("listed blocks, negligible values skipped", *faint, *operands[2:], skip_margin=1.0),
    ]


def _antidiagonals(draw: Draw) -> list[Problem]:
    q, (k, _) = draw.queries(333), draw.keys_and_values(333)
    return [
        Problem("antidiagonal_scores", f"a stride of {stride}", (q, k, _SCALE, stride, 128)) for stride in (8, 16)
    ]


def _block_means(draw: Draw) -> list[Problem]:
    k, _ = draw.keys_and_values(333)
    center = k.float().mean(dim=2)
    return [
        Problem("block_means", "blocks", (k, 64), {"center": each}, (_IN_FP32, _IN_FP32))
        for each in (None, center)
    ]


def _merge(draw: Draw) -> list[Problem]:
    """Make partial results of several hosts, of which one saw nothing."""
    outs, lses = draw(5, 1, _HEADS, 33, _HEAD_DIM), draw(5, 1, _HEADS, 33, dtype=torch.float32)
    lses[2] = -torch.inf
    return [Problem("merge_states", "partial results", (outs, lses), units=(_IN_FP32, _IN_FP32))]


def _importance(draw: Draw) -> list[Problem]:
    """Make every way to rank keys."""
    q, (k, _) = draw.queries(19), draw.keys_and_values(333)
    return [
        Problem("kv_importance", reduce, (q, k, _SCALE, reduce), {"pool": pool})
        for reduce, pool in (("peak", 1), ("softmax", 5), ("dot", 1))
    ]


def _select(draw: Draw) -> list[Problem]:
    """Make scores of which many are equal, so that it matters which row comes first."""
    k, v = draw.keys_and_values(333)
    scores = draw(1, _KV_HEADS, 333, dtype=torch.float32).mul(2).round()
    return [Problem("select_topk", "the best rows", (scores, k, v, 50), units=(_EXACT, _EXACT))]


def _visual(operator: str, *settings: int) -> Callable[[Draw], list[Problem]]:
    """Make the embeddings of a few frames of 7 x 11 tokens, whose neighbours are alike."""

    def make(draw: Draw) -> list[Problem]:
        frames = (draw(1, 77, 200, dtype=torch.float32) + draw(5, 77, 200, dtype=torch.float32)).to(draw.dtype)
        return [Problem(operator, "frames", (frames, *settings))]

    return make


def _similarity(draw: Draw) -> list[Problem]:
    return [Problem("similarity_to", "rows", (draw(300, 200), draw(200)))]


PROBLEMS: dict[str, Callable[[Draw], list[Problem]]] = {
    "segmented_attention": _segmented,
    "verify_attention": _verify,
    "batch_decode_attention": _batch,
    "varlen_attention": _varlen,
    "block_sparse_attention": _block_sparse,
    "antidiagonal_scores": _antidiagonals,
    "block_means": _block_means,
    "merge_states": _merge,
    "kv_importance": _importance,
    "select_topk": _select,
    "temporal_change": _visual("temporal_change"),
    "spatial_variety": _visual("spatial_variety", 7, 11),
    "similarity_to": _similarity,
}
