"""Layout of a prompt before its frames and images are decoded: token ids and items.

The model's own processor runs on tensors without storage, so that no host has to hold the whole
video to compute the prompt's layout. It writes a placeholder's text once for every visual token,
and the tokenizer turns each copy into the same id. To tokenise 150,000 copies takes a second, and
to repeat the id 10 ms: so each run of placeholders is tokenised once, and its id repeated.
"""

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import PromptError
from ...model.parts import ModelParts
from ..media.audio import Sound
from ..media.files import FileIdentity, Source
from ..media.images import Picture
from ..media.sizes import PixelLimits
from ..media.video import VideoInfo, length_of
from .rendering import RenderedPrompt
from .visual import FRAME_COPIES, PIXEL_COPIES, VisualItem

# The unit of the times that are told at a variable rate: a millisecond.
_TICKS = 1000
_PIXELS = ("pixel_values", "pixel_values_videos", "video_compression_mask")
# A processor's outputs with one entry per token; all others are about pixels.
_PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
# Those with one entry per image or video.
_PER_SOURCE = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "video_second_per_grid")


@dataclass(frozen=True)
class SampledVideo:
    """Video with its sampled frames.

    Attributes:
        info: the video.
        frames: indices of the sampled frames, ascending.
        sound: what is heard with them; None: nothing.
        kept: see :class:`~apbv.input.prompts.visual.VisualItem`; None also where that is not known
            yet.
        grid: ``[1, 3]`` patches (time, height, width), where the model has such a grid and it is
            known.
        limits: on the size of a frame.
        shown: the run of the file's frames from which these were sampled; None: all.
    """

    info: VideoInfo
    frames: tuple[int, ...]
    sound: Sound | None = None
    kept: Tensor | None = field(default=None, repr=False, compare=False)
    grid: Tensor | None = field(default=None, repr=False, compare=False)
    limits: PixelLimits = field(default_factory=PixelLimits)
    shown: range | None = None

    @property
    def sampled_from(self) -> range:
        """The run of the file's frames from which the frames were sampled."""
        return range(self.info.num_frames) if self.shown is None else self.shown


@dataclass(frozen=True)
class TokenizedPrompt:
    """Prompt that was read except for its pixels.

    A request with it needs no further reading on this host.

    Attributes:
        rendered: the prompt's text, and the files it refers to.
        videos: its videos.
        batch: the tokens of the whole prompt, and what its rotary positions depend on.
        items: the videos and images, in prompt order.
        sources: the source of every item.
        sounds: what every audio comes from, in prompt order.
    """

    rendered: RenderedPrompt
    videos: tuple[SampledVideo, ...]
    batch: Mapping[str, Any]
    items: tuple[VisualItem, ...] = ()
    sources: tuple[SampledVideo | Picture, ...] = ()
    sounds: tuple[Source, ...] = ()


def lay_out(
    parts: ModelParts,
    processor,
    rendered: RenderedPrompt,
    videos: Sequence[SampledVideo],
    sounds: Sequence[Sound],
    tokenizing: AbstractContextManager,
) -> TokenizedPrompt:
    """Lay out a prompt of videos, images and audio clips.

    Args:
        processor: the model's transformers processor.
        rendered: the prompt's text, with a placeholder for each, and its images.
        videos: in prompt order, with ``kept`` where the processor may leave out tokens of frames.
        sounds: the audio files, in prompt order.
        tokenizing: a lock, held while the processor is used: one thread at a time may tokenize.

    Raises:
        PromptError: the text has other placeholders, some videos are heard and others are not, or
            an image or frames cannot have a size within their limits.
    """
    # Check, and size the images.
    silent = [video.info.path for video in videos if video.sound is None]
    if silent and len(silent) < len(videos):
        raise PromptError(
            f"{silent[0]}: its audio is not used, but another video's is; use audio for all videos "
            "or none (audio_in_video)"
        )
    pictures = [_sized(parts, processor, picture) for picture in rendered.pictures]

    # Process: each video, each sound, and runs of images.
    calls = [
        ProcessorCall(
            processor.video_token, _video_arguments(parts, processor, video), video.info.path
        )
        for video in videos
    ]
    calls += [
        ProcessorCall(
            processor.audio_token, _audio_arguments(processor, sound), sound.source.file.path
        )
        for sound in sounds
    ]
    first_image_call = len(calls)
    calls += _image_calls(parts, processor, pictures)
    with tokenizing:
        batches, placeholders = process_apart(processor, rendered.text, calls)
    video_batches = iter(batches[: len(videos)])
    sound_batches = iter(batches[len(videos) : first_image_call])
    image_batches = batches[first_image_call:]

    # Lay out, in prompt order.
    image_bytes = sum(batch["pixel_values"].nbytes for batch in image_batches)
    num_image_tokens = sum(num_tokens for kind, num_tokens in placeholders if kind == "image")
    remaining_videos = iter(videos)
    remaining_sounds = iter(sounds)
    remaining_pictures = iter(pictures)
    items = []
    sources: list[SampledVideo | Picture] = []
    heard: list[tuple[Sound, Mapping[str, Any]]] = []
    for kind, num_tokens in placeholders:
        if kind == "audio":
            heard.append((next(remaining_sounds), next(sound_batches)))
        elif kind == "video":
            batch = next(video_batches)
            grid = batch.get("video_grid_thw")
            video = dataclasses.replace(next(remaining_videos), grid=grid)
            if video.sound is not None:
                heard.append((video.sound, batch))
            items.append(_video_item(parts, video, batch, num_tokens))
            sources.append(video)
        else:
            picture = next(remaining_pictures)
            num_bytes = PIXEL_COPIES * image_bytes * num_tokens // num_image_tokens
            items.append(_image_item(picture, num_tokens, num_bytes))
            sources.append(picture)
    return TokenizedPrompt(
        rendered=rendered,
        videos=tuple(videos),
        batch=_merged(batches, [batch for _, batch in heard]),
        items=tuple(items),
        sources=tuple(sources),
        sounds=tuple(sound.source for sound, _ in heard),
    )


def _video_item(
    parts: ModelParts, video: SampledVideo, batch: Mapping[str, Any], num_tokens: int
) -> VisualItem:
    """Return the item of a video, as its processor has laid it out.

    Args:
        video: with its grid, if the model has such.
        num_tokens: the visual tokens that stand for it.
    """
    pixels = batch[parts.family.video_pixels]
    if video.grid is not None:
        num_patches = int(video.grid[0, 0])
    elif pixels.dim() == 5:  # of a batch of videos
        num_patches = pixels.shape[1]
    else:
        num_patches = pixels.shape[0]
    frame_bytes = 3 * video.info.height * video.info.width * len(video.frames)
    size = None
    if video.limits != PixelLimits():
        assert video.grid is not None  # only models that have one take limits
        height, width = video.grid[0, 1:].tolist()
        size = (height, width)
    return VisualItem(
        kind="video",
        num_rows=num_tokens,
        num_patches=num_patches,
        num_ending_rows=parts.num_rows_ending_video,
        patch_bytes=FRAME_COPIES * frame_bytes // num_patches
        + PIXEL_COPIES * pixels.nbytes // num_patches,
        source=Source(FileIdentity.of(video.info.path), video.frames, size),
        kept=video.kept,
    )


def _image_item(picture: Picture, num_tokens: int, num_bytes: int) -> VisualItem:
    """Return the item of an image.

    Args:
        num_tokens: the visual tokens that stand for it.
        num_bytes: of the copies of its processed pixels.
    """
    stored_bytes = 3 * picture.height * picture.width
    return VisualItem(
        kind="image",
        num_rows=num_tokens,
        patch_bytes=num_bytes + FRAME_COPIES * stored_bytes,
        source=picture.source,
        size=picture.resized or (picture.height, picture.width),
    )


def _merged(
    batches: Sequence[Mapping[str, Any]], heard: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Merge a processor's outputs, without pixels.

    Args:
        batches: of every call; the last one's tokens are the whole prompt's.
        heard: those of them with audio, in prompt order.
    """
    merged = {name: value for name, value in batches[-1].items() if name not in _PIXELS}
    for name in _PER_SOURCE:
        values = [torch.as_tensor(batch[name]) for batch in batches if batch.get(name) is not None]
        if values:
            merged[name] = torch.cat(values)
    if heard:
        # Spectrograms, each as long as it is, and masks, as long as the longest.
        masks = [batch["feature_attention_mask"][0].bool() for batch in heard]
        spectrograms = [batch["input_features"][0] for batch in heard]
        merged["input_features"] = [
            spectrogram[:, mask] for spectrogram, mask in zip(spectrograms, masks, strict=True)
        ]
        merged["feature_attention_mask"] = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    return merged


def _sized(parts: ModelParts, processor, picture: Picture) -> Picture:
    """Return an image with the size that it gets because of its limits."""
    image_processor: Any = getattr(processor, "image_processor", None)
    size = picture.limits.size_of_image(
        image_processor,
        picture.without_pixels(),
        parts.family.num_times_counted(image_processor),
    )
    return dataclasses.replace(picture, resized=size)


def _image_calls(
    parts: ModelParts, processor, pictures: Sequence[Picture]
) -> "list[ProcessorCall]":
    """Return the processor's calls for images: one for each run of images that it resizes itself,
    and for each run of images that have their sizes already."""
    calls = []
    for are_resized, adjacent in groupby(pictures, lambda picture: picture.resized is not None):
        run = list(adjacent)
        images = [picture.without_pixels() for picture in run]
        arguments: dict[str, Any] = {"images": parts.family.images_argument(images)}
        if are_resized:
            arguments["do_resize"] = False
        files = [str(picture.image) for picture in run if isinstance(picture.image, Path)]
        name = ", ".join(files) if files else "an image"
        calls.append(ProcessorCall(processor.image_token * len(run), arguments, name))
    return calls


def _audio_arguments(processor, sound: Sound) -> dict[str, Any]:
    """Return the processor's arguments for audio.

    They prevent truncation, and padding to the maximum length of five minutes, whose spectrogram
    takes seconds. A shorter audio is padded by the width of a Fourier transform instead: its last
    frames are then what full padding would make of them.
    """
    extractor = processor.feature_extractor
    num_samples = len(sound.samples)
    num_padded = min(num_samples + extractor.n_fft, max(num_samples, extractor.n_samples))
    audio_kwargs = {"truncation": False, "max_length": num_padded}
    return {"audio": [sound.samples], "audio_kwargs": audio_kwargs}


def _video_arguments(parts: ModelParts, processor, video: SampledVideo) -> dict[str, Any]:
    """Return the arguments of :func:`process` for a video.

    transformers takes a frame's index over the frame rate for its time. At a variable rate it is
    therefore told a rate of 1000, and times in milliseconds for indices.
    """
    from transformers.video_utils import VideoMetadata

    info = video.info
    num_merged = getattr(processor.video_processor, "temporal_patch_size", 1)
    num_frames = parts.family.num_frames_told(len(video.frames), num_merged)
    # The last frame is repeated where temporal patches are to be whole.
    num_repeated = num_frames - len(video.frames)
    frames = [*video.frames, *video.frames[-1:] * num_repeated]
    pixels = torch.empty(num_frames, 3, info.height, info.width, dtype=torch.uint8, device="meta")
    # As in qwen-vl-utils, a part of a file has the times of the file, and the duration of the part.
    ticks_per_second = info.fps
    num_ticks = len(video.sampled_from)
    seconds = length_of(info, video.sampled_from)
    if not info.has_constant_rate:
        ticks_per_second = _TICKS
        num_ticks = max(1, round(seconds * _TICKS))
    metadata = VideoMetadata(
        total_num_frames=num_ticks,
        fps=ticks_per_second,
        width=info.width,
        height=info.height,
        duration=seconds,
        frames_indices=np.rint(info.timestamps[frames] * ticks_per_second).astype(int).tolist(),
    )
    arguments = {"videos": [pixels], "video_metadata": [metadata], "do_sample_frames": False}
    size = video.limits.size_of_frames(processor.video_processor, pixels, metadata)
    if size is not None:
        # The grid then says so, and the pixels follow it (pixels.py).
        resized = torch.empty(num_frames, 3, *size, dtype=torch.uint8, device="meta")
        arguments["videos"] = [resized]
        arguments["do_resize"] = False
    if video.kept is not None:
        arguments["use_token_compression"] = False
        arguments["kept"] = video.kept  # of `process`, not of the processor
    if parts.family.tells_frame_rate:
        # The rate at which its frames lie in time; others' processors ask the metadata.
        arguments["fps"] = len(video.frames) * ticks_per_second / num_ticks
    if video.sound is not None:
        arguments |= _audio_arguments(processor, video.sound)
        arguments["load_audio_from_video"] = True
        arguments["audio_from_video_indices"] = [0]
    return arguments


def process(
    processor,
    text: str,
    replace: Callable[..., tuple[list[str], list]] | None = None,
    kept: Tensor | None = None,
    **inputs,
) -> Mapping[str, Any]:
    """Call a transformers processor on one text, and return its usual result, in tensors.

    The processor is not changed: a copy of it, which shares its parts, hands a shortened text to
    the tokenizer, and transformers checks that the tokenizer found as many placeholders as the
    shortened text has.

    Args:
        processor: that of a video model; it is used by one thread at a time.
        text: the prompt, with one placeholder for each image, video or audio.
        replace: what writes the placeholders out, instead of the processor's
            ``get_text_with_replacements``.
        kept: bool ``[frames, h, w]``: which visual tokens of the text's only video to keep, which
            pixels without storage cannot tell.
        inputs: the processor's further arguments, such as ``images`` or ``videos``.
    """
    replace = replace or processor.get_text_with_replacements
    placeholders = _placeholder_ids(processor)
    run_of_placeholders = re.compile(rf"({'|'.join(map(re.escape, placeholders))})\1*")
    counts = []  # placeholders of each run, in order, written by `shortened`

    def shortened(*args, **kwargs) -> tuple[list[str], list]:
        texts, offsets = replace(*args, **kwargs)
        expanded = texts[0]
        for match in run_of_placeholders.finditer(expanded):
            counts.append(len(match[0]) // len(match[1]))
        return [run_of_placeholders.sub(r"\1", expanded)], offsets

    def replace_image_token(inputs: Mapping[str, Any], *args, **kwargs) -> str:
        return processor.replace_image_token(_with_storage(inputs), *args, **kwargs)

    def replace_video_token(inputs: Mapping[str, Any], *args, **kwargs) -> str:
        outputs = _with_storage(inputs)
        if kept is not None:
            outputs["video_compression_mask"] = kept.flatten()
        return processor.replace_video_token(outputs, *args, **kwargs)

    # Tokenise with each run of placeholders as one.
    shortening_processor = copy.copy(processor)
    shortening_processor.get_text_with_replacements = shortened
    shortening_processor.replace_image_token = replace_image_token
    shortening_processor.replace_video_token = replace_video_token
    output = shortening_processor(text=[text], return_tensors="pt", **inputs)

    # Repeat every output per token as often as its run is long.
    input_ids = output["input_ids"][0]
    repeats = torch.ones_like(input_ids)
    is_placeholder = torch.isin(input_ids, torch.tensor(list(placeholders.values())))
    repeats[is_placeholder] = torch.tensor(counts, dtype=repeats.dtype)
    for name in _PER_TOKEN:
        if name in output:
            output[name] = output[name].repeat_interleave(repeats, dim=1)
    return output


def _with_storage(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a processor's outputs with one zero as the storage of tensors that have none.

    The processors of LLaVA-1.5 and LLaVA-NeXT-Video turn pixels into arrays to ask their shapes.
    """
    outputs = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.is_meta:
            outputs[name] = torch.zeros((), dtype=value.dtype).expand(value.shape)
    return outputs


class ProcessorCall(NamedTuple):
    """A processor's call for one source of a prompt.

    Attributes:
        text: only the source's placeholders.
        arguments: of the processor.
        name: the source's, in errors.
    """

    text: str
    arguments: Mapping[str, Any]
    name: str


class Placeholder(NamedTuple):
    """An image, video or audio in a prompt's text.

    Attributes:
        kind: ``"image"``, ``"video"`` or ``"audio"``.
        num_tokens: how many tokens of this kind stand for it; those of a video's audio, which lie
            between, do not count.
    """

    kind: str
    num_tokens: int


def process_apart(
    processor, text: str, calls: Sequence[ProcessorCall]
) -> tuple[list[Mapping[str, Any]], list[Placeholder]]:
    """Call a transformers processor on one text and on its sources, one after the other.

    Each call expands the placeholders of its source alone. The last one expands those of the whole
    text, by the replacements of all sources, so that its tokens are the whole prompt's.

    A processor without a grid for each video takes several videos at once only if they have the
    same number of frames.

    Args:
        processor: that of a video model; it is used by one thread at a time.
        text: the prompt, with one placeholder for each image, video or audio.
        calls: one for each source: a video, which may have its audio with it, an audio clip, or a
            run of images that are resized alike.

    Returns:
        The processor's result for each source, with the whole prompt's tokens in the last; and the
        placeholders, in prompt order.

    Raises:
        PromptError: the text has other placeholders than there are sources, or the processor
            rejects one.
    """
    replacements: dict[str, list] = {
        "images_replacements": [],
        "videos_replacements": [],
        "audio_replacements": [],
    }
    placeholders: list[Placeholder] = []
    batches: list[Mapping[str, Any]] = []

    def replace(
        texts: list[str], *args: Sequence[str], **kwargs: Sequence[str]
    ) -> tuple[list[str], list]:
        """Collect a source's replacements; with the last source's, write out the whole text.

        transformers calls it inside :func:`process`, with the replacements of images, videos and
        audio, in this order or by name.
        """
        of_source = dict(zip(replacements, args, strict=False)) | kwargs
        for name, values in of_source.items():
            replacements[name] += values
        is_last = len(batches) == len(calls) - 1  # a batch is added after each call
        if not is_last:
            return texts, []
        num_sources = sum(len(values) for values in replacements.values())
        try:
            texts, (offsets,) = processor.get_text_with_replacements([text], **replacements)
        except StopIteration:  # the text has more placeholders than there are replacements
            offsets = []
        if len(offsets) != num_sources:
            raise PromptError(
                f"the prompt has {num_sources} images, videos and audio clips, but its text has "
                "another number of placeholders"
            )
        for offset in offsets:
            kinds = ("audio",) if offset["type"] == "audio" else ("image", "video")
            num_tokens = 0
            for token in _placeholder_ids(processor, kinds):
                num_tokens += offset["replacement"].count(token)
            placeholders.append(Placeholder(offset["type"], num_tokens))
        return texts, [offsets]

    for call in calls:
        try:
            batches.append(process(processor, call.text, replace, **call.arguments))
        except PromptError:
            raise
        except ValueError as error:
            raise PromptError(f"{call.name}: {error}") from error
    return batches, placeholders


def _placeholder_ids(
    processor, kinds: Sequence[str] = ("image", "video", "audio")
) -> dict[str, int]:
    """Return the texts that stand for tokens of these kinds, with their ids.

    InternVL has one, for images and video.
    """
    token_ids = {}
    for kind in kinds:
        token_id = getattr(processor, f"{kind}_token_id", None)
        if token_id is not None:
            token_ids[getattr(processor, f"{kind}_token")] = token_id
    return token_ids
