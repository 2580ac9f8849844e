"""Video files: lists frames without decoding them all, and decodes frames from a keyframe on."""

import io
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from fractions import Fraction
from itertools import chain
from operator import attrgetter

import av
import numpy as np
from av.sidedata.sidedata import Type as SideDataType
from av.video.frame import PictureType

from ...warn import warn_caller
from ..container import best_stream, open_media
from .bitstream import PacketReader
from .clock import is_constant, is_nearly_sorted, length_of_last, settle

# Containers whose packets carry the presentation time that the encoder gave them.
_STORES_PTS = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "mpegts", "flv"}
# In these a picture says of itself that no other refers to it (h264), or those of one type never
# are (B). Not in VP8 and VP9, where such a picture may still carry probabilities or segments that
# the next one starts from.
_SKIPPING = {"h264", "mpeg1video", "mpeg2video", "mpeg4"}
_NO_TIME = np.iinfo(np.int64).min


class VideoError(ValueError):
    """Raised if a file cannot be used as a video; the message names the file and the reason."""


class NotWholeError(VideoError):
    """Raised where frames do not come from a keyframe on, but may from an earlier one."""


@dataclass(frozen=True, eq=False)
class VideoInfo:
    """Frames of a video file, numbered in presentation order; only those that can be decoded count.

    Attributes:
        path: the file.
        num_bytes: its size.
        timestamps: float64, seconds since the first frame, ascending; frames may have the same.
        height, width: pixels, as displayed.
        most_pixels: of the largest frame, as far as keyframes tell; frames are scaled to the first
            one's size.
        fps: frames per second on average: (num_frames - 1) / (last - first time); of a single frame
            what the container says.
        has_constant_rate: whether every frame is shown at its number / ``fps``, to 50 ms.
        transpose, flip_vertical, flip_horizontal: how a stored image is displayed: transposed
            first, then flipped.
        duration: the length in seconds, with the last frame shown as long as the container says,
            else for a usual frame interval.
        clock: float64 ``[S, 2]``: of every recording in the file, one after the other, the time of
            its first frame in the file, and in ``timestamps``.
        pts: int64, the frames' presentation times in units of the stream's time base; empty where
            the file must be decoded from the start.
        keys: int64 ``[K, 2]``, of the packets where decoding may start the presentation and
            decoding time, ascending.
    """

    path: str
    num_bytes: int
    timestamps: np.ndarray = field(repr=False)
    height: int
    width: int
    most_pixels: int
    fps: float
    has_constant_rate: bool
    duration: float
    clock: np.ndarray = field(repr=False)
    transpose: bool
    flip_vertical: bool
    flip_horizontal: bool
    pts: np.ndarray = field(repr=False)
    keys: np.ndarray = field(repr=False)

    @property
    def num_frames(self) -> int:
        """The number of frames that can be decoded."""
        return len(self.timestamps)

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
        return cls(
            **{name: value if value.ndim else value.item() for name, value in values.items()}
        )


class VideoFile(AbstractContextManager):
    """Open file and its video stream; leaving its context turns ffmpeg's errors into VideoError.

    Attributes:
        stream: the video stream.
        reader: what its packets have told so far.

    Raises:
        VideoError: the file is missing, or no video that ffmpeg can open.
    """

    def __init__(self, path: str):
        self.path = path
        self.open()
        self.num_bytes = self._container.size

    def __exit__(self, kind, error, traceback) -> None:
        self._container.close()
        if isinstance(error, av.error.FFmpegError):
            raise self.error(f"cannot be decoded ({error.strerror})") from error

    def error(self, reason: str) -> VideoError:
        """Return an error that names this file."""
        return VideoError(f"{self.path}: {reason}")

    def open(self) -> None:
        """Open the file at its start, with a fresh decoder."""
        self._container = open_media(self.path, VideoError)
        self.stream = best_stream(self._container, "video")
        if self.stream is None:
            self._container.close()
            raise self.error("has no video stream that can be decoded")
        codec = self.stream.codec_context
        # Damage that the h264 decoder conceals it reports reliably only with a single thread.
        codec.thread_count = 1
        # Whether ffmpeg's skip_frame = NONREF leaves all other frames as they are, to the bit. In
        # HEVC it leaves out a sub-layer non-reference picture (H.265, 7.4.2.2), to which frames of
        # higher temporal sub-layers may refer: their number is in the header of mp4 and mkv, hvcC
        # (ISO/IEC 14496-15).
        self._can_skip = codec.name in _SKIPPING
        if codec.name == "hevc":
            header = bytes(codec.extradata or b"")
            self._can_skip = len(header) > 22 and header[0] == 1 and header[21] >> 3 & 7 == 1
        self.reader = PacketReader(codec.name, codec.extradata)

    def list_times(
        self, check: Callable[[int], None] | None
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Read all packets for the frames' times and the keyframes'; none where these packets do
        not tell them.

        Args:
            check: called with the number of each packet before it is listed.

        Returns:
            As :attr:`VideoInfo.pts` and :attr:`VideoInfo.keys`, and how long the last frame is
            shown, in units of the time base, 0 if that is unknown.

        Raises:
            VideoError: the file is cut short or has no frames.
        """
        container = self._container
        codec = self.stream.codec_context
        rows = []
        for packet in container.demux(self.stream):
            if check is not None:
                check(len(rows))
            if not packet.size:
                continue  # the end of the stream, or a repeated frame in avi
            # In a broadcast a lost packet is normal, and the decoder tells which frames it hurts.
            if packet.is_corrupt and container.format.name != "mpegts":
                raise self.error(f"is cut short or damaged: packet {len(rows)} is incomplete")
            is_key, is_second = self.reader.read(packet, packet.is_keyframe)
            # VP8 has packets that are only referred to; a bit of the header says whether to show
            # them.
            is_hidden = codec.name == "vp8" and not memoryview(packet)[0] & 0x10
            shown = not (packet.is_discard or is_hidden or is_second)
            pts = _NO_TIME if packet.pts is None else packet.pts
            dts = _NO_TIME if packet.dts is None else packet.dts
            rows.append((pts, dts, is_key, shown, packet.duration or 0))
        end = max((entry.pos + entry.size for entry in self.stream.index_entries), default=0)
        if container.format.name.startswith("mov") and end > container.size:
            raise self.error(f"is cut short: {container.size} of at least {end} bytes")
        nothing = np.empty(0, np.int64), np.empty((0, 2), np.int64), 0
        table = np.array(rows, np.int64).reshape(-1, 5)
        pts = table[:, 0]
        (is_key, shown) = table[:, 2:4].T.astype(bool)
        if not shown.any():
            raise self.error("has no video frames")
        first = int(is_key.argmax())
        if (
            not is_key[first] or self.reader.refreshes
        ):  # only the decoder knows from where on frames are whole
            return nothing
        # What comes or is displayed before it refers to frames that were cut away.
        frames = shown & (np.arange(len(pts)) >= first) & (pts >= pts[first])
        are_stored = container.format.name in _STORES_PTS or is_key.all()
        # Frames are reordered, by their header or as seen on opening, yet times ascend: decoding
        # times.
        are_of_decoding = (
            codec.has_b_frames and shown.sum() > 1 and (np.diff(pts[shown]) >= 0).all()
        )
        # Whatever comes before a keyframe is displayed before it, but for another recording.
        latest = np.maximum.accumulate(np.where(shown, pts, pts[first]))
        are_known = _NO_TIME not in pts[shown] and is_nearly_sorted(pts[shown])
        are_known &= bool((pts >= latest)[shown & is_key].all())
        are_known &= bool((pts[is_key] == pts[first]).sum() == 1)  # else a seek may find another
        if not (are_stored and are_known and frames.any()) or are_of_decoding:
            return nothing
        order = pts[frames].argsort(kind="stable")
        listed = pts[frames][order]
        last = length_of_last(pts[frames][order], table[frames, 4][order])
        # Decoding starts at frames that no other shares its time with.
        twins = listed[1:][np.diff(listed) == 0]
        is_key &= (pts != _NO_TIME) & (~np.isin(pts, twins) | (np.arange(len(pts)) == first))
        keys = table[is_key, :2]
        return listed, keys[keys[:, 0].argsort(kind="stable")], last

    def frames_from(
        self, key: np.ndarray, wanted: Mapping[int, int], check: Callable[[], None] | None = None
    ) -> Iterator[tuple[int, av.VideoFrame]]:
        """Decode from a keyframe on, and skip frames that are neither wanted nor needed.

        Args:
            key: a row of :attr:`VideoInfo.keys`.
            wanted: of the wanted frames, for each presentation time how many of the frames that
                have it.
            check: called between packets; what it raises ends the decoding.

        Yields:
            The frames of these times, in order, each with its number among those of its time.

        Raises:
            NotWholeError: a frame does not come, or decoding may not start here.
            VideoError: a frame up to the last wanted one is damaged.
        """
        key_time = int(key[0])
        unfed = dict(wanted)
        seen = Counter()
        needed = True
        has_begun = False
        missing = total = sum(wanted.values())
        for packet in chain(self._packets_from(key), (None,)):
            if check is not None:
                check()
            is_second = packet is not None and self.reader.read(packet, False)[1]
            # Nothing more is fed once the last wanted frame is in: the decoder is drained.
            if not unfed and not is_second:
                packet = None
            if not is_second:
                needed = packet is None or packet.pts in wanted or packet.pts == key_time
            for frame in self.decode(packet, needed):
                if frame.pts is None or frame.pts < key_time:
                    continue  # displayed before the keyframe: may lack what it refers to
                # A keyframe that is predicted from others is not one, except an interlaced one's
                # second field.
                is_predicted = (
                    frame.pict_type in (PictureType.P, PictureType.B) and not frame.interlaced_frame
                )
                if frame.pts == key_time and is_predicted and not has_begun:
                    raise NotWholeError(
                        f"{self.path}: a frame cannot be decoded: the data is damaged"
                    )
                if frame.is_corrupt:
                    raise self.error(
                        f"a frame cannot be decoded: the data is damaged at {frame.time:.3f} s"
                    )
                has_begun = True
                if seen[frame.pts] < wanted.get(frame.pts, 0):
                    yield seen[frame.pts], frame
                    seen[frame.pts] += 1
                    missing -= 1
            if packet is None:
                break
            if packet.pts in unfed and not (is_second or packet.is_discard):
                unfed[packet.pts] -= 1
                if not unfed[packet.pts]:
                    del unfed[packet.pts]
        if missing:
            raise NotWholeError(
                f"{self.path}: a frame cannot be decoded: {missing} of {total} are missing"
            )

    def _packets_from(self, key: np.ndarray) -> Iterator[av.Packet]:
        """Read from a keyframe's packet on: after a seek, or where none finds it, from the
        start."""
        self.reader.restart()
        # Containers index keyframes by presentation time or by decoding time, or they cannot seek
        # at all.
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
                    yield from filter(attrgetter("size"), packets)
                    return
                if (
                    target is not None
                    and packet.is_keyframe
                    and (packet.pts is None or packet.pts > key[0])
                ):
                    break
        raise self.error("changed since it was probed")

    def decode(self, packet: av.Packet | None, needed: bool = True) -> list[av.VideoFrame]:
        """Return the frames that the decoder gives out on one more packet; on None, those that it
        still holds.

        Args:
            needed: false where the packet's own frame is of no use. Where no other frame refers to
                it, the decoder then leaves it out, if that changes no others.
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


def probe(path: str | os.PathLike, check: Callable[[int], None] | None = None) -> VideoInfo:
    """List the frames of a file's video stream: of several the one that FFmpeg takes, but never a
    cover.

    This reads all packets and decodes one frame; it decodes all where packet times cannot be
    trusted (see :mod:`apbv.input.video`). Where frames have no time of their own, a warning says
    how many.

    Args:
        check: called with the number of each packet before it is listed, and of each frame that has
            to be decoded; what it raises ends the probing.

    Raises:
        VideoError: the file is missing, no video, has no frames, is cut short (as far as the
            container tells), or its first frame cannot be decoded.
    """
    path = os.fsdecode(path)
    with VideoFile(path) as file:
        pts, keys, last = file.list_times(check)
        rate = Fraction(file.stream.average_rate or file.stream.guessed_rate or 1)
        unit = file.stream.time_base
        first = None
        most_pixels = file.reader.most_pixels
        if len(pts):
            # The difference first, in integers: a late start must not cost precision.
            times = pts - pts[0]
            clock = np.array([[pts[0], 0]])
            try:
                _, first = next(file.frames_from(keys[0], {int(pts[0]): 1}))
            except NotWholeError:
                pts = pts[:0]
                keys = keys[:0]
        if first is None:
            times = []
            lengths = []
            most_pixels = 0
            for number, frame in enumerate(file.decode_all(threads=0)):
                if check is not None:
                    check(number)
                first = first or frame
                times.append(frame.pts)
                most_pixels = max(most_pixels, frame.width * frame.height)
                lengths.append(frame.duration or 0)
            if first is None:
                raise file.error("has no video frames")
            settled = settle(times)
            if settled is None:
                times = np.arange(len(times))
                clock = np.zeros((1, 2))
                unit = 1 / rate
                last = 0.0
            else:
                times, clock, num_estimated = settled
                last = length_of_last(times, np.array(lengths))
                if num_estimated:
                    shown = (
                        f"{num_estimated} of {len(times)} frames have no time of their own in the "
                        "file"
                    )
                    warn_caller(f"{path}: {shown}; it is estimated")
        timestamps = times * unit.numerator / unit.denominator
        if not timestamps[-1]:  # all the same: they tell nothing
            timestamps = np.arange(len(times)) / float(rate)
        fps = (len(times) - 1) / float(timestamps[-1]) if timestamps[-1] > 0 else float(rate)
        interval = 1 / fps
        shown = last * float(unit)
        has_constant_rate = is_constant(timestamps, fps)
        if has_constant_rate:  # some containers' lengths are imprecise, or those of fields
            shown = shown if shown > 1.5 * interval else interval
        elif shown <= 0:
            shown = float(np.median(np.diff(timestamps)))
        transpose, flip_vertical, flip_horizontal = _orientation(file, first)
        return VideoInfo(
            path=path,
            num_bytes=file.num_bytes,
            timestamps=timestamps,
            height=first.width if transpose else first.height,
            width=first.height if transpose else first.width,
            most_pixels=max(most_pixels, first.width * first.height),
            fps=fps,
            has_constant_rate=has_constant_rate,
            duration=float(timestamps[-1]) + shown,
            clock=clock * float(unit),
            transpose=transpose,
            flip_vertical=flip_vertical,
            flip_horizontal=flip_horizontal,
            pts=pts,
            keys=keys,
        )


def _orientation(file: VideoFile, frame: av.VideoFrame) -> tuple[bool, bool, bool]:
    """Read how to display a frame: (transpose, then flip vertically, then flip horizontally)."""
    if SideDataType.DISPLAYMATRIX not in frame.side_data:
        return False, False, False
    # Row major [[a, b, u], [c, d, v], [x, y, w]]: a pixel at (x, y) is displayed at (a x + c y, b x
    # + d y).
    a, b, _, c, d = struct.unpack_from("=5i", bytes(frame.side_data[SideDataType.DISPLAYMATRIX]))
    if a and d and not b and not c:
        return False, d < 0, a < 0
    if b and c and not a and not d:
        return True, b < 0, c < 0
    raise file.error("is rotated by an angle that is not a multiple of 90 degrees")
