"""Checks of attention backends, and of every operator against fp64."""

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .. import kernels
from ..hosts import HostGroup
from ..kernels import (
    ListedBlocks,
    PackedSequences,
    SequenceBuffers,
    library_attention,
    reference,
    torch_attention,
)
from ..kernels.backends import LIBRARIES, capability, drawn_numbers, why_not_triton
from .examination import Check, CheckFailed, CheckSkipped, Found

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("torch", "triton", *LIBRARIES)
_TO_INSTALL = {
    3: "pip install fa3-fwd: FlashAttention 3 takes half the time of torch's own on this GPU "
    "(H200, bf16)",
    4: "pip install flash-attn-4, which is made for this GPU",
}
_HEADS = 14
_KV_HEADS = 2
_HEAD_DIM = 128
_TOWER_HEAD_DIM = 80
_GROUPS = _HEADS // _KV_HEADS
_SCALE = _HEAD_DIM**-0.5
# What a result may be off by, relative to the largest number in it, in epsilons of its dtype. Of
# operands in half precision the weights are rounded, too, and so is the result of each segment;
# sums in fp32 lose a few digits.
_ALLOWED = 4.0
_ALLOWED_IN_FP32 = 256.0
_ALLOWED_OF_HALF = 2048.0


def backend_checks(hosts: HostGroup) -> Iterable[Check]:
    """List the checks of backends, and of the automatic choice."""
    each = [Check(name, partial(back_end, name)) for name in BACKENDS]
    return [*each, Check("chosen", chosen)]


def operator_checks(hosts: HostGroup) -> Iterable[Check]:
    """List every operator."""
    return [Check(operator, partial(compare, operator)) for operator in CASES]


def obstacle(name: str, device: torch.device, dtype: torch.dtype) -> tuple[str | None, bool]:
    """Return why a backend cannot compute attention, or None, and whether that is a fault.

    It is a fault where everything that the backend asks for is there, and what it computes is wrong
    all the same, or it cannot even be loaded.
    """
    if name == "torch":
        return None, False
    if name == "triton":
        why = why_not_triton(device, dtype)
        return why, why is not None and why.startswith("its first kernel")
    modules = chain.from_iterable(library_attention.FLASH_MODULES.values())
    if name == "flash_attn" and not any(find_spec(module.partition(".")[0]) for module in modules):
        return "it is not installed", False
    is_gpu = device.type == "cuda"
    if is_gpu and (
        why := library_attention.why_not_library(name, capability(device), dtype, _HEAD_DIM)
    ):
        return why, False
    why = library_attention.usable(name, device, dtype, _HEAD_DIM, _GROUPS)
    return why, why is not None and is_gpu


def back_end(name: str, hosts: HostGroup) -> Found:
    """Try a backend with every dtype.

    Raises:
        CheckFailed: it has a fault. That it refuses some dtypes, for which it was not built, is
            none.
        CheckSkipped: it cannot be used here.
    """
    found = {dtype_name(dtype): obstacle(name, hosts.device, dtype) for dtype in DTYPES}
    works = [dtype for dtype, (why, _) in found.items() if why is None]
    faults = {dtype: why for dtype, (why, is_fault) in found.items() if is_fault}
    if wrong := [
        f"{dtype}: {why}" for dtype, why in faults.items() if not works or " fails: " not in why
    ]:
        raise CheckFailed("; ".join(wrong))
    others = [why for why, is_fault in found.values() if why is not None and not is_fault]
    if not works:
        raise CheckSkipped(others[-1])
    refused = [f"not built for {dtype} ({why})" for dtype, why in faults.items()]
    return "; ".join([", ".join(works), *refused, *(f"else {why}" for why in others[:1])]), {
        "dtypes": works
    }


def chosen(hosts: HostGroup) -> Found:
    """Find out which backends ``auto`` selects."""
    dtype = torch.float32 if hosts.device.type == "cpu" else torch.bfloat16
    found = {}
    for kind, queries in {"a question": 64, "a block of 4k": 4096, "a block of 16k": 16384}.items():
        q = torch.empty(1, _GROUPS, queries, _HEAD_DIM, device=hosts.device, dtype=dtype)
        found[kind] = library_attention.choose_attention("auto", q, [(q[:, :1], q[:, :1])])
    is_split = torch_attention.varlen_obstacle(hosts.device, dtype, _TOWER_HEAD_DIM)
    found["a vision tower's windows"] = (
        f"torch, {'one after the other' if is_split else 'in one call'}"
    )
    text = ", ".join(f"{kind}: {name}" for kind, name in found.items()) + f" ({dtype_name(dtype)})"
    if hosts.device.type == "cuda" and (
        better := library_attention.better_flash(capability(hosts.device)[0])
    ):
        text += f"; {_TO_INSTALL[better]}"
    return text, {"chosen": found}


def compare(operator: str, hosts: HostGroup) -> Found:
    """Compare an operator with fp64, with every backend that works here and every dtype.

    Raises:
        CheckFailed: a result is off by more than its dtype allows, or a backend raises something.
    """
    errors: dict[str, dict[str, float]] = {}
    wrong = []
    for backend, dtype in product(_BACKENDS_OF.get(operator, ("torch", "triton")), DTYPES):
        if obstacle(backend, hosts.device, dtype)[0] is not None:
            continue
        name = dtype_name(dtype)
        try:
            off = max(
                error_of(operator, case, backend)
                for case in CASES[operator](Draw(hosts.device, dtype))
            )
        except Exception as error:
            wrong.append(f"{backend} in {name}: {type(error).__name__}: {error}")
            continue
        errors.setdefault(backend, {})[name] = off
        if not off <= 1:
            wrong.append(f"{backend} in {name} is off by {off:.3g} times what is allowed")
    if wrong:
        raise CheckFailed("; ".join(wrong))
    found = [f"{backend} {max(of_dtypes.values()):.2f}" for backend, of_dtypes in errors.items()]
    return ", ".join(found), {"errors": errors}


_BACKENDS_OF = {"segmented_attention": BACKENDS, "varlen_attention": ("torch",)}


def error_of(operator: str, case: "Case", backend: str) -> float:
    """Return how far the worst number of an operator's results is off, in units of what is
    allowed."""
    operands, settings = case
    choice = {} if operator == "varlen_attention" else {"backend": backend}
    results = tree_leaves(getattr(kernels, operator)(*operands, **settings, **choice))
    wide_operands, wide_settings = tree_map(_widened, case)
    exact = tree_leaves(getattr(reference, operator)(*wide_operands, **wide_settings))
    is_half = any(
        isinstance(leaf, Tensor) and leaf.dtype in DTYPES[1:] for leaf in tree_leaves(operands)
    )
    units = dict.fromkeys(DTYPES[1:], _ALLOWED)
    units[torch.float32] = _ALLOWED_OF_HALF if is_half else _ALLOWED_IN_FP32
    worst = 0.0
    for ours, its in zip(results, exact, strict=True):
        if not ours.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(ours, its) else float("inf"))
            continue
        off = (ours.double() - its.double()).abs().nan_to_num(nan=float("inf")).max().item()
        allowed = (
            units[ours.dtype] * torch.finfo(ours.dtype).eps * max(1e-30, its.abs().max().item())
        )
        worst = max(worst, off / allowed)
    return worst


def _widened(value: Any) -> Any:
    """Return an argument in fp64, if it is a floating-point tensor, or holds some."""
    if isinstance(value, SequenceBuffers):
        return SequenceBuffers(*tree_map(_widened, (value.keys, value.values)), value.lengths)
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


class Draw:
    """Makes the same random operands on every host and device."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device = device
        self.dtype = dtype
        self._draw = drawn_numbers(device, torch.float32)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self._draw(*shape).to(dtype or self.dtype)

    def queries(self, rows: int) -> Tensor:
        """Draw ``[1, Hq, S, D]`` as a projection leaves it."""
        return self(1, rows, _HEADS, _HEAD_DIM).transpose(1, 2)

    def kv(self, rows: int) -> tuple[Tensor, Tensor]:
        """Draw K and V as rows of a longer buffer, whose rest must not be read."""
        shape = (2, 1, _KV_HEADS, rows + 7, _HEAD_DIM)
        buffers = torch.full(shape, torch.nan, device=self.device, dtype=self.dtype)
        buffers[:, :, :, 3 : 3 + rows] = self(2, 1, _KV_HEADS, rows, _HEAD_DIM)
        return tuple(buffers[:, :, :, 3 : 3 + rows])


Case = tuple[tuple, dict[str, Any]]  # an operator's positional and keyword arguments


def _case(*operands: Any, **settings: Any) -> Case:
    return operands, settings


def _batch(draw: Draw) -> list[Case]:
    """Make the newest tokens of sequences of several lengths, of which one has no other."""
    lengths = [700, 0, 129, 256]
    keys, values = zip(
        *(draw(2, 1, _KV_HEADS, length + 9, _HEAD_DIM) for length in lengths), strict=True
    )
    newest = draw(2, 1, _KV_HEADS, len(lengths), _HEAD_DIM)
    buffers = SequenceBuffers(list(keys), list(values), lengths)
    return [_case(draw.queries(len(lengths)), *newest, buffers, _SCALE)]


def _varlen(draw: Draw) -> list[Case]:
    """Make the windows of a vision tower."""
    lengths = torch.tensor([0, 64, 64, 63, 1, 129])
    sequences = PackedSequences(lengths.cumsum(0).int().to(draw.device), 129)
    return [
        _case(*draw(3, int(lengths.sum()), 4, _TOWER_HEAD_DIM), sequences, _TOWER_HEAD_DIM**-0.5)
    ]


def _merge(draw: Draw) -> list[Case]:
    """Make partial results of several hosts, of which one saw nothing."""
    outs = draw(5, 1, _HEADS, 33, _HEAD_DIM)
    lses = draw(5, 1, _HEADS, 33, dtype=torch.float32)
    lses[2] = -torch.inf
    return [_case(outs, lses)]


def _verify(draw: Draw) -> list[Case]:
    """Make a token over a part of a buffer, and a tree of tokens."""
    tree = torch.eye(9, dtype=torch.bool)
    for node in range(1, 9):
        tree[node] |= tree[(node - 1) // 2]
    num_keys = torch.tensor([555], dtype=torch.int32, device=draw.device)
    return [
        _case(draw.queries(1), *draw.kv(611), _SCALE, num_keys=num_keys),
        _case(draw.queries(9), *draw.kv(555), _SCALE, visible=tree.to(draw.device)),
    ]


def _block_sparse(draw: Draw) -> list[Case]:
    """Make tokens whose heads list other blocks; the last block is a short one."""
    blocks = ListedBlocks.of(draw(1, _HEADS, 3, 6, dtype=torch.float32) > 0, 128, 64)
    out = draw.queries(333).fill_(torch.nan)
    return [_case(draw.queries(333), *draw.kv(333), blocks, _SCALE, out=out)]


def _scores(draw: Draw) -> Tensor:
    """Draw scores of which many are equal, so that it matters which row comes first."""
    return draw(1, _KV_HEADS, 333, dtype=torch.float32).mul(2).round()


# No length fills a tile.
CASES: dict[str, Callable[[Draw], list[Case]]] = {
    "segmented_attention": lambda draw: [
        _case(
            draw.queries(163), [draw.kv(37), draw.kv(40), draw.kv(40), draw.kv(163)], _SCALE, True
        ),
        _case(draw.queries(200), [draw.kv(40), draw.kv(200)], _SCALE, True, num_anchor_queries=37),
        _case(draw.queries(21), [draw.kv(64), draw.kv(300)], _SCALE, False),
        _case(draw.queries(1), [draw.kv(700)], _SCALE, False),
    ],
    "verify_attention": _verify,
    "batch_decode_attention": _batch,
    "varlen_attention": _varlen,
    "block_sparse_attention": _block_sparse,
    "antidiagonal_scores": lambda draw: [
        _case(draw.queries(333), draw.kv(333)[0], _SCALE, 16, 128)
    ],
    "block_means": lambda draw: [_case(draw.kv(333)[0], 64)],
    "merge_states": _merge,
    "kv_importance": lambda draw: [
        _case(draw.queries(19), draw.kv(333)[0], _SCALE, "peak"),
        _case(draw.queries(19), draw.kv(333)[0], _SCALE, "softmax", pool=5),
    ],
    "select_topk": lambda draw: [_case(_scores(draw), *draw.kv(333), 50)],
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")
