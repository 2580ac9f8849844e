"""Decoding behind every kind of prefill, against what Hugging Face's generate says."""

import pytest
import torch

from apbv import HostGroup, SamplingParams, prefill

from apbv_tests.answers import plain_tokens
from apbv_tests.configs import prefill_config
from apbv_tests.families import TEXT_FAMILIES
from apbv_tests.prompts import (
    ALL_FAMILIES,
    UNCOMPRESSED,
    as_inputs,
    build,
    reset_rope,
    text_batch,
    video_batch,
)


def continuation_job(
    hosts: HostGroup, family: str, batch: dict, query_start: int | None, method: str, kv: str
):
    """Greedy tokens, and those of model.generate after the hand-off."""
    model = build(family, torch.float32)
    config = prefill_config(method=method, kv=kv, passing_len=UNCOMPRESSED, on_single_host=True)
    inputs = as_inputs(family, batch, query_start, hosts)
    state = prefill(model, inputs, hosts=hosts, config=config)
    assert state.method == method
    handed_over = state.generate_inputs()
    continued = [plain_tokens(state, model, SamplingParams(max_new_tokens=STEPS))]
    reset_rope(model)
    if handed_over:
        output = model.generate(**handed_over, max_new_tokens=STEPS, min_new_tokens=STEPS)
        continued.append(output[0, state.num_tokens :].tolist()[:STEPS])
    return continued


STEPS = 9
KV = ("gathered", "sharded")
CASES = [
    (family, 1 + place % 3, "apbv", KV[place % 2]) for place, family in enumerate(ALL_FAMILIES)
]
CASES += [("qwen2_5_vl", 3, "zigzag_ring", KV[1]), ("llama", 2, "ulysses", KV[0])]


@pytest.mark.parametrize(("family", "num_hosts", "method", "kv"), CASES)
def test_continuations_equal_hugging_face_generate(pool, family, num_hosts, method, kv):
    # 40 frames of 2 x 2 tokens: more time steps than rows, where rotary positions of text and video
    # overlap.
    query_start = 108 if family in TEXT_FAMILIES else None
    batch = text_batch(120) if query_start else video_batch(family, frames=40)
    model = build(family, torch.float32)
    reset_rope(model)
    output = model.generate(**batch, max_new_tokens=STEPS, min_new_tokens=STEPS)
    expected = output[0, batch["input_ids"].shape[1] :].tolist()
    assert len(set(expected)) > 2
    results = pool.run(num_hosts, continuation_job, family, batch, query_start, method, kv)
    for host, continued in enumerate(results):
        assert continued == [expected] * (2 if host == 0 else 1), f"host {host}"
