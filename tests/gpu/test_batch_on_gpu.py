"""Answers decoded together on a pretended GPU: those of the CPU, one wait and one graph a step, no fault."""

from collections import Counter

import torch

from apbv import Engine, HostGroup, SamplingParams
from apbv.decode.batch import Batch
from apbv.input.request import Question, Request
from apbv.model.attention import apbv_attention
from apbv.stats import StageTimer

import families
from answers import plain_tokens
from pretend_gpu import rehearsal, to_gpu
from rehearsals import on_gpus, resizing_as_on_gpu

QUESTIONS = ["What happens?", "And who is it that comes in?", "Why?"]
SAMPLINGS = [
    SamplingParams(max_new_tokens=6),
    SamplingParams(max_new_tokens=3, temperature=1.2, top_p=0.9, seed=3),
    SamplingParams(max_new_tokens=5, ignore_eos=True, min_tokens=2),
]
JOINS = [0, 2, 3]  # before which step
ARRIVAL, RECORDING = ("event", "apbv/transfer.py:read"), ("synchronize", "apbv/decode/graphs.py:record")


def engine_of(hosts: HostGroup, gpu=None) -> Engine:
    model = families.build_model("qwen2_5_vl", layers=1)
    model = model if gpu is None else to_gpu(model, gpu)
    return Engine(model, families.build_processor("qwen2_5_vl"), hosts)


def together(engine: Engine, clip, on_step=lambda: None) -> list[list[int]]:
    """Prefill each prompt just before it joins, so that nothing has waited for that."""
    batch, members, steps = Batch(engine.parts), [], 0
    with apbv_attention(engine.parts.language_model):
        while len(members) < len(QUESTIONS) or len(batch):
            while len(members) < len(QUESTIONS) and JOINS[len(members)] <= steps:
                state = engine.prefill(QUESTIONS[len(members)], video=clip, num_frames=4)
                by = SAMPLINGS[len(members)]
                members.append(batch.join(state, Request(Question(), StageTimer(engine.hosts), sampling=by)))
            on_step()
            batch.step()
            steps += 1
    assert not [member.error for member in members if member.error]
    return [member.tokens for member in members]


def test_the_answers_are_those_of_the_cpu(clip, monkeypatch):
    with resizing_as_on_gpu():
        engine = engine_of(HostGroup.single("cpu"))
        states = [engine.prefill(question, video=clip, num_frames=4) for question in QUESTIONS]
        ends = engine.parts.eos_token_ids
        expected = [plain_tokens(each, engine.parts, by, ends) for each, by in zip(states, SAMPLINGS, strict=True)]
        with rehearsal() as gpu:
            engine, used_by = engine_of(on_gpus(HostGroup.single("cpu")), gpu), Counter()
            monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: used_by.update([id(stream)]))
            found = together(engine, clip, lambda: gpu.mark("step"))
    assert found == expected
    # The allocator knows that logits, keys and values of every prompt are used by the batch's stream, too.
    assert len(QUESTIONS) * (1 + 2 * engine.parts.num_layers) in used_by.values()
    assert [len(tokens) for tokens in found] == [sampling.max_new_tokens for sampling in SAMPLINGS]
    steps = [step for number, step in enumerate(gpu.events.between("step"), start=1) if number not in JOINS]
    assert all(step.waits[ARRIVAL] == 1 and set(step.waits) <= {ARRIVAL, RECORDING} for step in steps)
    replays = [len(step.of("replay")) for step in steps]
    assert max(replays) == 1 and sum(replays) >= 2
