"""vLLM goes on from saved KV: ``vllm_check.py``, in an environment of its own that has vLLM.

vLLM pins what it needs, and its CPU build weighs 3.6 GB: APBV_VLLM_PYTHON names the Python of such an environment,
and without it the test is skipped. ``.ci/run`` makes one.
"""

import os
import subprocess
from pathlib import Path

import pytest

from patience import limit

CHECK_SECONDS = limit(900.0)


@pytest.mark.timeout(CHECK_SECONDS + 60)
def test_vllm_continues_from_saved_kv(tmp_path):
    python = os.environ.get("APBV_VLLM_PYTHON")
    if not python:
        pytest.skip("NOTHING WAS TESTED WITH vLLM: APBV_VLLM_PYTHON names no environment that has it")
    command = [python, str(Path(__file__).with_name("vllm_check.py")), "--folder", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=CHECK_SECONDS)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "FAILED" not in result.stdout and result.stdout.count("ok: ") > 40
