"""What starting costs: ``import apbv``, ``--help`` and a mistyped option do not wait for torch or
transformers."""

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import apbv

from apbv_tests.patience import limit
from apbv_tests.scripts import ROOT

# What takes seconds to import.
HEAVY = ("torch", "transformers", "torchvision")
RUN = f"""
import contextlib, io, json, runpy, sys
ended = []
for script, *arguments in json.loads(sys.argv[1]):
    sys.argv = [script, *arguments]
    run = runpy.run_path if script.endswith(".py") else runpy.run_module
    said = io.StringIO()
    status = 0
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            run(script, run_name="__main__")
    except SystemExit as end:
        status = end.code
    ended.append((status, said.getvalue(), [name for name in {HEAVY} if name in sys.modules]))
print(json.dumps(ended))
"""
COMMANDS = ("infer", "batch", "serve", "doctor", "plan")
INFER, BATCH, SERVE, DOCTOR = (
    *(f"launch/{name}.py" for name in COMMANDS[:3]),
    "apbv/doctor/__main__.py",
)
BAD = {
    "--method magic": "argument --method: invalid choice: 'magic' (choose from ",
    "--speculate specvlm --keep magic": "argument --keep: invalid choice: 'magic' (choose from ",
    "--anchor-len -1": "argument --anchor-len: must be an integer in 0 .. 2^31-1, not -1",
    "--keep-ratio 0.1": "--keep-ratio needs --speculate",
    "--device gpu": "argument --device: must be cpu, cuda, or a GPU as in cuda:0, not gpu",
    "--fps nan": "argument --fps: must lie in 0 < fps <= 1e+09, not nan",
}


def python(code: str, *arguments, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=limit(240.0)
    )


def require_light(cases: list[tuple[list[str], int, str]]) -> None:
    """Run commands in one new interpreter: how each ends and what it says first; none imports what
    is heavy."""
    result = python(RUN, json.dumps([words for words, _, _ in cases]))
    assert result.returncode == 0, result.stderr
    for (words, status, said), (ended, printed, heavy) in zip(
        cases, json.loads(result.stdout), strict=True
    ):
        assert ended == status and printed.startswith(said) and not heavy, (words, printed)
        if status:
            assert printed.count("\n") == 1, printed


def test_a_bad_option_is_one_line_before_anything_is_imported():
    for script in ([INFER], [BATCH, "in", "--out", "out"], [SERVE]):
        asked = {
            message: [*script, "--model", "demo", *bad.split()] for bad, message in BAD.items()
        }
        require_light([(words, 2, f"error: {message}") for message, words in asked.items()])


def test_the_command_hands_on_to_the_scripts_and_help_is_light():
    cases = [([script, "--help"], 0, "usage: ") for script in (INFER, BATCH, SERVE, DOCTOR)]
    cases += [(["apbv", command, "--help"], 0, f"usage: apbv {command} ") for command in COMMANDS]
    cases += [(["apbv", "--help"], 0, "usage: apbv "), (["apbv", "--version"], 0, apbv.__version__)]
    require_light(
        [*cases, (["apbv", "magic"], 2, "error: argument COMMAND: invalid choice: 'magic'")]
    )
    result = python(
        f"import sys, apbv, apbv.config; print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert result.stdout.strip() == "[]", result.stderr


def modules_by_name(statements: list[ast.stmt]) -> dict[str, str]:
    """The names that statements import, and the modules that they name."""
    modules = {}
    for statement in statements:
        if isinstance(statement, ast.ImportFrom):
            modules |= dict.fromkeys((alias.name for alias in statement.names), statement.module)
    return modules


def test_type_checkers_see_the_same_names():
    """What they read (under TYPE_CHECKING), and what happens."""
    tree = ast.parse(Path(apbv.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    read = modules_by_name(block.body)
    at_once = modules_by_name(tree.body)
    assert set(read) == set(apbv.__all__) - set(at_once)
    for name, module in read.items():
        assert getattr(apbv, name) is getattr(import_module(f"apbv.{module}"), name), name
    assert not hasattr(apbv, "nonsense")
    assert {getattr(apbv, name).__name__ for name in apbv.__all__} == set(apbv.__all__)


@pytest.mark.thorough
def test_transformers_is_whole_after_a_bare_import():
    """Beside a CPU-only torch the index's torchvision fails to import, and transformers' processors
    with it.

    And transformers looks for a package ``kernels``, for which it could take the folder.
    """
    module = "transformers.models.qwen2_vl.video_processing_qwen2_vl"
    code = (
        f"import apbv, transformers, torchvision, {module} as m; "
        "print(m.Qwen2VLVideoProcessor.__name__)"
    )
    code += "; print(transformers.utils.import_utils.is_kernels_available())"
    result = python(code)
    is_installed = "kernels" in {each.name for each in importlib.metadata.distributions()}
    assert result.stdout.split() == ["Qwen2VLVideoProcessor", str(is_installed)], result.stderr
