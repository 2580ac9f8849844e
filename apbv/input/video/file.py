"""Reading the packets of an open video file, and feeding them to its decoder."""

import os
from collections.abc import Iterator, Sequence

import av
from av.stream import Disposition

from .info import Packet, PacketId, VideoError, is_ascending, is_nearly_sorted, packet_id, packet_indices

MPEGTS = "mpegts"
_MOV = "mov,mp4,m4a,3gp,3g2,mj2"
# Containers whose packets carry the presentation time that the encoder gave them.
_STORES_PTS = {_MOV, "matroska,webm", MPEGTS, "flv"}
# Nothing but video files: ffmpeg would render text as the video of a terminal, and playlists name others.
_FORMATS = "mov,mp4,matroska,webm,avi,mpegts,flv,mpeg,mpegvideo,asf,ogg,gif,nut,ivf,obu,h264,hevc,m4v,mxf,dv"


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

    @property
    def time_base(self):
        """The unit of the packets' times, a fraction of a second."""
        return self._stream.time_base

    def declared_fps(self) -> float:
        """Return the frames per second by the container's account."""
        return float(self._stream.average_rate or self._stream.guessed_rate or 1)

    def list_packets(self) -> list[Packet] | None:
        """List all packets in decoding order; None where their times do not tell the frames' times.

        Raises:
            VideoError: the file is cut short or has no frames.
        """
        vp8 = self._stream.codec_context.name == "vp8"
        declared = _declared_size(self.path)
        if declared > os.path.getsize(self.path):
            raise self.error(f"is cut short: {os.path.getsize(self.path)} of {declared} bytes")
        packets = []
        for packet in self._container.demux(self._stream):
            if not packet.size:
                continue  # the end of the stream, or a repeated frame in avi
            # In a broadcast a lost packet is normal, and the decoder tells which frames it hurts.
            if packet.is_corrupt and self.format_name != MPEGTS:
                raise self.error(f"is cut short or damaged: packet {len(packets)} is incomplete")
            # VP8 has packets that are only referred to; a bit of the header says whether to show them.
            shown = not packet.is_discard and not (vp8 and not memoryview(packet)[0] & 0x10)
            key = packet.is_keyframe
            packets.append(Packet(packet.pts, packet.dts, packet.pos, packet.size, key, shown))
        if self.format_name == _MOV:
            end = max((entry.pos + entry.size for entry in self._stream.index_entries), default=0)
            if end > self._container.size:
                raise self.error(f"is cut short: {self._container.size} of at least {end} bytes")
        if not any(packet.shown for packet in packets):
            raise self.error("has no video frames")
        return packets if self._times_are_right(packets) else None

    def _times_are_right(self, packets: list[Packet]) -> bool:
        stored = self.format_name in _STORES_PTS or all(packet.key for packet in packets)
        if not stored or any(packet.pts is None for packet in packets):
            return False
        if len(packet_indices(packets)) < len(packets):
            return False
        pts = [packet.pts for packet in packets if packet.shown]
        # Frames are reordered, by their header or as seen on opening, yet times ascend: decoding times.
        if self._stream.codec_context.has_b_frames and len(pts) > 1 and is_ascending(pts):
            return False
        return is_nearly_sorted(pts)

    def expect(self, packets: Sequence[Packet], indices: dict[PacketId, int]) -> None:
        """Say what :meth:`packets_between` will find in the file.

        Args:
            packets: all of them, as listed earlier.
            indices: :func:`packet_indices` of them.
        """
        self._packets, self._packet_indices = packets, indices

    def packets_between(self, start: int, stop: int) -> Iterator[av.Packet]:
        """Read the packets [start, stop) of those expected, after a seek.

        Raises:
            SeekFailed: reading from the start may help.
            VideoError: the file holds other packets.
        """
        key = self._packets[start]
        # Containers index keyframes by presentation time or by decoding time, or they cannot seek at all.
        for target in (key.pts, key.dts, None) if self.can_seek else (None,):
            if target is None:
                self.reopen()
            else:
                try:
                    self._container.seek(target, stream=self._stream)
                except av.error.FFmpegError:
                    continue
            expected = start
            for packet in self._container.demux(self._stream):
                found = self._packet_indices.get(packet_id(packet)) if packet.size else None
                if expected == start and (found is None or found < start):
                    continue  # the seek went too far back, which costs little
                if found != expected:
                    break
                yield packet
                expected += 1
                if expected == stop:
                    return
            if expected > start and target is not None:
                raise SeekFailed
        raise self.error("changed since it was probed")

    def decode(self, packet: av.Packet | None) -> list[av.VideoFrame]:
        """Return the frames that the decoder gives out on one more packet; on None, those that it still holds."""
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


def _declared_size(path: str) -> int:
    """Return the bytes that a Matroska or RIFF (avi) file must have by its outermost size field; 0 if unknown.

    ffmpeg reads such a file that is cut short as a shorter video.
    """
    with open(path, "rb") as file:
        head = file.read(4096)
    if head[:4] == b"RIFF" and len(head) >= 8:
        size = int.from_bytes(head[4:8], "little")
        return 0 if size == 0xFFFFFFFF else size + 8
    if head[:4] != b"\x1a\x45\xdf\xa3":
        return 0
    end = 4
    for following in (b"\x18\x53\x80\x67", b""):  # the EBML header, then the segment that holds the rest
        first = head[end] if end < len(head) else 0
        length = 9 - first.bit_length()  # of the size field: the leading zero bits of its first byte say
        value = int.from_bytes(head[end : end + length], "big") & ((1 << 7 * length) - 1)
        end += length
        if length > 8 or value == (1 << 7 * length) - 1:  # all ones: unknown, as in a live recording
            return 0
        end += value
        if following:
            if head[end : end + 4] != following:
                return 0
            end += 4
    return end
