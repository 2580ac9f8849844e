"""Limits on an image's pixels, and its size, as its part of a message gives them."""

import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as tvF

from apbv import Engine, HostGroup, ModelInputs, PrefillConfig, ReuseConfig
from apbv.errors import PromptError
from apbv.input.prompts.prompt_reader import PromptReader
from apbv.model.parts import inspect_model
from apbv.request.request import Question
from apbv.stats import StageTimer

from apbv_tests import families
from apbv_tests.prompts import by_processor

HOSTS = HostGroup.single("cpu")
QUESTION = "What is it?"
WITH_LIMITS = [
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    families.OMNI,
    "glm4v",
    "glm46v",
    "glm_ocr",
    "video_llama_3",
]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("pictures")
    paths = []
    for number, (height, width) in enumerate([(84, 112), (168, 56), (60, 200)]):
        paths.append(str(folder / f"{number}.png"))
        families.synthetic_image(height, width, seed=number).save(paths[-1])
    return paths


def chat(*images: tuple[str, dict]) -> list[dict]:
    content = [{"type": "image", "image": path, **options} for path, options in images]
    return [{"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]}]


def reader_of(family: str) -> PromptReader:
    return PromptReader(
        inspect_model(families.build_model(family)), families.build_processor(family), 8
    )


def read(reader: PromptReader, messages: list[dict], chunk: int = 10):
    """The inputs, and the pixels in chunks of some images."""
    prompt = reader.render(Question(messages=messages))
    inputs, pixels = reader.read(prompt, [], HOSTS, StageTimer(HOSTS))
    everything = inputs.visual.patches[0]
    chunks = [everything[start : start + chunk] for start in range(0, len(everything), chunk)]
    made = list(inputs.with_pixels(pixels).visual.pixels.chunks(chunks))
    return inputs, torch.cat([each.values["pixel_values"] for each in made])


def processed(family: str, messages: list[dict], **size) -> dict:
    processor = families.build_processor(family)
    processor.image_processor.size = {**dict(processor.image_processor.size), **size}
    content = messages[0]["content"]
    images = [
        Image.open(part["image"]).convert("RGB") for part in content if part["type"] == "image"
    ]
    return by_processor(processor, content, images=images)


@pytest.mark.parametrize("family", WITH_LIMITS)
@pytest.mark.parametrize(("least", "most"), [(1, 2500), (9000, 16000), (20000, 40000)])
def test_images_are_those_of_the_processor_with_these_limits(family, pictures, least, most):
    """GLM's counts each pixel of an image twice."""
    counted = 2 if family.startswith("glm") else 1
    messages = chat(*[(path, {"min_pixels": least, "max_pixels": most}) for path in pictures[:2]])
    batch = processed(family, messages, shortest_edge=least * counted, longest_edge=most * counted)
    reader = reader_of(family)
    expected = ModelInputs.from_processor(reader.parts, batch, HOSTS)
    for chunk in (1, 2):
        inputs, pixels = read(reader, messages, chunk)
        assert torch.equal(inputs.input_ids, expected.input_ids)
        assert torch.equal(inputs.position_ids, expected.position_ids)
        assert torch.equal(pixels, torch.as_tensor(batch["pixel_values"]))


def test_a_single_limit_goes_before_the_models_other_one(pictures):
    """Whose images have 784 pixels at least."""
    reader = reader_of("qwen2_5_vl")
    own = reader.processor.image_processor.size
    for options in ({"max_pixels": 784}, {"min_pixels": own["longest_edge"] + 784 * 10}):
        inputs, _ = read(reader, chat((pictures[0], options)))
        num_pixels = inputs.visual.num_rows * 784
        assert num_pixels <= options.get("max_pixels", 10**9)
        assert num_pixels >= options.get("min_pixels", 0)


@pytest.mark.parametrize("family", WITH_LIMITS)
def test_an_image_has_exactly_the_size_that_is_asked_for(family, pictures):
    reader = reader_of(family)
    image_processor = reader.processor.image_processor
    factor = image_processor.patch_size * image_processor.merge_size
    size = {"resized_height": 3 * factor - 2, "resized_width": 2 * factor + 2}
    _, pixels = read(reader, chat((pictures[2], size)))
    image = tvF.pil_to_tensor(Image.open(pictures[2]).convert("RGB"))
    image = tvF.resize(
        image, [3 * factor, 2 * factor], tvF.InterpolationMode.BICUBIC, antialias=True
    )
    expected = image_processor(images=[image], do_resize=False, return_tensors="pt")
    assert torch.equal(pixels, expected["pixel_values"])


def logits_job(
    hosts: HostGroup, family: str, requests: list[list[dict]], **options
) -> list[torch.Tensor]:
    engine = Engine(
        families.build_model(family, dtype=torch.float64),
        families.build_processor(family),
        hosts,
        PrefillConfig(method="zigzag_ring" if hosts.size > 1 else "full"),
        **options,
    )
    return [engine.prefill(messages=messages).logits for messages in requests]


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm4v"])
def test_hosts_that_share_images_of_several_sizes_prefill_as_transformers(pool, pictures, family):
    """Each with its own options, or none, between others."""
    options = [
        {"max_pixels": 2500},
        {},
        {"min_pixels": 20000},
        {},
        {"resized_height": 56, "resized_width": 84},
    ]
    messages = chat(*zip([*pictures, *pictures], options, strict=False))
    counted = 2 if family.startswith("glm") else 1
    images = [Image.open(path).convert("RGB") for path in [*pictures, *pictures]]
    processor = families.build_processor(family)
    made = []
    own = dict(processor.image_processor.size)
    for image, each in zip(images, options, strict=False):
        size = {"shortest_edge": min(own["shortest_edge"], counted * each.get("max_pixels", 10**9))}
        size["longest_edge"] = own["longest_edge"]
        if "min_pixels" in each:
            size["shortest_edge"] = counted * each["min_pixels"]
            size["longest_edge"] = max(size.values())
        if "max_pixels" in each:
            size["longest_edge"] = counted * each["max_pixels"]
        if "resized_height" in each:
            tensor = tvF.pil_to_tensor(image)
            tensor = tvF.resize(tensor, [56, 84], tvF.InterpolationMode.BICUBIC, antialias=True)
            made.append(
                processor.image_processor(images=[tensor], do_resize=False, return_tensors="pt")
            )
        else:
            made.append(processor.image_processor(images=[image], size=size, return_tensors="pt"))
    # The processor's prompt is that of images of these sizes, as far as its own limits reach.
    processor.image_processor.size = {"shortest_edge": 1, "longest_edge": 10**9}
    sides = [
        (each["image_grid_thw"][0, 1:] * processor.image_processor.patch_size).tolist()
        for each in made
    ]
    blank = [Image.new("RGB", (width, height)) for height, width in sides]
    batch = by_processor(processor, messages[0]["content"], images=blank)
    batch["pixel_values"] = torch.cat([each["pixel_values"] for each in made])
    expected = families.build_model(family, dtype=torch.float64)(**batch).logits[:, -1]
    for (logits,) in pool.run(2, logits_job, family, [messages]):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_same_image_at_another_size_is_encoded_anew(pictures):
    """Also at one with as many tokens."""
    options = [
        {"resized_height": 56, "resized_width": 84},
        {"resized_height": 84, "resized_width": 56},
        {},
    ]
    requests = [chat((pictures[0], each)) for each in [*options, options[0]]]
    found = logits_job(HOSTS, "qwen2_5_vl", requests, reuse=ReuseConfig())
    for messages, logits in zip(requests, found, strict=True):
        (expected,) = logits_job(HOSTS, "qwen2_5_vl", [messages])
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_what_no_image_can_be_is_named(pictures):
    reader = reader_of("qwen2_5_vl")
    for options, message in (
        (
            {"max_pixels": 783},
            "an image cannot have 1 to 783 pixels: the sides are multiples of 28",
        ),
        ({"min_pixels": 10**8}, "an image may be enlarged to 12845056 pixels, not 100000000"),
        ({"min_pixels": 2, "max_pixels": 1}, "min_pixels of an image is 2, but max_pixels is 1"),
        ({"max_pixels": 2.5}, "max_pixels of an image must be an integer of at least 1"),
        ({"total_pixels": 9}, "total_pixels beside image cannot be followed: options of videos"),
    ):
        with pytest.raises(PromptError, match=message):
            read(reader, chat((pictures[0], options)))
    for family in ("internvl", "llava_onevision", "llava", "llava_next", "llava_next_video"):
        for options in ({"max_pixels": 784}, {"resized_height": 28, "resized_width": 28}):
            with pytest.raises(PromptError, match="of an image do not apply to this model"):
                read(reader_of(family), chat((pictures[0], options)))
