"""In every layer of a prefill: which exchanges there are, how large, and what the GPU computes meanwhile."""

from dataclasses import dataclass

import pytest
import torch

from apbv.model.parts import inspect_model

from engines import QUESTION
from pretend_gpu import Events, assert_same_order, rehearsal
from rehearsals import Case, on_gpus

HOSTS, PASSING, FRAMES = 2, 4, 8
KV_HEADS, HEADS, DIM = 2, 4, 16  # of the models in families.py


@dataclass
class Prefilled:
    """What a prefill asks of a host's GPU, in every layer and in all; the lengths of the prompt and its end."""

    layers: list[Events]
    events: Events
    num_tokens: int
    num_questions: int


def prefill_job(hosts, clip) -> Prefilled:
    case = Case(dtype=torch.float16, prefill={"anchor_len": 4, "passing_len": PASSING})
    request = {"video": clip, "num_frames": FRAMES}
    with rehearsal() as gpu:
        engine = case.engine(on_gpus(hosts), gpu)
        model = inspect_model(engine.model).language_model
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda *_: gpu.mark("layer"))
        model.norm.register_forward_pre_hook(lambda *_: gpu.mark("layer"))
        engine.prefill(QUESTION, **request)  # libraries are tried on small problems
        gpu.reset()
        state = engine.prefill(QUESTION, **request)
    *layers, _ = gpu.events.between("layer")
    return Prefilled(layers, gpu.events, state.num_tokens, len(state.layout.query))


def attends(events: Events) -> bool:
    """Whether attention is computed among these events, by a library or by Triton."""
    return any("_attention" in (event.name if event.kind == "kernel" else event.place) for event in events)


@pytest.fixture(scope="module")
def prefilled(pool, clip) -> list[Prefilled]:
    return pool.run(HOSTS, prefill_job, clip)


def test_a_layer_exchanges_passing_blocks_and_the_question_and_waits_for_nothing(prefilled):
    assert_same_order([host.events for host in prefilled])
    for host in prefilled:
        # Of every host the keys and values that each of its blocks passes on, and the question's output and lse.
        passing = (HOSTS + 1) * 2 * KV_HEADS * PASSING * DIM * 2
        question = (HOSTS + 1) * HEADS * host.num_questions * (2 * DIM + 4)
        assert len(host.layers) == 2
        for events in host.layers:
            assert [event.nbytes for event in events.of("collective")] == [passing, passing, question]
            assert not events.of("wait", "to_gpu", "to_host", "host_collective")
        # Frames as they are stored, of 3 bytes a pixel, and a token's id and positions, of 8 bytes each.
        frames, rest = FRAMES // HOSTS * 64 * 96 * 3, 2048
        assert frames < host.events.nbytes("to_gpu") <= frames + 4 * 8 * host.num_tokens + rest
        assert host.events.nbytes("to_host") <= rest


def test_exchanges_travel_while_the_gpu_attends(prefilled):
    for host in prefilled:
        for events in host.layers:
            kinds = [(event.kind, event.detail) for event in events]
            numbers = [event.detail for event in events.of("collective")]
            begun = [kinds.index(("collective", number)) for number in numbers]
            awaited = [kinds.index(("await", number)) for number in numbers]
            # Passing blocks are on their way before the question attends, and its result before the context does;
            # the first block, of what it sees here, before anything is waited for; the question is merged last.
            assert max(begun) < min(awaited)
            assert attends(Events(events[begun[1] : begun[2]]))
            assert attends(Events(events[begun[2] : min(awaited)]))
            assert attends(Events(events[min(awaited) : awaited[2]]))
            assert not attends(Events(events[awaited[2] :]))
