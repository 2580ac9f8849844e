"""What each host prepares and encodes, against the processor and the vision tower on the whole
input."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
import torch
from transformers.video_utils import VideoMetadata

from apbv import HostGroup, ModelInputs
from apbv.errors import PromptError
from apbv.hosts import HostLinks
from apbv.input.media.video import VideoInfo, iter_frames, probe, read_frames, sample_uniform
from apbv.input.prompts.pixels import SourcePixels, preprocess_frames
from apbv.input.prompts.prompt_reader import PromptReader
from apbv.input.prompts.tokenized_prompt import SampledVideo
from apbv.layout import split_evenly
from apbv.model.parts import inspect_model
from apbv.prefilling.encoding.vision import encode_visual
from apbv.request.request import Question
from apbv.stats import StageTimer

from apbv_tests import families
from apbv_tests.families import VIDEO_FAMILIES
from apbv_tests.pairs import each_choice
from apbv_tests.prompts import by_processor
from apbv_tests.video_files import VFR, encode


def read_video(
    parts, processor, question: str, info: VideoInfo, frames: Sequence[int], hosts: HostGroup
) -> tuple[ModelInputs, SourcePixels]:
    """A question about some frames of a video."""
    reader = PromptReader(parts, processor, len(frames))
    rendered = reader.render(Question(question, video=info.path))
    return reader.read(rendered, [SampledVideo(info, tuple(frames))], hosts, StageTimer(hosts))


QUESTION = "What happens?"


def one_of(rank: int, size: int) -> HostGroup:
    """Host ``rank`` of ``size`` for work that needs no exchange."""
    return HostGroup(device=torch.device("cpu"), timeout=0.0, links=HostLinks(rank, size))


def assert_encoded_alike(pieces: list[torch.Tensor], whole: torch.Tensor) -> None:
    """Up to rounding: how a product of matrices is summed up depends on the CPU and on the number
    of rows."""
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-4, atol=1e-4)


def shown(kind: str, count: int = 1) -> list[dict]:
    return [{"type": kind}] * count + [{"type": "text", "text": QUESTION}]


def whole_batch(processor, info: VideoInfo, picked, pixels: torch.Tensor) -> dict:
    """The processor on the whole video, told in milliseconds."""
    if info.has_constant_rate:
        fps = info.fps
        total = info.num_frames
    else:
        fps = 1000
        total = round(info.duration * 1000)
    metadata = VideoMetadata(
        total_num_frames=total,
        fps=fps,
        width=info.width,
        height=info.height,
        duration=info.duration,
        frames_indices=[round(info.timestamps[i] * fps) for i in picked],
    )
    return by_processor(processor, shown("video"), [(pixels.permute(0, 3, 1, 2), metadata)])


@each_choice(family=VIDEO_FAMILIES, frames=[4, 13], num_hosts=[3, 8, 1, 2])
def test_pieces_from_a_file_are_those_of_the_whole(family, frames, num_hosts, tmp_path):
    """Pixels to the bit; more hosts than frames, odd frame counts, a variable rate, frames that get
    resized."""
    processor = families.build_processor(family)
    parts = inspect_model(families.build_model(family))
    info = probe(encode(tmp_path / "clip.mp4", n=20, pts=VFR[:20], size=(150, 222)))
    picked = sample_uniform(info, frames)

    pieces = []
    for rank in range(num_hosts):
        hosts = one_of(rank, num_hosts)
        inputs, pixels = read_video(parts, processor, QUESTION, info, picked, hosts)
        pieces.append(inputs.with_pixels(pixels))

    whole = whole_batch(processor, info, picked, torch.from_numpy(read_frames(info, picked)))
    reference = ModelInputs.from_processor(parts, whole, HostGroup.single("cpu"))
    expected = pixels_of(reference, 99)
    for chunk_size in (1, 2, 99):
        assert torch.equal(
            torch.cat([pixels_of(piece, chunk_size) for piece in pieces if piece.visual.pixels]),
            expected,
        )
    for piece in pieces:
        assert torch.equal(piece.input_ids, reference.input_ids)
        assert torch.equal(piece.position_ids, reference.position_ids)
        assert piece.context_start == reference.context_start
        assert piece.query_start == reference.query_start
    rows = list(chain.from_iterable(pieces[0].visual.pieces))
    assert rows == list(range(reference.num_visual_tokens))

    assert_encoded_alike(
        [encode_visual(parts, piece.visual) for piece in pieces],
        encode_visual(parts, reference.visual),
    )


def pixels_of(inputs: ModelInputs, chunk_size: int) -> torch.Tensor:
    """All pixels of a host, read in chunks of some temporal patches."""
    flat = []
    mine = inputs.visual.patches[inputs.visual.host]
    chunks = [mine[start : start + chunk_size] for start in range(0, len(mine), chunk_size)]
    for chunk, patches in zip(inputs.visual.pixels.chunks(chunks), chunks, strict=True):
        assert chunk.patches == patches
        pixels = chunk.values.get("pixel_values_videos", chunk.values.get("pixel_values"))
        flat.append(pixels.flatten(0, 1) if pixels.dim() == 5 else pixels)
    return torch.cat(flat)


def test_a_long_video_is_resized_as_a_whole():
    """Qwen3-VL's frame size depends on the number of frames; a piece must not get a size of its
    own."""
    processor = families.build_processor("qwen3_vl")
    frames = families.synthetic_video(40, 160, 224).permute(0, 2, 3, 1)
    whole = processor.video_processor(
        videos=[frames.permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="pt"
    )
    grid = whole["video_grid_thw"]
    parts = [
        preprocess_frames(processor, frames[r.start : r.stop], grid)
        for r in split_evenly(range(40), 4)
    ]
    assert torch.equal(
        torch.cat([p["pixel_values_videos"] for p in parts]), whole["pixel_values_videos"]
    )
    alone = processor.video_processor(
        videos=[frames[:10].permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="pt"
    )
    assert not torch.equal(alone["video_grid_thw"][0, 1:], grid[0, 1:]), (
        "the case must be one that differs"
    )


def text_batch(**changes) -> dict:
    return {"input_ids": torch.arange(12)[None], **changes}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            text_batch(input_ids=torch.zeros(2, 12, dtype=torch.long)),
            r"one prompt at a time.*\[2, 12\]",
        ),
        (text_batch(input_ids=torch.zeros(1, 0, dtype=torch.long)), "empty"),
        (text_batch(attention_mask=torch.tensor([[0] + [1] * 11])), "padded"),
        (text_batch(pixel_values_videos=torch.zeros(4, 3)), "no placeholder tokens"),
        ({}, "no input_ids"),
    ],
    ids=["batch of 2", "no tokens", "padded", "pixels without placeholders", "nothing"],
)
def test_what_cannot_be_prefilled_is_refused(batch, message):
    parts = inspect_model(families.build_model("qwen2_5_vl"))
    with pytest.raises(PromptError, match=message):
        ModelInputs.from_processor(parts, batch, HostGroup.single("cpu"))


def test_pixels_of_other_items_than_the_prompts_are_refused():
    processor = families.build_processor("qwen2_vl")
    parts = inspect_model(families.build_model("qwen2_vl"))
    video = families.synthetic_video(4, 56, 56)
    metadata = VideoMetadata(total_num_frames=4, fps=4.0, frames_indices=list(range(4)))
    one = by_processor(processor, shown("video"), [(video, metadata)])
    two = by_processor(processor, shown("video", 2), [(video, metadata)] * 2)
    image = by_processor(processor, shown("image"), images=[families.synthetic_image()])
    pixels = ("pixel_values_videos", "video_grid_thw")
    for batch, message in [
        (two | {name: one[name] for name in pixels}, "no video at placeholder 8"),
        (
            one | {name: two[name] for name in pixels},
            "another video at placeholder 0|more images or videos",
        ),
        (
            one | {name: image[name] for name in ("pixel_values", "image_grid_thw")},
            "more images or videos",
        ),
        ({name: one[name] for name in one if name not in pixels}, "no pixels were given"),
    ]:
        with pytest.raises(PromptError, match=message):
            ModelInputs.from_processor(parts, batch, HostGroup.single("cpu"))


def test_each_host_decodes_only_its_own_frames(tmp_path, monkeypatch):
    info = probe(encode(tmp_path / "clip.mp4", n=20))
    processor = families.build_processor("qwen2_5_vl")
    parts = inspect_model(families.build_model("qwen2_5_vl"))
    decoded = []

    def noted(video, frames, *rest):
        decoded.append(frames)
        return iter_frames(video, frames, *rest)

    monkeypatch.setattr("apbv.input.prompts.pixels.iter_frames", noted)
    for rank in range(3):
        inputs, pixels = read_video(parts, processor, QUESTION, info, range(20), one_of(rank, 3))
        assert list(pixels.chunks(inputs.visual.chunks(rank, 2**30)))
    assert [len(frames) for frames in decoded] == [8, 6, 6]  # 10 temporal patches: 4, 3, 3
    assert np.concatenate(decoded).tolist() == list(range(20))
