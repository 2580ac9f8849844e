"""Reading the pixels of videos and images: how frames and files become what a vision tower takes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import VideoConfig
from ..stats import StageTimer
from .images import Picture
from .placeholders import process
from .video import VideoInfo, iter_frames, read_frames


@dataclass
class Progress:
    """How many of this host's frames and images have been read.

    Attributes:
        timer: is told of it; None: nobody is.
        total: of how many.
    """

    timer: StageTimer | None = None
    total: int = 0
    _done: int = field(default=0, init=False)

    def add(self, count: int) -> None:
        """Say that so many more have been read."""
        self._done += count
        if self.timer is not None:
            self.timer.progress("decode_video", self._done, self.total)

    def stage(self, name: str, track: str | None = None) -> AbstractContextManager:
        """Time a stage."""
        return nullcontext() if self.timer is None else self.timer.stage(name, track)


@dataclass(frozen=True)
class VideoReader:
    """Reads the frames of one video.

    Attributes:
        video: the file that they are in.
        frames: the indices of all sampled frames, ascending.
        num_merged: the frames of one temporal patch.
        grid: ``[1, 3]`` patches (time, height, width) of the whole video, where the model has such a grid.
        processor: the model's transformers processor.
        device, dtype: of the vision tower; on a GPU pixels are made there, else (None, too) in fp32 on the CPU.
        config: how frames are decoded.
        runs_ahead: whether threads decode frames before they are asked for.
        progress: is told of frames.
    """

    kind = "video"

    video: VideoInfo
    frames: tuple[int, ...]
    num_merged: int
    grid: Tensor | None
    processor: Any
    device: torch.device | None = None
    dtype: torch.dtype = torch.float32
    config: VideoConfig = field(default_factory=VideoConfig)
    runs_ahead: bool = True
    progress: Progress = field(default_factory=Progress)

    @cached_property
    def _side_stream(self) -> "torch.cuda.Stream | None":
        return torch.cuda.Stream(self.device) if self.device and self.device.type == "cuda" else None

    def read(self, chunks: Sequence[range]) -> Iterator[Tensor]:
        """Decode frames: uint8 ``[t, H, W, 3]``; see :class:`~apbv.input.pixels.PixelReader`."""
        frames = self.frames[chunks[0].start * self.num_merged : chunks[-1].stop * self.num_merged]
        size = len(chunks[0]) * self.num_merged
        with closing(self._in_threads(frames, size) if self.runs_ahead else self._in_turn(frames, size)) as read:
            for chunk in read:
                self.progress.add(len(chunk))
                yield torch.as_tensor(chunk)

    def _in_threads(self, frames: Sequence[int], size: int) -> Iterator[np.ndarray | Tensor]:
        def at_work(thread: int) -> AbstractContextManager:
            return self.progress.stage("decode_video", f"decode_video {thread}")

        threads, device = self.config.threads or 0, str(self.device or "cpu")
        return iter_frames(self.video, frames, size, threads, self.config.backend, device, at_work)

    def _in_turn(self, frames: Sequence[int], size: int) -> Iterator[np.ndarray]:
        for start in range(0, len(frames), size):
            with self.progress.stage("decode_video"):
                chunk = read_frames(self.video, frames[start : start + size], self.config.threads or 0)
            yield chunk

    @torch.no_grad()
    def prepare(self, read: Tensor) -> "tuple[dict[str, Tensor], torch.cuda.Event | None]":
        """Make pixels of frames; see :class:`~apbv.input.pixels.PixelReader`."""
        side = self._side_stream
        # The stage lies within the stream, whose time counts.
        with nullcontext() if side is None else torch.cuda.stream(side), self.progress.stage("preprocess"):
            if side is None:
                return preprocess_frames(self.processor, read, self.grid), None
            if not read.is_cuda:
                read = read.pin_memory().to(self.device, non_blocking=True)
            values = preprocess_frames(self.processor, read, self.grid)
            values = {name: v.to(self.dtype) if v.is_floating_point() else v for name, v in values.items()}
            return values, side.record_event()


@dataclass(frozen=True)
class ImageReader:
    """Reads images that lie side by side in a prompt.

    Attributes:
        pictures: the images.
        processor: the model's transformers processor; it is used by one thread at a time.
        progress: is told of images.
        is_untiled: whether the processor is not to cut images into tiles, as LLaVA-OneVision's does with an image
            that is the only one of its sample.
    """

    kind = "image"

    pictures: tuple[Picture, ...]
    processor: Any
    progress: Progress = field(default_factory=Progress)
    is_untiled: bool = False

    def read(self, chunks: Sequence[range]) -> Iterator[list[Any]]:
        """Decode images; see :class:`~apbv.input.pixels.PixelReader`."""
        for chunk in chunks:
            with self.progress.stage("decode_video"):
                images = [picture.load() for picture in self.pictures[chunk.start : chunk.stop]]
            self.progress.add(len(images))
            yield images

    @torch.no_grad()
    def prepare(self, read: list[Any]) -> tuple[dict[str, Any], None]:
        """Make pixels of images; see :class:`~apbv.input.pixels.PixelReader`."""
        with self.progress.stage("preprocess"):
            shown = read * 2 if self.is_untiled and len(read) == 1 else read  # a sample of several
            images = [shown] if self.is_untiled else shown
            values = image_values(process(self.processor, self.processor.image_token * len(shown), images=images))
            if len(shown) > len(read):  # of the number in a sample the model asks only whether it is 1
                values |= {name: values[name][: len(read)] for name in ("pixel_values", "image_sizes")}
            return values, None


def image_values(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``get_image_features`` takes out of a processor's batch."""
    names = ("pixel_values", "image_grid_thw", "image_sizes", "batch_num_images")
    return {name: batch[name] for name in names if batch.get(name) is not None}


def preprocess_frames(processor, frames: Tensor, grid: Tensor | None) -> dict[str, Tensor]:
    """Return the processor's pixels of a piece of a video, bit-equal to the same piece of the whole.

    Args:
        frames: uint8 ``[t, H, W, 3]``; t is a multiple of the temporal patch except at the video's end.
        grid: ``[1, 3]`` patches (time, height, width) of the whole video, where the model has such a grid:
            there the frame size depends on the whole video's length, so it is pinned.
    """
    video_processor = processor.video_processor
    frames = frames.permute(0, 3, 1, 2)
    if grid is None:
        return _pixels(video_processor(videos=[frames], do_sample_frames=False, return_tensors="pt"))
    if video_processor.do_resize:
        from transformers.image_utils import SizeDict
        from transformers.video_processing_utils import BaseVideoProcessor

        _, height, width = (grid[0] * video_processor.patch_size).tolist()
        # The base class's resize goes to a given size; the families' own would compute one from the piece.
        frames = BaseVideoProcessor.resize(
            video_processor,
            frames[None],
            size=SizeDict(height=height, width=width),
            resample=video_processor.resample,
        )[0]
    return _pixels(video_processor(videos=[frames], do_resize=False, do_sample_frames=False, return_tensors="pt"))


def _pixels(output: Mapping[str, Any]) -> dict[str, Tensor]:
    return {n: output[n] for n in ("pixel_values_videos", "pixel_values", "video_grid_thw") if n in output}
