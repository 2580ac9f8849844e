"""A server's engine on GPUs answers a question of its own first, which brings the first request's kernels."""

from pathlib import Path

import pytest

from apbv import HostGroup, SamplingConfig
from apbv.decode.batch import Batch
from apbv.input.request import Question, Request
from apbv.model.attention import apbv_attention

from pretend_gpu import rehearsal
from rehearsals import Case, on_gpus


def warmed_job(hosts: HostGroup, clip: Path) -> tuple[set, set]:
    """The kernels and exchanges of the first question, and those of them that were not launched before."""
    with rehearsal() as gpu:
        engine = Case().engine(on_gpus(hosts), gpu)
        engine.warm_up()
        before = set(gpu.events.names("triton", "collective"))
        gpu.reset()
        engine.generate("What happens here?", video=clip, num_frames=8, max_new_tokens=4)
        asked = set(gpu.events.names("triton", "collective"))
        return asked, asked - before


def test_the_first_answer_in_a_batch_needs_no_kernel_that_is_new(clip):
    with rehearsal() as gpu:
        engine = Case().engine(on_gpus(HostGroup.single("cpu")), gpu)
        engine.warm_up(in_batch=True)
        before = set(gpu.events.names("triton"))
        gpu.reset()
        state = engine.prefill("What happens here?", video=clip, num_frames=8)
        with apbv_attention(engine.parts.language_model):
            batch = Batch(engine.parts)
            batch.join(state, Request(Question(), state.timer, sampling=SamplingConfig(max_new_tokens=4)))
            while batch:
                batch.step()
        asked = set(gpu.events.names("triton"))
    assert "batch_decode_kernel" in asked and asked <= before


@pytest.mark.thorough
def test_the_first_question_needs_no_kernel_that_is_new(pool, clip):
    for asked, new in pool.run(2, warmed_job, clip):
        assert asked and not new


def on_cpu_job(hosts: HostGroup, family: str, prefill: dict, in_batch: bool = False) -> int:
    before = hosts.bytes_received
    Case(family, prefill=prefill).engine(hosts).warm_up(in_batch)
    return hosts.bytes_received - before


@pytest.mark.parametrize("family", ["llama", "llava_onevision", "qwen2_5_vl"])
def test_the_hosts_exchange_what_they_will(pool, family):
    """A question that is too short would be answered by one host alone."""
    assert min(pool.run(2, on_cpu_job, family, {})) > 0


def test_an_answer_in_a_batch_is_host_0s_alone(pool):
    assert min(pool.run(2, on_cpu_job, "qwen2_5_vl", {}, True)) > 0


def test_lengths_for_long_prompts_do_not_keep_a_server_from_starting(pool):
    assert min(pool.run(2, on_cpu_job, "qwen2_5_vl", {"anchor_len": 100_000, "passing_len": 50_000})) > 0
