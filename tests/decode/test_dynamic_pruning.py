"""DyCoke's second stage: visual tokens left out of decoding steps, against its definition."""

from unittest import mock

import pytest
import torch

from apbv import (
    Engine,
    HostGroup,
    InvalidConfigError,
    PrefillConfig,
    ReduceConfig,
    SamplingParams,
    SpeculativeConfig,
    prefill,
)
from apbv.decode.answer import begin_answer
from apbv.decode.batch import Batch
from apbv.model.parts import inspect_model
from apbv.request.request import Question, Request, RequestSettings
from apbv.runner import dynamic_pruning
from apbv.stats import StageTimer

from apbv_tests import families
from apbv_tests.decode_pruning_oracle import pruned_steps
from apbv_tests.engines import QUESTION, build_engine
from apbv_tests.pairs import each_choice
from apbv_tests.prompts import (
    as_inputs,
    build,
    processed,
    relative_error,
    video_batch,
)

QWEN = "qwen2_5_vl"
HOST = HostGroup.single("cpu")
NUM_NEW = 8
# The tiny models have three layers.
FAMILIES = [QWEN, "qwen3_vl", "llava_onevision", "internvl"]


def prefilled(config: PrefillConfig, family: str = QWEN, batch: dict | None = None):
    batch = video_batch(family) if batch is None else batch
    inputs = as_inputs(family, batch, None, HOST, torch.float64)
    return prefill(build(family, torch.float64), inputs, hosts=HOST, config=config)


def answer_to(state, family: str = QWEN):
    parts = inspect_model(build(family, torch.float64))
    settings = RequestSettings(sampling=SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True))
    return begin_answer(parts, state, Request(Question(), StageTimer(HOST), settings))


def check(share: float, layer: int, family: str, batch=None, threshold: float = 0.9) -> list[bool]:
    """Compare every step's logits with the definition; return which steps chose anew."""
    batch = video_batch(family) if batch is None else batch
    expected, chose_anew = pruned_steps(family, batch, share, layer, NUM_NEW, threshold)
    # The first stage keeps everything here.
    reduce = ReduceConfig(method="dycoke", ratio=1, layer=layer, decode_ratio=share)
    state = prefilled(PrefillConfig(reduce=reduce), family, batch)
    decoder = answer_to(state, family).decoder
    logits = [state.logits]
    with mock.patch.object(dynamic_pruning, "_SIMILAR", threshold):
        while len(logits) < NUM_NEW:
            rows = decoder.advance([int(logits[-1].argmax())])
            logits.append(rows[-1:])
    for ours, theirs in zip(logits, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-9
    return chose_anew


@each_choice(family=FAMILIES, share=[0.1, 0.25, 0.5], layer=[1, 2])
def test_every_step_equals_its_definition(family, share, layer):
    check(share, layer, family)


def test_of_a_prompt_with_several_videos_and_an_image():
    first = families.synthetic_video(12, 56, 70)
    last = families.synthetic_video(20, 56, 70)
    image = families.synthetic_image(84, 56)
    check(0.3, 1, QWEN, processed(QWEN, first, "a video, ", image, "an image, ", last, "a video, "))


def test_steps_whose_attention_is_alike_keep_what_was_chosen():
    """With thresholds at which none, some and all steps choose anew."""
    assert check(0.2, 1, QWEN, threshold=-2.0) == [True] + [False] * (NUM_NEW - 2)
    assert check(0.2, 1, QWEN, threshold=2.0) == [True] * (NUM_NEW - 1)
    some = check(0.2, 1, QWEN, threshold=0.3)
    assert True in some[1:] and False in some[1:]


def test_nothing_is_left_out_of_a_prompt_without_visual_tokens_or_with_a_share_of_one():
    assert ReduceConfig(method="dycoke", decode_ratio=1.0).prunes_decoding is False
    state = prefilled(PrefillConfig(reduce=ReduceConfig(method="dycoke", decode_ratio=1.0)))
    assert state.decode_pruning is None


def test_the_engine_leaves_tokens_out_after_the_first_stage(clip):
    """One answer at a time."""
    reduce = ReduceConfig(method="dycoke", ratio=0.5, layer=1, decode_ratio=0.3)
    engine = build_engine(HOST, QWEN, "gathered", None, reduce=reduce)
    assert "decode_ratio" in engine.batching_obstacle
    questions = [{"prompt": QUESTION, "video": clip, "num_frames": 8}] * 2
    sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
    alone = engine.generate(QUESTION, video=clip, num_frames=8, sampling=sampling)
    answers = list(engine.generate_all(questions, sampling=sampling))
    assert [answer.token_ids for _, answer in answers] == [alone.token_ids] * 2


def test_what_needs_all_of_the_kv_is_refused():
    reduce = ReduceConfig(method="dycoke", decode_ratio=0.3)
    with pytest.raises(InvalidConfigError, match="needs kv='gathered'"):
        PrefillConfig(reduce=reduce, kv="sharded")
    with pytest.raises(InvalidConfigError, match="only dycoke leaves tokens out of decoding"):
        ReduceConfig(method="slowfast", decode_ratio=0.3)
    with pytest.raises(InvalidConfigError, match="before the language model: it has no layer"):
        ReduceConfig(method="dycoke", layer=2)
    with pytest.raises(InvalidConfigError, match="lie in 0 < ratio <= 1"):
        ReduceConfig(method="dycoke", decode_ratio=0.0)
    with pytest.raises(InvalidConfigError, match="ngram verifies several tokens in a step"):
        Engine(
            build(QWEN, torch.float32),
            families.build_processor(QWEN),
            HOST,
            PrefillConfig(reduce=reduce),
            speculate=SpeculativeConfig(strategy="ngram"),
        )
    with pytest.raises(InvalidConfigError, match="the model has 3, and at least one must follow"):
        prefilled(PrefillConfig(reduce=ReduceConfig(method="dycoke", layer=3, decode_ratio=0.3)))
    state = prefilled(PrefillConfig(reduce=reduce))
    with pytest.raises(InvalidConfigError, match="an answer with decode_ratio cannot be batched"):
        Batch(inspect_model(build(QWEN, torch.float64))).join(answer_to(state))
