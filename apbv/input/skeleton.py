"""What a prompt looks like before its frames and images are decoded: token ids, and its items.

The model's own processor runs on tensors without storage, so that no host has to hold the whole video to know what
the prompt looks like.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..model.parts import ModelParts
from .audio import Sound
from .files import FileIdentity, Source
from .images import Picture
from .placeholders import process_apart
from .rendering import RenderedPrompt
from .video import VideoInfo
from .visual import (
    FRAME_COPIES,
    PIXEL_COPIES,
    PromptError,
    VisualItem,
    equal_row_starts,
    num_frames_told,
)

_PIXELS = ("pixel_values", "pixel_values_videos")


@dataclass(frozen=True)
class SampledVideo:
    """A video, and which of its frames are shown.

    Attributes:
        info: the video.
        frames: indices of the sampled frames, ascending.
        sound: what is heard with them; None: nothing.
    """

    info: VideoInfo
    frames: tuple[int, ...]
    sound: Sound | None = None


@dataclass(frozen=True)
class Skeleton:
    """A prompt that was read, but for its pixels: with it a request needs no more reading on this host.

    Attributes:
        rendered: the prompt's text, and the files it refers to.
        videos: its videos.
        batch: the tokens of the whole prompt, and what its rotary positions depend on.
        items: the videos and images, in prompt order.
        row_starts: where the rows of every temporal patch start, and where the last one's end.
        sources: what every item shows.
        grids: of every item ``[1, 3]`` patches (time, height, width), where the model has such a grid for a video.
        sounds: what every sound comes from, in prompt order.
    """

    rendered: RenderedPrompt
    videos: tuple[SampledVideo, ...]
    batch: Mapping[str, Any]
    items: tuple[VisualItem, ...] = ()
    row_starts: tuple[int, ...] = (0,)
    sources: tuple[SampledVideo | Picture, ...] = ()
    grids: tuple[Tensor | None, ...] = ()
    sounds: tuple[Source, ...] = ()


def lay_out(
    parts: ModelParts,
    processor,
    rendered: RenderedPrompt,
    videos: Sequence[SampledVideo],
    sounds: Sequence[Sound],
    tokenizing: AbstractContextManager,
) -> Skeleton:
    """Lay out a prompt of videos, images and sounds.

    Args:
        processor: the model's transformers processor.
        rendered: the prompt's text, with a placeholder for each, and its images.
        videos: in prompt order.
        sounds: those that belong to no video, likewise.
        tokenizing: entered while the processor is used.

    Raises:
        PromptError: the text has other placeholders, or some videos are heard and others are not.
    """
    silent, pictures = [video.info.path for video in videos if video.sound is None], rendered.pictures
    if silent and len(silent) < len(videos):
        raise PromptError(
            f"{silent[0]}: is not heard, but another video of the prompt is; the model has a rule for all or "
            "none of them (audio_in_video)"
        )
    calls = [_video_arguments(parts, processor, video) for video in videos]
    calls += [_audio_arguments(processor, sound) for sound in sounds]
    names = [video.info.path for video in videos] + [sound.source.file.path for sound in sounds]
    names += [
        ", ".join(str(picture.image) for picture in pictures if isinstance(picture.image, Path)) or "an image"
    ]
    if pictures:
        images = [picture.without_pixels() for picture in pictures]
        # As transformers' own chats have them: all of a prompt's are one sample, not one each.
        calls.append({"images": [images] if parts.family == "llava_onevision" else images})
    with tokenizing:
        batches, found = process_apart(processor, rendered.text, calls, names)
    of_videos, of_sounds = batches[: len(videos)], batches[len(videos) :][: len(sounds)]
    of_images = batches[len(videos) + len(sounds) :]
    image_tokens = sum(num_tokens for kind, num_tokens in found if kind == "image")
    pixel_bytes = of_images[0]["pixel_values"].nbytes if of_images else 0
    left = {
        "video": iter(zip(videos, of_videos, strict=True)),
        "image": iter(pictures),
        "audio": iter(zip(sounds, of_sounds, strict=True)),
    }
    items, row_starts, sources, grids = [], [], [], []
    heard: list[tuple[Sound, Mapping[str, Any]]] = []
    start = 0
    for kind, num_tokens in found:
        source, grid = next(left[kind]), None
        if kind == "audio":
            heard.append(source)
            continue
        if kind == "video":
            source, batch = source
            grid = batch.get("video_grid_thw")
            if source.sound is not None:
                heard.append((source.sound, batch))
            item = _video_item(parts, source, batch)
        else:
            num_bytes = PIXEL_COPIES * pixel_bytes * num_tokens // image_tokens
            num_bytes += FRAME_COPIES * 3 * source.height * source.width
            item = VisualItem("image", patch_bytes=num_bytes, source=source.source)
        row_starts += equal_row_starts(start, item.num_patches, num_tokens, item.num_ending_rows)
        start += num_tokens
        items.append(item)
        sources.append(source)
        grids.append(grid)
    return Skeleton(
        rendered=rendered,
        videos=tuple(videos),
        batch=_merged(batches) | _merged_sounds([batch for _, batch in heard]),
        items=tuple(items),
        row_starts=(*row_starts, start),
        sources=tuple(sources),
        grids=tuple(grids),
        sounds=tuple(sound.source for sound, _ in heard),
    )


def _audio_arguments(processor, sound: Sound) -> dict[str, Any]:
    """Return what the processor is told of a sound: neither to cut nor to pad it to the longest that it expects.

    A spectrogram of five minutes takes seconds. Behind a shorter sound there is as much silence as its last frames
    reach into, so that they are those of the padded one.
    """
    extractor = processor.feature_extractor
    padded = min(len(sound.samples) + extractor.n_fft, max(len(sound.samples), extractor.n_samples))
    return {"audio": [sound.samples], "audio_kwargs": {"truncation": False, "max_length": padded}}


def _video_arguments(parts: ModelParts, processor, video: SampledVideo) -> dict[str, Any]:
    """Return what the processor is told of a video.

    Its timestamps are frame index over frame rate. For a variable frame rate the indices are therefore those of
    the nearest frames at the average rate.
    """
    from transformers.video_utils import VideoMetadata

    info = video.info
    num_merged = getattr(processor.video_processor, "temporal_patch_size", 1)
    told = num_frames_told(parts.family, len(video.frames), num_merged)
    frames = [*video.frames, *video.frames[-1:] * (told - len(video.frames))]
    pixels = torch.empty(told, 3, info.height, info.width, dtype=torch.uint8, device="meta")
    metadata = VideoMetadata(
        total_num_frames=info.num_frames,
        fps=info.fps,
        width=info.width,
        height=info.height,
        duration=info.duration,
        frames_indices=[round(info.timestamps[index] * info.fps) for index in frames],
    )
    arguments = {"videos": [pixels], "video_metadata": [metadata], "do_sample_frames": False}
    if parts.hears:  # its frames lie at this rate in time; the others' processors ask the metadata
        arguments["fps"] = len(video.frames) / info.duration
    if video.sound is not None:
        arguments |= _audio_arguments(processor, video.sound)
        arguments |= {"load_audio_from_video": True, "audio_from_video_indices": [0]}
    return arguments


def _video_item(parts: ModelParts, video: SampledVideo, batch: Mapping[str, Any]) -> VisualItem:
    # InternVL has one name for images and video.
    pixels = batch["pixel_values" if parts.family == "internvl" else "pixel_values_videos"]
    num_patches = num_temporal_patches(batch, pixels)
    num_bytes = 3 * video.info.height * video.info.width * len(video.frames)
    return VisualItem(
        kind="video",
        num_patches=num_patches,
        num_ending_rows=parts.num_rows_ending_video,
        patch_bytes=FRAME_COPIES * num_bytes // num_patches + PIXEL_COPIES * pixels.nbytes // num_patches,
        source=Source(FileIdentity.of(video.info.path), video.frames),
    )


def num_temporal_patches(batch: Mapping[str, Any], pixels: Tensor) -> int:
    """Count the temporal patches of the one video of a processor's batch."""
    if batch.get("video_grid_thw") is not None:
        return int(batch["video_grid_thw"][0, 0])
    return pixels.shape[1] if pixels.dim() == 5 else pixels.shape[0]


def _merged(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge what a processor returned for every source, but for the pixels; tokens are the last one's."""
    merged = {name: value for name, value in batches[-1].items() if name not in _PIXELS}
    for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "video_second_per_grid"):
        values = [batch[name] for batch in batches if batch.get(name) is not None]
        if values:
            merged[name] = torch.cat([torch.as_tensor(value) for value in values])
    return merged


def _merged_sounds(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the spectrograms of single sounds, each as long as it is, and their masks, as long as the longest."""
    if not batches:
        return {}
    masks = [batch["feature_attention_mask"][0].bool() for batch in batches]
    features = [batch["input_features"][0] for batch in batches]
    return {
        "input_features": [each[:, mask] for each, mask in zip(features, masks, strict=True)],
        "feature_attention_mask": torch.nn.utils.rnn.pad_sequence(masks, batch_first=True),
    }
