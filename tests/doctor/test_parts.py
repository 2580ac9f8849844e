"""What single checks notice, each tried by something wrong; and what the page makes of it."""

import io
import threading

import pytest
import torch

from apbv import HostGroup, kernels
from apbv.doctor import hosts as answers
from apbv.doctor import kernels as checked
from apbv.doctor import machine
from apbv.doctor.examination import WIDTH, Check, CheckFailed, CheckSkipped, Examination, carry_out
from apbv.hosts import HostLinks
from apbv.kernels import library_attention

from apbv_tests.pairs import each_choice

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
ALONE = HostGroup.single("cpu")


def test_no_check_ends_the_others():
    for error, detail in (
        (CheckFailed("it is wrong"), "it is wrong"),
        (RuntimeError("no kernel image\nfor this device"), "RuntimeError: no kernel image"),
        (SystemExit(3), "SystemExit: 3"),
    ):

        def fail(hosts: HostGroup, error=error):
            raise error

        verdict = carry_out(Check("one", fail), ALONE, limit=600.0)
        assert (verdict.status, verdict.detail, verdict.is_stuck) == ("failed", detail, False)


def test_behind_a_check_that_hangs_nothing_runs():
    ended = threading.Event()
    checks = [
        Check("first", lambda hosts: ended.wait()),
        Check("second", lambda hosts: ("fine", {})),
    ]
    examination = Examination(ALONE, limit=0.2)
    try:
        first, second = examination.run({"machine": checks})
    finally:
        ended.set()
    assert examination.stuck
    assert first.on_hosts[0].is_stuck and first.on_hosts[0].detail == "not done after 0.2 s"
    assert second.status == "skipped" and second.on_hosts[0].detail == "'first' has not ended"


@each_choice(operator=checked.CASES, dtype=checked.DTYPES)
def test_one_wrong_number_is_noticed(operator, dtype, monkeypatch):
    """By what rounding cannot explain, or one that is none."""
    cases = checked.CASES[operator](checked.Draw(CPU, dtype))
    assert all(checked.error_of(operator, case, "torch") <= 0.5 for case in cases)
    right = getattr(kernels, operator)
    number = None

    def wrong(*operands, **settings):
        first, *others = torch.utils._pytree.tree_leaves(result := right(*operands, **settings))
        flat = first.contiguous().clone().view(-1)
        place = int(flat.abs().argmax())
        flat[place] = number or (
            flat[place] + 1 if operator == "select_topk" else flat[place] * 1.04
        )
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
    why, is_fault = checked.obstacle("flash_attn", GPU, torch.bfloat16)
    assert is_fault and "off by 0.3" in why
    with pytest.raises(CheckFailed, match="bfloat16: its attention of 1 queries"):
        checked.check_backend("flash_attn", HostGroup(device=GPU, timeout=0.0))


def test_a_library_that_was_built_for_one_dtype_is_no_fault(monkeypatch):
    """Such as FlashAttention 3 in the package fa3-fwd; but wrong numbers are."""
    mistake = ["fails: RuntimeError: This flash attention build does not support FP16."]
    monkeypatch.setattr(checked, "capability", lambda device: (9, 0))
    monkeypatch.setattr(checked, "find_spec", lambda name: name == "fa3_fwd_interface")

    def usable(name, device, dtype, *_):
        return (
            None
            if dtype == torch.bfloat16
            else f"its attention of 1 queries over 129 keys {mistake[0]}"
        )

    monkeypatch.setattr(library_attention, "usable", usable)
    hosts = HostGroup(device=GPU, timeout=0.0)
    text, figures = checked.check_backend("flash_attn", hosts)
    assert text.startswith("bfloat16; not built for float16 (") and figures == {
        "dtypes": ["bfloat16"]
    }
    mistake[0] = "is wrong: it is off by nan and 0"
    with pytest.raises(CheckFailed, match="float16: its attention of 1 queries"):
        checked.check_backend("flash_attn", hosts)


def test_a_part_of_the_decoder_that_is_no_longer_recognized_is_a_fault(monkeypatch):
    text, _ = answers.fused_kernels(ALONE)
    assert text == "norms, MLPs, rotary positions: recognized"
    # The fault: transformers' function has another name.
    monkeypatch.setattr("apbv.model.fused._ROTARY", "renamed")
    with pytest.raises(CheckFailed, match=r"transformers .*: rotary positions are not recognized"):
        answers.fused_kernels(ALONE)


def test_a_torch_without_cuda_beside_a_gpu_is_a_fault(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 570.86.15'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(CheckFailed, match="nvidia-smi sees 1 GPU"):
        machine.cuda()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(CheckSkipped, match="CUDA_VISIBLE_DEVICES hides GPUs"):
        machine.cuda()
    tool.unlink()
    with pytest.raises(CheckSkipped, match="no GPU is visible"):
        machine.cuda()


def test_secrets_stay_out_of_the_report(monkeypatch):
    monkeypatch.setenv("APBV_API_KEY", "hush")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    detail, figures = machine.settings()
    assert figures["environment"]["NCCL_P2P_DISABLE"] == "1" and "NCCL_P2P_DISABLE=1" in detail
    assert "hush" not in f"{detail} {figures}"


class FourHosts(HostGroup):
    """A group of hosts on which a check finds, one after the other, what it is told."""

    def __init__(self):
        super().__init__(device=CPU, timeout=0.0, links=HostLinks(0, 4))

    def subgroup(self, hosts):
        return self

    def gather_json(self, mine):
        return [mine if found is None else [{**mine[0], **found}, False] for found in self.found]


def test_the_page_names_the_hosts_that_differ():
    hosts, file = FourHosts(), io.StringIO()

    def finding(*found):
        def run(_):
            hosts.found = [dict(zip(("status", "detail"), each, strict=True)) for each in found]
            return "", {}

        return run

    f = ("ok", "f")
    s = ("ok", "s")
    failed = ("failed", "x " * 400)
    none = ("skipped", "none")
    of_first = {"a": [none] * 4, "first": [f, s, f, f], "one": [f, f, failed, f]}
    parts = {"kernels": [Check(name, finding(*found)) for name, found in of_first.items()]}
    parts["machine"] = [Check("alike", finding(f, f, f, f)), Check("each", finding(f, s, f, s))]
    Examination(hosts, 600.0, file).run(parts)
    words = " ".join(file.getvalue().split())
    expected = [
        "skipped a none",
        "ok alike f",
        "ok each host 0, host 2: f",
        "ok each host 1, host 3: s",
        "ok first f",
    ]
    expected += ["ok one host 0, host 1, host 3: f", "failed one host 2: x x"]
    assert all(line in words for line in expected), words
    assert "3 ok, 1 skipped, 1 failed" in words
    assert max(map(len, file.getvalue().splitlines())) <= WIDTH
