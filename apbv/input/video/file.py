"""Reading the packets of an open video file, and feeding them to its decoder."""

import os
from collections.abc import Callable, Iterator

import av
import numpy as np
from av.stream import Disposition
from av.video.codeccontext import VideoCodecContext

from .info import NO_POSITION, NO_TIME, Packets, VideoError, is_nearly_sorted

MPEGTS = "mpegts"
_MOV = "mov,mp4,m4a,3gp,3g2,mj2"
# Containers whose packets carry the presentation time that the encoder gave them.
_STORES_PTS = {_MOV, "matroska,webm", MPEGTS, "flv"}
# Nothing but video files: ffmpeg would render text as the video of a terminal, and playlists name others.
_FORMATS = "mov,mp4,matroska,webm,avi,mpegts,flv,mpeg,mpegvideo,asf,ogg,gif,nut,ivf,obu,h264,hevc,m4v,mxf,dv"
# In these a picture says of itself that no other refers to it (h264), or those of one type never are (B). Not in
# VP8 and VP9, where such a picture may still carry probabilities or segments that the next one starts from.
_SKIPPING = {"h264", "mpeg1video", "mpeg2video", "mpeg4"}
_START_OF_HEVC_VPS = b"\0\0\1\x40\1"


class SeekFailed(Exception):
    """The packets after a seek are not those that reading from the start gives."""


class VideoFile:
    """An open file and its first video stream; leaving its context turns ffmpeg's errors into VideoError.

    Attributes:
        can_seek: whether :meth:`packets_between` seeks, instead of reading from the start.
        format_name: ffmpeg's name of the container.

    Raises:
        VideoError: the file is missing, or no video that ffmpeg can open.
    """

    def __init__(self, path: str):
        self.path, self.can_seek = path, True
        if not os.path.exists(path):
            raise self.error("no such file")
        if not os.path.isfile(path):
            raise self.error("not a regular file")
        self._open()
        self.format_name: str = self._container.format.name

    def __enter__(self) -> "VideoFile":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._container.close()
        if isinstance(error, av.error.FFmpegError):
            raise self.error(f"cannot be decoded ({error.strerror})") from error

    def error(self, reason: str) -> VideoError:
        """Return an error that names this file."""
        return VideoError(f"{self.path}: {reason}")

    def reopen(self) -> None:
        """Go back to the start, with a fresh decoder."""
        self._container.close()
        self._open()

    def _open(self) -> None:
        # The prefix and the two lists keep ffmpeg from following an address in the name or in the file.
        options = {"protocol_whitelist": "file", "format_whitelist": _FORMATS}
        try:
            self._container = av.open("file:" + self.path, options=options, metadata_errors="ignore")
        except av.error.FFmpegError as error:
            raise self.error(f"cannot be read as a video ({error.strerror})") from error
        streams = [s for s in self._container.streams.video if not s.disposition & Disposition.attached_pic]
        if not streams:
            self._container.close()
            raise self.error("has no video stream")
        self._stream = streams[0]
        if self._stream.codec_context is None:
            self._container.close()
            raise self.error("no decoder for its video stream")
        # Damage that the h264 decoder conceals it reports reliably only with a single thread.
        self._stream.codec_context.thread_count = 1
        self._skip, self._can_skip = "DEFAULT", _can_skip(self._stream.codec_context)

    @property
    def time_base(self):
        """The unit of the packets' times, a fraction of a second."""
        return self._stream.time_base

    def declared_fps(self) -> float:
        """Return the frames per second by the container's account."""
        return float(self._stream.average_rate or self._stream.guessed_rate or 1)

    def list_packets(self, check: Callable[[int], None]) -> Packets | None:
        """List all packets; None where their times do not tell the frames' times.

        Args:
            check: called with the number of each before it is listed.

        Raises:
            VideoError: the file is cut short or has no frames.
        """
        packets = self._read_packets(check)
        if self.format_name == _MOV:
            end = max((entry.pos + entry.size for entry in self._stream.index_entries), default=0)
            if end > self._container.size:
                raise self.error(f"is cut short: {self._container.size} of at least {end} bytes")
        if not packets.shown.any():
            raise self.error("has no video frames")
        return packets if self._times_are_right(packets) else None

    def _read_packets(self, check: Callable[[int], None]) -> Packets:
        vp8 = self._stream.codec_context.name == "vp8"
        rows = []
        for packet in self._container.demux(self._stream):
            check(len(rows))
            size = packet.size
            if not size:
                continue  # the end of the stream, or a repeated frame in avi
            # In a broadcast a lost packet is normal, and the decoder tells which frames it hurts.
            if packet.is_corrupt and self.format_name != MPEGTS:
                raise self.error(f"is cut short or damaged: packet {len(rows)} is incomplete")
            # VP8 has packets that are only referred to; a bit of the header says whether to show them.
            shown = not packet.is_discard and not (vp8 and not memoryview(packet)[0] & 0x10)
            rows.append((packet.pts, packet.dts, packet.pos, size, packet.is_keyframe, shown))
        pts, dts, pos, size, key, shown = zip(*rows, strict=True) if rows else ((),) * 6
        return Packets(_known(pts, NO_TIME), _known(dts, NO_TIME), _known(pos, NO_POSITION), size, key, shown)

    def _times_are_right(self, packets: Packets) -> bool:
        stored = self.format_name in _STORES_PTS or packets.key.all()
        if not stored or (packets.pts == NO_TIME).any() or not packets.are_distinct():
            return False
        pts = packets.pts[packets.shown]
        # Frames are reordered, by their header or as seen on opening, yet times ascend: decoding times.
        if self._stream.codec_context.has_b_frames and len(pts) > 1 and (np.diff(pts) > 0).all():
            return False
        return is_nearly_sorted(pts)

    def expect(self, packets: Packets) -> None:
        """Say what :meth:`packets_between` will find in the file: all packets, as listed earlier."""
        self._packets = packets

    def packets_between(self, start: int, stop: int) -> Iterator[av.Packet]:
        """Read the packets [start, stop) of those expected, after a seek.

        Raises:
            SeekFailed: reading from the start may help.
            VideoError: the file holds other packets.
        """
        key_times = self._packets.pts[start], self._packets.dts[start]
        # Containers index keyframes by presentation time or by decoding time, or they cannot seek at all.
        targets = [int(time) for time in key_times if time != NO_TIME] if self.can_seek else []
        for target in (*targets, None):
            if target is None:
                self.reopen()
            else:
                try:
                    self._container.seek(target, stream=self._stream)
                except av.error.FFmpegError:
                    continue
            expected, at = start, -1
            for packet in self._container.demux(self._stream):
                if not packet.size:
                    continue
                at = self._index_of(packet, at + 1)
                if expected == start and at < start:
                    continue  # the seek went too far back, which costs little
                if at != expected:
                    break
                yield packet
                expected += 1
                if expected == stop:
                    return
            if expected > start and target is not None:
                raise SeekFailed
        raise self.error("changed since it was probed")

    def _index_of(self, packet: av.Packet, likely: int) -> int:
        """Return which of the expected packets this is, -1 if none; fastest for the one that is thought likely."""
        if likely < len(self._packets) and self._is(packet, likely):
            return likely
        same_time = np.flatnonzero(self._packets.pts == packet.pts)
        return next((int(i) for i in same_time if self._is(packet, i)), -1)

    def _is(self, packet: av.Packet, index: int) -> bool:
        packets, pos = self._packets, NO_POSITION if packet.pos is None else packet.pos
        return (
            packet.pts == packets.pts[index] and packet.size == packets.size[index] and pos == packets.pos[index]
        )

    def decode(self, packet: av.Packet | None, needed: bool = True) -> list[av.VideoFrame]:
        """Return the frames that the decoder gives out on one more packet; on None, those that it still holds.

        Args:
            needed: false where the packet's own frame is of no use. Where no other frame refers to it, the decoder
                then leaves it out, if that changes no others.
        """
        skip = "DEFAULT" if needed or not self._can_skip else "NONREF"
        if skip != self._skip:
            self._stream.codec_context.skip_frame = self._skip = skip
        return self._stream.decode(packet)

    def decode_all(self, threads: int = 1) -> Iterator[av.VideoFrame]:
        """Decode all frames, from the start.

        Args:
            threads: 0 for one per CPU; with more than one damage may go unreported.
        """
        self.reopen()
        self._stream.thread_type = "FRAME"
        self._stream.codec_context.thread_count = threads
        for packet in self._container.demux(self._stream):
            if packet.size:
                yield from self.decode(packet)
        yield from self.decode(None)


def _known(values, default: int) -> list[int]:
    return [default if value is None else value for value in values]


def _can_skip(codec: VideoCodecContext) -> bool:
    """Return whether ffmpeg's ``skip_frame = NONREF`` leaves all other frames as they are, to the bit."""
    if codec.name == "hevc":
        return _num_temporal_layers(bytes(codec.extradata or b"")) == 1
    return codec.name in _SKIPPING


def _num_temporal_layers(extradata: bytes) -> int:
    """Return how many temporal sub-layers an HEVC stream has by its headers; 0 if unknown.

    What ffmpeg takes for a frame that is not referred to is a *sub-layer non-reference picture* (H.265, 7.4.2.2):
    frames of higher sub-layers may refer to it.
    """
    if len(extradata) > 22 and extradata[0] == 1:  # hvcC (ISO/IEC 14496-15, 8.3.3.1.2): numTemporalLayers
        return extradata[21] >> 3 & 7
    vps = extradata.find(_START_OF_HEVC_VPS) + len(_START_OF_HEVC_VPS)
    if vps < len(_START_OF_HEVC_VPS) or len(extradata) < vps + 2:
        return 0
    return (extradata[vps + 1] >> 1 & 7) + 1  # vps_max_sub_layers_minus1 (H.265, 7.3.2.1)
