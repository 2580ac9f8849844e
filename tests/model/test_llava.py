"""What LLaVA checkpoints differ in: vision towers, the layers that are read, old processors."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers as tf

from apbv import Engine, HostGroup, ModelInputs, PrefillConfig, ReduceConfig, plan, prefill
from apbv.errors import UnsupportedModelError
from apbv.model.families import require_supported
from apbv.model.parts import inspect_model

from apbv_tests import families
from apbv_tests.pairs import each_choice
from apbv_tests.prompts import processed

QUESTION = "What is shown?"
LLAVA_FAMILIES = ("llava", "llava_next", "llava_next_video")
CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
# By name: the tower, what its rows are selected by, and the layers that are read.
CHECKPOINTS = {
    "CLIP, without the class token": ("clip_vision_model", "default", -2),
    "CLIP, with the class token": ("clip_vision_model", "full", -2),
    "CLIP, two layers": ("clip_vision_model", "default", [-2, -1]),
    "SigLIP": ("siglip_vision_model", "full", -1),
    "SigLIP, without the first patch": ("siglip_vision_model", "default", -1),
    "SigLIP, two layers": ("siglip_vision_model", "full", [1, -1]),
}
# What transformers itself cannot lay out in tiles, or pool.
ONLY_IN_1_5 = ("CLIP, with the class token", "SigLIP, without the first patch")
CASES = [
    (family, name)
    for family, name in product(LLAVA_FAMILIES, CHECKPOINTS)
    if family == "llava" or name not in ONLY_IN_1_5
]


def save(family: str, name: str, path: Path) -> Path:
    """Save a tiny checkpoint of such a tower, whose processor counts as transformers needs it."""
    tower, strategy, layer = CHECKPOINTS[name]
    config = families.build_config(family)
    vision = config.vision_config.to_dict() | {"model_type": tower, "vision_use_head": False}
    settings = config.to_dict() | {
        "vision_config": vision,
        "vision_feature_select_strategy": strategy,
        "vision_feature_layer": layer,
    }
    config = type(config).from_dict(settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tf.AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
        families.randomise(model)
    model.generation_config.eos_token_id = config.get_text_config().eos_token_id
    model.save_pretrained(path)
    processor = families.build_processor(family)
    processor.vision_feature_select_strategy = strategy
    processor.num_additional_image_tokens = CLASS_TOKENS[tower]
    processor.save_pretrained(path)
    return path


def forget(path: Path, *names: str) -> None:
    """Remove fields from a saved processor, as older releases wrote it without."""
    file = path / "processor_config.json"
    told = json.loads(file.read_text())
    for name in names:
        del told[name]
    file.write_text(json.dumps(told))


def prompt_of(family: str) -> tuple:
    shown = [families.synthetic_image(84, 112), families.synthetic_image(56, 140, seed=1)]
    if family == "llava_next_video":
        shown.append(families.synthetic_video(5, 56, 70))
    return (*shown, QUESTION)


def prefill_job(hosts: HostGroup, path: str, batch: dict):
    engine = Engine.from_pretrained(path, hosts=hosts)
    config = PrefillConfig(method="zigzag_ring")
    return prefill(engine.model, batch, hosts=hosts, config=config).logits


@pytest.mark.parametrize(("family", "name"), CASES)
def test_every_tower_and_selection_of_its_rows_is_that_of_transformers(
    pool, tmp_path, monkeypatch, family, name
):
    """Of a batch that the caller's processor made, whose tokens are counted from the config."""
    path = save(family, name, tmp_path)
    processor = tf.AutoProcessor.from_pretrained(path)
    monkeypatch.setattr(families, "build_processor", lambda family: processor)
    batch = processed(family, *prompt_of(family))
    model = tf.AutoModelForImageTextToText.from_pretrained(path).eval()
    with torch.no_grad():
        expected = model(**batch).logits[:, -1]
    for logits in pool.run(2, prefill_job, str(path), batch):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


LACKS = {
    "patch_size": ["patch_size"],
    "the class token": ["num_additional_image_tokens"],
    "all": ["patch_size", "num_additional_image_tokens", "vision_feature_select_strategy"],
}


@each_choice(family=LLAVA_FAMILIES, lacks=LACKS)
def test_a_processor_of_an_older_release_counts_as_the_model_does(tmp_path, family, lacks):
    hosts = HostGroup.single("cpu")
    images = [families.synthetic_image(84, 112)]
    path = save(family, "CLIP, without the class token", tmp_path)
    request = {"prompt": QUESTION, "images": images, "max_new_tokens": 3}
    expected = Engine.from_pretrained(path, hosts=hosts).generate(**request)
    forget(path, *LACKS[lacks])
    found = Engine.from_pretrained(path, hosts=hosts).generate(**request)
    assert found.token_ids == expected.token_ids
    assert found.stats["num_video_tokens"] == expected.stats["num_video_tokens"]


@pytest.mark.parametrize("height", [30, 84, 95])
@pytest.mark.parametrize("width", [40, 112, 300])
@pytest.mark.parametrize("family", ["llava_next", "llava_next_video"])
def test_the_rows_of_tiles_are_those_that_the_processor_counts(family, height, width):
    """With a newline after every row of patches, also where padding is cut off."""
    parts = inspect_model(families.build_model(family))
    batch = processed(family, families.synthetic_image(height, width), QUESTION)
    inputs = ModelInputs.from_processor(parts, batch, HostGroup.single("cpu"))
    assert inputs.num_visual_tokens == parts.num_image_rows(torch.tensor([height, width]))


def test_a_tower_of_another_kind_is_refused():
    """Pixtral is LLaVA by its type; its images have as many tokens as their size needs."""
    config = tf.LlavaConfig(vision_config=tf.PixtralVisionConfig())
    message = "^llava with a pixtral is not supported; supported vision towers are clip_vision_"
    with pytest.raises(UnsupportedModelError, match=message):
        require_supported(config)


@pytest.mark.parametrize("family", families.IMAGE_FAMILIES)
def test_what_needs_a_video_is_refused_for_models_of_images(tmp_path, family):
    """Prompts are refused in tests/engine/test_engine.py."""
    path = families.save_checkpoint(family, tmp_path)
    with pytest.raises(ValueError, match=f"^{family} models read images only: give the tokens"):
        plan(path, num_frames=8)
    assert plan(path, tokens=1_000).fits
    reduce = PrefillConfig(reduce=ReduceConfig(method="fastvid"))
    message = f"^fastvid prunes a video's visual tokens, but {family} models read images only"
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(path, hosts=HostGroup.single("cpu"), prefill=reduce)
