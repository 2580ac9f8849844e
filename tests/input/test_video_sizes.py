"""Limits on the pixels of a video's frames, as its part of a message gives them."""

import pytest
import torch
from torchvision.transforms.v2 import functional as tvF

from apbv import Engine, HostGroup, ModelInputs, PrefillConfig
from apbv.errors import PromptError
from apbv.input.media.video import probe
from apbv.input.prompts.prompt_reader import PromptReader
from apbv.model.parts import inspect_model
from apbv.request.request import Question
from apbv.stats import StageTimer

from apbv_tests import families
from apbv_tests.prompts import by_processor, sampled

HOSTS = HostGroup.single("cpu")
QUESTION = "What happens?"
WITHOUT_GRIDS = ("internvl", "llava_onevision", "llava_next_video", "video_llama_3")
WITH_GRIDS = [family for family in families.VIDEO_FAMILIES if family not in WITHOUT_GRIDS]


def read(reader: PromptReader, clip, *options: dict):
    """The inputs of a chat about a clip, several times, each with its own options."""
    content = [{"type": "video", "video": str(clip), **each} for each in options]
    question = Question(messages=[{"role": "user", "content": [*content, QUESTION]}], num_frames=4)
    prompt = reader.render(question)
    videos = reader.sample([probe(clip)] * len(options), question, prompt.sampling)
    return reader.read(prompt, videos, HOSTS, StageTimer(HOSTS))


def reader_of(family: str) -> PromptReader:
    return PromptReader(
        inspect_model(families.build_model(family)), families.build_processor(family), 8
    )


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize(("least", "most"), [(1, 2000), (1, 784), (9000, 12000)])
def test_frames_have_the_size_that_the_processor_makes_of_these_limits(family, clip, least, most):
    """The processor's own limits are those of a frame, too."""
    frames, told = sampled(clip, 4)
    processor = families.build_processor(family)
    processor.video_processor.size = {"shortest_edge": least, "longest_edge": most}
    expected = by_processor(
        processor, [{"type": "video"}, {"type": "text", "text": QUESTION}], [(frames, told)]
    )
    inputs, pixels = read(reader_of(family), clip, {"min_pixels": least, "max_pixels": most})
    assert torch.equal(inputs.input_ids, expected["input_ids"])
    (chunk,) = inputs.with_pixels(pixels).visual.pixels.chunks([inputs.visual.patches[0]])
    assert torch.equal(chunk.values["pixel_values_videos"], expected["pixel_values_videos"])


@pytest.mark.parametrize("family", WITH_GRIDS)
def test_total_pixels_are_shared_by_the_frames_as_in_qwens_tools(family, clip):
    """The frames of a temporal patch count once; every frame may have one token, or what min_pixels
    says."""
    reader = reader_of(family)
    video_processor = reader.processor.video_processor
    factor = video_processor.patch_size * video_processor.merge_size
    for total, own in (
        (2 * 2 * factor**2, {}),
        (1, {}),
        (1, {"min_pixels": 2 * factor**2}),
        (10**9, {"max_pixels": 2000}),
    ):
        least = own.get("min_pixels", factor**2)
        most = own.get("max_pixels", 10**9)
        shared = min(most, max(total / 4 * 2, int(least * 1.05)))
        expected = read(reader, clip, {"max_pixels": int(shared)})[0]
        assert torch.equal(
            read(reader, clip, {**own, "total_pixels": total})[0].input_ids, expected.input_ids
        )


@pytest.mark.parametrize("family", WITH_GRIDS)
def test_frames_have_exactly_the_size_that_is_asked_for(family, clip):
    """Up to whole tokens; the pixels are those of frames resized before the processor, which leaves
    their size."""
    reader = reader_of(family)
    video_processor = reader.processor.video_processor
    factor = video_processor.patch_size * video_processor.merge_size
    inputs, pixels = read(reader, clip, {"resized_height": 2 * factor + 3, "resized_width": 1})
    frames, told = sampled(clip, 4)
    frames = tvF.resize(frames, [2 * factor, factor], tvF.InterpolationMode.BICUBIC, antialias=True)
    options = {
        "video_metadata": [told],
        "do_sample_frames": False,
        "do_resize": False,
        "return_tensors": "pt",
    }
    expected = video_processor(videos=[frames], **options)
    (chunk,) = inputs.with_pixels(pixels).visual.pixels.chunks([inputs.visual.patches[0]])
    assert torch.equal(chunk.values["pixel_values_videos"], expected["pixel_values_videos"])
    assert inputs.visual.num_rows == 2 * expected["video_grid_thw"][0, 0]


def logits_job(hosts: HostGroup, family: str, messages: list[dict]) -> torch.Tensor:
    engine = Engine(
        families.build_model(family, dtype=torch.float64),
        families.build_processor(family),
        hosts,
        PrefillConfig(method="zigzag_ring"),
    )
    return engine.prefill(messages=messages, num_frames=4).logits


@torch.no_grad()
def test_hosts_that_share_a_resized_video_prefill_as_transformers(pool, clip):
    """Which gets the limits as those of its processor."""
    family = "qwen2_5_vl"
    limits = {"min_pixels": 1, "max_pixels": 2000}
    frames, told = sampled(clip, 4)
    processor = families.build_processor(family)
    processor.video_processor.size = {"shortest_edge": 1, "longest_edge": 2000}
    content = [{"type": "video", "video": str(clip), **limits}, {"type": "text", "text": QUESTION}]
    batch = by_processor(processor, content, [(frames, told)])
    expected = families.build_model(family, dtype=torch.float64)(**batch).logits[:, -1]
    for logits in pool.run(2, logits_job, family, [{"role": "user", "content": content}]):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", WITH_GRIDS)
def test_no_frame_has_more_pixels_than_its_limit(family, clip):
    """Others of the same prompt keep the model's size; a wide limit changes nothing."""
    reader = reader_of(family)
    side = reader.processor.video_processor.patch_size * reader.processor.video_processor.merge_size
    most = {"max_pixels": side * side}
    usual = read(reader, clip, {})[0]
    limited = read(reader, clip, most)[0]
    both = read(reader, clip, {}, most)[0]
    wide = read(reader, clip, {"max_pixels": 10**6, "min_pixels": 1})[0]

    def num_rows(inputs: ModelInputs) -> list[int]:
        return [item.num_rows for item in inputs.visual.items]

    assert num_rows(limited)[0] < num_rows(usual)[0]
    assert num_rows(both) == [num_rows(usual)[0], num_rows(limited)[0]]
    assert num_rows(wide) == num_rows(usual)
    assert limited.visual.items[0].num_rows == limited.visual.items[0].num_patches  # a token each
    assert usual.visual.identity != limited.visual.identity
    assert torch.equal(usual.input_ids, wide.input_ids)


def test_what_no_frame_can_be_is_named(clip):
    reader = reader_of("qwen2_5_vl")
    for options, message in (
        ({"max_pixels": 783}, "cannot have .* to 783 pixels: the sides are multiples of 28"),
        (
            {"min_pixels": 2000, "max_pixels": 1000},
            "min_pixels of a video is 2000, but max_pixels is 1000",
        ),
        ({"max_pixels": 0}, "max_pixels of a video must be an integer of at least 1"),
        (
            {"min_pixels": 10**9},
            "a video's frames may be enlarged to 12845056 pixels, not 1000000000",
        ),
        (
            {"resized_height": 10**6, "resized_width": 28},
            "may be enlarged to 12845056 pixels, not 28000000",
        ),
        (
            {"resized_height": 28},
            "resized_height and resized_width are given together or not at all",
        ),
        (
            {"resized_height": 28, "resized_width": 28, "max_pixels": 1},
            "set the size: they exclude max_pixels",
        ),
    ):
        with pytest.raises(PromptError, match=message):
            read(reader, clip, options)
    for family in WITHOUT_GRIDS:
        for options in (
            {"max_pixels": 784},
            {"total_pixels": 784},
            {"resized_height": 28, "resized_width": 28},
        ):
            with pytest.raises(PromptError, match="do not apply to this model"):
                read(reader_of(family), clip, options)
