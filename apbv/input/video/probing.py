"""Finding a video's frames without decoding them all."""

import itertools
import os
import struct

import av
from av.sidedata.sidedata import Type as SideDataType

from .file import MPEGTS, VideoFile
from .info import Packet, VideoError, VideoInfo, is_nearly_sorted, keyframe_indices, packet_indices


def probe(path: str | os.PathLike) -> VideoInfo:
    """List the frames of a file's first video stream.

    This reads all packets and decodes one frame, or a few where the stream does not start cleanly; it decodes all
    where packet times cannot be trusted (see :mod:`apbv.input.video`).

    Raises:
        VideoError: the file is missing, no video, has no frames, is cut short (as far as the container tells), or
            its first frame cannot be decoded.
    """
    path = os.fsdecode(path)
    with VideoFile(path) as file:
        packets = file.list_packets()
        if packets is None:
            times, first = _decode_times(file)
            frame_packets: list[int] = []
        else:
            first, frame_packets = _find_frames(file, packets)
            # The difference first, in integers: a late start must not cost precision.
            origin = packets[frame_packets[0]].pts
            times = [float((packets[i].pts - origin) * file.time_base) for i in frame_packets]
        transpose, flip_vertical, flip_horizontal = _orientation(path, first)
        height, width = (first.width, first.height) if transpose else (first.height, first.width)
        fps = (len(times) - 1) / times[-1] if len(times) > 1 else file.declared_fps()
        return VideoInfo(
            path=path,
            timestamps=tuple(times),
            height=height,
            width=width,
            fps=fps,
            transpose=transpose,
            flip_vertical=flip_vertical,
            flip_horizontal=flip_horizontal,
            packets=tuple(packets or ()),
            frame_packets=tuple(frame_packets),
        )


def _find_frames(file: VideoFile, packets: list[Packet]) -> tuple[av.VideoFrame, list[int]]:
    """Decode the first frame, and find for each frame that can be decoded the index of its packet."""
    start = keyframe_indices(packets)[0]
    origin = packets[start].pts
    order = sorted((i for i, packet in enumerate(packets) if packet.shown), key=lambda i: packets[i].pts)
    regular = [i for i in order if i >= start and packets[i].pts >= origin]
    # What follows the first keyframe in the file but is displayed before it may refer to frames cut away.
    leading = [i for i in order if i > start and packets[i].pts < origin]
    if not regular:
        raise file.error("has no video frames")
    first, decoded = None, set()
    stop = max(regular[:1] + leading) + 1
    file.expect(packets, packet_indices(packets))
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
            if not leading:
                raise
            continue
        for frame in frames:
            if not frame.is_corrupt:
                decoded.add(frame.pts)
                if frame.pts == packets[regular[0]].pts:
                    first = frame
    if first is None:
        raise file.error("its first frame cannot be decoded")
    return first, [i for i in leading if packets[i].pts in decoded] + regular


def _decode_times(file: VideoFile) -> tuple[list[float], av.VideoFrame]:
    """Decode everything: times of all frames in seconds since the first, and the first frame."""
    first, pts = None, []
    for frame in file.decode_all(threads=0):
        first = first or frame
        pts.append(frame.pts)
    if first is None:
        raise file.error("has no video frames")
    if None not in pts and is_nearly_sorted(pts):
        # Where decoding times stand for presentation times, they are the right ones, in the wrong order.
        pts.sort()
        return [float((p - pts[0]) * file.time_base) for p in pts], first
    return [i / file.declared_fps() for i in range(len(pts))], first


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
