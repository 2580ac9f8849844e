"""Video files: lists their frames, mostly without decoding, and decodes from a keyframe on."""

import io
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from fractions import Fraction
from itertools import chain
from typing import Any

import av
import numpy as np
from av.sidedata.sidedata import Type as SideDataType
from av.video.frame import PictureType

from ....errors import InvalidRequestError
from ....reporting import warn_caller
from ..container import best_stream, open_media
from .bitstream import PacketReader
from .clock import is_constant, is_nearly_sorted, length_of_last, settle

# Containers whose packets carry the presentation time that the encoder gave them.
_STORES_PTS = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "mpegts", "flv"}
# Codecs in which pictures that no other refers to are safe to skip: those marked as such (h264), or
# all B pictures. Not VP8 and VP9, where the next picture may start from such a picture's
# probabilities or segments.
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
        timestamps: float64, seconds since the first frame, ascending; two frames may have the same.
        height, width: pixels of the first frame, as displayed; all are scaled to its size.
        most_pixels: pixels of the largest frame, as far as keyframes tell.
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
        stream = best_stream(self._container, "video")
        if stream is None:
            self._container.close()
            raise self.error("has no video stream that can be decoded")
        self.stream = stream
        codec = stream.codec_context
        # With several threads the h264 decoder does not always report damage that it conceals.
        codec.thread_count = 1
        # Whether ffmpeg's skip_frame = NONREF leaves all other frames as they are, to the bit.
        self._can_skip = codec.name in _SKIPPING
        if codec.name == "hevc":
            # It skips sub-layer non-reference pictures (H.265, 7.4.2.2), to which frames of higher
            # temporal sub-layers may refer. So there must be one sub-layer only; their number is in
            # the header of mp4 and mkv, hvcC (ISO/IEC 14496-15).
            header = bytes(codec.extradata or b"")
            self._can_skip = False
            if len(header) > 22 and header[0] == 1:
                num_sub_layers = (header[21] >> 3) & 7
                self._can_skip = num_sub_layers == 1
        self.reader = PacketReader(codec.name, codec.extradata)

    def list_times(
        self, check: Callable[[int], None] | None
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """List the times of frames and keyframes from all packets.

        They are empty if the packets do not tell them.

        Args:
            check: called with the number of each packet before it is listed.

        Returns:
            :attr:`VideoInfo.pts`, :attr:`VideoInfo.keys`, and how long the last frame is shown, in
            units of the time base, 0 if that is unknown.

        Raises:
            VideoError: the file is cut short or has no frames.
        """
        no_times = (np.empty(0, np.int64), np.empty((0, 2), np.int64), 0)

        # Find the first keyframe.
        packets = self._list_packets(check)
        pts = packets.pts
        is_key = packets.is_key
        is_shown = packets.is_shown
        if not is_shown.any():
            raise self.error("has no video frames")
        first = int(is_key.argmax())
        if not is_key[first] or self.reader.refreshes:
            return no_times  # only the decoder knows from where on frames are whole
        numbers = np.arange(len(pts))

        # Frames that come or are displayed before the first keyframe refer to frames that were cut
        # off.
        is_frame = is_shown & (numbers >= first) & (pts >= pts[first])
        if not is_frame.any() or not self._can_trust(packets, first):
            return no_times

        # The frames, in the order in which they are displayed.
        order = pts[is_frame].argsort(kind="stable")
        times = pts[is_frame][order]
        length = length_of_last(times, packets.durations[is_frame][order])

        # Decoding starts at keyframes that share their times with no other frame, or at the first.
        repeated_times = times[1:][np.diff(times) == 0]
        has_own_time = ~np.isin(pts, repeated_times)
        is_start = is_key & (pts != _NO_TIME) & (has_own_time | (numbers == first))
        keys = np.stack([pts[is_start], packets.dts[is_start]], axis=1)
        keys = keys[keys[:, 0].argsort(kind="stable")]
        return times, keys, length

    def _list_packets(self, check: Callable[[int], None] | None) -> "_Packets":
        """Read all packets.

        Args:
            check: called with the number of each packet before it is listed.

        Raises:
            VideoError: the file is cut short.
        """
        container = self._container
        is_vp8 = self.stream.codec_context.name == "vp8"

        # Read them.
        rows: list[tuple[int, int, bool, bool, int]] = []
        for packet in container.demux(self.stream):
            if check is not None:
                check(len(rows))
            if not packet.size:
                continue  # the end of the stream, or a repeated frame in avi
            # In a broadcast a lost packet is normal, and the decoder tells which frames it hurts.
            if packet.is_corrupt and container.format.name != "mpegts":
                raise self.error(f"is cut short or damaged: packet {len(rows)} is incomplete")
            is_key, is_second_field = self.reader.read(packet, packet.is_keyframe)
            # VP8 has frames that are only referred to; a bit of the header says whether to show
            # them.
            is_hidden = is_vp8 and not memoryview(packet)[0] & 0x10
            is_shown = not (packet.is_discard or is_hidden or is_second_field)
            pts = _NO_TIME if packet.pts is None else packet.pts
            dts = _NO_TIME if packet.dts is None else packet.dts
            rows.append((pts, dts, is_key, is_shown, packet.duration or 0))

        # Compare the file's size with its index.
        end = 0
        for entry in self.stream.index_entries:
            end = max(end, entry.pos + entry.size)
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
        # If frames are reordered (by their header, or as seen on opening) and the times in the file
        # ascend all the same, these are decoding times.
        if codec.has_b_frames and len(shown_times) > 1 and (np.diff(shown_times) >= 0).all():
            return False
        # A keyframe is displayed after all that comes before it in the file. Where it is not,
        # another recording begins, and seeks would mix the two. Hidden packets do not count.
        latest = np.maximum.accumulate(np.where(is_shown, pts, pts[first]))
        if not (pts >= latest)[is_shown & is_key].all():
            return False
        # A seek to the first keyframe must not find another.
        return int((pts[is_key] == pts[first]).sum()) == 1

    def frames_from(
        self,
        key: np.ndarray,
        num_wanted: Mapping[int, int],
        check: Callable[[], None] | None = None,
    ) -> Iterator[tuple[int, av.VideoFrame]]:
        """Decode from a keyframe on, and skip frames that are neither wanted nor needed.

        Args:
            key: a row of :attr:`VideoInfo.keys`.
            num_wanted: how many frames to yield, by presentation time; several frames may have the
                same.
            check: called between packets; what it raises ends the decoding.

        Yields:
            Number and frame: the frame's number among those of its time, from 0. Frames come in
            the order of their times.

        Raises:
            NotWholeError: a frame does not come, or decoding may not start here.
            VideoError: a frame up to the last wanted one is damaged.
        """
        key_time = int(key[0])
        # Wanted frames whose packets the decoder has not got, by their times.
        num_unfed = dict(num_wanted)
        num_yielded: Counter[int] = Counter()  # frames, by their times
        is_needed = True
        has_begun = False
        for packet in chain(self._packets_from(key), (None,)):  # None: the file has ended
            if check is not None:
                check()

            # Once the decoder has the last wanted frame, with its second field, drain it: without a
            # packet it gives what it has left.
            is_second_field = False
            if packet is not None:
                _, is_second_field = self.reader.read(packet, False)
            if not num_unfed and not is_second_field:
                packet = None

            # Decode. A second field is needed if the first one was: then nothing changes.
            if not is_second_field:
                is_needed = packet is None or packet.pts in num_wanted or packet.pts == key_time
            for frame in self.decode(packet, is_needed):
                if frame.pts is None or frame.pts < key_time:
                    continue  # displayed before the keyframe: it may refer to frames before that
                is_keyframe = frame.pts == key_time and not has_begun
                self._require_whole(frame, is_keyframe)
                has_begun = True
                if num_yielded[frame.pts] < num_wanted.get(frame.pts, 0):
                    yield num_yielded[frame.pts], frame
                    num_yielded[frame.pts] += 1
            if packet is None:
                break

            # Count the packet's frame as fed.
            if packet.pts in num_unfed and not (is_second_field or packet.is_discard):
                num_unfed[packet.pts] -= 1
                if num_unfed[packet.pts] == 0:
                    del num_unfed[packet.pts]

        num_frames = sum(num_wanted.values())
        num_missing = num_frames - num_yielded.total()
        if num_missing:
            raise NotWholeError(
                f"{self.path}: a frame cannot be decoded: {num_missing} of {num_frames} are missing"
            )

    def _require_whole(self, frame: av.VideoFrame, is_keyframe: bool) -> None:
        """Reject a damaged frame.

        Args:
            is_keyframe: whether it is the keyframe with which decoding has begun.

        Raises:
            NotWholeError: it is the keyframe, and is predicted from frames before it.
            VideoError: the decoder has noticed damage.
        """
        # The second field of an interlaced keyframe may be predicted from the first.
        is_predicted = (
            frame.pict_type in (PictureType.P, PictureType.B) and not frame.interlaced_frame
        )
        if is_keyframe and is_predicted:
            raise NotWholeError(f"{self.path}: a frame cannot be decoded: the data is damaged")
        if frame.is_corrupt:
            raise self.error(
                f"a frame cannot be decoded: the data is damaged at {frame.time:.3f} s"
            )

    def _packets_from(self, key: np.ndarray) -> Iterator[av.Packet]:
        """Yield packets from a keyframe's on: after a seek, or if none finds it, from the start.

        Raises:
            VideoError: no keyframe in the file has this time.
        """
        self.reader.restart()
        key_time = int(key[0])

        # Containers index keyframes by presentation time or by decoding time.
        keyframe = None
        for target in key.tolist():
            if target == _NO_TIME:
                continue
            try:
                self._container.seek(target, stream=self.stream)
            except av.error.FFmpegError:
                continue
            packets = self._container.demux(self.stream)
            keyframe = _next_keyframe_at(key_time, packets, is_sought=True)
            if keyframe is not None:
                break

        # Others cannot seek at all.
        if keyframe is None:
            self._container.close()
            self.open()
            packets = self._container.demux(self.stream)
            keyframe = _next_keyframe_at(key_time, packets, is_sought=False)
        if keyframe is None:
            raise self.error("changed since it was probed")

        yield keyframe
        for packet in packets:
            if packet.size:
                yield packet

    def decode(self, packet: av.Packet | None, needed: bool = True) -> list[av.VideoFrame]:
        """Return the frames that the decoder gives out on one more packet.

        Args:
            packet: None: no more come, and the decoder gives out the frames that it still has.
            needed: whether the packet's own frame is needed. If it is not, and no other frame
                refers to it, the decoder skips it, in codecs where that changes no other frame.
        """
        if self._can_skip:
            self.stream.codec_context.skip_frame = "DEFAULT" if needed else "NONREF"
        return self.stream.decode(packet)

    def decode_all(self, threads: int = 1) -> Iterator[av.VideoFrame]:
        """Decode all frames, from the start.

        Args:
            threads: 0 for one per CPU. With more than one, damage may go unreported.
        """
        self._container.close()
        self.open()
        self.stream.thread_type = "FRAME"
        self.stream.codec_context.thread_count = threads
        for packet in self._container.demux(self.stream):
            if packet.size:
                yield from self.decode(packet)
        yield from self.decode(None)


def _next_keyframe_at(
    key_time: int, packets: Iterator[av.Packet], is_sought: bool
) -> av.Packet | None:
    """Take packets up to the keyframe with a presentation time, and return this; None: not there.

    Args:
        is_sought: whether the packets follow a seek: then a later keyframe ends the search.
    """
    for packet in packets:
        if packet.pts == key_time and packet.is_keyframe:
            return packet
        is_past = packet.is_keyframe and (packet.pts is None or packet.pts > key_time)
        if is_past and is_sought:
            return None
    return None


@dataclass(frozen=True, eq=False)
class _Listing:
    """The frames of a file, with times in units.

    Attributes:
        first: the first frame, decoded.
        most_pixels: pixels of the largest frame, as far as it is known.
        times: the frames' times since the first one, ascending, in units.
        unit: seconds.
        last_length: how long the last frame is shown, in units; 0 if that is unknown.
        clock: :attr:`VideoInfo.clock`, in units.
        pts, keys: as in :class:`VideoInfo`.
    """

    first: av.VideoFrame
    most_pixels: int
    times: np.ndarray
    unit: Fraction
    last_length: float
    clock: np.ndarray
    pts: np.ndarray
    keys: np.ndarray


def probe(path: str | os.PathLike, check: Callable[[int], None] | None = None) -> VideoInfo:
    """List the frames of a file's video stream; if it has several, of the one FFmpeg prefers.

    Cover pictures are not taken. This reads all packets and decodes one frame; it decodes all if
    packet times cannot be trusted (:mod:`apbv.input.media.video`). If frames have no time of their
    own, a warning says how many.

    Args:
        path: the file.
        check: called with the number of each packet before it is listed, and of each frame that has
            to be decoded; what it raises ends the probing.

    Raises:
        VideoError: the file is missing, no video, has no frames, is cut short (as far as the
            container tells), or its first frame cannot be decoded.
    """
    path = os.fsdecode(path)
    with VideoFile(path) as file:
        # List the frames, from the packets if possible.
        pts, keys, last_length = file.list_times(check)
        rate = Fraction(file.stream.average_rate or file.stream.guessed_rate or 1)
        unit = file.stream.time_base
        listing = None
        if len(pts):
            listing = _listed_from_packets(file, pts, keys, unit, last_length)
        if listing is None:
            listing = _listed_by_decoding(file, unit, rate, check)

        # Convert the times to seconds.
        unit = listing.unit
        num_frames = len(listing.times)
        timestamps = listing.times * unit.numerator / unit.denominator
        if timestamps[-1] == 0:  # all the same: they tell nothing
            timestamps = np.arange(num_frames) / float(rate)

        # Compute the rate.
        fps = float(rate)
        if timestamps[-1] > 0:
            fps = (num_frames - 1) / float(timestamps[-1])
        has_constant_rate = is_constant(timestamps, fps)

        # Compute for how long the last frame is shown.
        interval = 1 / fps
        last_seconds = listing.last_length * float(unit)
        if has_constant_rate:
            # Some containers' lengths are imprecise, or of fields.
            if last_seconds <= 1.5 * interval:
                last_seconds = interval
        elif last_seconds <= 0:
            last_seconds = float(np.median(np.diff(timestamps)))

        first = listing.first
        transpose, flip_vertical, flip_horizontal = _orientation(file, first)
        return VideoInfo(
            path=path,
            num_bytes=file.num_bytes,
            timestamps=timestamps,
            height=first.width if transpose else first.height,
            width=first.height if transpose else first.width,
            most_pixels=max(listing.most_pixels, first.width * first.height),
            fps=fps,
            has_constant_rate=has_constant_rate,
            duration=float(timestamps[-1]) + last_seconds,
            clock=listing.clock * float(unit),
            transpose=transpose,
            flip_vertical=flip_vertical,
            flip_horizontal=flip_horizontal,
            pts=listing.pts,
            keys=listing.keys,
        )


def _listed_from_packets(
    file: VideoFile, pts: np.ndarray, keys: np.ndarray, unit: Fraction, last_length: float
) -> _Listing | None:
    """List frames whose times the packets tell; None if the first one cannot be decoded alone.

    Args:
        pts, keys, last_length: from :meth:`VideoFile.list_times`.
        unit: the stream's time base, in seconds.
    """
    most_pixels = file.reader.most_pixels
    try:
        _, first = next(file.frames_from(keys[0], {int(pts[0]): 1}))
    except NotWholeError:
        return None
    return _Listing(
        first=first,
        most_pixels=most_pixels,
        # Subtracted as integers: a late start must not cost precision.
        times=pts - pts[0],
        unit=unit,
        last_length=last_length,
        clock=np.array([[pts[0], 0]]),
        pts=pts,
        keys=keys,
    )


def _listed_by_decoding(
    file: VideoFile, unit: Fraction, rate: Fraction, check: Callable[[int], None] | None
) -> _Listing:
    """List all frames by decoding them.

    Args:
        unit: the stream's time base, in seconds.
        rate: frames per second, for frames without any times.
        check: called with the number of each frame.

    Raises:
        VideoError: the file has no frames.
    """
    # Decode.
    first = None
    frame_times = []
    frame_lengths = []
    most_pixels = 0
    for number, frame in enumerate(file.decode_all(threads=0)):
        if check is not None:
            check(number)
        if first is None:
            first = frame
        frame_times.append(frame.pts)
        frame_lengths.append(frame.duration or 0)
        most_pixels = max(most_pixels, frame.width * frame.height)
    if first is None:
        raise file.error("has no video frames")

    # Put the times in order, or count the frames if none has a time.
    settled = settle(frame_times)
    if settled is None:
        times = np.arange(len(frame_times))
        clock = np.zeros((1, 2))
        unit = 1 / rate
        last_length = 0.0
    else:
        times, clock, num_estimated = settled
        last_length = length_of_last(times, np.array(frame_lengths))
        if num_estimated:
            warn_caller(
                f"{file.path}: {num_estimated} of {len(times)} frames have no time of their own in "
                "the file; it is estimated"
            )
    return _Listing(
        first=first,
        most_pixels=most_pixels,
        times=times,
        unit=unit,
        last_length=last_length,
        clock=clock,
        pts=np.empty(0, np.int64),
        keys=np.empty((0, 2), np.int64),
    )


def _orientation(file: VideoFile, frame: av.VideoFrame) -> tuple[bool, bool, bool]:
    """Read how to display a frame.

    Returns:
        Whether to transpose it, then to flip it vertically, then horizontally.

    Raises:
        VideoError: it is rotated by another angle.
    """
    # PyAV's stub takes it for a dictionary with one known key.
    side_data: Any = frame.side_data
    if SideDataType.DISPLAYMATRIX not in side_data:
        return False, False, False
    # The matrix is row major, [[a, b, u], [c, d, v], [x, y, w]]: a pixel at (x, y) is displayed at
    # (a x + c y, b x + d y).
    matrix = bytes(side_data[SideDataType.DISPLAYMATRIX])
    a, b, _, c, d = struct.unpack_from("=5i", matrix)
    if a and d and not b and not c:
        return False, d < 0, a < 0
    if b and c and not a and not d:
        return True, b < 0, c < 0
    raise file.error("is rotated by an angle that is not a multiple of 90 degrees")
