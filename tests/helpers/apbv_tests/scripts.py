"""Scripts run as a user runs them, and benchmarks' figures checked against their schemas."""

import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import Process
from pathlib import Path
from subprocess import CompletedProcess

import torch.distributed as dist
from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator

from apbv.errors import ApbvError

from apbv_tests.patience import limit
from apbv_tests.pool import exit_statuses, start

ROOT = Path(__file__).parents[3]
SCRIPT_TIMEOUT = limit(600.0)
BENCHMARKS = ROOT / "benchmarks"
INFER = ROOT / "launch" / "infer.py"


def run_hosts(
    script: Path,
    *options,
    hosts: int = 1,
    folders: list[Path] | None = None,
    timeout: float = SCRIPT_TIMEOUT,
) -> list[CompletedProcess]:
    """What became of a script on so many hosts, started as torchrun starts it; each in a folder of
    its own.

    In processes forked from the server: torchrun and each process of its own would take seconds to
    import everything. What torchrun itself does, such as ending all hosts when one fails, is for
    the tests that run it.
    """
    arguments = [str(option) for option in options]
    with (
        tempfile.TemporaryDirectory() as outputs,
        started_hosts(script, arguments, hosts, outputs, folders) as started,
    ):
        statuses = exit_statuses(started, timeout)
        results = []
        for rank, status in enumerate(statuses):
            stdout = Path(outputs, f"{rank}.stdout").read_text(errors="replace")
            stderr = Path(outputs, f"{rank}.stderr").read_text(errors="replace")
            results.append(CompletedProcess([str(script), *arguments], status, stdout, stderr))
        return results


@contextmanager
def started_hosts(
    script: Path,
    arguments: list[str],
    hosts: int,
    outputs: str | Path,
    folders: list[Path] | None = None,
) -> Iterator[list[Process]]:
    """The hosts' processes, which write to RANK.stdout and RANK.stderr in ``outputs``."""
    # What torchrun's agent holds for its processes.
    store = (
        dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        if hosts > 1
        else None
    )
    processes = []
    try:
        for rank in range(hosts):
            folder = folders[rank] if folders else ROOT
            place = (rank, hosts, store.port) if store else None
            processes.append(
                start(script_job, script, arguments, place, folder, Path(outputs, str(rank)))
            )
        yield processes
    finally:
        for process in processes:
            process.kill()


def run_script(
    script: Path, *options, hosts: int = 1, timeout: float = SCRIPT_TIMEOUT
) -> CompletedProcess:
    """``run_hosts`` as one: the output of all hosts, one after the other, and the first status that
    is not 0."""
    results = run_hosts(script, *options, hosts=hosts, timeout=timeout)
    return CompletedProcess(
        results[0].args,
        next((result.returncode for result in results if result.returncode), 0),
        "".join(result.stdout for result in results),
        "".join(result.stderr for result in results),
    )


def as_torchrun_starts(rank: int, size: int, port: int) -> None:
    """The environment that torchrun's agent gives to its processes."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )


def script_job(
    script: Path, arguments: list[str], place: tuple | None, folder: Path, output: Path
) -> None:
    """The script's main process, with an output of its own."""
    if place is not None:
        as_torchrun_starts(*place)
    # Which is ignored below a shell's background job.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output.with_suffix(f".{name}"), os.O_WRONLY | os.O_CREAT), number)
        setattr(
            sys, name, os.fdopen(number, "w", buffering=1, errors="backslashreplace", closefd=False)
        )
    os.chdir(folder)
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def run_benchmark(name: str, *options, hosts: int = 1) -> CompletedProcess:
    return run_script(BENCHMARKS / f"{name}.py", *options, hosts=hosts)


def figures_of(name: str, path: Path, *options, hosts: int = 1) -> tuple[list[dict], str]:
    """The valid records that a run wrote to ``path``, and what it printed."""
    path.unlink(missing_ok=True)
    result = run_benchmark(name, *options, "--json", path, hosts=hosts)
    assert result.returncode == 0, result.stderr
    return valid_records(name, path), result.stdout


def valid_records(name: str, path: Path) -> list[dict]:
    """The records of a file, each checked against its schema, a benchmark's or its batches'."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        assert record["benchmark"] in (name, f"batch_{name}")
        validator_of(record["benchmark"]).validate(record)
    return records


@cache
def validator_of(name: str | None, file: str = "benchmarks.json") -> Validator:
    """The schema of a benchmark's records, or a whole file's, which is checked itself only once."""
    schema = json.loads((BENCHMARKS / "schemas" / file).read_text())
    schema |= {} if name is None else {"$ref": f"#/$defs/{name}"}
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def assert_one_line_error(name: str, options: list, message: str, capsys) -> None:
    """The script fails, and says so in one line; called in this process, which is quicker."""
    status = importlib.import_module(name).main([str(option) for option in options])
    assert status in {kind.exit_status for kind in ApbvError.__subclasses__()}
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and message in lines[0]


def infer(*options, hosts: int = 2) -> CompletedProcess:
    return run_script(INFER, *options, hosts=hosts)
