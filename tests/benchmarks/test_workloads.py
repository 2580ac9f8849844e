"""The models and prompts that benchmarks run: sizes as published, and prompts that the models can read."""

import pytest
import scaling
import torch

from apbv import HostGroup, ModelInputs, PrefillConfig, prefill
from apbv.model.parts import inspect_model

from support import workloads
from support.cost_model.plan import prompt_of


@pytest.mark.parametrize(("name", "billions"), [("llama-3.1-8b", 8.03), ("internvl3-2b", 2.09)])
def test_models_have_as_many_weights_as_published(name, billions):
    model = workloads.build_model(workloads.CONFIGS[name], torch.bfloat16, "meta")
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)


def test_frames_of_internvl_can_be_prefilled():
    config = workloads.internvl_config(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, vocab=2000)
    tower = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "image_size": [56, 56]}
    config.vision_config = type(config.vision_config)(num_attention_heads=2, **tower)
    config.image_seq_length = 4
    model, hosts = workloads.build_model(config, torch.float32, "cpu"), HostGroup.single("cpu")
    prompt = workloads.internvl_prompt(model.config, num_frames=3, query_len=7)
    inputs = ModelInputs.from_processor(inspect_model(model), prompt.batch, hosts)
    state = prefill(model, inputs, hosts=hosts, config=PrefillConfig(method="full"))
    assert state.inputs.num_visual_tokens == 3 * model.config.image_seq_length
    assert state.num_tokens - state.inputs.query_start == 7 + 1  # and the end of the frames
    assert state.logits.isfinite().all()


def test_the_plan_of_internvl_has_256_tokens_a_frame():
    options = scaling.parse_arguments(
        ["plan", "--model", "internvl3-2b", "--frames", "8", "--resolution", "1440p"]
    )
    num_tokens, start, query_start, video = prompt_of(options, None)
    assert query_start - start == len(video.tokens) == 8 * 256 and video.frames == 8
    assert num_tokens == query_start + 1 + options.query_len
