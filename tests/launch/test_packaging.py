"""What is installed: everything of ours under ``apbv``, and nothing that hides the package ``kernels``.

transformers looks for a package of that name. A folder ``kernels`` that Python finds first makes it believe
that the package is installed, and may make its import fail.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from patience import limit
from scripts import ROOT

FOLDERS = {"apbv": "apbv", "kernels": "apbv/kernels", "launch": "apbv/launch"}

PROBE = """
import importlib.util, json
seen = {"kernels": importlib.util.find_spec("kernels") is not None}
import apbv, apbv.kernels, apbv.launch
from apbv import demo
from transformers.utils.import_utils import is_kernels_available
seen["files"] = [apbv.__file__, apbv.kernels.__file__, apbv.launch.__file__, str(demo.model_path())]
seen["is_kernels_available"] = is_kernels_available()
print(json.dumps(seen))
"""


VERSIONS = {each.name: each.version for each in importlib.metadata.distributions()}


def python(*arguments, cwd: Path, path: Path | None = None) -> str:
    """Run this interpreter with nothing but ``path`` added to where it looks; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, *map(str, arguments)]
    run = {"env": environment, "capture_output": True, "text": True, "timeout": limit(600.0)}
    result = subprocess.run(command, cwd=cwd, **run)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the tree, so that the tree stays clean and old build folders stay out."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in (*FOLDERS, "benchmarks", "tests"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, source)
    options = ["--no-deps", "--disable-pip-version-check", "--wheel-dir", built]
    if int(VERSIONS.get("setuptools", "0").split(".")[0]) >= 77:  # else pip fetches what pyproject.toml accepts
        options.append("--no-build-isolation")
    python("-m", "pip", "wheel", source, *options, cwd=built)
    (file,) = built.glob("apbv-*.whl")
    return file


@pytest.mark.thorough
def test_the_wheel_holds_everything_under_one_name(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    (metadata,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"apbv", metadata} and f"{metadata}/licenses/LICENSE" in names
    expected = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == expected
    entry_points = zipfile.ZipFile(wheel).read(f"{metadata}/entry_points.txt").decode()
    assert entry_points.split() == ["[console_scripts]", "apbv", "=", "apbv.__main__:main"]
    demo = {path for path in (ROOT / "apbv" / "demo").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {"apbv/py.typed", *(path.relative_to(ROOT).as_posix() for path in demo)} <= names


@pytest.mark.thorough
def test_an_import_neither_shows_nor_hides_kernels(wheel, tmp_path):
    """From the wheel, without what it depends on; and as installed here, beside the folder ``kernels``."""
    target = tmp_path / "installed"
    options = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "--target", target]
    python("-m", "pip", "install", *options, wheel, cwd=tmp_path)
    for cwd, path in ((tmp_path, target), (ROOT, None)):
        seen = json.loads(python("-c", PROBE, cwd=cwd, path=path))
        assert path is None or all(Path(file).is_relative_to(path) for file in seen["files"]), seen["files"]
        if "kernels" in VERSIONS:
            assert seen["kernels"]
        else:
            assert (seen["kernels"], seen["is_kernels_available"]) == (cwd == ROOT, False)
