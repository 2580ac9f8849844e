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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_large_results_are_written_to_pages_that_were_touched_before():
    def faults(*arguments) -> int:
        command = [sys.executable, "-c", COUNT_FAULTS, *arguments]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults("keep") < 100 < faults()


def test_elsewhere_nothing_happens(monkeypatch):
    from apbv import allocator

    monkeypatch.setattr(sys, "platform", "darwin")
    assert not allocator.keep_freed_memory()
