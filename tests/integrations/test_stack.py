"""The whole stack with a router and vLLM: ``stack_check.py``, in the environment that test_vllm.py names."""

import os
import subprocess
from pathlib import Path

import pytest

from patience import limit

CHECK_SECONDS = limit(900.0)


@pytest.mark.timeout(CHECK_SECONDS + 60)
def test_routers_and_vllm_use_the_server_without_knowing_it(tmp_path):
    python = os.environ.get("APBV_VLLM_PYTHON")
    if not python:
        pytest.skip("NOTHING WAS TESTED WITH A ROUTER: APBV_VLLM_PYTHON names no environment that has vLLM")
    command = [python, str(Path(__file__).with_name("stack_check.py")), "--folder", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=CHECK_SECONDS)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "FAILED" not in result.stdout and result.stdout.count("ok: ") >= 25
