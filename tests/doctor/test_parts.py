"""What single checks notice, each tried by something wrong; and what the page makes of it."""

import io
import threading
from functools import partial

import pytest
import torch

from apbv import HostGroup, kernels
from apbv.doctor import kernels as checked
from apbv.doctor import machine
from apbv.doctor.examination import (
    Check,
    CheckFailed,
    CheckSkipped,
    Examination,
    Finding,
    HostResult,
    Result,
    carry_out,
)
from apbv.doctor.page import WIDTH, Page
from apbv.kernels import library_attention

from pairs import each_choice

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
ALONE = HostGroup.single("cpu")


def raising(error: BaseException, hosts: HostGroup) -> Finding:
    raise error


def test_no_check_ends_the_others():
    for error, status, detail in (
        (CheckFailed("it is wrong"), "failed", "it is wrong"),
        (RuntimeError("no kernel image\nfor this device"), "failed", "RuntimeError: no kernel image"),
        (SystemExit(3), "failed", "SystemExit: 3"),
    ):
        verdict = carry_out(Check("one", partial(raising, error)), ALONE, limit=600.0)
        assert (verdict.status, verdict.detail, verdict.is_stuck) == (status, detail, False)


def test_behind_a_check_that_hangs_nothing_runs():
    ended, told = threading.Event(), []

    def hang(hosts: HostGroup) -> Finding:
        ended.wait()
        return Finding()

    checks = [Check("first", hang), Check("second", lambda hosts: Finding("fine"))]
    examination = Examination(ALONE, limit=0.2)
    try:
        first, second = examination.run({"machine": checks}, told.append)
    finally:
        ended.set()
    assert told == [first, second] and examination.has_stuck
    assert first.verdicts[0].is_stuck and first.verdicts[0].detail == "not done after 0.2 s"
    assert second.status == "skipped" and second.verdicts[0].detail == "'first' has not ended"


@each_choice(operator=checked.CASES, dtype=checked.DTYPES)
def test_one_wrong_number_is_noticed(operator, dtype, monkeypatch):
    """By what rounding cannot explain, or one that is none."""
    cases = checked.CASES[operator](checked.Draw(CPU, dtype))
    assert all(checked.error_of(operator, case, "torch") <= 0.5 for case in cases)
    right, number = getattr(kernels, operator), None

    def wrong(*operands, **settings):
        first, *others = torch.utils._pytree.tree_leaves(result := right(*operands, **settings))
        flat = first.contiguous().clone().view(-1)
        place = int(flat.abs().argmax())
        flat[place] = number or (flat[place] + 1 if operator == "select_topk" else flat[place] * 1.04)
        changed = flat.view(first.shape)
        return (changed, *others) if isinstance(result, tuple) else changed

    monkeypatch.setattr(kernels, operator, wrong)
    assert all(checked.error_of(operator, case, "torch") > 1 for case in cases)
    if operator == "merge_states":
        number = float("nan")
        assert all(checked.error_of(operator, case, "torch") == float("inf") for case in cases)


def test_a_library_is_a_fault_where_it_is_installed_and_wrong(monkeypatch):
    """As if there were a GPU with an installed FlashAttention."""
    monkeypatch.setattr(checked, "capability", lambda device: (9, 0))
    monkeypatch.setattr(checked, "find_spec", lambda name: name == "flash_attn")
    off = "its attention of 1 queries over 129 keys is off by 0.3, and the lse by 0"
    monkeypatch.setattr(library_attention, "usable", lambda *asked: off)
    assert checked.obstacle("flashinfer", GPU, torch.bfloat16) == ("it is not installed", False)
    why, is_fault = checked.obstacle("flash_attn", GPU, torch.bfloat16)
    assert is_fault and "off by 0.3" in why
    with pytest.raises(CheckFailed, match="bfloat16: its attention of 1 queries"):
        checked.back_end("flash_attn", HostGroup(device=GPU, timeout=0.0))


def test_a_torch_without_cuda_beside_a_gpu_is_a_fault(monkeypatch):
    monkeypatch.setattr(machine, "_ask", lambda *command: "NVIDIA H100 80GB HBM3, 570.86.15\n")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(CheckFailed, match="nvidia-smi sees 1 GPU"):
        machine.cuda()
    monkeypatch.setattr(machine, "_ask", lambda *command: None)
    with pytest.raises(CheckSkipped, match="there is no GPU to be seen"):
        machine.cuda()


def test_secrets_stay_out_of_the_report(monkeypatch):
    monkeypatch.setenv("APBV_API_KEY", "hush")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    found = machine.settings()
    assert found.figures["environment"]["NCCL_P2P_DISABLE"] == "1" and "NCCL_P2P_DISABLE=1" in found.detail
    assert "hush" not in str(found)


def result(name: str, *verdicts: HostResult, **settings: bool) -> Result:
    return Result("kernels", Check(name, lambda hosts: Finding(), **settings), list(verdicts))


def test_the_page_names_the_hosts_that_differ():
    said = ("ok", "f"), ("ok", "s"), ("failed", "x " * 400), ("skipped", "none")
    ok, slow, failed, none = (HostResult(*each) for each in said)
    results = [result("a", none), result("first", ok, slow), result("one", ok, ok, failed)]
    results += [result("alike", ok, ok, is_per_host=True), result("each", ok, slow, ok, is_per_host=True)]
    file = io.StringIO()
    page = Page(ALONE, file)
    for each in results:
        page.add(each)
    page.end(results)
    words = " ".join(file.getvalue().split())
    expected = ["skipped a none", "ok alike f", "ok each host 0, host 2: f", "ok each host 1: s", "ok first f"]
    expected += ["ok one host 0, host 1: f", "failed one host 2: x x"]
    assert all(line in words for line in expected)
    assert "3 ok, 1 skipped, 1 failed failed: one (kernels) on host 2" in words
    assert max(map(len, file.getvalue().splitlines())) <= WIDTH
