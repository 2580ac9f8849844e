"""Decoding chosen frames with torchcodec: on a GPU that has a video decoder (NVDEC), or on a CPU.

torchcodec is told the frames that :func:`apbv.input.video.probe` found. So it does not look through the file
again, and both number the frames alike. On a CPU, with the same FFmpeg, its frames are PyAV's to the bit where
they are progressive and of 8 bits; of others it makes RGB in another way.

It promises less: it says nothing of damage that a decoder conceals, and believes every keyframe that a file marks
as one. Frames of another time than was asked for, as it gives out of MPEG transport streams, are refused here.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from .info import VideoError, VideoInfo


def load_decoder() -> type:
    """Return torchcodec's ``VideoDecoder``.

    Raises:
        ImportError: it is not installed, or finds no shared libraries of FFmpeg, or was built for another torch.
    """
    try:
        from torchcodec.decoders import VideoDecoder
    except (OSError, RuntimeError) as error:
        raise ImportError(f"torchcodec is installed but cannot be loaded: {error}") from error
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
    reader = _Reader(decoder_type, info, threads, device)
    for start in range(0, len(wanted), chunk_len):
        with at_work(0):
            chunk = reader.decode(wanted[start : start + chunk_len])
        yield chunk
        del chunk


class _Reader:
    """A file that torchcodec has opened; VideoError where it cannot be read as it was probed."""

    def __init__(self, decoder_type: type, info: VideoInfo, threads: int, device: str):
        self._info = info
        if info.packets is None:
            raise self._error("its packets do not tell the frames' times")
        if info.transpose ^ info.flip_vertical ^ info.flip_horizontal:
            raise self._error("it is mirrored")
        self._pts = info.packets.pts[info.frame_packets]
        try:
            self._decoder = decoder_type(
                info.path,
                dimension_order="NHWC",
                num_ffmpeg_threads=threads,
                device=device,
                custom_frame_mappings=self._frame_mappings(),
            )
        except (RuntimeError, ValueError) as error:
            raise self._error(str(error)) from error

    def decode(self, frames: Sequence[int]) -> np.ndarray | Tensor:
        """Decode frames: uint8 ``[len(frames), height, width, 3]``."""
        try:
            batch = self._decoder.get_frames_at(list(frames))
        except (RuntimeError, ValueError) as error:
            raise self._error(f"a frame among {frames[0]}..{frames[-1]}: {error}") from error
        self._check_times(frames, batch.pts_seconds.numpy())
        if tuple(batch.data.shape[1:]) != (self._info.height, self._info.width, 3):
            raise self._error("the frame size changes within the video")
        if batch.data.is_cuda:
            torch.cuda.current_stream(batch.data.device).synchronize()
            return batch.data
        return batch.data.numpy()

    def _frame_mappings(self) -> str:
        """What ffprobe would say of the frames, in JSON."""
        durations = np.append(np.diff(self._pts), 1).tolist()
        keys = self._info.packets.key[self._info.frame_packets].tolist()
        frames = [
            {"pts": pts, "duration": duration, "key_frame": int(key)}
            for pts, duration, key in zip(self._pts.tolist(), durations, keys, strict=True)
        ]
        return json.dumps({"frames": frames})

    def _check_times(self, frames: Sequence[int], seconds: np.ndarray) -> None:
        times, pts = self._info.timestamps[list(frames)], self._pts
        # The time base is not known here, but what a tick lasts is, unless all is one frame.
        tick = self._info.timestamps[-1] / (pts[-1] - pts[0]) if len(pts) > 1 else 0
        if tick and np.abs(seconds - times - pts[0] * tick).max() > tick / 2:
            raise self._error(f"it gives out other frames than {frames[0]}..{frames[-1]}")

    def _error(self, reason: str) -> VideoError:
        return VideoError(f"{self._info.path}: torchcodec cannot decode it: {reason}")
