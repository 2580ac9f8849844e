"""The whole stack with a router and vLLM: ``stack_check.py``, in the environment that test_vllm.py
names."""

import pytest

from apbv_tests.weights import folder


def test_routers_and_vllm_use_the_server_without_knowing_it(passed_checks):
    assert passed_checks("stack_check.py") >= 25


@pytest.mark.pretrained
def test_vllm_goes_on_with_a_pretrained_models_kv(passed_checks):
    assert passed_checks("stack_check.py", folder("APBV_PRETRAINED_DRAFT"), "3") == 6
