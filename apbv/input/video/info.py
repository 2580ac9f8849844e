"""A video's frames and packets, as :func:`apbv.input.video.probe` finds them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import av

# No codec displays a frame further from its place in the file than this, in frames.
_MAX_REORDER = 32

# What tells a packet from the others of its stream: presentation time, byte offset and size.
PacketId = tuple[int | None, int | None, int]


class VideoError(ValueError):
    """The file cannot be used as a video; the message names the file and the reason."""


class Packet(NamedTuple):
    """One compressed packet of the video stream. Times are in units of the stream's time base."""

    pts: int
    dts: int | None
    pos: int | None  # byte offset in the file, where the container knows it
    size: int  # bytes
    key: bool
    shown: bool  # False: decoded because others refer to it, but no frame of the video


@dataclass(frozen=True)
class VideoInfo:
    """A video file's frames, numbered in presentation order; only those that can be decoded count.

    Attributes:
        path: the file.
        timestamps: seconds since the first frame, strictly ascending.
        height, width: pixels, as displayed.
        fps: frames per second on average: (num_frames - 1) / (last - first time); of a single frame what the
            container says.
        transpose, flip_vertical, flip_horizontal: how a stored image is displayed: transposed first, then flipped.
        packets: all packets in decoding order; empty where the file must be decoded from the start.
        frame_packets: for each frame the index of its packet.
    """

    path: str
    timestamps: tuple[float, ...] = field(repr=False)
    height: int
    width: int
    fps: float
    transpose: bool
    flip_vertical: bool
    flip_horizontal: bool
    packets: tuple[Packet, ...] = field(repr=False)
    frame_packets: tuple[int, ...] = field(repr=False)

    @property
    def num_frames(self) -> int:
        """The number of frames that can be decoded."""
        return len(self.timestamps)

    @property
    def duration(self) -> float:
        """The length in seconds, with the last frame shown for the mean frame interval."""
        return self.num_frames / self.fps


def packet_id(packet: Packet | av.Packet) -> PacketId:
    """Return what tells a packet from the others of its stream."""
    # Without dts: some containers store none, and what ffmpeg makes up depends on where reading started.
    return packet.pts, packet.pos, packet.size


def packet_indices(packets: Sequence[Packet]) -> dict[PacketId, int]:
    """Map each packet's :data:`PacketId` to its index."""
    return {packet_id(packet): i for i, packet in enumerate(packets)}


def keyframe_indices(packets: Sequence[Packet]) -> list[int]:
    """Return the indices of the packets that decoding may start from; at least one."""
    return [i for i, packet in enumerate(packets) if packet.key] or [0]


def is_ascending(values: Sequence[int]) -> bool:
    """Return whether every value is greater than the one before."""
    return all(a < b for a, b in itertools.pairwise(values))


def is_nearly_sorted(pts: Sequence[int]) -> bool:
    """Return whether the values are distinct and out of order by no more than the reordering of frames."""
    order = sorted(range(len(pts)), key=pts.__getitem__)
    moved = max(abs(i - j) for i, j in enumerate(order))
    return moved <= _MAX_REORDER and is_ascending([pts[i] for i in order])
