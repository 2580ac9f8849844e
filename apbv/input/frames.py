"""Preparing a video's frames for the model: which of them a host reads, and their pixels.

The processor also runs on tensors without storage, so that no host has to hold the whole video to know what the
prompt looks like.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import VideoConfig
from ..stats import StageTimer
from .pixels import PixelChunk, stream
from .placeholders import process
from .video import VideoInfo, iter_frames, read_frames


@dataclass(frozen=True)
class FramePiece:
    """The frames that one host reads.

    Attributes:
        video: the file that they are in.
        frames: their indices, ascending.
        num_merged: the frames of one temporal patch.
        grid: ``[1, 3]`` patches (time, height, width) of the whole video, where the model has such a grid.
    """

    video: VideoInfo
    frames: tuple[int, ...]
    num_merged: int
    grid: Tensor | None


def video_skeleton(processor, text: str, info: VideoInfo, frames: Sequence[int]) -> dict[str, Any]:
    """Return what the processor gives for a whole video, computed on tensors that have a shape but no pixels.

    The processor's timestamps are frame index over frame rate. For a variable frame rate the indices are
    therefore those of the nearest frames at the average rate.
    """
    from transformers.video_utils import VideoMetadata

    pixels = torch.empty(len(frames), 3, info.height, info.width, dtype=torch.uint8, device="meta")
    metadata = VideoMetadata(
        total_num_frames=info.num_frames,
        fps=info.fps,
        width=info.width,
        height=info.height,
        duration=info.duration,
        frames_indices=[round(info.timestamps[index] * info.fps) for index in frames],
    )
    return process(processor, text, videos=[pixels], video_metadata=[metadata], do_sample_frames=False)


@dataclass(frozen=True)
class VideoPixels:
    """The pixels of one host's frames, decoded and preprocessed as they are asked for.

    Attributes:
        piece: the frames.
        processor: the model's transformers processor.
        device, dtype: of the vision tower; on a GPU pixels are made there, else (None, too) in fp32 on the CPU.
        config: how frames are decoded.
        runs_ahead: whether threads make chunks before they are asked for.
        timer: times decoding and preprocessing.
    """

    piece: FramePiece
    processor: Any
    device: torch.device | None = None
    dtype: torch.dtype = torch.float32
    config: VideoConfig = field(default_factory=VideoConfig)
    runs_ahead: bool = True
    timer: StageTimer | None = None

    def chunks(self, size: int) -> Iterator[PixelChunk]:
        """See :class:`~apbv.input.pixels.Pixels`."""
        side = torch.cuda.Stream(self.device) if self.device and self.device.type == "cuda" else None
        decode = partial(self._decode, size * self.piece.num_merged)
        return stream(decode, partial(self._prepare, side), self.runs_ahead)

    def _decode(self, num_frames: int) -> Iterator[Tensor]:
        """Decode chunks of so many frames, and say how far this is."""
        done = 0
        with closing(self._in_threads(num_frames) if self.runs_ahead else self._in_turn(num_frames)) as chunks:
            for chunk in chunks:
                done += len(chunk)
                if self.timer is not None:
                    self.timer.progress("decode_video", done, len(self.piece.frames))
                yield torch.as_tensor(chunk)

    def _in_threads(self, num_frames: int) -> Iterator[np.ndarray | Tensor]:
        def at_work(thread: int) -> AbstractContextManager:
            return self._stage("decode_video", f"decode_video {thread}")

        video, frames, device = self.piece.video, self.piece.frames, str(self.device or "cpu")
        return iter_frames(
            video, frames, num_frames, self.config.threads or 0, self.config.backend, device, at_work
        )

    def _in_turn(self, num_frames: int) -> Iterator[np.ndarray]:
        frames = self.piece.frames
        for start in range(0, len(frames), num_frames):
            with self._stage("decode_video"):
                chunk = read_frames(self.piece.video, frames[start : start + num_frames], self.config.threads or 0)
            yield chunk

    @torch.no_grad()
    def _prepare(self, side: "torch.cuda.Stream | None", frames: Tensor) -> PixelChunk:
        num_patches = -(-len(frames) // self.piece.num_merged)
        # The stage lies within the stream, whose time counts.
        with nullcontext() if side is None else torch.cuda.stream(side), self._stage("preprocess"):
            if side is None:
                return PixelChunk(preprocess_frames(self.processor, frames, self.piece.grid), num_patches)
            if not frames.is_cuda:
                frames = frames.pin_memory().to(self.device, non_blocking=True)
            values = preprocess_frames(self.processor, frames, self.piece.grid)
            values = {name: v.to(self.dtype) if v.is_floating_point() else v for name, v in values.items()}
            return PixelChunk(values, num_patches, side.record_event())

    def _stage(self, name: str, track: str | None = None) -> AbstractContextManager:
        return nullcontext() if self.timer is None else self.timer.stage(name, track)


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
