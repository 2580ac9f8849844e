"""Freed memory stays with the process."""

import multiprocessing as mp
import platform
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from apbv.device.allocator import keep_freed_memory, return_freed_memory

from apbv_tests.pool import start

with_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
NUMBERS = 16 * 2**20  # 64 MiB of fp32: more than the C library ever keeps by itself


def page_faults(keep: bool) -> int:
    """Of products that are each freed before the next, once those before have touched what they
    need.

    The first few find holes between what the process has imported, some of which other objects take
    again.
    """
    if keep:
        assert keep_freed_memory()
    states = torch.ones(NUMBERS)
    for turn in range(15):
        if turn == 12:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        del [0 for _ in [states * 2]][:]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def bytes_returned() -> int:
    """By which the resident set shrinks."""
    keep_freed_memory()
    states = torch.ones(NUMBERS)
    del states
    before = resident_bytes()
    return_freed_memory()
    return before - resident_bytes()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def in_a_process_of_its_own(job: Callable, *args) -> int:
    """Memory that is kept once is kept for good."""
    ours, theirs = mp.Pipe(duplex=False)
    process = start(send_result, theirs, job, args)
    theirs.close()
    result = ours.recv()
    process.join()
    return result


def send_result(pipe, job: Callable, args: tuple) -> None:
    pipe.send(job(*args))


@with_glibc
def test_large_results_are_written_to_pages_that_were_touched_before():
    assert (
        in_a_process_of_its_own(page_faults, True)
        < 100
        < in_a_process_of_its_own(page_faults, False)
    )


@with_glibc
def test_kept_memory_can_be_returned():
    assert in_a_process_of_its_own(bytes_returned) > 40 * 2**20
