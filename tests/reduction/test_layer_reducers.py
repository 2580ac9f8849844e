"""Visual tokens dropped between layers, against their definitions layer by layer."""

from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch

from apbv import (
    Engine,
    HostGroup,
    PrefillConfig,
    ReuseConfig,
    SamplingParams,
    SpeculativeConfig,
    prefill,
)
from apbv.config import LAYER_REDUCER_NAMES, ReduceConfig
from apbv.decode.answer import begin_answer
from apbv.decode.batch import Batch
from apbv.model.attention import apbv_attention
from apbv.model.parts import inspect_model
from apbv.prefilling.reduction import LAYER_REDUCERS, layer_reducer
from apbv.request.request import Question, Request, RequestSettings
from apbv.stats import StageTimer

from apbv_tests import families
from apbv_tests.answers import plain_tokens
from apbv_tests.engines import QUESTION, build_engine
from apbv_tests.late_oracle import run_reduced
from apbv_tests.pairs import each_choice
from apbv_tests.prompts import (
    as_inputs,
    build,
    kv_of,
    processed,
    relative_error,
    text_batch,
    video_batch,
)

QWEN = "qwen2_5_vl"
NUM_NEW = 6
HOST = HostGroup.single("cpu")
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
# After how many of the tiny models' three layers tokens are dropped.
DROPS = {"fastv": (1,), "pdrop": (1, 2), "sparsevlm": (1, 2)}
FAMILIES = [
    QWEN,
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "internvl",
    "llava_onevision",
    "glm4v",
    "video_llama_3",
    families.OMNI,
]


@cache
def prompt_of(family: str, is_mixed: bool = False) -> dict:
    """A video, or two videos and an image with text between them."""
    if not is_mixed:
        return video_batch(family)
    first = families.synthetic_video(12, 56, 70)
    last = families.synthetic_video(20, 56, 70)
    image = families.synthetic_image(84, 56)
    return processed(family, first, "a video, ", image, "an image, ", last, "a video, ")


def prefilled(
    reduce: ReduceConfig | None,
    family: str = QWEN,
    batch: dict | None = None,
    dtype: torch.dtype = torch.float64,
    **settings,
):
    batch = prompt_of(family) if batch is None else batch
    inputs = as_inputs(family, batch, None, HOST, dtype)
    config = PrefillConfig(reduce=reduce, **settings)
    return prefill(build(family, dtype), inputs, hosts=HOST, config=config)


def check(name: str, ratio: float, family: str, is_mixed: bool = False, asked_by=None, **settings):
    """Compare a prefill, and the answer behind it, with the definition."""
    layer = DROPS[name][0]
    reduce = ReduceConfig(method=name, ratio=ratio, layer=layer, asked_by=asked_by)
    batch = prompt_of(family, is_mixed)
    expected = run_reduced(family, batch, name, ratio, list(DROPS[name]), asked_by)
    state = prefilled(reduce, family, batch, **settings)
    assert state.reduction.kept.tolist() == expected.kept
    assert relative_error(state.logits, expected.logits) < 1e-9
    for layer_kv, expected_kv in zip(kv_of(state.kv.cache), kv_of(expected.cache), strict=True):
        for ours, theirs in zip(layer_kv, expected_kv, strict=True):
            assert ours.shape == theirs.shape
            assert relative_error(ours, theirs) < 1e-9
    assert not state.exact
    tokens = plain_tokens(state, build(family, torch.float64), GREEDY)
    assert tokens == expected.continuation(NUM_NEW)
    by_layer = [layer.keys.shape[2] for layer in expected.cache.layers]
    dropped = [state.num_tokens + len(tokens) - rows for rows in by_layer]
    num_visual = state.reduction.num_before
    assert state.reduction.by_layer == tuple(num_visual - count for count in dropped)


@each_choice(family=FAMILIES, name=LAYER_REDUCER_NAMES, ratio=[0.1, 0.25, 0.5])
def test_every_reducer_equals_its_definition(family, name, ratio):
    check(name, ratio, family)


@pytest.mark.parametrize("name", LAYER_REDUCER_NAMES)
@pytest.mark.parametrize("kv", ["gathered", "sharded"])
def test_of_prompts_with_several_videos_and_an_image(name, kv):
    check(name, 0.4, QWEN, is_mixed=True, kv=kv)


@pytest.mark.parametrize("name", ["fastv", "pdrop"])
def test_the_question_may_rank(name):
    check(name, 0.4, QWEN, asked_by="question")


@pytest.mark.parametrize("name", LAYER_REDUCER_NAMES)
def test_attention_is_the_same_however_few_probabilities_are_in_memory(name):
    with mock.patch.object(layer_reducer, "MOST_PROBABILITIES", 300):
        check(name, 0.4, QWEN)


def test_layers_are_those_of_the_papers():
    layers = {}
    for name, reducer in LAYER_REDUCERS.items():
        layers[name] = reducer.choose_layers(ReduceConfig(method=name), 28)
    assert layers == {"fastv": (2,), "pdrop": (7, 14, 21), "sparsevlm": (3, 6, 14)}


def test_answers_in_a_batch_say_what_each_says_alone():
    """Of members whose layers are short in different ways, one of them in none."""
    parts = inspect_model(build(QWEN, torch.float32))
    asked = [
        ReduceConfig(method="fastv", ratio=0.3, layer=1),
        None,
        ReduceConfig(method="pdrop", ratio=0.2, layer=1),
    ]

    def states():
        return [prefilled(reduce, dtype=torch.float32) for reduce in asked]

    expected = [plain_tokens(state, parts, GREEDY) for state in states()]
    batch = Batch(parts)
    members = []
    with apbv_attention(parts.language_model):
        for state in states():
            settings = RequestSettings(sampling=GREEDY)
            request = Request(Question(), StageTimer(HOST), settings)
            members.append(batch.join(begin_answer(parts, state, request)))
            batch.step()
        while len(batch):
            batch.step()
    assert [member.tokens for member in members] == expected


def test_another_answer_begins_behind_the_prompt_of_every_layer():
    """Not behind the tokens of the answer before."""
    state = prefilled(ReduceConfig(method="pdrop", ratio=0.2, layer=1), dtype=torch.float32)
    parts = inspect_model(build(QWEN, torch.float32))
    rows = [layer.keys.shape[2] for layer in state.kv.cache.layers]
    first = plain_tokens(state, parts, GREEDY)
    another = replace(state, kv=state.kv.behind(state.layout))
    assert [layer.keys.shape[2] for layer in another.kv.cache.layers] == rows
    assert plain_tokens(another, parts, GREEDY) == first


@pytest.mark.parametrize("name", LAYER_REDUCER_NAMES)
def test_numbers_that_overflow_end_no_more_than_the_answer(name):
    """They come out as NaN, which decoding refuses."""
    model = families.build_model(QWEN)
    torch.nn.init.constant_(model.get_decoder().layers[0].mlp.up_proj.weight, float("inf"))
    config = PrefillConfig(reduce=ReduceConfig(method=name, ratio=0.3, layer=1))
    inputs = as_inputs(QWEN, prompt_of(QWEN), None, HOST)
    state = prefill(model, inputs, hosts=HOST, config=config)
    assert state.logits.isnan().all()
    assert 0 < state.reduction.num_after < state.reduction.num_before


def test_the_engine_answers_and_tells_what_each_layer_read(clip):
    reduce = ReduceConfig(method="fastv", ratio=0.25, layer=1)
    engine = build_engine(HOST, QWEN, "gathered", None, reduce=reduce)
    result = engine.generate(QUESTION, video=clip, num_frames=8, max_new_tokens=3)
    reduction = result.stats["reduction"]
    num_visual = result.stats["num_video_tokens"]
    by_layer = reduction["num_video_tokens_by_layer"]
    assert by_layer[0] == num_visual == reduction["num_video_tokens_before"]
    assert set(by_layer[1:]) == {reduction["num_video_tokens_after"]} == {round(num_visual / 4)}


FASTV = ReduceConfig(method="fastv", ratio=0.3, layer=1)


def test_what_needs_all_tokens_in_all_layers_is_refused(tmp_path):
    late = PrefillConfig(reduce=FASTV)
    model = families.build_model(QWEN)
    processor = families.build_processor(QWEN)
    engine = Engine(model, processor, HOST, late)
    for refused in (
        engine.for_kv_export,
        lambda: Engine(model, processor, HOST, late, reuse=ReuseConfig(mode="kv")),
        lambda: Engine(model, processor, HOST, late, speculate=SpeculativeConfig(strategy="ngram")),
        lambda: PrefillConfig(method="xattention", reduce=FASTV),
        lambda: prefilled(FASTV, batch=text_batch(40)),
        lambda: prefilled(ReduceConfig(method="fastv", layer=3)),
        lambda: ReduceConfig(method="sparsevlm", asked_by="last"),
        lambda: ReduceConfig(method="dycoke", layer=2),
    ):
        with pytest.raises(ValueError, match=r"fastv|sparsevlm|dycoke"):
            refused()
    for kv in ("gathered", "sharded"):
        state = prefilled(FASTV, kv=kv)
        for export in (state.generate_inputs, lambda state=state: state.save(tmp_path / "kv")):
            with pytest.raises(ValueError, match="layers differ in length"):
                export()


def several_hosts_job(hosts: HostGroup) -> str:
    with pytest.raises(ValueError, match="fastv prunes between layers, on one host") as refusal:
        build_engine(hosts, QWEN, "gathered", None, reduce=FASTV)
    return str(refusal.value)


def test_several_hosts_refuse_alike(pool):
    first, second = pool.run(2, several_hosts_job)
    assert first == second
