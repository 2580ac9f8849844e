"""Decoding behind every kind of prefill, against what Hugging Face's generate says."""

from functools import cache

import pytest
import torch

from apbv import HostGroup, PrefillConfig, SamplingConfig, prefill
from apbv.model.parts import inspect_model

from answers import plain_tokens
from families import TEXT_FAMILIES
from prompts import ALL_FAMILIES, UNCOMPRESSED, as_inputs, build, reset_rope, text_batch, video_batch


def continuation_job(
    hosts: HostGroup, family: str, dtype: torch.dtype, batch: dict, query_start, steps: int, method: str = "apbv"
):
    """Greedy tokens by gathered decoding, by sharded decoding, and by model.generate after the hand-off."""
    model = build(family, dtype)
    parts = inspect_model(model)
    greedy, continued = SamplingConfig(max_new_tokens=steps), {}
    for kv in ("gathered", "sharded"):
        config = PrefillConfig(method=method, kv=kv, passing_len=UNCOMPRESSED, on_single_host=True)
        inputs = as_inputs(family, batch, query_start, hosts, dtype)
        state = prefill(model, inputs, hosts=hosts, config=config)
        assert state.method == method
        handed_over = state.generate_inputs()
        continued[kv] = plain_tokens(state, parts, greedy)
        reset_rope(model)
        if handed_over:
            output = model.generate(**handed_over, max_new_tokens=steps, min_new_tokens=steps)
            continued[f"generate after {kv}"] = output[0, state.num_tokens :].tolist()
    return continued


CASES = [(family, 1 + place % 3, "apbv") for place, family in enumerate(ALL_FAMILIES)]
CASES += [("qwen2_5_vl", 3, "zigzag_ring"), ("llama", 2, "ulysses")]


@pytest.mark.parametrize(("family", "num_hosts", "method"), CASES)
def test_continuations_equal_hugging_face_generate(pool, family, num_hosts, method):
    batch, query_start, expected = continuation(family)
    assert len(set(expected)) > 2
    steps = len(expected)
    results = pool.run(num_hosts, continuation_job, family, torch.float32, batch, query_start, steps, method)
    for host, continued in enumerate(results):
        assert len(continued) == (4 if host == 0 else 2)
        for way, tokens in continued.items():
            assert tokens == expected, f"host {host}, {way}"


@cache
def continuation(family: str, steps: int = 9) -> tuple[dict, int | None, list[int]]:
    """A prompt, its first query token where it is a text, and what the model itself says next."""
    # 40 frames of 2 x 2 tokens: more time steps than rows, where rotary positions of text and video overlap.
    batch = text_batch(120) if family in TEXT_FAMILIES else video_batch(family, frames=40)
    model = build(family, torch.float32)
    reset_rope(model)
    output = model.generate(**batch, max_new_tokens=steps, min_new_tokens=steps)
    expected = output[0, batch["input_ids"].shape[1] :].tolist()
    return batch, 108 if family in TEXT_FAMILIES else None, expected
