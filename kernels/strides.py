"""Strides and sizes that kernels are launched with."""

from collections.abc import Iterable, Sequence
from math import gcd

from torch import Tensor

_LOAD_BYTES = 16  # of one thread's widest load


def cdiv(dividend: int, divisor: int) -> int:
    """Divide and round up. Triton's own function of the name takes as long as half a launch."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """Return the lowest power of 2 that is at least a number above 0."""
    return 1 << (number - 1).bit_length()


def magic_divisor(divisor: int) -> tuple[int, int]:
    """Return magic and shift with which a kernel divides rows without a division.

    ``(row * magic >> 32) >> shift`` is ``row // divisor`` for rows below 2 ** 31. A processor has
    no division of integers (Granlund and Montgomery, 1994). A divisor of 1 is taken for 2.
    """
    divisor = max(2, divisor)
    bits = (divisor - 1).bit_length()
    magic = (1 << (31 + bits)) // divisor + 1
    return magic, bits - 1


def row_strides(states: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, head and row; 0 where there is only one of them."""
    return strides_of(states.shape[:3], states.stride()[:3])


def strides_of(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return strides, with 0 for sizes of 1, whose stride may be anything."""
    return tuple([0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True)])


def with_contiguous_rows(states: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous; copy only where necessary."""
    if states.stride(-1) == 1:
        return states
    return states.contiguous()


def common_alignment(element_size: int, strides: Iterable[int]) -> int:
    """Return the number of elements to which all rows are aligned, at most those of one load."""
    return gcd(_LOAD_BYTES // element_size, *strides)


def in_units(strides: Iterable[int], unit: int) -> tuple[int, ...]:
    """Express strides, multiples of ``unit`` elements, in that unit."""
    return tuple([stride // unit for stride in strides])
