"""What is installed: everything of ours under ``apbv``, and nothing that hides the package
``kernels``.

transformers looks for a package of that name. A folder ``kernels`` that Python finds first makes it
believe that the package is installed, and may make its import fail.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from apbv_tests.patience import limit
from apbv_tests.scripts import ROOT

FOLDERS = {"apbv": "apbv", "kernels": "apbv/kernels", "launch": "apbv/launch"}

VERSIONS = {each.name: each.version for each in importlib.metadata.distributions()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the tree, so that the tree stays clean and old build folders
    stay out."""
    source = tmp_path_factory.mktemp("source")
    built = tmp_path_factory.mktemp("wheel")
    for folder in (*FOLDERS, "benchmarks", "tests"):
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, source)
    options = ["--no-deps", "--disable-pip-version-check", "--wheel-dir", built]
    if (
        int(VERSIONS.get("setuptools", "0").split(".")[0]) >= 77
    ):  # else pip fetches what pyproject.toml accepts
        options.append("--no-build-isolation")
    command = [sys.executable, "-m", "pip", "wheel", source, *options]
    result = subprocess.run(
        command, cwd=built, capture_output=True, text=True, timeout=limit(600.0)
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (file,) = built.glob("apbv-*.whl")
    return file


@pytest.mark.thorough
def test_the_wheel_holds_everything_under_one_name(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    (metadata,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"apbv", metadata} and f"{metadata}/licenses/LICENSE" in names
    roots = {package: ROOT / folder for folder, package in FOLDERS.items()}.items()
    expected = {
        f"{package}/{path.relative_to(root)}"
        for package, root in roots
        for path in root.rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == expected
    entry_points = zipfile.ZipFile(wheel).read(f"{metadata}/entry_points.txt").decode()
    assert entry_points.split() == ["[console_scripts]", "apbv", "=", "apbv.__main__:main"]
    demo = {
        path
        for path in (ROOT / "apbv" / "demo").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {"apbv/py.typed", *(path.relative_to(ROOT).as_posix() for path in demo)} <= names
