"""Answers decoded together on a pretended GPU: those of the CPU, one wait and one graph a step, no
fault."""

import pytest

from apbv import Engine, HostGroup, SamplingParams, SpeculativeConfig
from apbv.decode.answer import begin_answer
from apbv.decode.batch import Batch
from apbv.model.attention import apbv_attention
from apbv.request.request import Question, Request, RequestSettings
from apbv.request.sink import StopFunction
from apbv.stats import StageTimer

from apbv_tests import families
from apbv_tests.answers import plain_tokens
from apbv_tests.configs import speculative_config
from apbv_tests.next_token import save_with_next_token
from apbv_tests.pretend_gpu import rehearsal, to_gpu
from apbv_tests.rehearsals import on_gpus, resizing_as_on_gpu

QUESTIONS = ["What happens?", "And who is it that comes in?", "Why?"]
SAMPLINGS = [
    SamplingParams(max_new_tokens=6),
    SamplingParams(max_new_tokens=9, temperature=1.2, top_p=0.9, seed=3),
    SamplingParams(max_new_tokens=5, ignore_eos=True, min_tokens=2),
]
SAMPLED = [{}, {"temperature": 1.2, "top_p": 0.9}, {"temperature": 0.8}]
LENGTHS = [6, 3, 5]  # the second is stopped, while the GPU has begun its next token
JOINS = [0, 2, 3]  # before which step
ARRIVAL = "event", "apbv/device/copies.py:read"
RESULT = "event", "apbv/hosts/group.py:wait_for_device"  # of an answer that has ended


def engine_of(hosts: HostGroup, gpu=None, speculate: SpeculativeConfig | None = None) -> Engine:
    """A draft model has the target's weights: it errs where tokens are drawn with other numbers."""
    has_draft = speculate is not None and speculate.strategy == "vanilla"
    models = [families.build_model("qwen2_5_vl", layers=1) for _ in range(1 + has_draft)]
    model, *draft = models if gpu is None else [to_gpu(model, gpu) for model in models]
    return Engine(
        model, families.build_processor("qwen2_5_vl"), hosts, None, None, speculate, *draft
    )


def together(engine: Engine, clip, gpu) -> list[list[int]]:
    """Prefill each prompt just before it joins, so that nothing has waited for that; a mark tells
    of each step."""
    batch = Batch(engine.parts)
    members = []
    steps = 0
    with apbv_attention(engine.parts.language_model):
        while len(members) < len(QUESTIONS) or len(batch):
            while len(members) < len(QUESTIONS) and JOINS[len(members)] <= steps:
                state = engine.prefill(QUESTIONS[len(members)], video=clip, num_frames=4)
                by = SAMPLINGS[len(members)]
                count = LENGTHS[len(members)]
                stop = StopFunction(lambda tokens, count=count: len(tokens) == count)
                settings = RequestSettings(sampling=by)
                members.append(
                    batch.join(
                        begin_answer(
                            engine.parts,
                            state,
                            Request(Question(), StageTimer(engine.hosts), settings, sink=stop),
                        )
                    )
                )
                del state
            gpu.mark("step")
            batch.step()
            steps += 1
    assert not [member.error for member in members if member.error]
    return [member.tokens for member in members]


def test_the_answers_are_those_of_the_cpu(clip):
    with resizing_as_on_gpu():
        engine = engine_of(HostGroup.single("cpu"))
        states = [engine.prefill(question, video=clip, num_frames=4) for question in QUESTIONS]
        ends = engine.parts.eos_token_ids
        expected = [
            plain_tokens(each, engine.parts, by, ends)
            for each, by in zip(states, SAMPLINGS, strict=True)
        ]
        with rehearsal() as gpu:
            engine = engine_of(on_gpus(HostGroup.single("cpu")), gpu)
            found = together(engine, clip, gpu)
    assert found == [tokens[:count] for tokens, count in zip(expected, LENGTHS, strict=True)]
    assert [len(tokens) for tokens in found] == LENGTHS
    # The allocator knows that the batch's stream uses logits, keys and values of every prompt. No
    # rule finds where that is missing: a kernel gets the addresses of keys and values as numbers.
    own = [f"apbv/decode/batch.py:{function}" for function in ("_take_in", "_own")]
    lent = [event for event in gpu.events.of("lent") if event.place in own]
    assert len(lent) == len(QUESTIONS) * (1 + 2 * engine.parts.num_layers)
    # Behind the first, which has to wait for its prefill, and those behind which another prompt is
    # prefilled.
    steps = [
        step
        for number, step in enumerate(gpu.events.between("step"), start=1)
        if number not in (1, *JOINS)
    ]
    assert all(step.waits[ARRIVAL] == 1 and set(step.waits) <= {ARRIVAL} for step in steps)
    replays = [len(step.of("replay")) for step in steps]
    assert max(replays) == 1 and sum(replays) >= 2
    # One each for pixels, for decoding and for recording, however many prompts there are.
    assert gpu.streams.num_taken.total() == 3


@pytest.mark.parametrize("strategy", ["vanilla", pytest.param("std", marks=pytest.mark.thorough)])
def test_a_round_of_drafts_waits_once(clip, monkeypatch, strategy):
    """And runs the draft's passes and the target's as graphs."""
    speculate = speculative_config(strategy=strategy, num_draft_tokens=2, keep_losing_draft=True)
    asked = [
        {"prompt": question, "video": str(clip), "num_frames": 2} for question in QUESTIONS[:2]
    ]
    samplings = [
        SamplingParams(max_new_tokens=12, seed=number, **SAMPLED[number]) for number in range(2)
    ]
    step = Batch.step
    with resizing_as_on_gpu():
        engine = engine_of(HostGroup.single("cpu"), None, speculate)
        expected = [
            engine.generate(**each, sampling=by) for each, by in zip(asked, samplings, strict=True)
        ]
        with rehearsal() as gpu:
            engine = engine_of(on_gpus(HostGroup.single("cpu")), gpu, speculate)

            def marked(batch):
                gpu.mark("step")
                return step(batch)

            monkeypatch.setattr(Batch, "step", marked)
            questions = [
                {**each, "sampling": by} for each, by in zip(asked, samplings, strict=True)
            ]
            found = dict(engine.generate_all(questions))
    for number, answer in enumerate(expected):
        assert found[number].token_ids == answer.token_ids
        figures = found[number].stats["speculation"]
        assert figures["num_accepted"] == answer.stats["speculation"]["num_accepted"] > 2
    _, *steps, _ = gpu.events.between("step")  # around them are the prefills and the results
    assert all(step.waits[ARRIVAL] == 1 and set(step.waits) <= {ARRIVAL, RESULT} for step in steps)
    # All but the last token drafted, each in a pass, and the target's.
    assert max(len(step.of("replay")) for step in steps) == 3


@pytest.mark.thorough
def test_a_round_of_multi_token_prediction_waits_once(tmp_path, monkeypatch):
    """The hidden states stay on the GPU: the CPU knows how many there are by the tokens."""
    path = save_with_next_token("glm4", tmp_path)
    speculate = speculative_config(strategy="mtp", num_draft_tokens=2, keep_losing_draft=True)
    asked = [{"prompt": question, "context": "some words " * 20} for question in QUESTIONS[:2]]
    sampling = SamplingParams(max_new_tokens=12)
    step = Batch.step
    with resizing_as_on_gpu():
        engine = Engine.from_pretrained(path, hosts=HostGroup.single("cpu"), speculate=speculate)
        expected = [engine.generate(**each, sampling=sampling) for each in asked]
        with rehearsal() as gpu:
            hosts = on_gpus(HostGroup.single("cpu"))
            model = to_gpu(engine.model, gpu)
            engine = Engine(model, engine.processor, hosts, speculate=speculate)
            alone = [engine.generate(**each, sampling=sampling) for each in asked]

            def marked(batch):
                gpu.mark("step")
                return step(batch)

            monkeypatch.setattr(Batch, "step", marked)
            found = dict(engine.generate_all(asked, sampling=sampling))
    num_accepted = []
    for number, answer in enumerate(expected):
        num_accepted.append(answer.stats["speculation"]["num_accepted"])
        for other in (alone[number], found[number]):
            assert other.token_ids == answer.token_ids
            assert other.stats["speculation"]["num_accepted"] == num_accepted[-1]
    assert sum(num_accepted) > 0
    _, *steps, _ = gpu.events.between("step")
    assert all(step.waits[ARRIVAL] == 1 and set(step.waits) <= {ARRIVAL, RESULT} for step in steps)
