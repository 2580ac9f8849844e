"""Tokens of a video that its prompt does not have, as VideoLLaMA 3's processor leaves out what
repeats a frame.

Pixels decide which: a token is left out where its patches hardly differ from those in the frame
before. The layout of the prompt depends on it. So frames are decoded twice: first to compare them,
every host its share, before the prompt is laid out; then those that the host encodes.
"""

from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from ..config import VideoConfig
from ..hosts import HostGroup
from ..stats import StageTimer
from .pixels import VideoReader, preprocess_frames
from .skeleton import SampledVideo

_CHUNK_BYTES = 2**26  # of pixels in fp32


def may_leave_out(processor) -> bool:
    """Return whether a processor is of the kind that may leave tokens out, be it that it is told
    not to."""
    return hasattr(getattr(processor, "video_processor", None), "use_token_compression")


@torch.no_grad()
def kept_tokens(
    processor,
    video: SampledVideo,
    frames: range,
    hosts: HostGroup,
    timer: StageTimer,
    config: VideoConfig,
) -> Tensor:
    """Return which tokens of some of a video's frames are left: bool ``[len(frames), h, w]``.

    Args:
        processor: one that :func:`may_leave_out`.
        frames: the numbers of the frames among those that were sampled. The one before them is
            decoded, too.

    Raises:
        VideoError: a frame cannot be decoded.
    """
    info = video.info
    video_processor = processor.video_processor
    pixels = torch.empty(
        len(video.frames), 3, info.height, info.width, dtype=torch.uint8, device="meta"
    )
    options = {"do_sample_frames": False, "use_token_compression": False, "return_tensors": "pt"}
    batch = video_processor(videos=[pixels], **options)
    grid = batch["video_grid_thw"]
    num_bytes = batch["pixel_values_videos"].nbytes // len(video.frames)
    height, width = (grid[0, 1:] // batch["video_merge_sizes"]).tolist()
    if not frames or not video_processor.use_token_compression:
        return torch.ones(len(frames), height, width, dtype=torch.bool)
    found = []
    size = max(1, _CHUNK_BYTES // num_bytes)
    first = max(frames.start - 1, 0)
    before = None
    chunks = [
        range(start, min(start + size, frames.stop)) for start in range(first, frames.stop, size)
    ]
    reader = VideoReader(
        replace(video, grid=grid),
        1,
        processor,
        timer,
        config=config,
        runs_ahead=hosts.has_own_process,
    )
    with closing(reader.read(chunks)) as read:
        for decoded in read:
            shown = decoded if before is None else torch.cat([before, decoded])
            with timer.stage("preprocess"):
                kept = preprocess_frames(processor, shown, grid, compares=True)[
                    "video_compression_mask"
                ]
            kept = kept.view(len(shown), height, width)
            # Of the first frame that is shown all is kept, and only the video's first is one that
            # counts.
            found.append(kept if before is None and not frames.start else kept[1:])
            before = decoded[-1:]
    return torch.cat(found)
