"""Benchmarks run as a user runs them, and their figures checked against their schemas."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run_benchmark(name: str, *options, hosts: int = 1) -> subprocess.CompletedProcess:
    """The script of that name, under torchrun where there are several hosts."""
    launcher = [sys.executable]
    if hosts > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(hosts)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [*launcher, str(BENCHMARKS / f"{name}.py"), *map(str, options)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def figures_of(name: str, path: Path, *options, hosts: int = 1) -> tuple[list[dict], str]:
    """The valid records that a run wrote to ``path``, and what it printed."""
    path.unlink(missing_ok=True)
    result = run_benchmark(name, *options, "--json", path, hosts=hosts)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in path.read_text().splitlines()]
    schema = json.loads((BENCHMARKS / "schemas" / f"{name}.json").read_text())
    for record in records:
        jsonschema.validate(record, schema)
    return records, result.stdout


def assert_one_line_error(name: str, options: list, message: str, capsys) -> None:
    """The script fails, and says so in one line; called in this process, which is quicker."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        status = importlib.import_module(name).main([str(option) for option in options])
    finally:
        sys.path.remove(str(BENCHMARKS))
    assert status == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and message in lines[0]
