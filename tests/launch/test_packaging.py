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
FILES = ("setup.py", "pyproject.toml", "LICENSE", "README.md")

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


def has_hugging_face_kernels() -> bool:
    try:
        importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def python(*arguments, cwd: Path, path: Path | None = None) -> str:
    """Run this interpreter with nothing but ``path`` added to where it looks; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=limit(600.0)
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the tree, so that the tree stays clean and old build folders stay out."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in (*FOLDERS, "benchmarks", "tests"):
        if (ROOT / folder).exists():
            shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        if (ROOT / file).exists():
            shutil.copy(ROOT / file, source)
    options = ["--no-deps", "--disable-pip-version-check", "--wheel-dir", built]
    if has_build_backend():  # else pip fetches it from the index
        options.append("--no-build-isolation")
    python("-m", "pip", "wheel", source, *options, cwd=built)
    (file,) = built.glob("apbv-*.whl")
    return file


def has_build_backend() -> bool:
    """Whether setuptools is here in a version that pyproject.toml accepts."""
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder into which the wheel is installed, without what it depends on."""
    target = tmp_path_factory.mktemp("installed")
    options = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "--target", target]
    python("-m", "pip", "install", *options, wheel, cwd=target)
    return target


@pytest.mark.thorough
def test_the_wheel_holds_everything_under_one_name(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    (metadata,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"apbv", metadata}
    assert f"{metadata}/licenses/LICENSE" in names
    top_level = zipfile.ZipFile(wheel).read(f"{metadata}/top_level.txt").decode().split()
    assert top_level == ["apbv"]

    expected = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == expected
    assert {"apbv/kernels/__init__.py", "apbv/launch/infer.py", "apbv/prefilling/methods/apbv.py"} <= expected

    entry_points = zipfile.ZipFile(wheel).read(f"{metadata}/entry_points.txt").decode()
    assert entry_points.split() == ["[console_scripts]", "apbv", "=", "apbv.__main__:main"]
    assert "apbv/py.typed" in names

    demo = ROOT / "apbv" / "demo"
    data = {
        path.relative_to(ROOT).as_posix() for path in demo.rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
    assert {"apbv/demo/model/config.json", "apbv/demo/draft/config.json", "apbv/demo/clip.mp4"} <= data
    assert data <= names


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["wheel", "environment, in the repository"])
def test_an_import_neither_shows_nor_hides_kernels(request, tmp_path, place):
    """From the wheel; and as installed here, with the folder ``kernels`` in the working directory."""
    target = request.getfixturevalue("installed") if place == "wheel" else None
    cwd = ROOT if place.endswith("repository") else tmp_path
    seen = json.loads(python("-c", PROBE, cwd=cwd, path=target))
    if target is not None:
        assert all(Path(file).is_relative_to(target) for file in seen["files"]), seen["files"]
    if has_hugging_face_kernels():
        assert seen["kernels"]
        return
    assert seen["kernels"] == (cwd == ROOT)
    assert seen["is_kernels_available"] is False


def test_neither_the_environment_nor_pytest_shows_the_folder(tmp_path):
    """``pytest`` leaves the working directory off sys.path; ``python -m pytest`` does not."""
    code = "import importlib.util; print(importlib.util.find_spec('kernels') is not None)"
    assert python("-c", code, cwd=tmp_path).strip() == str(has_hugging_face_kernels())
    if Path(sys.argv[0]).name == "__main__.py":
        pytest.skip("run as python -m pytest, which puts the working directory on sys.path")
    assert ROOT not in {Path(entry).resolve() for entry in sys.path}
    spec = importlib.util.find_spec("kernels")
    assert spec is None or has_hugging_face_kernels()
