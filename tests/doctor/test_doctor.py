"""The doctor as a user runs it: on healthy hosts, and where something is wrong with one of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from apbv.doctor.__main__ import PARTS, parse_arguments
from apbv.doctor.examination import WIDTH

from apbv_tests.scripts import BENCHMARKS, ROOT, SCRIPT_TIMEOUT, run_hosts

SCHEMA = json.loads((BENCHMARKS / "schemas" / "doctor.json").read_text())


def report_in(path: Path) -> dict | None:
    """The report that was written, if any."""
    if not path.exists():
        return None
    (line,) = path.read_text().splitlines()
    report = json.loads(line)
    jsonschema.validate(report, SCHEMA)
    assert report["healthy"] == all(check["status"] != "failed" for check in report["checks"])
    assert all(len(check["on_hosts"]) == report["hosts"] for check in report["checks"])
    return report


def require_healthy(report: dict, page: str) -> None:
    assert report["healthy"] and report["hosts"] == 2
    assert {check["part"] for check in report["checks"]} == set(report["parts"])
    assert max(map(len, page.splitlines())) <= WIDTH and page.endswith(" 0 failed\n")
    for check in report["checks"]:
        assert check["part"] != "hosts" or check["status"] == "ok"
        assert check["status"] != "ok" or f"ok       {check['name']} " in page


@pytest.mark.thorough
def test_two_healthy_hosts(tmp_path):
    """With torchrun itself."""
    path = tmp_path / "report.jsonl"
    command = [
        "torchrun",
        "--nproc-per-node",
        "2",
        "-m",
        "apbv.doctor",
        "--only",
        "machine",
        "hosts",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    run = {
        "cwd": ROOT,
        "env": environment,
        "capture_output": True,
        "text": True,
        "timeout": SCRIPT_TIMEOUT,
    }
    result = subprocess.run([*command, "--json", str(path)], **run)
    assert result.returncode == 0, result.stdout + result.stderr
    report = report_in(path)
    require_healthy(report, result.stdout)
    assert result.stdout.count("Machine\n") == 1, "once, and not once for each host"


def test_one_host_says_what_it_leaves_out(tmp_path):
    path = tmp_path / "report.jsonl"
    (result,) = run_hosts(
        ROOT / "apbv" / "doctor" / "__main__.py", "--only", "machine", "hosts", "--json", path
    )
    assert result.returncode == 0, result.stderr
    assert {check["status"] for check in report_in(path)["checks"] if check["part"] == "hosts"} == {
        "skipped"
    }
    assert "torchrun --nproc-per-node N -m apbv.doctor" in " ".join(result.stdout.split())


def examine(tmp_path, faults: str, *options) -> tuple[list[int], str, dict | None, str]:
    """The exit statuses of two hosts with faults, what host 0 printed, its report, and all
    errors."""
    path = tmp_path / "report.jsonl"
    script = Path(__file__).with_name("doctor_with_fault.py")
    results = run_hosts(script, faults, "--json", path, *options, hosts=2)
    assert results[1].stdout == ""
    errors = "".join(result.stderr for result in results)
    return [result.returncode for result in results], results[0].stdout, report_in(path), errors


@pytest.mark.thorough
def test_two_healthy_hosts_without_operators(tmp_path):
    parts = [part for part in PARTS if part != "kernels"]
    ended, page, report, errors = examine(tmp_path, "nothing", "--only", *parts)
    assert ended == [0, 0], page + errors
    require_healthy(report, page)
    assert page.count("X J P H E L") == 7


FAILED = ["failed", "failed"]
WRONG = {
    "raising_host,other_version --only machine hosts": (
        {
            "versions": ["ok", "failed"],
            "broadcast": ["ok", "ok"],
            "ring": FAILED,
            "several at once": FAILED,
        },
        "torch 1.0.0",
        "failed ring host 0: HostError: host 1 failed in ring: RuntimeError: the link is down",
    ),
    "unnoticed --only hosts": (
        {"a failing host": ["failed", "ok"]},
        "failed a failing host host 0: the others got a tensor that was never sent after",
    ),
    "blind,hosts_mixed_up --only kernels demo hosts": (
        {
            "segmented_attention": FAILED,
            "apbv": FAILED,
            "all-gather": FAILED,
            "several at once": FAILED,
        },
        "failed segmented_attention torch in float32 is off by",
        "'X J P H E L'",
        "1 numbers in torch.float32 (no. 0) arrived wrong",
    ),
}


FAULTS = [
    pytest.param(fault, marks=[pytest.mark.thorough] * ("kernels" in fault)) for fault in WRONG
]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_found_and_the_rest_is_examined_all_the_same(tmp_path, fault):
    wrong, *said = WRONG[fault]
    ended, page, report, errors = examine(tmp_path, *fault.split())
    assert ended == [1, 1] and not report["healthy"]
    found = {
        check["name"]: [each["status"] for each in check["on_hosts"]] for check in report["checks"]
    }
    assert wrong.items() <= found.items()
    page = " ".join((page + errors).split())
    assert all(line in page for line in said), page


@pytest.mark.thorough
def test_a_host_that_dies(tmp_path):
    """Nobody is left waiting, and what was found before is on the page."""
    ended, page, report, errors = examine(tmp_path, "dying_host", "--only", "machine")
    assert ended == [1, 3] and report is None and "error (host 0): " in errors
    page = " ".join(page.split())
    assert "ok versions python" in page and "ok processor" not in page


def test_wrong_options_are_one_line(capsys):
    for options in ("--only everything", "--limit 0", "--threads 0"):
        with pytest.raises(SystemExit):
            parse_arguments(options.split())
        error = capsys.readouterr().err
        assert options.split()[0] in error and error.count("\n") == 1
