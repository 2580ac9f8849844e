"""Freed memory stays with the process."""

import platform
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource, sys
import torch
from apbv.allocator import keep_freed_memory
if "keep" in sys.argv:
    assert keep_freed_memory()
states = torch.ones(16 * 2**20)  # 64 MiB: more than the C library ever keeps by itself
for round in range(6):
    if round == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del [0 for _ in [states * 2]][:]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


# The bytes by which the resident set shrinks.
KEEP_AND_RETURN = """
from pathlib import Path
import torch
from apbv.allocator import keep_freed_memory, return_freed_memory
keep_freed_memory()
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096
states = torch.ones(16 * 2**20)
del states
before = resident()
return_freed_memory()
print(before - resident())
"""


def run_python(code: str, *arguments) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_large_results_are_written_to_pages_that_were_touched_before():
    assert int(run_python(COUNT_FAULTS, "keep")) < 100 < int(run_python(COUNT_FAULTS))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_kept_memory_can_be_returned():
    assert int(run_python(KEEP_AND_RETURN)) > 40 * 2**20


def test_elsewhere_nothing_happens(monkeypatch):
    from apbv import allocator

    monkeypatch.setattr(sys, "platform", "darwin")
    assert not allocator.keep_freed_memory()
