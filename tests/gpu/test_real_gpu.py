"""What a real GPU computes, in sessions of their own that see it; to all other tests it is hidden.

``APBV_TEST_ON_GPU=1 pytest tests/kernels tests/gpu/test_real_gpu.py`` starts such a session by
hand.
"""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import apbv
from apbv import Engine, HostGroup, PrefillConfig, SamplingParams, SpeculativeConfig

from apbv_tests.patience import GROUP_TIMEOUT
from apbv_tests.scripts import ROOT, SCRIPT_TIMEOUT

QUESTIONS = [
    "name the letters in order",
    "which letter has the border: red",
    "how many letters are shown",
]
METHODS = [
    {"method": "full"},
    {"passing_len": 16},
    {"method": "apbv", "sparse": apbv.SparseConfig(method="spargeattn")},
]


@pytest.mark.cpu
@pytest.mark.parametrize("tests", ["tests/kernels", "tests/gpu/test_real_gpu.py"])
def test_a_session_on_the_gpu_passes(tests):
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has no GPU")
    hidden = (
        "CUDA_VISIBLE_DEVICES",
        "TRITON_INTERPRET",
        "PYTEST_CURRENT_TEST",
        "PYTEST_XDIST_WORKER",
    )
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    if (visible := environment.pop("APBV_TEST_GPUS")) != "all":
        environment["CUDA_VISIBLE_DEVICES"] = visible
    # As the script pytest does, without the root on the path.
    start = "import sys, pytest; sys.path.remove(''); sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, "-q", tests]
    run = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": SCRIPT_TIMEOUT}
    result = subprocess.run(command, env={**environment, "APBV_TEST_ON_GPU": "1"}, **run)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


# ---- in such a session ----


def answers(hosts: HostGroup, batched: bool = False, **options) -> list[list[int]]:
    """The tokens of the demo's answers, one after the other or in a batch, on any device."""
    engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32", **options)
    asked = [{"prompt": question, "video": apbv.demo.video_path()} for question in QUESTIONS]
    if not batched:
        return [engine.generate(**each, max_new_tokens=12).token_ids for each in asked]
    sampling = SamplingParams(max_new_tokens=12)
    found = dict(engine.generate_all([{**each, "sampling": sampling} for each in asked]))
    return [found[number].token_ids for number in range(len(asked))]


@cache
def expected(index: int) -> list[list[int]]:
    return answers(HostGroup.single("cuda"), prefill=PrefillConfig(**METHODS[index]))


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(METHODS)))
def test_answers_are_those_of_the_cpu(index):
    assert answers(HostGroup.single("cuda"), prefill=PrefillConfig(**METHODS[index])) == expected(
        index
    )


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", [None, "vanilla", "std"])
def test_answers_in_a_batch_by_recorded_steps_are_those_of_the_cpu(strategy):
    options = {"speculate": SpeculativeConfig(strategy=strategy)} if strategy else {}
    assert answers(
        HostGroup.single("cuda"), batched=True, prefill=PrefillConfig(method="full"), **options
    ) == expected(0)


def shared_job(hosts: HostGroup, **prefill) -> tuple[list[list[int]], list[list[int]]]:
    """On CPUs, and on one GPU that all hosts share."""
    on_cpu = answers(hosts, prefill=PrefillConfig(**prefill))
    sharing = HostGroup.from_process_group(hosts.process_group, "cuda:0", GROUP_TIMEOUT)
    return on_cpu, answers(sharing, prefill=PrefillConfig(**prefill))


@pytest.mark.gpu
def test_hosts_that_share_a_gpu_answer_as_on_cpus(pool):
    for on_cpu, on_gpu in pool.run(2, shared_job):
        assert on_gpu == on_cpu


@pytest.mark.gpu
def test_the_doctor_finds_no_fault():
    result = subprocess.run(
        [sys.executable, "-m", "apbv.doctor"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SCRIPT_TIMEOUT,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"ok +GPU ", result.stdout)
