"""What the README says, run."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from apbv import demo
from apbv.demo.clips import make_clip, questions

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run(command: str, shell: bool) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    arguments = command if shell else [sys.executable, "-c", command]
    result = subprocess.run(
        arguments, shell=shell, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def answer_to(question: str) -> str:
    return next(a for _, q, a in questions(make_clip(*demo.DEMO_CLIP)) if q == question)


def test_the_first_command_answers_right():
    first, second = blocks("bash quickstart")[0].splitlines()
    install, job = first.split(" && ")
    assert install == "pip install -c constraints.txt -e ."
    assert second == 'pip install -c constraints.txt -e ".[test]" && pytest'
    expected = answer_to(demo.DEMO_QUESTION)
    assert f"(`{expected}`)" in README
    assert run(job, shell=True).strip() == expected


@pytest.mark.parametrize("option", ["--passing-len 16", "--kv sharded"])
def test_further_demo_commands_answer_right(option):
    line = next(line for line in blocks("bash")[0].splitlines() if line.endswith(option))
    assert run(line, shell=True).strip() == answer_to(re.search('--prompt "(.*?)"', line).group(1))


def test_the_library_examples_run():
    first, second = blocks("python")
    lines = run(first, shell=False).splitlines()
    assert lines[0].startswith(answer_to("name the letters in order"))
    assert lines[1].strip() == answer_to("how many letters are shown")
    assert "torch.Size([1, " in run(second, shell=False)


def test_the_benchmark_commands_are_understood(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    commands = re.findall(r"benchmarks/(\w+)\.py(.*?)(?:#.*)?$", blocks("bash benchmarks")[0], re.MULTILINE)
    assert {name for name, _ in commands} == {"throughput", "scaling", "accuracy", "speculative"}
    for name, options in commands:
        importlib.import_module(name).parse_arguments(shlex.split(options))
