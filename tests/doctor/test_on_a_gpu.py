"""The doctor on a GPU that is not there: its checks ask nothing of a GPU that one refuses."""

import pytest
import torch

from apbv import HostGroup
from apbv.doctor import operators
from apbv.doctor.examination import Examination
from apbv.doctor.parts import checks_of

from patience import GROUP_TIMEOUT
from pretend_gpu import rehearsal


@pytest.mark.thorough
def test_one_gpu(monkeypatch):
    """The kernels in one dtype, without the three whose interpretation takes longest."""
    slow = ("segmented_attention", "block_sparse_attention", "antidiagonal_scores")
    problems = {name: listed for name, listed in operators.PROBLEMS.items() if name not in slow}
    monkeypatch.setattr(operators, "PROBLEMS", problems)
    monkeypatch.setattr(operators, "DTYPES", (torch.float32,))
    with rehearsal():
        gpu = HostGroup.single("cuda:0")
        parts = checks_of(["backends", "kernels", "demo"], gpu, True)
        results = Examination(gpu, GROUP_TIMEOUT).run(parts, lambda result: None)
    found = {result.check.name: (result.status, result.verdicts[0].detail) for result in results}
    assert not {name: verdict for name, verdict in found.items() if verdict[0] == "failed"}
    for name in ("torch", "triton", "verify_attention by triton", "logits", "apbv"):
        assert found[name][0] == "ok", (name, found[name])
    assert found["flashinfer"] == ("skipped", "it is not installed")
    assert "those of the CPU" in found["logits"][1]
