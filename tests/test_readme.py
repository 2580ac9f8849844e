"""What the README says, run."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from test_serve import serving

from apbv import demo
from apbv.demo.clips import make_clip, questions

from scripts import ROOT, SCRIPT_TIMEOUT, run_hosts, run_script

README = (ROOT / "README.md").read_text(encoding="utf-8")


def run(command: str) -> str:
    """As it stands, by the shell."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SCRIPT_TIMEOUT
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_quickly(script: Path, *options, hosts: int = 1) -> str:
    result = run_script(script, *options, hosts=hosts)
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
    assert second == 'pip install -c constraints.txt -e ".[test]" && pytest -n 2 --dist loadfile'
    expected = answer_to(demo.DEMO_QUESTION)
    assert f"(`{expected}`)" in README
    assert run(job).strip() == expected


@pytest.mark.parametrize("option", ["--passing-len 16", "--kv sharded"])
def test_further_demo_commands_answer_right(option):
    line = next(line for line in blocks("bash")[0].splitlines() if line.endswith(option))
    torchrun, per_node, hosts, script, *options = shlex.split(line)
    assert (torchrun, per_node) == ("torchrun", "--nproc-per-node")
    said = run_quickly(ROOT / script, *options, hosts=int(hosts))
    assert said.strip() == answer_to(options[options.index("--prompt") + 1])


def test_the_library_examples_run(tmp_path):
    said = []
    for number, example in enumerate(blocks("python")):
        script = tmp_path / f"example{number}.py"
        script.write_text(example)
        (result,) = run_hosts(script, folders=[tmp_path])
        assert result.returncode == 0, result.stderr
        said.append(result.stdout)
    lines = said[0].splitlines()
    assert lines[0].startswith(answer_to("name the letters in order"))
    assert lines[1].strip() == answer_to("how many letters are shown")
    assert "torch.Size([1, " in said[1]
    assert said[2].strip() == answer_to("name the letters in order")


def test_the_server_is_started_and_asked_as_it_says(tmp_path):
    _, start, ask = blocks("bash serving")[0].split("\n", 2)
    torchrun, per_node, hosts, script, *options = shlex.split(start)
    assert (torchrun, per_node, script) == ("torchrun", "--nproc-per-node", "launch/serve.py")
    (client,) = blocks("python client")
    with serving(tmp_path / "server", *options, hosts=int(hosts)) as server:
        at_its_port = server.url.removesuffix("/v1")
        said = json.loads(run(ask.replace("http://127.0.0.1:8000", at_its_port)))
        assert said["choices"][0]["message"]["content"] == answer_to("which letter has the border: red")
        script = tmp_path / "client.py"
        script.write_text(client.replace("http://127.0.0.1:8000", at_its_port))
        assert run(f"{sys.executable} {script}").strip() == answer_to("name the letters in order")


def test_the_benchmark_commands_are_understood(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    commands = re.findall(r"benchmarks/(\w+)\.py(.*?)(?:#.*)?$", blocks("bash benchmarks")[0], re.MULTILINE)
    names = {path.stem for path in (ROOT / "benchmarks" / "schemas").glob("*.json")}
    assert {name for name, _ in commands} == names
    for name, options in commands:
        importlib.import_module(name).parse_arguments(shlex.split(options))
