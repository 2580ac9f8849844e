"""Triton's kernels read nothing outside their operands, behind which there may be no memory."""

import ctypes
import math
import mmap

import pytest
import torch

from apbv.kernels import (
    kv_importance,
    merge_states,
    segmented_attention,
    select_topk,
    triton_elementwise,
    triton_specialization,
    verify_attention,
)

from apbv_tests.pool import exit_statuses, start

pytestmark = pytest.mark.cpu  # a GPU has no such pages

_libc = ctypes.CDLL(None)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(tensor: torch.Tensor, behind: bool) -> torch.Tensor:
    """A copy right before, or right behind, a page that nobody may touch."""
    page = mmap.PAGESIZE
    pages = math.ceil(tensor.nbytes / page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + (pages + 1) * page):
        assert _libc.mprotect(guard, page, 0) == 0  # PROT_NONE
    start = page if behind else (pages + 1) * page - tensor.nbytes
    place = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
    return place.view(tensor.shape).copy_(tensor)


def attend(guard):
    q, k, v = (
        guard(torch.randn(1, heads, rows, 40)) for heads, rows in ((3, 17), (1, 35), (1, 35))
    )
    segmented_attention(q, [(k, v)] * 2, 0.1, True, num_anchor_queries=5, backend="triton")


def attend_masked(guard):
    for queries in (1, 33):  # times 3 heads in a group: they fill no tile
        q, k, v = (
            guard(torch.randn(1, heads, rows, 40))
            for heads, rows in ((3, queries), (1, 70), (1, 70))
        )
        visible = guard(torch.ones(queries, 33, dtype=torch.bool))
        verify_attention(q, k, v, 0.1, visible=visible, backend="triton")


def merge(guard):
    merge_states(
        guard(torch.randn(3, 1, 3, 5, 40)), guard(torch.randn(3, 1, 3, 5)), backend="triton"
    )
    outs = [guard(torch.randn(1, 3, rows, 40)) for rows in (5, 2)]
    lses = [guard(torch.randn(1, 3, rows)) for rows in (5, 2)]
    merge_states(outs, lses, out=guard(torch.empty(1, 3, 7, 40)), backend="triton")


def rank(guard):
    q, k, v = (guard(torch.randn(1, heads, rows, 40)) for heads, rows in ((3, 5), (1, 70), (1, 70)))
    for lse in (None, guard(torch.randn(1, 3, 5))):
        scores = kv_importance(q, k, 0.1, lse=lse, backend="triton")
    out = guard(torch.empty(2, 1, 1, 7, 40))
    select_topk(guard(scores), k, v, 7, out, backend="triton")


def between_products(guard):
    triton_elementwise.rms_norm(guard(torch.randn(1, 5, 40)), guard(torch.ones(40)), 1e-6)
    triton_elementwise.silu_product(guard(torch.randn(1, 5, 40)), guard(torch.randn(1, 5, 40)))
    angles = (guard(torch.randn(1, 5, 40)) for _ in range(2))
    q, k = (guard(torch.randn(1, 5, heads, 40)).transpose(1, 2) for heads in (3, 1))
    triton_elementwise.rotated(q, k, *angles)


def run_between_guards(behind: bool) -> None:
    torch.set_num_threads(1)
    for operator in (attend, attend_masked, merge, rank, between_products):
        print(operator.__name__, flush=True)
        operator(lambda tensor: guarded(tensor, behind))


@pytest.mark.parametrize("behind", [False, True])
def test_nothing_outside_is_read(behind):
    """In a process of its own, which touching a guard page would end.

    This process may have threads that hold locks: one that is forked of it could wait for them for
    ever.
    """
    assert exit_statuses([start(run_between_guards, behind)]) == [0]


def test_lengths_and_strides_do_not_compile_anew():
    """Of integers in a tuple Triton looks at whether they are 1 and whether 16 divides them, like
    it or not."""
    numbers = (-16, -1, 0, 1, 2, 16, 129, 2**20)
    hidden = triton_specialization.hide(*numbers)
    assert not any(number == 1 or number % 16 == 0 for number in hidden)
    assert tuple(number >> 2 for number in hidden) == numbers
