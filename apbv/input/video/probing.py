"""Finding a video's frames without decoding them all."""

import itertools
import os
import struct
from collections.abc import Callable
from fractions import Fraction

import av
import numpy as np
from av.sidedata.sidedata import Type as SideDataType

from .file import MPEGTS, VideoFile
from .info import Packets, VideoError, VideoInfo, is_nearly_sorted


def probe(path: str | os.PathLike, check: Callable[[int], None] = lambda number: None) -> VideoInfo:
    """List the frames of a file's first video stream.

    This reads all packets and decodes one frame, or a few where the stream does not start cleanly; it decodes all
    where packet times cannot be trusted (see :mod:`apbv.input.video`).

    Args:
        check: called with the number of each packet before it is listed, and of each frame that has to be decoded;
            what it raises ends the probing.

    Raises:
        VideoError: the file is missing, no video, has no frames, is cut short (as far as the container tells), or
            its first frame cannot be decoded.
    """
    path = os.fsdecode(path)
    with VideoFile(path) as file:
        packets = file.list_packets(check)
        if packets is None:
            times, first = _decode_times(file, check)
            frame_packets = np.empty(0, np.int64)
        else:
            first, frame_packets = _find_frames(file, packets)
            times = _seconds(packets.pts[frame_packets], file.time_base)
        transpose, flip_vertical, flip_horizontal = _orientation(path, first)
        height, width = (first.width, first.height) if transpose else (first.height, first.width)
        fps = (len(times) - 1) / float(times[-1]) if len(times) > 1 else file.declared_fps()
        return VideoInfo(
            path=path,
            timestamps=times,
            height=height,
            width=width,
            fps=fps,
            transpose=transpose,
            flip_vertical=flip_vertical,
            flip_horizontal=flip_horizontal,
            packets=packets,
            frame_packets=frame_packets,
        )


def _find_frames(file: VideoFile, packets: Packets) -> tuple[av.VideoFrame, np.ndarray]:
    """Decode the first frame, and find for each frame that can be decoded the index of its packet."""
    start = int(packets.keyframes[0])
    origin = packets.pts[start]
    shown = np.flatnonzero(packets.shown)
    order = shown[np.argsort(packets.pts[shown], kind="stable")]
    regular = order[(order >= start) & (packets.pts[order] >= origin)]
    # What follows the first keyframe in the file but is displayed before it may refer to frames cut away.
    leading = order[(order > start) & (packets.pts[order] < origin)]
    if not len(regular):
        raise file.error("has no video frames")
    first, decoded = None, set()
    stop = int(max(regular[0], leading.max(initial=0))) + 1
    file.expect(packets)
    file.can_seek = False  # no need to: it is near the start
    if start and file.format_name != MPEGTS:
        # A video may be cut out between keyframes, but what precedes the first may also be a damaged
        # keyframe, which the decoder refuses. A broadcast starts anywhere.
        for packet in file.packets_between(0, start):
            file.decode(packet)
    for packet in itertools.chain(file.packets_between(start, stop), (None,)):
        try:
            frames = file.decode(packet)
        except av.error.FFmpegError:
            if not len(leading):
                raise
            continue
        for frame in frames:
            if not frame.is_corrupt:
                decoded.add(frame.pts)
                if frame.pts == packets.pts[regular[0]]:
                    first = frame
    if first is None:
        raise file.error("its first frame cannot be decoded")
    leading = leading[np.isin(packets.pts[leading], list(decoded))]
    return first, np.concatenate([leading, regular])


def _decode_times(file: VideoFile, check: Callable[[int], None]) -> tuple[np.ndarray, av.VideoFrame]:
    """Decode everything: times of all frames in seconds since the first, and the first frame."""
    first, pts = None, []
    for number, frame in enumerate(file.decode_all(threads=0)):
        check(number)
        first = first or frame
        pts.append(frame.pts)
    if first is None:
        raise file.error("has no video frames")
    if None not in pts and is_nearly_sorted(np.array(pts)):
        # Where decoding times stand for presentation times, they are the right ones, in the wrong order.
        return _seconds(np.sort(pts), file.time_base), first
    return np.arange(len(pts)) / file.declared_fps(), first


def _seconds(pts: np.ndarray, time_base: Fraction) -> np.ndarray:
    # The difference first, in integers: a late start must not cost precision.
    return (pts - pts[0]) * time_base.numerator / time_base.denominator


def _orientation(path: str, frame: av.VideoFrame) -> tuple[bool, bool, bool]:
    """Read how to display a frame: (transpose, then flip vertically, then flip horizontally)."""
    if SideDataType.DISPLAYMATRIX not in frame.side_data:
        return False, False, False
    # Row major [[a, b, u], [c, d, v], [x, y, w]]: a pixel at (x, y) is displayed at (a x + c y, b x + d y).
    a, b, _, c, d = struct.unpack_from("=5i", bytes(frame.side_data[SideDataType.DISPLAYMATRIX]))
    if a and d and not b and not c:
        return False, d < 0, a < 0
    if b and c and not a and not d:
        return True, b < 0, c < 0
    raise VideoError(f"{path}: is rotated by an angle that is no multiple of 90 degrees")
