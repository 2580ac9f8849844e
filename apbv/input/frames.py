"""Preparing a video's frames for the model: which of them a host reads, and their pixels.

The processor also runs on tensors without storage, so that no host has to hold the whole video to know what the
prompt looks like.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .video import VideoInfo, read_frames


@dataclass(frozen=True)
class FramePiece:
    """The frames that one host reads.

    Attributes:
        video: the file that they are in.
        frames: their indices, ascending.
        grid: ``[1, 3]`` patches (time, height, width) of the whole video, where the model has such a grid.
    """

    video: VideoInfo
    frames: tuple[int, ...]
    grid: Tensor | None

    def read(self) -> Tensor:
        """Decode the frames: uint8 ``[t, H, W, 3]``.

        Raises:
            VideoError: a frame cannot be decoded.
        """
        return torch.from_numpy(read_frames(self.video, list(self.frames)))


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
    return processor(
        text=[text],
        videos=[pixels],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="pt",
    )


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
