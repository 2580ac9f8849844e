"""What starting costs: ``import apbv``, ``--help`` and a mistyped option do not wait for torch or transformers."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import apbv

from scripts import ROOT

# What takes seconds to import.
HEAVY = ("torch", "transformers", "torchvision")

RUN = f"""
import json, runpy, sys
script, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = script
try:
    runpy.run_path(script, run_name="__main__")
    status = 0
except SystemExit as end:
    status = end.code
print(json.dumps([status, [name for name in {HEAVY} if name in sys.modules]]))
"""


def python(code: str, *arguments, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=240)


def run_lightly(script: Path, *options) -> tuple[int, list[str], subprocess.CompletedProcess]:
    """A script's status, which heavy packages it imported, and its output."""
    result = python(RUN, script, *options)
    assert result.returncode == 0, result.stderr
    status, heavy = json.loads(result.stdout.splitlines()[-1])
    return status, heavy, result


SCRIPTS = [ROOT / "launch" / "infer.py", ROOT / "launch" / "serve.py"]
DOCTOR = ROOT / "apbv" / "doctor" / "__main__.py"


@pytest.mark.parametrize("script", [*SCRIPTS, DOCTOR], ids=lambda path: str(path.relative_to(ROOT)))
def test_help_imports_neither_torch_nor_transformers(script):
    status, heavy, result = run_lightly(script, "--help")
    assert status == 0 and result.stdout.startswith("usage: ")
    assert not heavy


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "magic"], "argument --method: invalid choice: 'magic' (choose from "),
        (["--importance", "magic"], "argument --importance: invalid choice: 'magic' (choose from "),
        (["--speculate", "magic"], "argument --speculate: invalid choice: 'magic' (choose from "),
        (["--speculate", "specvlm", "--keep", "magic"], "argument --keep: invalid choice: 'magic' (choose from "),
        (["--dtype", "magic"], "argument --dtype: invalid choice: 'magic' (choose from "),
        (["--anchor-len", "-1"], "anchor_len must lie in 0 .. 2^31-1, not -1"),
        (["--temperature", "-1"], "temperature must be 0 (greedy) or at least 1e-6, not -1.0"),
        (["--speculate", "specvlm", "--keep-ratio", "2"], "keep_ratio must lie in (0, 1], not 2.0"),
        (["--keep-ratio", "0.1"], "--keep-ratio needs --speculate"),
        (["--num-draft-tokens", "5"], "--num-draft-tokens needs --speculate"),
        (["--frames", "0"], "--frames must be at least 1, not 0"),
        (["--threads", "0"], "--threads must be at least 1, not 0"),
        (["--timeout", "0"], "--timeout must be a positive number of seconds, not 0.0"),
        (["--device", "gpu"], "--device must be cpu, cuda, or a GPU as in cuda:0, not 'gpu'"),
        (["--fps", "nan"], "--fps must lie in 0 < fps <= 1e+09, not nan"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_is_one_line_before_anything_is_imported(script, options, message):
    status, heavy, result = run_lightly(script, "--model", "demo", *options)
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {message}")
    assert status == 2 and not heavy


RUN_MODULE = RUN.replace("script, *sys.argv[1:] = sys.argv[1:]\nsys.argv[0] = script", "script = 'apbv'").replace(
    "runpy.run_path(script", "runpy.run_module(script"
)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--help"], 0, "usage: apbv "),
        (["infer", "--help"], 0, "usage: apbv infer "),
        (["serve", "--help"], 0, "usage: apbv serve "),
        (["doctor", "--help"], 0, "usage: apbv doctor "),
        (["plan", "--help"], 0, "usage: apbv plan "),
        (["--version"], 0, apbv.__version__),
        ([], 2, "error: the following arguments are required: COMMAND"),
        (["magic"], 2, "error: argument COMMAND: invalid choice: 'magic'"),
        (
            ["infer", "--model", "demo", "--method", "magic"],
            2,
            "error: argument --method: invalid choice: 'magic'",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_hands_on_to_the_scripts(arguments, status, said):
    result = python(RUN_MODULE, *arguments)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == [status, []]
    assert (result.stderr if status else result.stdout).startswith(said)


def test_importing_the_package_costs_nothing():
    result = python(f"import sys, apbv, apbv.config; print([name for name in {HEAVY} if name in sys.modules])")
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.thorough
def test_every_public_name_is_there_when_asked_for():
    result = python(
        "import apbv, json\n"
        "names = {name: getattr(apbv, name).__name__ for name in apbv.__all__}\n"
        "print(json.dumps([sorted(set(apbv.__all__) - set(dir(apbv))), names]))"
    )
    missing, names = json.loads(result.stdout)
    assert not missing and names == {name: name for name in apbv.__all__}


def test_type_checkers_see_the_same_names():
    """What they read (under TYPE_CHECKING), and what happens."""
    tree = ast.parse(Path(apbv.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    read = {alias.name: statement.module for statement in block.body for alias in statement.names}
    assert read == apbv._HOMES


def test_submodules_are_attributes_and_nothing_else_is():
    code = (
        "import apbv\n"
        "print(apbv.demo.video_path().name, apbv.kernels.__name__, apbv.launch.__name__, apbv.layout.__name__)\n"
        "print(hasattr(apbv, 'nonsense'), hasattr(apbv, '_nonsense'), hasattr(apbv, '__wrapped__'))"
    )
    lines = python(code).stdout.splitlines()
    assert lines == ["clip.mp4 apbv.kernels apbv.launch apbv.layout", "False False False"]


@pytest.mark.parametrize(
    "order",
    ["import apbv, transformers", "import transformers, apbv"],
)
@pytest.mark.thorough
def test_video_processors_load_after_a_bare_import(order):
    """Beside a CPU-only torch the index's torchvision fails to import, and transformers' processors with it."""
    module = "transformers.models.qwen2_vl.video_processing_qwen2_vl"
    result = python(f"{order}\nimport {module} as m\nprint(m.Qwen2VLVideoProcessor.__name__)")
    assert result.stdout.strip() == "Qwen2VLVideoProcessor", result.stderr


def test_two_copies_of_the_guard_find_torchvision(tmp_path):
    """As where a process has one of its own from ``sitecustomize``; each must not ask the other without end."""
    guard = Path(apbv.torchvision_guard.__file__).read_text()
    (tmp_path / "sitecustomize.py").write_text(f"{guard}\n\nensure_torchvision_imports()\n")
    result = python("import apbv, torchvision\nprint(torchvision.__name__)", PYTHONPATH=str(tmp_path))
    assert result.stdout.strip() == "torchvision", result.stderr[-2000:]
