"""Decodes selected frames with torchcodec: on a GPU with a video decoder (NVDEC), or on a CPU.

torchcodec gets the frames that :func:`apbv.input.video.probe` found. It therefore does not scan the file again,
and both number the frames identically. On a CPU, with the same FFmpeg, its frames are PyAV's to the bit where they
are progressive and of 8 bits; of others it makes RGB in another way.

Its guarantees are weaker: it does not report damage that a decoder conceals, and trusts every keyframe mark of a
file. Frames of another time than was asked for, as it gives out of MPEG transport streams, are rejected here.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from ...warn import raised_as
from .file import VideoError, VideoInfo


def load_decoder() -> type:
    """Return torchcodec's ``VideoDecoder``.

    Raises:
        ImportError: it is not installed, or finds no shared libraries of FFmpeg, or was built for another torch.
    """
    with raised_as(ImportError, "torchcodec is installed but cannot be loaded", OSError, RuntimeError):
        from torchcodec.decoders import VideoDecoder
    return VideoDecoder


def torchcodec_chunks(
    decoder_type: type,
    info: VideoInfo,
    wanted: Sequence[int],
    chunk_len: int,
    threads: int,
    device: str,
    at_work: Callable[[int], AbstractContextManager],
) -> Iterator[np.ndarray | Tensor]:
    """Decode frames chunk by chunk.

    Args:
        decoder_type: what :func:`load_decoder` returned.
        info: the video.
        wanted: the frames' numbers, ascending.
        threads: of the decoder, on a CPU.
        device: where to decode.
        at_work: called with 0, and entered while this decodes.

    Returns:
        uint8 ``[<= chunk_len, height, width, 3]``: arrays on a CPU, else tensors on the device, complete for every
        stream.

    Raises:
        VideoError: torchcodec cannot decode a frame of the next chunk, or gives out another than was probed.
    """
    with raised_as(VideoError, f"{info.path}: torchcodec cannot decode it", RuntimeError, ValueError):
        refusals = {
            "its packets have no frame times": not len(info.pts),
            "it is mirrored": info.transpose ^ info.flip_vertical ^ info.flip_horizontal,
            "its packets may be fields": info.has_fields,
            "some of its frames have the same time": not np.diff(info.pts).all(),
            "every frame is marked as a keyframe": len(info.keys) == len(info.pts) > 1,
            "pictures are refreshed part by part": (info.keys[:, 0] != info.keys[:, 2]).any(),
        }
        for reason, applies in refusals.items():
            if applies:
                raise ValueError(reason)
        decoder = decoder_type(
            info.path,
            dimension_order="NHWC",
            num_ffmpeg_threads=threads,
            device=device,
            custom_frame_mappings=_frame_mappings(info),
        )
        for start in range(0, len(wanted), chunk_len):
            with at_work(0):
                frames = list(wanted[start : start + chunk_len])
                batch = decoder.get_frames_at(frames)
                _check(info, frames, batch)
                chunk = batch.data
                if chunk.is_cuda:
                    torch.cuda.current_stream(chunk.device).synchronize()
            yield chunk if chunk.is_cuda else chunk.numpy()
            del batch, chunk


def _frame_mappings(info: VideoInfo) -> str:
    """The frames in ffprobe's JSON format."""
    durations, are_keys = np.append(np.diff(info.pts), 1), np.isin(info.pts, info.keys[:, 0])
    frames = [
        {"pts": pts, "duration": duration, "key_frame": int(key)}
        for pts, duration, key in zip(info.pts.tolist(), durations.tolist(), are_keys, strict=True)
    ]
    return json.dumps({"frames": frames})


def _check(info: VideoInfo, frames: list[int], batch) -> None:
    """Reject frames of other times or of another size than were asked for."""
    times, pts = info.timestamps, info.pts
    # The time base is not known here, but what a tick lasts is, unless all is one frame.
    tick = times[-1] / (pts[-1] - pts[0]) if len(pts) > 1 else 0
    if tick and np.abs(batch.pts_seconds.numpy() - times[frames] - pts[0] * tick).max() > tick / 2:
        raise ValueError(f"it returns other frames than {frames[0]}..{frames[-1]}")
    if tuple(batch.data.shape[1:3]) != (info.height, info.width):
        raise ValueError("the frame size changes within the video")
