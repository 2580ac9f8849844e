"""In every layer of a prefill: which exchanges there are, how large, and what the GPU computes
meanwhile."""

from itertools import pairwise

import torch

from apbv import ModelInputs, PrefillConfig, prefill
from apbv.layout import ContextLayout
from apbv.model.parts import inspect_model
from apbv.testing.random_models import text_prompt
from apbv.testing.simulated import Network, simulate

from apbv_tests import families
from apbv_tests.engines import QUESTION
from apbv_tests.pretend_gpu import Events, assert_same_order, rehearsal, to_gpu
from apbv_tests.rehearsals import Case, on_gpus

HOSTS = 2
PASSING = 4
FRAMES = 8
KV_HEADS, HEADS, DIM = 2, 4, 16  # of the models in families.py


def prefill_job(hosts, clip) -> tuple[list[Events], Events, ContextLayout]:
    """What a prefill asks of a host's GPU, in every layer and in all; how the prompt is shared
    out."""
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
    return any(
        "_attention" in (event.name if event.kind == "kernel" else event.place) for event in events
    )


def test_a_layer_exchanges_while_it_attends_and_waits_for_nothing(pool, clip):
    prefilled = pool.run(HOSTS, prefill_job, clip)
    assert_same_order([events for _, events, *_ in prefilled])
    for host, (layers, all_events, layout) in enumerate(prefilled):
        # Of every host the keys and values that each of its blocks passes on, and the question's
        # output and lse.
        passing = (HOSTS + 1) * 2 * KV_HEADS * PASSING * DIM * 2
        question = (HOSTS + 1) * HEADS * len(layout.query) * (2 * DIM + 4)
        # The KV that a host keeps leaves for host 0.
        leaving = sum(map(len, layout.cache_spans(host))) + (layout.num_tokens if host == 0 else 0)
        leaving *= 2 * KV_HEADS * DIM * 2
        # Frames as they are stored, of 3 bytes a pixel, and a token's id and positions, of 8 bytes
        # each.
        frames = FRAMES // HOSTS * 64 * 96 * 3
        rest = 2048
        assert frames < all_events.nbytes("to_gpu") <= frames + 4 * 8 * layout.num_tokens + rest
        assert all_events.nbytes("to_host") <= rest and len(layers) == 2
        for events in layers:
            (*exchanges, last) = events.of("collective")
            kinds = [(event.kind, event.detail) for event in events]
            assert [event.nbytes for event in (*exchanges, last)] == [
                passing,
                passing,
                question,
                leaving,
            ]
            assert not events.of("wait", "to_gpu", "to_host", "host_collective")
            begun = [kinds.index(("collective", each.detail)) for each in exchanges]
            awaited = [kinds.index(("await", each.detail)) for each in exchanges]
            # Passing blocks are on their way before the question attends, and its result before the
            # context does; the first block, of what it sees here, before anything is waited for;
            # the question is merged last.
            assert max(begun) < min(awaited) and not attends(events[awaited[2] :])
            places = [begun[1], begun[2], min(awaited), awaited[2]]
            assert all(attends(events[start:stop]) for start, stop in pairwise(places))
            # The KV travels while the layer goes on, and is waited for by a later one.
            left = kinds.index(("collective", last.detail))
            assert max(awaited) < left and ("await", last.detail) not in kinds
            assert [event.name for event in events[left:]].count("mm") >= 3


def test_simulated_hosts_wait_for_the_gpu_at_the_end_only():
    """Their clocks are worked out afterwards: else launches would not hide behind kernels, as they
    do."""
    prompt = text_prompt(families.build_model("qwen2").config, 100, 12)
    config = PrefillConfig(anchor_len=4, passing_len=4, kv="sharded")
    with rehearsal() as gpu:

        def job(hosts):
            parts = inspect_model(to_gpu(families.build_model("qwen2", layers=2), gpu))
            inputs = ModelInputs.from_processor(
                parts, prompt.batch, hosts, query_start=prompt.query_start
            )
            assert parts.weights_sample  # which an engine has read when it is loaded
            hosts.barrier()
            gpu.mark("begin")
            state = prefill(parts, inputs, hosts=hosts, config=config)
            gpu.mark("end")
            figures = state.timer.summary()
            return figures["ttft_ms"], figures["stages_ms"]["prefill"], len(hosts.laps)

        simulated = simulate(2, job, device="cuda:0", network=Network(latency=0.1))
    marks = [place for place, event in enumerate(gpu.events) if event.kind == "mark"]
    # From the first host's beginning to the first end.
    prefilling = Events(gpu.events[marks[0] : marks[2]])
    assert prefilling.num_launches > 100 and not prefilling.of("wait"), prefilling.waits
    assert simulated[0][:2] == simulated[1][:2]
    # Two layers gather passing blocks and the question's state, in two steps each.
    assert all(ttft >= prefill_ms > 2 * 2 * 2 * 100 for ttft, prefill_ms, _ in simulated)
    assert len({num_laps for *_, num_laps in simulated}) == 1
