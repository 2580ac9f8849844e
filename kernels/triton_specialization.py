"""Integers in tuples that Triton does not specialize kernels for.

Triton compiles a kernel anew where an integer argument is 1, or is divisible by 16. For arguments
``do_not_specialize`` prevents that, but it has no effect inside tuples. :func:`hide` encodes an
integer so that neither ever holds; :func:`reveal` decodes it in the kernel.
"""

import triton
import triton.language as tl

# 4 n + 3 is odd, so that 16 does not divide it, and 1 for no integer n.
_SHIFT = tl.constexpr(2)
_LOW_BITS = 3


def hide(*numbers: int) -> tuple[int, ...]:
    """Encode integers so that Triton sees neither that one is 1 nor that 16 divides it."""
    return tuple([(number << _SHIFT.value) + _LOW_BITS for number in numbers])


@triton.jit
def reveal(number):
    """Return the integer that :func:`hide` encoded."""
    return number >> _SHIFT
