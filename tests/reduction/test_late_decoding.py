"""What follows a prompt whose layers hold different numbers of tokens: batches, graphs, drafts, and refusals."""

import pytest
import torch

from apbv import Engine, HostGroup, PrefillConfig, SamplingParams, SpeculativeConfig, prefill
from apbv.config import ReduceConfig, ReuseConfig
from apbv.decode.batch import Batch
from apbv.input.request import Question, Request
from apbv.kv import cache as kv_cache
from apbv.model.parts import inspect_model
from apbv.prefilling.reduction import LATE_REDUCERS
from apbv.stats import StageTimer

import families
from answers import plain_tokens
from engines import QUESTION, build_engine
from prompts import as_inputs, build, video_batch

FAMILY, STEPS = "qwen2_5_vl", 6
GREEDY = SamplingParams(max_new_tokens=STEPS, ignore_eos=True)
FASTV = ReduceConfig(method="fastv", ratio=0.3, layer=1)


def prefilled(reduce: ReduceConfig | None, frames: int = 29, **settings):
    hosts, config = HostGroup.single("cpu"), PrefillConfig(reduce=reduce, **settings)
    inputs = as_inputs(FAMILY, video_batch(FAMILY, frames), None, hosts)
    return prefill(build(FAMILY, torch.float32), inputs, hosts=hosts, config=config)


def test_answers_in_a_batch_say_what_each_says_alone(monkeypatch):
    """Of members whose layers are short in different ways, one of them in none."""
    monkeypatch.setattr(kv_cache, "GROWTH_ROWS", 3)  # so that buffers are left for new ones
    parts = inspect_model(build(FAMILY, torch.float32))
    asked = [(FASTV, 29), (None, 9), (ReduceConfig(method="pdrop", ratio=0.2, layer=1), 17)]
    expected = [plain_tokens(prefilled(*each), parts, GREEDY) for each in asked]
    batch, members = Batch(parts), []
    for each in asked:
        state = prefilled(*each)
        members.append(batch.join(state, Request(Question(), StageTimer(state.kv.hosts), sampling=GREEDY)))
        batch.step()
    while len(batch):
        batch.step()
    assert [member.tokens for member in members] == expected


DRAFTS = {"ngram": {}, "sd_tree": {"num_tree_nodes": 6}, "specvlm": {"keep": "even"}}


def drafting_job(hosts: HostGroup, clip, reduce: ReduceConfig):
    """The answer of the reduced model, and those with drafts."""
    ways = [None, *(SpeculativeConfig(strategy=name, **way) for name, way in DRAFTS.items())]
    engines = [build_engine(hosts, FAMILY, "sharded", way, reduce=reduce) for way in ways]
    request = {"video": clip, "num_frames": 12, "max_new_tokens": 4}
    return [engine.generate(QUESTION, **request).token_ids for engine in engines]


@pytest.mark.thorough
def test_drafts_change_nothing_in_the_reduced_models_answers(pool, clip):
    reduce = ReduceConfig(method="sparsevlm", ratio=0.3, layer=1)
    plain, *drafted = pool.run(2, drafting_job, clip, reduce)[0]
    assert len(plain) > 2 and drafted == [plain] * len(DRAFTS)


@pytest.mark.parametrize("name", ["fastv", "sparsevlm", "hippo_attention"])
def test_numbers_that_overflow_end_no_more_than_the_answer(name):
    """They come out as NaN, which decoding refuses; an error in between would end the group of hosts."""
    model, hosts = families.build_model(FAMILY), HostGroup.single("cpu")
    weights = model.get_decoder().layers[0].mlp.up_proj if name == "fastv" else model.get_input_embeddings()
    torch.nn.init.constant_(weights.weight, float("inf"))
    config = PrefillConfig(reduce=ReduceConfig(method=name, ratio=0.3, layer=1))
    state = prefill(model, as_inputs(FAMILY, video_batch(FAMILY), None, hosts), hosts=hosts, config=config)
    assert state.logits.isnan().all()
    assert 0 < state.reduction.num_after < state.reduction.num_before


def test_what_needs_all_tokens_in_all_layers_is_refused():
    layers = {name: LATE_REDUCERS[name].choose_layers(ReduceConfig(method=name), 28) for name in LATE_REDUCERS}
    in_steps = {"pdrop": (7, 14, 21), "sparsevlm": (3, 6, 14)}
    assert layers == in_steps | {"fastv": (2,), "hippo_attention": (14,)}
    hosts, late = HostGroup.single("cpu"), PrefillConfig(reduce=FASTV)
    engine = Engine(families.build_model(FAMILY), families.build_processor(FAMILY), hosts, late)
    reuse = ReuseConfig(mode="kv")
    for refused in (
        lambda: PrefillConfig(anchor_query=True, reduce=FASTV),
        engine.handing_over,
        lambda: Engine(engine.model, engine.processor, hosts, late, reuse=reuse),
        prefilled(FASTV, kv="gathered").generate_inputs,
        prefilled(FASTV, kv="sharded").generate_inputs,
    ):
        with pytest.raises(ValueError, match="fastv"):
            refused()
    # Before anything is loaded.
    for strategy, message in (("std", "std drafts on the target's KV"), ("hippo", "keep='hippo' ranks by")):
        with pytest.raises(ValueError, match=message):
            Engine.from_pretrained("demo", prefill=late, speculate=SpeculativeConfig(strategy=strategy))
