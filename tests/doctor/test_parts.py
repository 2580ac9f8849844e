"""What single checks notice, each tried by something wrong; and what the page makes of it."""

import io
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from apbv import HostGroup, kernels
from apbv.doctor import answers, backends, machine, operators, speed
from apbv.doctor.checks import Check, CheckFailed, CheckSkipped, Finding, Verdict, carry_out
from apbv.doctor.examination import Examination, Result
from apbv.doctor.page import WIDTH, Page
from apbv.doctor.peaks import published
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
        first, second = examination.run({"machine": lambda: checks}, told.append)
    finally:
        ended.set()
    assert told == [first, second] and examination.has_stuck
    assert first.verdicts[0].is_stuck and first.verdicts[0].detail == "not done after 0.2 s"
    assert second.status == "skipped" and second.verdicts[0].detail == "'first' has not ended"


@each_choice(operator=operators.PROBLEMS, dtype=operators.DTYPES)
def test_one_wrong_number_is_noticed(operator, dtype, monkeypatch):
    """By what rounding cannot explain, or one that is none."""
    problems = operators.PROBLEMS[operator](operators.Draw(CPU, dtype))
    assert all(operators.error_of(problem, "torch", dtype) <= 0.5 for problem in problems)
    right, number = getattr(kernels, operator), None

    def wrong(*operands, **settings):
        first, *others = torch.utils._pytree.tree_leaves(result := right(*operands, **settings))
        flat = first.contiguous().clone().view(-1)
        place = int(flat.abs().argmax())
        flat[place] = number or (flat[place] + 1 if operator == "select_topk" else flat[place] * 1.04)
        changed = flat.view(first.shape)
        return (changed, *others) if isinstance(result, tuple) else changed

    monkeypatch.setattr(kernels, operator, wrong)
    assert all(operators.error_of(problem, "torch", dtype) > 1 for problem in problems)
    if operator == "merge_states":
        number = float("nan")
        assert all(operators.error_of(problem, "torch", dtype) == float("inf") for problem in problems)


def test_a_library_is_a_fault_where_it_is_installed_and_wrong(monkeypatch):
    """As if there were a GPU with an installed FlashAttention."""
    monkeypatch.setattr(backends, "capability", lambda device: (9, 0))
    monkeypatch.setattr(backends, "find_spec", lambda name: name == "flash_attn")
    off = "its attention of 1 queries over 129 keys is off by 0.3, and the lse by 0"
    monkeypatch.setattr(library_attention, "usable", lambda *asked: off)
    assert backends.obstacle("flashinfer", GPU, torch.bfloat16) == ("it is not installed", False)
    why, is_fault = backends.obstacle("flash_attn", GPU, torch.bfloat16)
    assert is_fault and "off by 0.3" in why
    with pytest.raises(CheckFailed, match="bfloat16: its attention of 1 queries"):
        backends.back_end("flash_attn", HostGroup(device=GPU, timeout=0.0))


def test_a_torch_without_cuda_beside_a_gpu_is_a_fault(monkeypatch):
    monkeypatch.setattr(machine, "_ask", lambda *command: "NVIDIA H100 80GB HBM3, 570.86.15\n")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(CheckFailed, match="nvidia-smi sees 1 GPU"):
        machine.cuda()
    monkeypatch.setattr(machine, "_ask", lambda *command: None)
    with pytest.raises(CheckSkipped, match="there is no GPU to be seen"):
        machine.cuda()


def test_secrets_stay_out_of_the_report_and_connections_between_gpus_are_read(monkeypatch):
    monkeypatch.setenv("APBV_API_KEY", "hush")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    found = machine.settings()
    assert found.figures["environment"]["NCCL_P2P_DISABLE"] == "1" and "NCCL_P2P_DISABLE=1" in found.detail
    assert "hush" not in str(found)
    rows = ["GPU0\t X \tNV18\tSYS\tPIX", "GPU1\tNV18\t X \tSYS\tSYS", "GPU2\tSYS\tSYS\t X \tSYS"]
    topology = "\n".join(["\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity", *rows, "NIC0\tPIX\tSYS\tSYS\t X"])
    assert machine.connections(topology, 3) == ["NV18", "SYS"] and machine.connections("", 3) == []


def test_logits_that_are_not_the_cpus(monkeypatch):
    """As if there were a GPU: what it computes is the CPU's, times a factor."""
    right, factor = answers.Engine.from_pretrained, 1 + 1e-6

    def load(name, *, hosts, **settings):
        engine = right(name, hosts=ALONE, **settings)
        if hosts.device == GPU:
            prefill = engine.prefill
            engine.prefill = lambda *asked, **more: SimpleNamespace(logits=factor * prefill(*asked, **more).logits)
        return engine

    monkeypatch.setattr(answers.Engine, "from_pretrained", load)
    monkeypatch.setattr(answers.HostGroup, "single", lambda device: HostGroup(device=device, timeout=0.0))
    gpu = HostGroup(device=GPU, timeout=0.0)
    assert "those of the CPU" in answers.logits(gpu).detail
    factor = 1.01
    with pytest.raises(CheckFailed, match="they differ from the CPU's by"):
        answers.logits(gpu)


def test_published_peaks_by_name():
    peaks = {"H100 80GB HBM3": 989, "H100 PCIe": 756, "L40S": 362, "L4": 121}
    assert [published(f"NVIDIA {name}").flops for name in peaks] == [peak * 1e12 for peak in peaks.values()]
    unknown = ("NVIDIA RTX A4000", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "cpu")
    assert [published(name) for name in unknown] == [None] * 3


def test_what_is_predicted_is_the_slower_of_arithmetic_and_memory():
    device = speed.Device(CPU)
    device.peak = published("NVIDIA H100 80GB HBM3")
    vars(device).update(flops=1e12, stopwatch=SimpleNamespace(bandwidth=1e11))
    measured = Finding("", {"chosen": "triton", "ms": {"triton": 4.0}})
    for operations, bound, ceiling, share, predicted in (
        (5e8, "memory", "a copy", 1e8 / 1e11, 1e8 / 3.35e12),
        (989e8, "arithmetic", "a matrix product", 989e8 / 1e12, 1e-4),
    ):
        finding = speed._with_ceiling(device, measured, (operations, 10**8))
        figures = finding.figures
        assert figures["bound"] == bound and f"of the speed of {ceiling};" in finding.detail
        assert figures["share"] == pytest.approx(share / 4e-3)
        assert figures["predicted_ms"] == pytest.approx(1e3 * predicted)


def result(name: str, *verdicts: Verdict, **settings: bool) -> Result:
    return Result("kernels", Check(name, lambda hosts: Finding(), **settings), list(verdicts))


def test_the_page_names_the_hosts_that_differ_and_a_reason_once():
    said = ("ok", "f"), ("ok", "s"), ("failed", "x " * 400), ("skipped", "none")
    ok, slow, failed, none = (Verdict(*each) for each in said)
    results = [result("a", none), result("b", none), result("first", ok, slow), result("one", ok, ok, failed)]
    results += [result("alike", ok, ok, is_per_host=True), result("each", ok, slow, ok, is_per_host=True)]
    file = io.StringIO()
    page = Page(ALONE, file)
    for each in results:
        page.add(each)
    page.end(results)
    words = " ".join(file.getvalue().split())
    expected = ["skipped a, b none", "ok alike f", "ok each host 0, host 2: f", "ok each host 1: s", "ok first f"]
    expected += ["ok one host 0, host 1: f", "failed one host 2: x x"]
    assert all(line in words for line in expected)
    assert "3 ok, 2 skipped, 1 failed failed: one (kernels) on host 2" in words
    assert max(map(len, file.getvalue().splitlines())) <= WIDTH
