"""A case of the operators' benchmark: an operator on operands of one size.

Counted are the floating-point operations of the matrix products, where keys that nobody sees cost nothing, and the
fewest bytes: every operand read once, every result written once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from apbv.kernels.backends import choose
from apbv.layout import FEWEST_ANCHOR, FEWEST_PASSING

Outputs = tuple[Tensor, ...]
# The index of a part of each of an operator's outputs, and the exact result of this part.
Piece = tuple[Any, Outputs]

# The largest |out - exact| / |exact| of attention: half precision rounds weights and every partial result.
ATTENTION_TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# The same for results in fp32 of operands in a lower precision, whose products are exact.
FP32_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and of a prompt.

    Attributes:
        tokens: n, the context's length, and the number of keys after which tokens are verified.
        hosts: H; the context is cut into 2H blocks.
        heads, kv_heads, head_dim: of attention.
        query_len: tokens of the question.
        frames, height, width: the video's visual tokens.
        hidden: numbers of a visual token's embedding.
    """

    tokens: int
    hosts: int
    heads: int
    kv_heads: int
    head_dim: int
    query_len: int
    frames: int
    height: int
    width: int
    hidden: int

    @property
    def block(self) -> int:
        """Return the length of a block."""
        return self.tokens // (2 * self.hosts)

    @property
    def anchor(self) -> int:
        """Return the anchor's length, l_a."""
        return max(FEWEST_ANCHOR, -(-self.tokens // 64))

    @property
    def passing(self) -> int:
        """Return how many KV pairs a block passes on, l_p."""
        return min(self.block, max(FEWEST_PASSING, -(-self.tokens // 128)))


class Draw:
    """A source of random operands, which differ from seed to seed."""

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw normally distributed numbers."""
        return torch.randn(*shape, generator=self._generator, device=self.device, dtype=dtype or self.dtype)

    def states(self, heads: int, rows: int, dim: int) -> Tensor:
        """Draw ``[1, H, S, D]`` as projections leave it, with the heads of a token side by side."""
        return self.randn(1, rows, heads, dim).transpose(1, 2)


@dataclass(frozen=True)
class Case:
    """An operator on operands of one size.

    Attributes:
        op, label: the operator, and what distinguishes the case from its others.
        sizes: for the records.
        flops: floating-point operations of one call.
        bytes: function of the dtype that counts the fewest bytes of one call.
        make: function that draws operands.
        run: function of (operands, backend) that returns the outputs.
        exact: function of the operands that yields pieces of the result in fp64.
        tolerance: function of the dtype that returns the relative error allowed for each output.
        chosen: function of (operands, backend) that returns the backend that would run, or raises BackendError.
        is_segmented: whether libraries of attention kernels compute it.
        rows_alone: see :func:`apbv.kernels.segmented_attention`.
    """

    op: str
    label: str
    sizes: dict[str, int]
    flops: int
    bytes: Callable[[torch.dtype], int]
    make: Callable[[Draw], tuple]
    run: Callable[[tuple, str], Outputs]
    exact: Callable[[tuple], Iterator[Piece]]
    tolerance: Callable[[torch.dtype], tuple[float, ...]] = lambda dtype: (FP32_TOLERANCE[dtype],)
    chosen: Callable[[tuple, str], str] = lambda ops, backend: choose(backend, ops[0])
    is_segmented: bool = False
    rows_alone: int = 0


def local_kv(draw: Draw, s: Sizes, rows: int) -> tuple[Tensor, Tensor]:
    """Draw K and V as projections leave them."""
    return draw.states(s.kv_heads, rows, s.head_dim), draw.states(s.kv_heads, rows, s.head_dim)


def heads_of(s: Sizes) -> Iterator[tuple[slice, slice]]:
    """Yield the query heads of each KV head, and the KV head."""
    groups = s.heads // s.kv_heads
    for head in range(s.kv_heads):
        yield slice(head * groups, (head + 1) * groups), slice(head, head + 1)


def whole(function: Callable[..., Outputs | Tensor]) -> Callable[[tuple], Iterator[Piece]]:
    """Return a function that yields the exact result in one piece."""

    def exact(ops: tuple) -> Iterator[Piece]:
        outputs = function(*ops)
        yield ..., outputs if isinstance(outputs, tuple) else (outputs,)

    return exact
