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

import av
import numpy as np
from av.sidedata.sidedata import Type as SideDataType
from av.video.frame import PictureType

from ...errors import InvalidRequestError
from ...reporting import warn_caller
from ..container import best_stream, open_media
from .bitstream import PacketReader
from .clock import is_constant, is_nearly_sorted, length_of_last, settle

# Containers whose packets carry the presentation time that the encoder gave them.
_STORES_PTS = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "mpegts", "flv"}
# Codecs whose pictures that no other refers to are safe to skip: marked as such (h264), or all B
# pictures. Not VP8 and VP9, where such a picture may still carry probabilities or segments that the
# next one starts from.
_SKIPPING = {"h264", "mpeg1video", "mpeg2video", "mpeg4"}
_NO_TIME = np.iinfo(np.int64).min


class VideoError(InvalidRequestError):
    """Raised if a file cannot be used as a video; the message names the file and the reason."""


class NotWholeError(VideoError):
    """Raised if frames cannot be decoded from a keyframe, but may be from an earlier one."""


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
        fps: frames per second on average: (num_frames - 1) / (last - first time); for a single
            frame the container's rate.
        has_constant_rate: whether every frame is shown at its number / ``fps``, to 50 ms.
        transpose, flip_vertical, flip_horizontal: how a stored image is displayed: transposed
            first, then flipped.
        duration: the length in seconds, with the last frame shown as long as the container says,
            or for a usual frame interval.
        clock: float64 ``[S, 2]``: for every recording in the file, one after the other, the time of
            its first frame in the file, and in ``timestamps``.
        pts: int64, the frames' presentation times in units of the stream's time base; empty where
            the file must be decoded from the start.
        keys: int64 ``[K, 2]``, the presentation and decoding times of the packets where decoding
            may start, ascending.
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
        values = {}
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            for entry in fields(cls):
                value = stored[entry.name]
                values[entry.name] = value if value.ndim else value.item()
        return cls(**values)


@dataclass(frozen=True)
class _Packets:
    """What the packets of a stream say, in the order of the file.

    Attributes:
        pts, dts: int64, presentation and decoding times; _NO_TIME where there is none.
        is_key: bool, whether decoding may start there.
        is_shown: bool, whether it has a frame of its own that is displayed.
        durations: int64; 0 where it is unknown.
    """

    pts: np.ndarray
    dts: np.ndarray
    is_key: np.ndarray
    is_shown: np.ndarray
    durations: np.ndarray


class VideoFile(AbstractContextManager):
    """Open file and its video stream; leaving its context turns ffmpeg's errors into VideoError.

    Attributes:
        stream: the video stream.
        reader: reads what its packets say of their frames.

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
        # With several threads the h264 decoder does not always report damage that it conceals.
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
        """List the times of frames and keyframes from all packets; none where they don't tell them.

        Args:
            check: called with the number of each packet before it is listed.

        Returns:
            :attr:`VideoInfo.pts`, :attr:`VideoInfo.keys`, and how long the last frame is shown, in
            units of the time base, 0 if that is unknown.

        Raises:
            VideoError: the file is cut short or has no frames.
        """
        no_times = np.empty(0, np.int64), np.empty((0, 2), np.int64), 0
        packets = self._list_packets(check)
        pts = packets.pts
        is_key = packets.is_key
        is_shown = packets.is_shown
        if not is_shown.any():
            raise self.error("has no video frames")
        first = int(is_key.argmax())
        if not is_key[first] or self.reader.refreshes:
            return no_times  # only the decoder knows from where on frames are whole
        is_first = np.arange(len(pts)) == first

        # Frames that come or are displayed before the first keyframe refer to some that were cut
        # away.
        is_frame = is_shown & (np.arange(len(pts)) >= first) & (pts >= pts[first])
        if not is_frame.any() or not self._can_trust(packets, first):
            return no_times

        # The frames, in the order in which they are displayed.
        order = pts[is_frame].argsort(kind="stable")
        times = pts[is_frame][order]
        length = length_of_last(times, packets.durations[is_frame][order])

        # Decoding starts at keyframes that share their times with no other frame.
        repeated_times = times[1:][np.diff(times) == 0]
        is_start = is_key & (pts != _NO_TIME) & (~np.isin(pts, repeated_times) | is_first)
        keys = np.stack([pts[is_start], packets.dts[is_start]], axis=1)
        return times, keys[keys[:, 0].argsort(kind="stable")], length

    def _list_packets(self, check: Callable[[int], None] | None) -> "_Packets":
        """Read all packets.

        Args:
            check: called with the number of each packet before it is listed.

        Raises:
            VideoError: the file is cut short.
        """
        container = self._container
        is_vp8 = self.stream.codec_context.name == "vp8"
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
            is_hidden = is_vp8 and not memoryview(packet)[0] & 0x10
            is_shown = not (packet.is_discard or is_hidden or is_second)
            pts = _NO_TIME if packet.pts is None else packet.pts
            dts = _NO_TIME if packet.dts is None else packet.dts
            rows.append((pts, dts, is_key, is_shown, packet.duration or 0))
        end = max((entry.pos + entry.size for entry in self.stream.index_entries), default=0)
        if container.format.name.startswith("mov") and end > container.size:
            raise self.error(f"is cut short: {container.size} of at least {end} bytes")
        table = np.array(rows, np.int64).reshape(-1, 5)
        return _Packets(
            pts=table[:, 0],
            dts=table[:, 1],
            is_key=table[:, 2].astype(bool),
            is_shown=table[:, 3].astype(bool),
            durations=table[:, 4],
        )

    def _can_trust(self, packets: "_Packets", first: int) -> bool:
        """Return whether packets have the presentation times of their frames, and seeks find them.

        Args:
            first: the number of the first keyframe.
        """
        codec = self.stream.codec_context
        pts = packets.pts
        is_key = packets.is_key
        is_shown = packets.is_shown
        shown_times = pts[is_shown]
        if self._container.format.name not in _STORES_PTS and not is_key.all():
            return False
        if _NO_TIME in shown_times or not is_nearly_sorted(shown_times):
            return False
        # Frames are reordered, by their header or as seen on opening, yet times ascend: these are
        # decoding times.
        if codec.has_b_frames and len(shown_times) > 1 and (np.diff(shown_times) >= 0).all():
            return False
        # Whatever comes before a keyframe is displayed before it, but for another recording.
        latest = np.maximum.accumulate(np.where(is_shown, pts, pts[first]))
        if not (pts >= latest)[is_shown & is_key].all():
            return False
        # A seek to the first keyframe must not find another.
        return int((pts[is_key] == pts[first]).sum()) == 1

    def frames_from(
        self, key: np.ndarray, wanted: Mapping[int, int], check: Callable[[], None] | None = None
    ) -> Iterator[tuple[int, av.VideoFrame]]:
        """Decode from a keyframe on, and skip frames that are neither wanted nor needed.

        Args:
            key: a row of :attr:`VideoInfo.keys`.
            wanted: for each presentation time of a wanted frame, how many of the frames of that
                time are wanted.
            check: called between packets; what it raises ends the decoding.

        Yields:
            The frames of these times, in order, each with its number among those of its time.

        Raises:
            NotWholeError: a frame does not come, or decoding may not start here.
            VideoError: a frame up to the last wanted one is damaged.
        """
        key_time = int(key[0])
        num_unfed = dict(wanted)  # wanted frames whose packets were not fed yet, by their times
        num_yielded = Counter()  # frames, by their times
        num_frames = sum(wanted.values())
        is_needed = True
        has_begun = False
        for packet in chain(self._packets_from(key), (None,)):
            if check is not None:
                check()

            # Feed the packet; once the last wanted frame is in, drain the decoder instead.
            is_second_field = False
            if packet is not None:
                _, is_second_field = self.reader.read(packet, False)
            if not num_unfed and not is_second_field:
                packet = None
            if not is_second_field:
                is_needed = packet is None or packet.pts in wanted or packet.pts == key_time
            for frame in self.decode(packet, is_needed):
                if frame.pts is None or frame.pts < key_time:
                    continue  # displayed before the keyframe: it may refer to frames before that
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
                if num_yielded[frame.pts] < wanted.get(frame.pts, 0):
                    yield num_yielded[frame.pts], frame
                    num_yielded[frame.pts] += 1
            if packet is None:
                break

            # Count it.
            if packet.pts in num_unfed and not (is_second_field or packet.is_discard):
                num_unfed[packet.pts] -= 1
                if not num_unfed[packet.pts]:
                    del num_unfed[packet.pts]
        num_missing = num_frames - num_yielded.total()
        if num_missing:
            raise NotWholeError(
                f"{self.path}: a frame cannot be decoded: {num_missing} of {num_frames} are missing"
            )

    def _packets_from(self, key: np.ndarray) -> Iterator[av.Packet]:
        """Read from a keyframe's packet on: after a seek, or if none finds it, from the start."""
        self.reader.restart()
        # Containers index keyframes by presentation time or by decoding time, or they cannot seek
        # at all: the last try, None, is from the start.
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
                    for next_packet in packets:
                        if next_packet.size:
                            yield next_packet
                    return
                is_past = packet.is_keyframe and (packet.pts is None or packet.pts > key[0])
                if is_past and target is not None:
                    break
        raise self.error("changed since it was probed")

    def decode(self, packet: av.Packet | None, needed: bool = True) -> list[av.VideoFrame]:
        """Return the frames that the decoder gives out on one more packet.

        Args:
            packet: None: no more come, and the decoder gives out those that it still has.
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
    """List the frames of a file's video stream; if it has several, the one that FFmpeg prefers.

    A cover is never taken. This reads all packets and decodes one frame; it decodes all where
    packet times cannot be trusted (:mod:`apbv.input.video`). Where frames have no time of their
    own, a warning says how many.

    Args:
        check: called with the number of each packet before it is listed, and of each frame that has
            to be decoded; what it raises ends the probing.

    Raises:
        VideoError: the file is missing, no video, has no frames, is cut short (as far as the
            container tells), or its first frame cannot be decoded.
    """
    path = os.fsdecode(path)
    with VideoFile(path) as file:
        # Times of frames, in units: from the packets, or else by decoding all frames.
        pts, keys, length_of_last_frame = file.list_times(check)
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
            frame_times = []
            lengths = []
            most_pixels = 0
            for number, frame in enumerate(file.decode_all(threads=0)):
                if check is not None:
                    check(number)
                first = first or frame
                frame_times.append(frame.pts)
                most_pixels = max(most_pixels, frame.width * frame.height)
                lengths.append(frame.duration or 0)
            if first is None:
                raise file.error("has no video frames")
            settled = settle(frame_times)
            if settled is None:
                times = np.arange(len(frame_times))
                clock = np.zeros((1, 2))
                unit = 1 / rate
                length_of_last_frame = 0.0
            else:
                times, clock, num_estimated = settled
                length_of_last_frame = length_of_last(times, np.array(lengths))
                if num_estimated:
                    warn_caller(
                        f"{path}: {num_estimated} of {len(times)} frames have no time of their own "
                        "in the file; it is estimated"
                    )

        # Seconds, and the rate.
        timestamps = times * unit.numerator / unit.denominator
        if not timestamps[-1]:  # all the same: they tell nothing
            timestamps = np.arange(len(times)) / float(rate)
        fps = float(rate)
        if timestamps[-1] > 0:
            fps = (len(times) - 1) / float(timestamps[-1])
        has_constant_rate = is_constant(timestamps, fps)

        # For how long the last frame is shown.
        interval = 1 / fps
        last_seconds = length_of_last_frame * float(unit)
        if has_constant_rate:
            # Some containers' lengths are imprecise, or of fields.
            if last_seconds <= 1.5 * interval:
                last_seconds = interval
        elif last_seconds <= 0:
            last_seconds = float(np.median(np.diff(timestamps)))

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
            duration=float(timestamps[-1]) + last_seconds,
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
