"""A server's engine on GPUs answers a question of its own first, which brings the first request's
kernels."""

from pathlib import Path

import pytest

from apbv import HostGroup, SamplingParams
from apbv.decode.answer import begin_answer
from apbv.decode.batch import Batch
from apbv.model.attention import apbv_attention
from apbv.request.request import Question, Request, RequestSettings

from apbv_tests.pretend_gpu import rehearsal
from apbv_tests.rehearsals import Case, on_gpus


def warmed_job(hosts: HostGroup, clip: Path, in_batch: bool) -> tuple[set, set]:
    """The kernels and exchanges of the first question, and those of them that were not launched
    before."""
    with rehearsal() as gpu:
        engine = Case().engine(on_gpus(hosts), gpu)
        engine.warm_up(hosts.size if in_batch else 0)
        before = set(gpu.events.names("triton", "collective"))
        gpu.reset()
        state = engine.prefill("What happens here?", video=clip, num_frames=8)
        if in_batch:
            batch = Batch(engine.parts)
            batch.join(
                begin_answer(
                    engine.parts,
                    state,
                    Request(
                        Question(),
                        state.timer,
                        RequestSettings(sampling=SamplingParams(max_new_tokens=4)),
                    ),
                )
            )
            with apbv_attention(engine.parts.language_model):
                while batch:
                    batch.step()
        else:
            engine.decode(state, max_new_tokens=4)
        asked = set(gpu.events.names("triton", "collective"))
        return asked, asked - before


@pytest.mark.thorough
@pytest.mark.parametrize(("num_hosts", "in_batch"), [(1, True), (2, False)])
def test_the_first_question_needs_no_kernel_that_is_new(pool, clip, num_hosts, in_batch):
    for asked, new in pool.run(num_hosts, warmed_job, clip, in_batch):
        assert asked and not new and ("batch_decode_kernel" in asked) == in_batch


def on_cpu_job(hosts: HostGroup, family: str, prefill: dict, in_batch: bool) -> int:
    before = hosts.bytes_received
    Case(family, prefill=prefill).engine(hosts).warm_up(hosts.size if in_batch else 0)
    return hosts.bytes_received - before


def test_the_hosts_exchange_what_they_will(pool):
    """A question that is too short would be answered by one host alone."""
    long = {"anchor_len": 100_000, "passing_len": 50_000}  # do not keep a server from starting
    for case in (("llama", {}, False), ("qwen2_5_vl", {}, True), ("qwen2_5_vl", long, False)):
        assert min(pool.run(2, on_cpu_job, *case)) > 0
