"""Tokens of a video that its prompt lacks: VideoLLaMA 3's processor leaves out repeated ones.

Pixels decide which: a token is left out where its patches hardly differ from those in the frame
before. The layout of the prompt depends on it. So frames are decoded twice: first to compare them,
every host its share, before the prompt is laid out; then those that the host encodes.
"""

from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from ...config import VideoConfig
from ...hosts import HostGroup
from ...stats import StageTimer
from .pixels import VideoReader, preprocess_frames
from .tokenized_prompt import SampledVideo

CHUNK_BYTES = 2**26  # of pixels in fp32


def may_leave_out(processor) -> bool:
    """Return whether a processor can leave tokens out, even if it is set not to."""
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
    batch = video_processor(
        videos=[pixels],
        do_sample_frames=False,
        use_token_compression=False,
        return_tensors="pt",
    )
    grid = batch["video_grid_thw"]
    num_bytes = batch["pixel_values_videos"].nbytes // len(video.frames)
    height, width = (grid[0, 1:] // batch["video_merge_sizes"]).tolist()
    if not frames or not video_processor.use_token_compression:
        return torch.ones(len(frames), height, width, dtype=torch.bool)

    # Cut the frames, with the one before them, into chunks.
    chunk_len = max(1, CHUNK_BYTES // num_bytes)
    first = max(frames.start - 1, 0)
    chunks = []
    for start in range(first, frames.stop, chunk_len):
        chunks.append(range(start, min(start + chunk_len, frames.stop)))
    reader = VideoReader(
        video=replace(video, grid=grid),
        num_merged=1,
        processor=processor,
        timer=timer,
        config=config,
        runs_ahead=hosts.has_own_process,
    )

    # Compare the frames of each, the first with the last one of the chunk before.
    masks = []
    frame_before = None
    with closing(reader.read(chunks)) as decoded_chunks:
        for decoded in decoded_chunks:
            compared = decoded
            if frame_before is not None:
                compared = torch.cat([frame_before, decoded])
            with timer.stage("preprocess"):
                values = preprocess_frames(processor, compared, grid, compares=True)
            mask = values["video_compression_mask"].view(len(compared), height, width)
            # All tokens of the first frame are left, which is right for the video's first only.
            is_first_of_video = frame_before is None and frames.start == 0
            masks.append(mask if is_first_of_video else mask[1:])
            frame_before = decoded[-1:]
    return torch.cat(masks)
