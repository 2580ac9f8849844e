"""The doctor as a user runs it: on healthy hosts, and where something is wrong with one of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from apbv.doctor.__main__ import PARTS, parse_arguments
from apbv.doctor.page import WIDTH

from patience import limit
from scripts import BENCHMARKS, HELPERS, ROOT, SCRIPT_TIMEOUT, run_hosts

GIVEN_UP = limit(4.0)
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


def statuses(report: dict, part: str) -> dict[str, list[str]]:
    """What became of a part's checks, host by host."""
    checks = [check for check in report["checks"] if check["part"] == part]
    return {check["name"]: [verdict["status"] for verdict in check["on_hosts"]] for check in checks}


def failing(report: dict, part: str) -> list[str]:
    return [name for name, each in statuses(report, part).items() if "failed" in each]


def require_healthy(report: dict, page: str) -> None:
    assert report["healthy"] and report["hosts"] == 2
    assert {check["part"] for check in report["checks"]} == set(report["parts"])
    names = [(check["part"], check["name"]) for check in report["checks"]]
    assert len(names) == len(set(names))
    assert max(map(len, page.splitlines())) <= WIDTH and page.endswith(" 0 failed\n")
    assert all(each == ["ok", "ok"] for each in statuses(report, "hosts").values())
    for check in report["checks"]:
        if check["status"] == "ok":
            assert f"ok       {check['name']} " in page
            if check["part"] == "kernels":
                assert all(len(verdict["figures"]["errors"]) == 3 for verdict in check["on_hosts"])


@pytest.mark.thorough
def test_two_healthy_hosts(tmp_path):
    """With torchrun itself, and the benchmarks."""
    path = tmp_path / "report.jsonl"
    command = ["torchrun", "--nproc-per-node", "2", "-m", "apbv.doctor", "--json", str(path)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    run = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": SCRIPT_TIMEOUT}
    result = subprocess.run(command, **run)
    assert result.returncode == 0, result.stdout + result.stderr
    report = report_in(path)
    assert report["parts"] == list(PARTS)
    require_healthy(report, result.stdout)
    # Once, and not once for each host.
    assert result.stdout.count("The machine\n") == 1 and result.stdout.count("X J P H E L") == 10
    speed = {check["name"]: check["on_hosts"] for check in report["checks"] if check["part"] == "speed"}
    for host in (0, 1):
        figures = {name: on_hosts[host]["figures"] for name, on_hosts in speed.items()}
        ceilings, attention = figures["device"], figures["attention, whole prompt"]
        assert ceilings["tflops"] > 0 and figures["file to first token, apbv"]["stages_ms"]["prefill"] > 0
        assert attention["ms"][attention["fastest"]] == min(attention["ms"].values())
        tokens = int(attention["size"].removesuffix(" tokens"))
        assert attention["flops"] == 4 * 28 * 128 * sum(range(1, tokens + 1)) and attention["predicted_ms"] is None
        ms = attention["flops"] / ceilings["tflops"] / 1e9
        assert attention["share"] == pytest.approx(ms / attention["ms"][attention["chosen"]])
        reading = figures["attention, one new token"]
        assert reading["bytes"] == 4 * 128 * (2 * 28 + 2 * 4 * 16384) + 4 * 28  # and the log-sum-exp


def test_one_host_says_what_it_leaves_out(tmp_path):
    path = tmp_path / "report.jsonl"
    options = ["--only", "machine", "backends", "hosts", "--json", path]
    (result,) = run_hosts(ROOT / "apbv" / "doctor" / "__main__.py", *options)
    assert result.returncode == 0, result.stderr
    assert all(each == ["skipped"] for each in statuses(report_in(path), "hosts").values())
    assert "torchrun --nproc-per-node N -m apbv.doctor" in " ".join(result.stdout.split())
    assert "The demo model" not in result.stdout


def examine(tmp_path, faults: str, *options) -> tuple[list[int], str, dict | None, str]:
    """The exit statuses of two hosts with faults, what host 0 printed, its report, and all errors."""
    path, script = tmp_path / "report.jsonl", HELPERS / "doctor_with_fault.py"
    results = run_hosts(script, faults, "--json", path, *options, hosts=2)
    assert results[1].stdout == ""
    errors = "".join(result.stderr for result in results)
    return [result.returncode for result in results], results[0].stdout, report_in(path), errors


def test_two_healthy_hosts_quickly(tmp_path):
    ended, page, report, errors = examine(tmp_path, "nothing", "--quick")
    assert ended == [0, 0], page + errors
    assert report["is_quick"] and "speed" not in report["parts"]
    require_healthy(report, page)
    assert page.count("X J P H E L") == 2


def test_what_is_wrong_on_one_host_and_what_is_examined_all_the_same(tmp_path):
    """Another torch, a kernel that computes wrongly, and an exchange in which it raises."""
    faults = "wrong_kernel,raising_host,other_version"
    ended, page, report, _ = examine(tmp_path, faults, "--only", "machine", "kernels", "hosts")
    page = " ".join(page.split())
    assert ended == [1, 1] and not report["healthy"]
    assert "failed versions host 1: python" in page and "torch 1.0.0" in page
    assert failing(report, "kernels") == ["segmented_attention by torch"]
    assert statuses(report, "kernels")["segmented_attention by torch"] == ["ok", "failed"]
    assert "failed segmented_attention by torch host 1: a block behind passing blocks in float32 is off by" in page
    assert "failed: segmented_attention by torch (kernels) on host 1" in page
    found = statuses(report, "hosts")
    assert failing(report, "hosts") == ["ring", "several at once"]
    assert found["ring"] == ["failed", "failed"] and found["host memory"] == ["ok", "ok"]
    assert "failed ring host 0: HostError: host 1 failed in ring: RuntimeError: the link is down" in page
    assert "failed ring host 1: RuntimeError: the link is down" in page and "and more failed" not in page


def test_hosts_that_cannot_be_connected(tmp_path):
    """Each is examined by itself."""
    ended, page, report, errors = examine(tmp_path, "no_connection", "--only", "machine", "hosts")
    assert ended == [1, 1] and report["hosts"] == 1 and not report["healthy"]
    assert errors.count("error: NCCL error: unhandled system error\n") == 2
    page = " ".join(page.split())
    assert "ok versions python" in page and "failed connecting the hosts could not be connected" in page


@pytest.mark.thorough
def test_models_that_answer_wrongly_and_tensors_that_arrive_so(tmp_path):
    ended, page, report, _ = examine(tmp_path, "blind,hosts_mixed_up", "--only", "demo", "hosts", "--quick")
    assert ended == [1, 1] and statuses(report, "demo")["apbv"] == ["failed", "failed"]
    page = " ".join(page.split())
    assert "failed apbv CheckFailed" not in page and "in place of 'X J P H E L'" in page
    assert failing(report, "hosts") == ["all-gather", "several at once"]
    assert "1 numbers in torch.float32 (no. 0) arrived wrong" in page


@pytest.mark.thorough
def test_a_failure_that_nobody_hears_of(tmp_path):
    ended, page, report, _ = examine(tmp_path, "unnoticed", "--only", "hosts")
    assert ended == [1, 1] and statuses(report, "hosts")["a failing host"] == ["failed", "ok"]
    told = "failed a failing host host 0: the others got a tensor that was never sent after"
    assert told in " ".join(page.split())


@pytest.mark.thorough
def test_a_host_that_hangs_is_given_up(tmp_path):
    ended, page, report, _ = examine(tmp_path, "hanging_host", "--only", "hosts", "--limit", GIVEN_UP)
    found = statuses(report, "hosts")
    assert ended == [1, 1] and found["ring"] == ["ok", "ok"] and found["broadcast"] == ["failed", "failed"]
    assert found["host memory"] == ["skipped", "skipped"] == found["a failing host"]
    assert f"not done after {GIVEN_UP:g} s" in page and "'broadcast' has not ended" in page


@pytest.mark.thorough
def test_a_host_that_dies(tmp_path):
    """Nobody is left waiting, and what was found before is on the page."""
    ended, page, report, errors = examine(tmp_path, "dying_host", "--only", "machine")
    assert ended == [1, 3] and report is None and "error (host 0): " in errors
    page = " ".join(page.split())
    assert "ok versions python" in page and "ok processor" not in page


def test_wrong_options_are_one_line(capsys):
    for options, message in (
        ("--only everything", "invalid choice: 'everything'"),
        ("--limit 0", "--limit must be a positive number of seconds, not 0.0"),
        ("--threads 0", "--threads must be at least 1, not 0"),
    ):
        with pytest.raises(SystemExit):
            parse_arguments(options.split())
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
