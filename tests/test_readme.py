"""What is the README's alone: the quick start, the server, and that it stays short."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from apbv import demo
from apbv.compat import versions
from apbv.model.parts import inspect_model

from apbv_tests import families
from apbv_tests.documents import README, answer_to, blocks_in, marked, read_command
from apbv_tests.scripts import ROOT, SCRIPT_TIMEOUT
from apbv_tests.servers import serving

MOST_LINES = 140


def run(command: str) -> subprocess.CompletedProcess:
    """Run a command as it stands, by the shell, from the root."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    result = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SCRIPT_TIMEOUT,
    )
    assert result.returncode == 0, result.stderr
    return result


def test_it_is_read_in_one_sitting():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_the_versions_that_it_names_are_those_that_pip_and_the_package_know():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = next(
        line
        for line in README.read_text(encoding="utf-8").splitlines()
        if line.startswith("- **Needs**")
    )
    assert project["requires-python"] == f">={re.search('Python ([0-9.]+)', needs)[1]}"
    for package, newest in versions.NEWEST_TRIED.items():
        tried = re.search(
            rf"{'PyAV' if package == 'av' else package} ([0-9.]+)",
            needs.partition("tried up to")[2],
        )
        assert tried[1].rstrip(".") == ".".join(map(str, newest))
        oldest = re.search(rf"{package} ([0-9.]+)", needs.partition("tried")[0])
        assert oldest is None or f"{package}>={oldest[1]}" in project["dependencies"]


def test_a_later_version_is_used_with_a_warning(monkeypatch):
    monkeypatch.setattr(versions, "NEWEST_TRIED", {"torch": (2, 10), "transformers": (99, 0)})
    with pytest.warns(
        UserWarning, match=r"apbv was not tried yet with torch 2\..* \(tried: up to 2\.10\)$"
    ):
        inspect_model(families.build_model("llama"))


@pytest.mark.thorough  # which whoever tries the project has just seen
def test_the_first_command_prints_what_it_says():
    (commands,) = marked("bash quickstart")
    first, second = commands.code.splitlines()
    install, job = first.split(" && ")
    assert install == "pip install -c constraints.txt -e ."
    assert second == 'pip install -c constraints.txt -e ".[test]" && pytest -n 2 --dist loadfile'
    (shown,) = marked("text quickstart")
    answer, *figures = shown.code.splitlines()
    assert answer == answer_to(demo.DEMO_QUESTION) and demo.DEMO_QUESTION in README.read_text(
        encoding="utf-8"
    )
    assert figures.pop().strip() == "…"  # times differ from run to run
    result = run(job)
    assert result.stdout.strip() == answer
    assert result.stderr.splitlines()[: len(figures)] == figures


def test_the_server_is_started_and_asked_as_it_says(tmp_path):
    """With it the clients of the other pages, which stand behind the same command."""
    (block,) = marked("bash serve")
    assert block in blocks_in(README)
    start, ask = block.code.split("\n", 1)
    job = read_command(start)
    assert job.script == Path("launch/serve.py")
    clients = marked("python client")
    assert clients
    with serving(tmp_path / "server", *job.options, hosts=job.hosts) as server:
        at_its_port = server.url.removesuffix("/v1")

        def here(code: str) -> str:
            assert "http://127.0.0.1:8000" in code
            return code.replace("http://127.0.0.1:8000", at_its_port)

        said = json.loads(run(here(ask)).stdout)
        assert said["choices"][0]["message"]["content"] == answer_to(
            "which letter has the border: red"
        )
        for client in clients:
            script = tmp_path / "client.py"
            script.write_text(here(client.code))
            said = run(shlex.join([sys.executable, str(script)])).stdout
            assert said.strip() == answer_to("name the letters in order")
