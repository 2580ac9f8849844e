"""What kernels were compiled into: a small one for an absent GPU, and how listings are read."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import jsonschema
import pytest
from sass import obstacle

from scripts import BENCHMARKS, SCRIPT_TIMEOUT, schema_of


@pytest.mark.thorough  # a process that compiles
def test_a_kernel_for_a_gpu_that_is_not_here(tmp_path, monkeypatch):
    """In a process of its own, because kernels of this one are interpreted."""
    assert "TRITON_INTERPRET=1" in obstacle() or not find_spec("triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    if reason := obstacle():
        pytest.skip(reason)
    path = tmp_path / "sass.jsonl"
    command = [sys.executable, BENCHMARKS / "sass.py", "--calls", "one token", "--capabilities", "9.0"]
    result = subprocess.run(
        [*command, "--json", path], env=dict(os.environ), capture_output=True, text=True, timeout=SCRIPT_TIMEOUT
    )
    assert result.returncode == 0, result.stderr
    records = {record["kernel"]: record for record in map(json.loads, path.read_text().splitlines())}
    for record in records.values():
        jsonschema.validate(record, schema_of("sass"))
        told = (record["kernel"], record["warps"], record["registers"], record["spilled_bytes"])
        assert f" {' | '.join(map(str, told))} |" in result.stdout
    assert set(records) == {"verify_kernel", "_merge_kernel"}
    kernel = records["verify_kernel"]
    (loop,) = kernel["loops"]
    file, _, line = loop["place"].partition(":")
    source = (BENCHMARKS.parent / "kernels" / file).read_text().splitlines()
    assert "for i_t in range(first_key, whole, BT):" in source[int(line) - 1]
    # 16 rows and 64 keys of 128 numbers, twice, by products of 16 x 8 x 16 that 4 warps share.
    assert loop["tensor_core"] == 2 * 16 * 64 * 128 // (16 * 8 * 16) // kernel["warps"] < loop["instructions"]
    assert loop["instructions"] < kernel["instructions"]
    assert kernel["spills_in_loops"] == 0
