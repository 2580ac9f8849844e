"""The whole stack with a router and vLLM: ``stack_check.py``, in the environment that test_vllm.py names."""


def test_routers_and_vllm_use_the_server_without_knowing_it(passed_checks):
    assert passed_checks("stack_check.py") >= 25
