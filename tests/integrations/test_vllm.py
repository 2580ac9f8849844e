"""vLLM goes on from saved KV: ``vllm_check.py``, in an environment of its own that has vLLM.

vLLM pins what it needs, and its CPU build weighs 3.6 GB: APBV_VLLM_PYTHON names the Python of such
an environment, and without it the test is skipped. ``.ci/run`` makes one.
"""

import pytest


# The text models that the script makes, and the demo model.
@pytest.mark.shows("KV to vLLM", families=("qwen2", "qwen2_5_vl", "glm4", "qwen3_moe"))
def test_vllm_continues_from_saved_kv(passed_checks):
    assert passed_checks("vllm_check.py") > 40
