"""Video files: lists frames without decoding them all, and decodes frames from a keyframe on."""

import io
import os
import struct
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, fields
from fractions import Fraction
from itertools import chain

import av
import numpy as np
from av.sidedata.sidedata import Type as SideDataType
from av.stream import Disposition
from av.video.frame import PictureType

from ..container import open_media

# Containers whose packets carry the presentation time that the encoder gave them.
_STORES_PTS = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "mpegts", "flv"}
# Nothing but video files: ffmpeg would render text as the video of a terminal, and playlists name others.
_FORMATS = "mov,mp4,matroska,webm,avi,mpegts,flv,mpeg,mpegvideo,asf,ogg,gif,nut,ivf,obu,h264,hevc,m4v,mxf,dv"
# In these a picture says of itself that no other refers to it (h264), or those of one type never are (B). Not in
# VP8 and VP9, where such a picture may still carry probabilities or segments that the next one starts from.
_SKIPPING = {"h264", "mpeg1video", "mpeg2video", "mpeg4"}
# No codec displays a frame further from its place in the file than this, in frames.
_MAX_REORDER = 32
_NO_TIME = np.iinfo(np.int64).min


class VideoError(ValueError):
    """Raised if a file cannot be used as a video; the message names the file and the reason."""


@dataclass(frozen=True, eq=False)
class VideoInfo:
    """Frames of a video file, numbered in presentation order; only those that can be decoded count.

    Attributes:
        path: the file.
        num_bytes: its size.
        timestamps: float64, seconds since the first frame, strictly ascending.
        height, width: pixels, as displayed.
        fps: frames per second on average: (num_frames - 1) / (last - first time); of a single frame what the
            container says.
        transpose, flip_vertical, flip_horizontal: how a stored image is displayed: transposed first, then flipped.
        pts: int64, the frames' presentation times in units of the stream's time base; empty where the file must be
            decoded from the start.
        keys: int64 ``[K, 2]``, presentation and decoding times of the packets where decoding may start, ascending.
    """

    path: str
    num_bytes: int
    timestamps: np.ndarray = field(repr=False)
    height: int
    width: int
    fps: float
    transpose: bool
    flip_vertical: bool
    flip_horizontal: bool
    pts: np.ndarray = field(repr=False)
    keys: np.ndarray = field(repr=False)

    @property
    def num_frames(self) -> int:
        """The number of frames that can be decoded."""
        return len(self.timestamps)

    @property
    def duration(self) -> float:
        """The length in seconds, with the last frame shown for the mean frame interval."""
        return self.num_frames / self.fps

    def to_bytes(self) -> bytes:
        """Serialise it, for :meth:`from_bytes` on another host."""
        file = io.BytesIO()
        np.savez(file, **vars(self))
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "VideoInfo":
        """Deserialise the output of :meth:`to_bytes`, without executing any of it."""
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            values = {entry.name: stored[entry.name] for entry in fields(cls)}
        return cls(**{name: value if value.ndim else value.item() for name, value in values.items()})


class VideoFile:
    """Open file and its first video stream; leaving its context turns ffmpeg's errors into VideoError.

    Raises:
        VideoError: the file is missing, or no video that ffmpeg can open.
    """

    def __init__(self, path: str):
        self.path = path
        if not os.path.exists(path):
            raise self.error("no such file")
        if not os.path.isfile(path):
            raise self.error("not a regular file")
        self.num_bytes = os.path.getsize(path)
        self.open()

    def __enter__(self) -> "VideoFile":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._container.close()
        if isinstance(error, av.error.FFmpegError):
            raise self.error(f"cannot be decoded ({error.strerror})") from error

    def error(self, reason: str) -> VideoError:
        """Return an error that names this file."""
        return VideoError(f"{self.path}: {reason}")

    def open(self) -> None:
        """Open the file at its start, with a fresh decoder."""
        # The two lists keep ffmpeg from following an address in the file.
        options = {"protocol_whitelist": "file", "format_whitelist": _FORMATS}
        try:
            self._container = open_media(self.path, options)
        except av.error.FFmpegError as error:
            raise self.error(f"cannot be read as a video ({error.strerror})") from error
        streams = [s for s in self._container.streams.video if not s.disposition & Disposition.attached_pic]
        if not streams or streams[0].codec_context is None:
            self._container.close()
            raise self.error("has no video stream that can be decoded")
        self.stream, codec = streams[0], streams[0].codec_context
        # Damage that the h264 decoder conceals it reports reliably only with a single thread.
        codec.thread_count = 1
        # Whether ffmpeg's skip_frame = NONREF leaves all other frames as they are, to the bit. In HEVC it leaves
        # out a sub-layer non-reference picture (H.265, 7.4.2.2), to which frames of higher temporal sub-layers may
        # refer: their number is in the header of mp4 and mkv, hvcC (ISO/IEC 14496-15).
        self._can_skip = codec.name in _SKIPPING
        if codec.name == "hevc":
            header = bytes(codec.extradata or b"")
            self._can_skip = len(header) > 22 and header[0] == 1 and header[21] >> 3 & 7 == 1

    def list_times(self, check: Callable[[int], None]) -> tuple[np.ndarray, np.ndarray]:
        """Read all packets for the frames' times and the keyframes'; none where these packets do not tell them.

        Args:
            check: called with the number of each packet before it is listed.

        Returns:
            As :attr:`VideoInfo.pts` and :attr:`VideoInfo.keys`.

        Raises:
            VideoError: the file is cut short or has no frames.
        """
        container, codec, rows = self._container, self.stream.codec_context, []
        for packet in container.demux(self.stream):
            check(len(rows))
            if not packet.size:
                continue  # the end of the stream, or a repeated frame in avi
            # In a broadcast a lost packet is normal, and the decoder tells which frames it hurts.
            if packet.is_corrupt and container.format.name != "mpegts":
                raise self.error(f"is cut short or damaged: packet {len(rows)} is incomplete")
            # VP8 has packets that are only referred to; a bit of the header says whether to show them.
            shown = not packet.is_discard and not (codec.name == "vp8" and not memoryview(packet)[0] & 0x10)
            times = (_NO_TIME if time is None else time for time in (packet.pts, packet.dts))
            rows.append((*times, packet.is_keyframe, shown))
        end = max((entry.pos + entry.size for entry in self.stream.index_entries), default=0)
        if container.format.name.startswith("mov") and end > container.size:
            raise self.error(f"is cut short: {container.size} of at least {end} bytes")
        nothing = np.empty(0, np.int64), np.empty((0, 2), np.int64)
        table = np.array(rows, np.int64).reshape(-1, 4)
        pts, (is_key, shown) = table[:, 0], table[:, 2:].T.astype(bool)
        if not shown.any():
            raise self.error("has no video frames")
        if not is_key.any():
            return nothing
        first = int(is_key.argmax())  # what comes or is displayed before it refers to frames that were cut away
        frames = shown & (np.arange(len(pts)) >= first) & (pts >= pts[first])
        are_stored = container.format.name in _STORES_PTS or is_key.all()
        are_distinct = len(np.unique(pts)) == len(pts) and _NO_TIME not in pts
        # Frames are reordered, by their header or as seen on opening, yet times ascend: decoding times.
        are_of_decoding = codec.has_b_frames and shown.sum() > 1 and (np.diff(pts[shown]) > 0).all()
        if not (are_stored and are_distinct and frames.any() and is_nearly_sorted(pts[shown])) or are_of_decoding:
            return nothing
        keys = table[is_key, :2]
        return np.sort(pts[frames]), keys[keys[:, 0].argsort()]

    def frames_from(
        self, key: np.ndarray, wanted: Container[int], check: Callable[[], None] = lambda: None
    ) -> Iterator[av.VideoFrame]:
        """Decode from a keyframe on, skip frames that are neither wanted nor needed, and yield the wanted ones.

        Args:
            key: presentation and decoding time of the keyframe.
            wanted: the frames' presentation times.
            check: called between packets; what it raises ends the decoding.

        Raises:
            VideoError: a frame up to the last wanted one is damaged, or does not come.
        """
        key_time, unfed, unseen = int(key[0]), set(wanted), set(wanted)
        for packet in chain(self._packets_from(key), (None,)):
            check()
            if not unfed:
                packet = None  # nothing more is fed once the last wanted frame is in: the decoder is drained
            needed = packet is None or packet.pts in wanted or packet.pts == key_time
            for frame in self.decode(packet, needed):
                if frame.pts is None or frame.pts < key_time:
                    continue  # displayed before the keyframe: may lack what it refers to
                # A keyframe that is predicted from others is not one, except an interlaced one's second field.
                is_predicted = frame.pict_type in (PictureType.P, PictureType.B) and not frame.interlaced_frame
                if frame.is_corrupt or (frame.pts == key_time and is_predicted):
                    raise self.error(f"a frame cannot be decoded: the data is damaged at {frame.time:.3f} s")
                if frame.pts in unseen:
                    unseen.remove(frame.pts)
                    yield frame
            if packet is None:
                break
            unfed.discard(packet.pts)
        if unseen:
            raise self.error(f"a frame cannot be decoded: {len(unseen)} of {len(wanted)} are missing")

    def _packets_from(self, key: np.ndarray) -> Iterator[av.Packet]:
        """Read from a keyframe's packet on: after a seek, or where none finds it, from the start."""
        # Containers index keyframes by presentation time or by decoding time, or they cannot seek at all.
        for target in (*key.tolist(), None):
            if target is None:
                self._container.close()
                self.open()
            elif target == _NO_TIME:
                continue
            else:
                try:
                    self._container.seek(target, stream=self.stream)
                except av.error.FFmpegError:
                    continue
            packets = self._container.demux(self.stream)
            for packet in packets:
                if packet.pts == key[0] and packet.is_keyframe:
                    yield packet
                    yield from (packet for packet in packets if packet.size)
                    return
                if target is not None and packet.is_keyframe and (packet.pts is None or packet.pts > key[0]):
                    break
        raise self.error("changed since it was probed")

    def decode(self, packet: av.Packet | None, needed: bool = True) -> list[av.VideoFrame]:
        """Return the frames that the decoder gives out on one more packet; on None, those that it still holds.

        Args:
            needed: false where the packet's own frame is of no use. Where no other frame refers to it, the decoder
                then leaves it out, if that changes no others.
        """
        if self._can_skip:
            self.stream.codec_context.skip_frame = "DEFAULT" if needed else "NONREF"
        return self.stream.decode(packet)

    def decode_all(self, threads: int = 1) -> Iterator[av.VideoFrame]:
        """Decode all frames, from the start.

        Args:
            threads: 0 for one per CPU; with more than one damage may go unreported.
        """
        self._container.close()
        self.open()
        self.stream.thread_type = "FRAME"
        self.stream.codec_context.thread_count = threads
        for packet in self._container.demux(self.stream):
            if packet.size:
                yield from self.decode(packet)
        yield from self.decode(None)


def probe(path: str | os.PathLike, check: Callable[[int], None] = lambda number: None) -> VideoInfo:
    """List the frames of a file's first video stream.

    This reads all packets and decodes one frame; it decodes all where packet times cannot be trusted (see
    :mod:`apbv.input.video`).

    Args:
        check: called with the number of each packet before it is listed, and of each frame that has to be decoded;
            what it raises ends the probing.

    Raises:
        VideoError: the file is missing, no video, has no frames, is cut short (as far as the container tells), or
            its first frame cannot be decoded.
    """
    path = os.fsdecode(path)
    with VideoFile(path) as file:
        pts, keys = file.list_times(check)
        rate = Fraction(file.stream.average_rate or file.stream.guessed_rate or 1)
        unit = file.stream.time_base
        if len(pts):
            first = next(file.frames_from(keys[0], {int(pts[0])}))
            times = pts
        else:
            first, times = None, []
            for number, frame in enumerate(file.decode_all(threads=0)):
                check(number)
                first = first or frame
                times.append(frame.pts)
            if first is None:
                raise file.error("has no video frames")
            if None in times or not is_nearly_sorted(np.array(times)):
                times, unit = np.arange(len(times)), 1 / rate
            # Where decoding times stand for presentation times, they are the right ones, in the wrong order.
            times = np.sort(times)
        # The difference first, in integers: a late start must not cost precision.
        timestamps = (times - times[0]) * unit.numerator / unit.denominator
        transpose, flip_vertical, flip_horizontal = _orientation(file, first)
        return VideoInfo(
            path=path,
            num_bytes=file.num_bytes,
            timestamps=timestamps,
            height=first.width if transpose else first.height,
            width=first.height if transpose else first.width,
            fps=(len(times) - 1) / float(timestamps[-1]) if len(times) > 1 else float(rate),
            transpose=transpose,
            flip_vertical=flip_vertical,
            flip_horizontal=flip_horizontal,
            pts=pts,
            keys=keys,
        )


def is_nearly_sorted(pts: np.ndarray) -> bool:
    """Return whether the values are distinct and out of order by no more than the reordering of frames."""
    order = np.argsort(pts, kind="stable")
    moved = np.abs(order - np.arange(len(order))).max(initial=0)
    return bool(moved <= _MAX_REORDER and (np.diff(pts[order]) > 0).all())


def _orientation(file: VideoFile, frame: av.VideoFrame) -> tuple[bool, bool, bool]:
    """Read how to display a frame: (transpose, then flip vertically, then flip horizontally)."""
    if SideDataType.DISPLAYMATRIX not in frame.side_data:
        return False, False, False
    # Row major [[a, b, u], [c, d, v], [x, y, w]]: a pixel at (x, y) is displayed at (a x + c y, b x + d y).
    a, b, _, c, d = struct.unpack_from("=5i", bytes(frame.side_data[SideDataType.DISPLAYMATRIX]))
    if a and d and not b and not c:
        return False, d < 0, a < 0
    if b and c and not a and not d:
        return True, b < 0, c < 0
    raise file.error("is rotated by an angle that is not a multiple of 90 degrees")
