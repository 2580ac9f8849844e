"""Checks that run in an environment of their own, which has vLLM."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from apbv_tests.patience import limit

CHECK_SECONDS = limit(900.0)


def pytest_collection_modifyitems(items):
    for item in items:
        if "passed_checks" in item.fixturenames:
            item.add_marker(pytest.mark.timeout(CHECK_SECONDS + 60))


@pytest.fixture
def passed_checks(tmp_path) -> Callable[..., int]:
    """Run a script, with the Python that APBV_VLLM_PYTHON names, and count the checks in it that
    have passed."""

    def run(script: str, *arguments: str) -> int:
        python = os.environ.get("APBV_VLLM_PYTHON")
        if not python:
            pytest.skip(
                "NOTHING WAS TESTED WITH vLLM: APBV_VLLM_PYTHON names no environment that has it"
            )
        command = [python, str(Path(__file__).with_name(script)), str(tmp_path), *arguments]
        result = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=CHECK_SECONDS
        )
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
        assert "FAILED" not in result.stdout
        return result.stdout.count("ok: ")

    return run
