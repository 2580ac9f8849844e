"""What is planned from a config alone, against what is loaded, read and prefilled later."""

from functools import partial

import av
import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.video_utils import VideoMetadata

from apbv import (
    Engine,
    HostGroup,
    PrefillConfig,
    ReduceConfig,
    SpeculativeConfig,
    demo,
    plan,
    planning,
)
from apbv.input.prompts.model_inputs import ModelInputs
from apbv.launch.plan import main
from apbv.model.loading.tensor_parallel import weight_bytes
from apbv.model.parts import inspect_model
from apbv.planning import video_size

from apbv_tests import families
from apbv_tests.documents import require_table, text_table
from apbv_tests.families import TEXT_FAMILIES, VIDEO_FAMILIES, VISION_FAMILIES
from apbv_tests.pairs import each_choice
from apbv_tests.prompts import by_processor
from apbv_tests.scripts import ROOT

LLAMA = families.build_config("llama", layers=4)


@each_choice(family=VIDEO_FAMILIES, frames=[2, 7, 30])
def test_a_videos_tokens_are_those_of_the_whole_processor(family, frames):
    model = families.build_model(family)
    processor = families.build_processor(family)
    metadata = VideoMetadata(frames, fps=2.0, frames_indices=list(range(frames)))
    batch = by_processor(
        processor, [{"type": "video"}], [(families.synthetic_video(frames, 84, 112), metadata)]
    )
    inputs = ModelInputs.from_processor(inspect_model(model), batch, HostGroup.single("cpu"))
    size = video_size(model.config, frames, 84, 112, processor.video_processor)
    assert size.num_rows == inputs.num_visual_tokens
    assert size.num_patches == len(inputs.visual.row_starts) - 1
    pixels = batch["pixel_values" if family == "internvl" else "pixel_values_videos"]
    assert size.pixel_bytes == pixels.nbytes
    between = inputs.query_start - inputs.context_start - inputs.num_visual_tokens
    assert (between > 0) == (size.num_text_tokens > 0)  # how many depends on the tokenizer


@pytest.mark.parametrize("family", VISION_FAMILIES + TEXT_FAMILIES)
def test_weights_are_those_of_the_model(family):
    model = families.build_model(family)
    one = partial(weight_bytes, model.config, 1)
    cpu = torch.device("cpu")
    assert one(cpu) == sum(weight.numel() for weight in model.parameters())
    shared = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    for name, module in model.get_decoder().layers.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("shared_expert_gate"):
            shared.append(module.weight)
        if name.endswith("mlp.experts"):
            shared += [module.gate_up_proj, module.down_proj]
    saved = one(cpu) - one(cpu, 2)
    assert saved == sum(weight.numel() // 2 for weight in shared)

    # Of two KV heads each of four processes has one.
    of_kv = [
        module.weight
        for name, module in model.get_decoder().layers.named_modules()
        if name.endswith(("k_proj", "v_proj"))
    ]
    saved_more = one(cpu, 2) - one(cpu, 4)
    others = sum(weight.numel() for weight in shared) - sum(weight.numel() for weight in of_kv)
    assert abs(saved_more - others // 4) <= len(shared)


# Sizes that differ from those of the family's default config.
LARGE = {
    "Qwen3-VL-235B-A22B": (
        "qwen3_vl_moe",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 12288,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
        },
    ),
    "GLM-4.5V": ("glm4v_moe", {}),
    "Qwen3-Next-80B-A3B": (
        "qwen3_next",
        {
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "Qwen3.5-9B": ("qwen3_5", {}),
    "Qwen3.5-27B": (
        "qwen3_5",
        {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "intermediate_size": 17408,
            "linear_num_value_heads": 48,
        },
    ),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe", {}),
    "Qwen3.5-122B-A10B": (
        "qwen3_5_moe",
        {
            "hidden_size": 3072,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
            "linear_num_value_heads": 64,
        },
    ),
    "Qwen3.5-397B-A17B": (
        "qwen3_5_moe",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
            "linear_num_value_heads": 64,
        },
    ),
}


def large_config(name: str):
    family, sizes = LARGE[name]
    text = dict(sizes)
    if "num_hidden_layers" in text and family.startswith("qwen3_5"):
        kinds = ["linear_attention"] * 3 + ["full_attention"]
        text["layer_types"] = kinds * (text["num_hidden_layers"] // 4)
    config_class = CONFIG_MAPPING[family]
    if family in TEXT_FAMILIES:
        return config_class(**text)
    return config_class(text_config=text)


def fewest_processes(config, gigabytes: int) -> str:
    """On how many GPUs to a host a text of 131,072 tokens fits in bf16."""
    for num_processes in (1, 2, 4, 8, 16):
        planned = plan(
            config,
            tokens=131_072,
            tensor_parallel=num_processes,
            dtype="bfloat16",
            device_memory=gigabytes * 10**9,
        )
        if planned.fits:
            return str(num_processes)
    return "more than 16"


def test_the_page_says_on_how_many_gpus_large_models_fit():
    rows = []
    for name in LARGE:
        config = large_config(name)
        weights = plan(config, tokens=131_072, dtype="bfloat16", device_memory=1).weights
        of_80 = fewest_processes(config, 80)
        of_141 = fewest_processes(config, 141)
        rows.append([name, f"{weights / 1e9:.0f} GB", of_80, of_141])
    header = ["model in bf16", "weights", "T on GPUs of 80 GB", "of 141 GB"]
    require_table(ROOT / "docs" / "multi-gpu.md", text_table(header, rows))


def test_the_packaged_model_is_planned_as_it_is_prefilled():
    with av.open(demo.video_path()) as container:
        resolution = container.streams.video[0].height, container.streams.video[0].width
    planned, engine = (
        plan("demo", num_frames=8, resolution=resolution),
        Engine.from_pretrained("demo"),
    )
    state = engine.prefill("how many letters are shown", video=demo.video_path(), num_frames=8)
    assert planned.num_visual_tokens == state.inputs.num_visual_tokens
    assert abs(planned.num_tokens - state.num_tokens) < 100
    assert planned.weights == sum(weight.nbytes for weight in engine.model.parameters())
    layers = state.to_dynamic_cache().layers
    per_token = sum(layer.keys[:, :, :1].nbytes + layer.values[:, :, :1].nbytes for layer in layers)
    assert planned.hosts[0].kv == per_token * planned.num_tokens
    assert planned.fits


@pytest.mark.parametrize("family", [*VISION_FAMILIES, *TEXT_FAMILIES])
def test_a_familys_default_config_is_planned(family):
    """Which may lack fields that the tests' own configs have."""
    config = CONFIG_MAPPING[family]()
    if family == "mistral":
        config.sliding_window = None
    config.get_text_config().num_hidden_layers = 4
    planned = plan(config, tokens=1_000, hosts=2)
    assert planned.weights > 0 and min(planned.needed) > planned.weights


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_any_number_of_frames_is_planned_or_refused(family):
    """With the sizes that transformers gives the processor; the search for how many fit tries
    millions."""
    name = families.FAMILY_DATA[family]["processor"]["video"]
    processor = getattr(transformers, f"{name}VideoProcessor")()
    config = CONFIG_MAPPING[family]()
    assert video_size(config, 64, 720, 1280, processor).num_rows > 0
    for frames in (2**20, 2**24 - 1):
        try:
            assert video_size(config, frames, 720, 1280, processor).num_rows > 0
        except ValueError as error:
            assert f"leaves no pixel for each of {frames:,} frames" in str(error)


def test_no_more_frames_fit_than_the_processor_can_read(monkeypatch, tmp_path):
    path = families.save_checkpoint("video_llama_3", tmp_path)
    processor = transformers.VideoLlama3VideoProcessor()
    monkeypatch.setattr(planning, "read_video_processor", lambda path: processor)
    most = processor.size["longest_edge"]
    planned = plan(path, num_frames=64, device_memory=2**62)
    assert planned.fits and 64 < planned.most <= most
    with pytest.raises(
        ValueError, match=r"video_llama_3 model leaves no pixel for each of 2,000,000 frames"
    ):
        plan(path, num_frames=2_000_000)


@each_choice(hosts=[1, 4], kv=["gathered", "sharded"])
def test_as_many_tokens_fit_as_it_says(hosts, kv):
    settings = {"hosts": hosts, "prefill": PrefillConfig(kv=kv), "dtype": "bfloat16"}
    assert plan(LLAMA, tokens=500).weights == 2 * plan(LLAMA, tokens=500, dtype="bfloat16").weights
    memory = 2 * 10**9
    planned = plan(LLAMA, tokens=1_000_000, device_memory=memory, **settings)
    assert planned.most and plan(LLAMA, tokens=planned.most, device_memory=memory, **settings).fits
    more = plan(LLAMA, tokens=planned.most + 1, device_memory=memory, **settings)
    assert not more.fits and max(more.needed) > memory
    assert planned.fits == (planned.most >= 1_000_000)


@pytest.mark.thorough
def test_a_draft_takes_its_weights_and_the_kv_of_what_it_sees():
    def draft(**settings) -> int:
        return plan("demo", num_frames=64, speculate=SpeculativeConfig(**settings)).draft

    few = draft(draft_model="demo", keep_ratio=0.1)
    all_of_it = draft(draft_model="demo", strategy="vanilla")
    weights = sum(w.nbytes for w in Engine.from_pretrained(demo.draft_path()).model.parameters())
    assert weights < few < all_of_it
    assert draft(strategy="ngram") == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "frames of a video or the tokens"),
        ({"num_frames": 3, "tokens": 3}, "either the frames .* or the tokens"),
        ({"tokens": 5, "hosts": 0}, "hosts must be a whole number of at least 1"),
        ({"num_frames": "8"}, "not '8'"),
        ({"tokens": 5, "tensor_parallel": 3}, "across 3 processes"),
        ({"num_frames": 5}, "needs the processor"),
        ({"num_frames": 5, "resolution": "large"}, "'large' is not a resolution"),
        ({"tokens": 5, "dtype": "int8"}, "dtype must be one of"),
        (
            {"tokens": 500, "hosts": 2, "prefill": PrefillConfig(anchor_len=400)},
            "leaves no context",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        plan(LLAMA, **settings)


def test_longer_passing_blocks_in_some_layers_need_the_memory_of_such_a_layer():
    def of_passing(**lengths) -> list[int]:
        planned = plan(LLAMA, tokens=20_000, hosts=2, prefill=PrefillConfig(**lengths))
        return [host.stages["prefill"]["passing KV"] for host in planned.hosts]

    assert "activations" in str(
        plan("demo", num_frames=256, resolution="1080p", hosts=2, device_memory=4 * 10**9)
    )
    assert of_passing(early_passing_len=625) == of_passing(passing_len=625) > of_passing()
    scheduled = of_passing(passing_len=250, passing_weights=(1, 2.5, 0.5, 1))
    assert scheduled == of_passing(passing_len=500)
    # 4 blocks share an eighth of the prompt.
    assert of_passing(passing_budget=0.125) == of_passing(passing_len=625)


def test_short_passing_blocks_are_warned_of():
    def warning(num_tokens: int, **settings) -> str | None:
        return plan(LLAMA, tokens=num_tokens, hosts=2, prefill=PrefillConfig(**settings)).warning

    assert "l_p below 256" in warning(4096, passing_len=128)
    assert "l_a below 128" in warning(4096, anchor_len=32)
    assert "with early_passing_len = 625, and more so with passing_len = 625" in warning(20_000)
    assert warning(20_000, passing_len=625) is warning(20_000, early_passing_len=625) is None
    pruned = plan(
        "demo",
        num_frames=40_000,
        hosts=2,
        prefill=PrefillConfig(reduce=ReduceConfig(method="fastvid", ratio=0.25)),
    )
    assert (
        f"passing_len = {-(-pruned.num_left // 32):,}" in pruned.warning
        and pruned.num_left < pruned.num_tokens / 3
    )
    assert (
        warning(4096)
        is warning(300, passing_len=64)
        is warning(4096, method="star", anchor_len=32)
        is None
    )


@pytest.mark.parametrize(("gigabytes", "status", "said"), [("4", 0, "yes"), ("0.02", 1, "no")])
def test_the_command_says_so_and_ends_with_a_status(capsys, gigabytes, status, said):
    assert main(["--model", "demo", "--frames", "64", "--device-memory", gigabytes]) == status
    table = dict(
        line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line.strip()
    )
    assert table["fits"].strip() == said
    assert main(["--model", "nowhere/at all", "--frames", "64"]) == 79
    assert capsys.readouterr().err.startswith("error: cannot load the model nowhere")
