"""Prompts whose runs of placeholders are tokenised as one, against the processors' own calls."""

import pytest
import torch
from transformers.video_utils import VideoMetadata

from apbv.input.prompts.tokenized_prompt import process

from apbv_tests import families
from apbv_tests.families import VIDEO_FAMILIES, VISION_FAMILIES
from apbv_tests.pairs import each_choice

FAMILY = pytest.mark.parametrize("family", VIDEO_FAMILIES)
SEEING_FAMILY = pytest.mark.parametrize("family", VISION_FAMILIES)
VIDEO = {"type": "video"}
IMAGE = {"type": "image"}


def prompt(family: str, *parts: dict | str) -> str:
    """A turn of videos, images and texts, as the chat template writes it."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    turns = [{"role": "user", "content": content}]
    return families.build_processor(family).apply_chat_template(
        turns, add_generation_prompt=True, tokenize=False
    )


def video(frames: int, device: str = "cpu") -> dict:
    """A clip, on the meta device without its pixels, at times that are not equally spaced."""
    places = [round(2.3 * index) for index in range(frames)]
    metadata = VideoMetadata(total_num_frames=3 * frames, fps=8.0, frames_indices=places)
    pixels = families.synthetic_video(frames).to(device)
    return {"videos": [pixels], "video_metadata": [metadata], "do_sample_frames": False}


def images(*sizes: tuple[int, int]) -> dict:
    return {
        "images": [families.synthetic_image(*size, seed=seed) for seed, size in enumerate(sizes)]
    }


def both(family: str, text: str, shown: dict, told: dict | None = None) -> tuple[dict, dict]:
    """What ``process`` makes of a prompt, and what the processor itself does.

    Args:
        told: what ``process`` is told instead, such as pixels without storage.
    """
    processor = families.build_processor(family)
    expected = processor(text=[text], return_tensors="pt", **shown)
    if told is None:
        told = shown
    return process(processor, text, **told), expected


def require_equal(output, expected) -> None:
    assert list(output) == list(expected)
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert output[name] == value, name
            continue
        assert output[name].dtype == value.dtype and output[name].shape == value.shape, name
        assert output[name].is_meta or torch.equal(output[name], value), name


# Behind the video or the images. The last has whitespace that a tokenizer might join with a special
# token's.
QUESTIONS = ["What happens?", "", "  two  spaces,\n\n\ttabs   and é日 ", "\n \n  "]


@each_choice(family=VIDEO_FAMILIES, question=QUESTIONS, device=["cpu", "meta"])
def test_a_video(family, question, device):
    """Qwen3-VL has times between its frames, InternVL wraps each one, LLaVA-OneVision adds a
    newline."""
    # Its own compares pixels, see test_repeats.py.
    device = "cpu" if family == "video_llama_3" else device
    # LLaVA-NeXT-Video's processor turns pixels into an array, which needs them.
    shown = video(7, "cpu" if family == "llava_next_video" else device)
    output, expected = both(
        family, prompt(family, " ", VIDEO, question), shown, told=video(7, device)
    )
    require_equal(output, expected)
    assert output["input_ids"].shape[1] > 20


@SEEING_FAMILY
def test_images(family):
    require_equal(*both(family, prompt(family, IMAGE, "What is this?"), images((84, 112))))
    two = prompt(family, "One: ", IMAGE, " two:", IMAGE, ". Which?")
    require_equal(*both(family, two, images((84, 112), (56, 140))))
    neighbours = f"Which? {families.build_processor(family).image_token * 2}"
    require_equal(*both(family, neighbours, images((84, 112), (56, 140))))


@each_choice(family=VIDEO_FAMILIES, copies=[1, 3])
def test_a_placeholder_in_the_question(family, copies):
    """A video's prompt may have an image's placeholder as text; where both are one, transformers
    refuses."""
    processor = families.build_processor(family)
    text = prompt(
        family, VIDEO, f"What is {processor.image_token * copies}, or {processor.image_token}?"
    )
    try:
        expected = processor(text=[text], return_tensors="pt", **video(4))
    except Exception as error:
        with pytest.raises(type(error)):
            process(processor, text, **video(4))
    else:
        require_equal(process(processor, text, **video(4)), expected)


@FAMILY
def test_the_tokenizer_sees_one_placeholder_of_a_run(family, monkeypatch):
    processor = families.build_processor(family)
    seen = []
    tokenize = type(processor.tokenizer).__call__

    def recorded(self, text, *args, **kwargs):
        seen.extend(text)
        return tokenize(self, text, *args, **kwargs)

    monkeypatch.setattr(type(processor.tokenizer), "__call__", recorded)
    output = process(processor, prompt(family, VIDEO, "What happens?"), **video(8))
    own_name = family != "internvl" and not family.startswith("glm")  # for a video's tokens
    token = processor.video_token if own_name else processor.image_token
    token_id = processor.tokenizer.convert_tokens_to_ids(token)
    # A frame, or two that are merged, or the video.
    runs = {"internvl": 8, "video_llama_3": 8}.get(
        family, 4 if family.startswith(("qwen3", "glm")) else 1
    )
    assert [text.count(token) for text in seen] == [runs]
    assert int((output["input_ids"] == token_id).sum()) >= 4 * runs


@FAMILY
def test_the_processor_is_left_as_it_was(family):
    processor = families.build_processor(family)
    before = dict(vars(processor))
    text = prompt(family, VIDEO, "What happens?")
    process(processor, text, **video(4))
    with pytest.raises(Exception):  # noqa: B017  (each family says it in its own way)
        process(processor, text * 2, **video(4))
    assert vars(processor) == before
