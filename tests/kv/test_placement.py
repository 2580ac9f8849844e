"""Where the KV lies: it knows what it can be asked for, and is in memory once."""

import gc

import pytest
import torch

from apbv import Engine, HostGroup, PrefillConfig, demo

from apbv_tests.answers import decoder_behind

FRAMES = 16


def storages_of(shape_tail: tuple[int, ...]) -> int:
    """Bytes of all live tensors ``[1, heads, rows, dim]`` of so many heads and dimensions, shared
    ones once."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if (
            type(thing) is torch.Tensor
            and thing.dim() == 4
            and (thing.shape[1], thing.shape[3]) == shape_tail
        ):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def memory_job(hosts: HostGroup, kv: str) -> tuple[int, int, bool]:
    """Bytes of KV in this process while an answer is decoded, bytes that it needs, and whether its
    rows stayed."""
    engine = Engine.from_pretrained(
        "demo", hosts=hosts, dtype="float32", prefill=PrefillConfig(kv=kv)
    )
    state = engine.prefill(
        "describe the clip shot by shot", video=demo.video_path(), num_frames=FRAMES
    )
    decoder = decoder_behind(state, engine.model)
    layers = state.kv.cache.layers
    before = [layer.keys.data_ptr() for layer in layers]
    for _ in range(2):
        decoder.advance([5])
    num_rows = (
        sum(map(len, state.layout.cache_spans(hosts.rank))) if kv == "sharded" else state.num_tokens
    )
    needed = (
        2 * len(layers) * (num_rows + (0 if hosts.rank else 256)) * layers[0].keys[0, :, 0].nbytes
    )
    held = storages_of((layers[0].keys.shape[1], layers[0].keys.shape[3]))
    return held, needed, before == [layer.keys.data_ptr() for layer in layers]


@pytest.mark.parametrize(("num_hosts", "kv"), [(1, "gathered"), (2, "sharded")])
def test_the_kv_is_in_memory_once_and_has_room_for_the_answer(pool, num_hosts, kv):
    for held, needed, stayed in pool.run(num_hosts, memory_job, kv):
        assert stayed and held == needed


def views_job(hosts: HostGroup, kv: str):
    """What an answer leaves of the prompt's KV for those who hold a view of it."""
    engine = Engine.from_pretrained(
        "demo", hosts=hosts, dtype="float32", prefill=PrefillConfig(kv=kv)
    )
    state = engine.prefill(
        "describe the clip shot by shot", video=demo.video_path(), num_frames=FRAMES
    )
    view = state.to_dynamic_cache()
    copies = [] if view is None else [layer.keys.clone() for layer in view.layers]
    answers = [engine.decode(state, max_new_tokens=steps).token_ids for steps in (12, 5)]
    assert answers[0][:5] == answers[1]
    layers = [] if view is None else view.layers
    assert all(layer.keys.shape[2] == state.num_tokens for layer in layers)
    return [torch.equal(layer.keys, copy) for layer, copy in zip(layers, copies, strict=True)]


@pytest.mark.parametrize("kv", ["gathered", "sharded"])
def test_an_answer_leaves_the_prompts_kv_as_it_is(pool, kv):
    first, second = pool.run(2, views_job, kv)
    assert first and all(first) and not second
