"""In every layer of a prefill: which exchanges there are, how large, and what the GPU computes meanwhile."""

from itertools import pairwise

import torch

from apbv.layout import ContextLayout
from apbv.model.parts import inspect_model

from engines import QUESTION
from pretend_gpu import Events, assert_same_order, rehearsal
from rehearsals import Case, on_gpus

HOSTS, PASSING, FRAMES = 2, 4, 8
KV_HEADS, HEADS, DIM = 2, 4, 16  # of the models in families.py


def prefill_job(hosts, clip) -> tuple[list[Events], Events, ContextLayout]:
    """What a prefill asks of a host's GPU, in every layer and in all; how the prompt is shared out."""
    case = Case(dtype=torch.float16, prefill={"anchor_len": 4, "passing_len": PASSING})
    with rehearsal() as gpu:
        engine = case.engine(on_gpus(hosts), gpu)
        model = inspect_model(engine.model).language_model
        for module in (*model.layers, model.norm):
            module.register_forward_pre_hook(lambda *_: gpu.mark("layer"))
        for _ in range(2):  # the first time, libraries are tried on small problems
            gpu.reset()
            state = engine.prefill(QUESTION, video=clip, num_frames=FRAMES)
    *layers, _ = gpu.events.between("layer")
    return layers, gpu.events, state.layout


def attends(events: Events) -> bool:
    """Whether attention is computed among these events, by a library or by Triton."""
    return any("_attention" in (event.name if event.kind == "kernel" else event.place) for event in events)


def test_a_layer_exchanges_while_it_attends_and_waits_for_nothing(pool, clip):
    prefilled = pool.run(HOSTS, prefill_job, clip)
    assert_same_order([events for _, events, *_ in prefilled])
    for host, (layers, all_events, layout) in enumerate(prefilled):
        # Of every host the keys and values that each of its blocks passes on, and the question's output and lse.
        passing = (HOSTS + 1) * 2 * KV_HEADS * PASSING * DIM * 2
        question = (HOSTS + 1) * HEADS * len(layout.query) * (2 * DIM + 4)
        # The KV that a host keeps leaves for host 0.
        leaving = sum(map(len, layout.cache_spans(host))) + (layout.num_tokens if host == 0 else 0)
        leaving *= 2 * KV_HEADS * DIM * 2
        # Frames as they are stored, of 3 bytes a pixel, and a token's id and positions, of 8 bytes each.
        frames, rest = FRAMES // HOSTS * 64 * 96 * 3, 2048
        assert frames < all_events.nbytes("to_gpu") <= frames + 4 * 8 * layout.num_tokens + rest
        assert all_events.nbytes("to_host") <= rest and len(layers) == 2
        for events in layers:
            (*exchanges, last), kinds = events.of("collective"), [(event.kind, event.detail) for event in events]
            assert [event.nbytes for event in (*exchanges, last)] == [passing, passing, question, leaving]
            assert not events.of("wait", "to_gpu", "to_host", "host_collective")
            begun, awaited = ([kinds.index((of, e.detail)) for e in exchanges] for of in ("collective", "await"))
            # Passing blocks are on their way before the question attends, and its result before the context does;
            # the first block, of what it sees here, before anything is waited for; the question is merged last.
            assert max(begun) < min(awaited) and not attends(events[awaited[2] :])
            places = [begun[1], begun[2], min(awaited), awaited[2]]
            assert all(attends(events[start:stop]) for start, stop in pairwise(places))
            # The KV travels while the layer goes on, and is waited for by a later one.
            left = kinds.index(("collective", last.detail))
            assert max(awaited) < left and ("await", last.detail) not in kinds
            assert [event.name for event in events[left:]].count("mm") >= 3
