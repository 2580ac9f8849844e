"""The doctor on a GPU that is not there: its checks ask nothing of a GPU that one refuses."""

from itertools import product

import pytest

from apbv import HostGroup
from apbv.doctor import hosts, kernels
from apbv.doctor.examination import Examination

from apbv_tests.patience import GROUP_TIMEOUT
from apbv_tests.pretend_gpu import rehearsal


@pytest.mark.thorough
def test_one_gpu(monkeypatch):
    """The kernels in one dtype, without the three whose interpretation takes longest."""
    slow = ("segmented_attention", "block_sparse_attention", "antidiagonal_scores")
    cases = {name: listed for name, listed in kernels.CASES.items() if name not in slow}
    monkeypatch.setattr(kernels, "CASES", cases)
    monkeypatch.setattr(kernels, "product", lambda backends, dtypes: product(backends, dtypes[:1]))
    with rehearsal():
        gpu = HostGroup.single("cuda:0")
        answers = [
            check for check in hosts.answer_checks(gpu) if check.name in ("apbv", "fused kernels")
        ]
        parts = {
            "backends": kernels.backend_checks(gpu),
            "kernels": kernels.operator_checks(gpu),
            "demo": answers,
        }
        results = Examination(gpu, GROUP_TIMEOUT).run(parts)
    found = {result.name: (result.status, result.on_hosts[0].detail) for result in results}
    assert not {name: verdict for name, verdict in found.items() if verdict[0] == "failed"}
    assert found["fused kernels"][1] == "norms, MLPs, rotary positions: one kernel each"
    for name in ("torch", "triton", "apbv"):
        assert found[name][0] == "ok", (name, found[name])
    assert found["flash_attn"] == ("skipped", "it is not installed")
    assert "triton 0." in found["verify_attention"][1]
    assert "pip install fa3-fwd: FlashAttention 3" in found["chosen"][1]
