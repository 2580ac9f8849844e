"""Reading videos with PyAV: timestamps, frame sampling, and decoding of chosen frames only.

Every host probes the file, samples the same frame indices and decodes its own share of them. `probe` reads
the packets (all bytes of the file, almost no decoding) and lists the frames in presentation order;
`read_frames` seeks to the keyframe before each group of wanted frames and stops at the last of the group.
What it returns is bit-equal to decoding the whole file and picking the frames.

That takes a container that stores presentation times (mp4/mov, mkv/webm, mpegts, flv) or a file of keyframes
only. In others (avi, mpeg, raw streams...) packet times are missing or guessed, wrongly where there are
B-frames, and some writers of mp4 store decoding times instead. `probe` decodes such files once and
`read_frames` decodes them from the start.

Rotation and mirroring metadata are applied. The sample aspect ratio is ignored: pixels come as stored.
"""

import bisect
import itertools
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import av
import numpy as np
from av.sidedata.sidedata import Type as SideDataType
from av.stream import Disposition
from av.video.frame import PictureType

_MOV, _MPEGTS = "mov,mp4,m4a,3gp,3g2,mj2", "mpegts"
# Containers whose packets carry the presentation time that the encoder gave them.
_STORES_PTS = {_MOV, "matroska,webm", _MPEGTS, "flv"}
# Nothing but video files: ffmpeg would render text as the video of a terminal, and playlists name others.
_FORMATS = "mov,mp4,matroska,webm,avi,mpegts,flv,mpeg,mpegvideo,asf,ogg,gif,nut,ivf,obu,h264,hevc,m4v,mxf,dv"
# Pictures that refer to no other; decoders that do not say give NONE.
_INTRA = (PictureType.I, PictureType.SI, PictureType.NONE)
# Frames after which a run of wanted frames may be split at a keyframe, for several threads to share.
_RUN = 64
# Frames per second: more than any camera's, and small enough for times of years to be counted exactly.
MAX_FPS = 1e9
# No codec displays a frame further from its place in the file than this, in frames.
_MAX_REORDER = 32


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
    """What `probe` found. Frames are numbered in presentation order; only those that can be decoded count."""

    path: str
    timestamps: tuple[float, ...] = field(repr=False)  # seconds since the first frame, strictly ascending
    height: int  # pixels, as displayed
    width: int  # pixels, as displayed
    fps: float  # average: (num_frames - 1) / (last - first time); for one frame what the container says
    transpose: bool  # stored image -> displayed image: transpose, then flip vertically and horizontally
    flip_vertical: bool
    flip_horizontal: bool
    packets: tuple[Packet, ...] = field(repr=False)  # in decoding order; empty: decode from the start
    frame_packets: tuple[int, ...] = field(repr=False)  # frame -> index in `packets`

    @property
    def num_frames(self) -> int:
        return len(self.timestamps)

    @property
    def duration(self) -> float:
        """Seconds, the last frame shown for the mean frame interval."""
        return self.num_frames / self.fps


def probe(path: str | os.PathLike) -> VideoInfo:
    """List the frames of the first video stream of `path`.

    Reads all packets and decodes one frame, or a few where the stream does not start cleanly; decodes all
    where packet times cannot be trusted (see above).

    Raises VideoError if the file is missing, no video, has no frames, is cut short (as far as the container
    tells), or if its first frame cannot be decoded.
    """
    path = os.fsdecode(path)
    with _Reader(path) as reader:
        packets = reader.list_packets()
        if packets is None:
            times, first = _decode_times(reader)
            frame_packets: list[int] = []
        else:
            first, frame_packets = _find_frames(reader, packets)
            # The difference first, in integers: a late start must not cost precision.
            origin, base = packets[frame_packets[0]].pts, reader.stream.time_base
            times = [float((packets[i].pts - origin) * base) for i in frame_packets]
        transpose, flip_vertical, flip_horizontal = _orientation(path, first)
        height, width = (first.width, first.height) if transpose else (first.height, first.width)
        fps = (len(times) - 1) / times[-1] if len(times) > 1 else reader.rate()
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


def sample_uniform(info_or_n: VideoInfo | int, num_frames: int) -> list[int]:
    """`min(n, num_frames)` distinct indices spread evenly over all n frames, ascending.

    Index i of k is i * (n - 1) / (k - 1) rounded to nearest, halves up, in integer arithmetic: both ends are
    included, steps differ by at most one. For k = 1 it is frame 0. This is even in frame numbers;
    `sample_fps` is even in time.

    Raises ValueError if `num_frames` < 1 or n < 0.
    """
    n = info_or_n.num_frames if isinstance(info_or_n, VideoInfo) else info_or_n
    if num_frames < 1 or n < 0:
        raise ValueError(f"cannot sample {num_frames} of {n} frames")
    k = min(n, num_frames)
    if k < 2:
        return [0] * k
    return [(2 * i * (n - 1) + k - 1) // (2 * (k - 1)) for i in range(k)]


def require_frame_rate(fps: float) -> None:
    """Make sure that frames can be sampled at this rate, in frames per second.

    Raises ValueError if it is not in 0 < fps <= MAX_FPS.
    """
    if not 0 < fps <= MAX_FPS:
        raise ValueError(f"fps must lie in 0 < fps <= {MAX_FPS:g}, not {fps!r:.50}")


def sample_fps(info: VideoInfo, fps: float, min_frames: int = 1, max_frames: int | None = None) -> list[int]:
    """Indices of the frames nearest to the times 0, 1/fps, 2/fps... up to the last; ascending, distinct.

    By timestamps, so right for a variable frame rate; of two frames equally near, the earlier. An `fps` well
    above the video's own gives every frame. Where this makes fewer than `min_frames` or more than
    `max_frames`, the result is `sample_uniform` of that many frames instead.

    Raises ValueError if `fps` is not in 0 < fps <= MAX_FPS or the limits are not 1 <= min_frames <= max_frames.
    """
    require_frame_rate(fps)
    if min_frames < 1 or (max_frames is not None and max_frames < min_frames):
        raise ValueError(f"need 1 <= min_frames <= max_frames, got {min_frames} and {max_frames}")
    times = np.asarray(info.timestamps)
    # A frame is nearest to the times from half way to the one before (excluded) to half way to the next, and
    # is taken if a grid time lies there. Counting the grid times up to each edge needs no grid in memory. The
    # small term makes ties, common at 2 of 25 fps, fall the same way however the times are rounded.
    edges = np.concatenate([(times[1:] + times[:-1]) / 2, times[-1:]])
    count = np.floor(edges * fps + 1e-6)
    chosen = np.flatnonzero(np.diff(count, prepend=-1) > 0).tolist()
    if len(chosen) < min_frames:
        return sample_uniform(info, min_frames)
    if max_frames is not None and len(chosen) > max_frames:
        return sample_uniform(info, max_frames)
    return chosen


def read_frames(info: VideoInfo, indices: Sequence[int], threads: int = 0) -> np.ndarray:
    """Decode frames `indices`, strictly ascending: uint8 [len(indices), height, width, 3], RGB as displayed.

    Bit-equal to decoding the whole file and picking the frames. Seeks wherever a keyframe lets it skip
    packets, and holds no frames but those it returns and the decoders' own. `threads`: how many groups of
    pictures to decode at the same time, where there are several; 0 for one per CPU, up to 16.

    Raises VideoError if a wanted frame, or one decoded on the way to it from its keyframe, cannot be decoded
    or is damaged so that the decoder notices, or if the frame size changes, or if the file no longer holds
    the packets that `probe` listed; ValueError if the indices do not ascend; IndexError if one is out of
    range.
    """
    wanted = [int(i) for i in indices]
    if any(a >= b for a, b in itertools.pairwise(wanted)):
        raise ValueError("frame indices must be strictly ascending")
    if wanted and (wanted[0] < 0 or wanted[-1] >= info.num_frames):
        raise IndexError(f"frame indices {wanted[0]}..{wanted[-1]} of {info.num_frames} frames")
    out = np.empty((len(wanted), info.height, info.width, 3), np.uint8)
    if wanted:
        if info.packets:
            _read_by_seeking(info, wanted, out, threads or min(os.cpu_count() or 1, 16))
        else:
            _read_from_start(info, wanted, out)
    return out


class _SeekFailed(Exception):
    """The packets after a seek are not those that reading from the start gives."""


class _Undecodable(Exception):
    """Decoding from this keyframe did not work out. `entered`: though the keyframe itself came out well."""

    def __init__(self, reason: str, entered: bool):
        super().__init__(reason)
        self.entered = entered


class _Reader:
    """An open file and its first video stream; leaving its context turns ffmpeg's errors into VideoError."""

    def __init__(self, path: str):
        self.path, self.can_seek = path, True
        if not os.path.exists(path):
            raise self.error("no such file")
        if not os.path.isfile(path):
            raise self.error("not a regular file")
        self._open()

    def error(self, reason: str) -> VideoError:
        return VideoError(f"{self.path}: {reason}")

    def _open(self) -> None:
        # The prefix and the two lists keep ffmpeg from following an address in the name or in the file.
        options = {"protocol_whitelist": "file", "format_whitelist": _FORMATS}
        try:
            self.container = av.open("file:" + self.path, options=options, metadata_errors="ignore")
        except av.error.FFmpegError as error:
            raise self.error(f"cannot be read as a video ({error.strerror})") from error
        streams = [s for s in self.container.streams.video if not s.disposition & Disposition.attached_pic]
        if not streams:
            self.container.close()
            raise self.error("has no video stream")
        self.stream = streams[0]
        if self.stream.codec_context is None:
            self.container.close()
            raise self.error("no decoder for its video stream")
        # Damage that the h264 decoder conceals it reports reliably only with a single thread.
        self.stream.codec_context.thread_count = 1

    def reopen(self) -> None:
        self.container.close()
        self._open()

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.container.close()
        if isinstance(error, av.error.FFmpegError):
            raise self.error(f"cannot be decoded ({error.strerror})") from error

    def rate(self) -> float:
        """Frames per second by the container's account."""
        return float(self.stream.average_rate or self.stream.guessed_rate or 1)

    def list_packets(self) -> list[Packet] | None:
        """All packets in decoding order, or None where their times do not tell the frames' times."""
        format_name, vp8 = self.container.format.name, self.stream.codec_context.name == "vp8"
        declared = _declared_size(self.path)
        if declared > os.path.getsize(self.path):
            raise self.error(f"is cut short: {os.path.getsize(self.path)} of {declared} bytes")
        packets = []
        for packet in self.container.demux(self.stream):
            if not packet.size:
                continue  # the end of the stream, or a repeated frame in avi
            # In a broadcast a lost packet is normal, and the decoder tells which frames it hurts.
            if packet.is_corrupt and format_name != _MPEGTS:
                raise self.error(f"is cut short or damaged: packet {len(packets)} is incomplete")
            # VP8 has packets that are only referred to; a bit of the header says whether to show them.
            shown = not packet.is_discard and not (vp8 and not memoryview(packet)[0] & 0x10)
            key = packet.is_keyframe
            packets.append(Packet(packet.pts, packet.dts, packet.pos, packet.size, key, shown))
        if format_name == _MOV:
            end = max((entry.pos + entry.size for entry in self.stream.index_entries), default=0)
            if end > self.container.size:
                raise self.error(f"is cut short: {self.container.size} of at least {end} bytes")
        if not any(packet.shown for packet in packets):
            raise self.error("has no video frames")
        return packets if self._times_are_right(packets) else None

    def _times_are_right(self, packets: list[Packet]) -> bool:
        stored = self.container.format.name in _STORES_PTS or all(packet.key for packet in packets)
        if not stored or any(packet.pts is None for packet in packets):
            return False
        if len({_identity(packet) for packet in packets}) < len(packets):
            return False
        pts = [packet.pts for packet in packets if packet.shown]
        # Frames are reordered, by their header or as seen on opening, yet times ascend: decoding times.
        if self.stream.codec_context.has_b_frames and len(pts) > 1 and _ascending(pts):
            return False
        return _nearly_sorted(pts)

    def expect(self, packets: Sequence[Packet], position: dict[tuple, int]) -> None:
        """Say what `packets_between` will find in the file. `position`: _positions(packets)."""
        self.packets, self.position = packets, position

    def packets_between(self, start: int, stop: int) -> Iterator[av.Packet]:
        """The packets [start, stop) of those expected, read after a seek.

        Raises _SeekFailed where reading from the start may help, VideoError if the file holds other packets.
        """
        key = self.packets[start]
        # Containers index keyframes by presentation time or by decoding time, or they cannot seek at all.
        for target in (key.pts, key.dts, None) if self.can_seek else (None,):
            if target is None:
                self.reopen()
            else:
                try:
                    self.container.seek(target, stream=self.stream)
                except av.error.FFmpegError:
                    continue
            expected = start
            for packet in self.container.demux(self.stream):
                found = self.position.get(_identity(packet)) if packet.size else None
                if expected == start and (found is None or found < start):
                    continue  # the seek went too far back, which costs little
                if found != expected:
                    break
                yield packet
                expected += 1
                if expected == stop:
                    return
            if expected > start and target is not None:
                raise _SeekFailed
        raise self.error("changed since it was probed")

    def frames(self, threads: int = 1) -> Iterator[av.VideoFrame]:
        """All frames, from the start. With more than one thread (0: one per CPU) damage may go unreported."""
        self.reopen()
        self.stream.thread_type = "FRAME"
        self.stream.codec_context.thread_count = threads
        for packet in self.container.demux(self.stream):
            if packet.size:
                yield from _decode(self.stream, packet)
        yield from _decode(self.stream, None)


def _identity(packet: Packet | av.Packet) -> tuple[int | None, ...]:
    # Without dts: some containers store none, and what ffmpeg makes up depends on where reading started.
    return packet.pts, packet.pos, packet.size


def _positions(packets: Sequence[Packet]) -> dict[tuple, int]:
    return {_identity(packet): i for i, packet in enumerate(packets)}


def _ascending(values: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))


def _nearly_sorted(pts: Sequence[int]) -> bool:
    """Whether the values are distinct and out of order by no more than the reordering of frames."""
    order = sorted(range(len(pts)), key=pts.__getitem__)
    moved = max(abs(i - j) for i, j in enumerate(order))
    return moved <= _MAX_REORDER and _ascending([pts[i] for i in order])


def _decode(stream: av.VideoStream, packet: av.Packet | None) -> list[av.VideoFrame]:
    """The frames that the decoder gives out on one more packet; on None, those that it still holds."""
    return stream.decode(packet)


def _declared_size(path: str) -> int:
    """Bytes that a Matroska or RIFF (avi) file must have by its outermost size field; 0 if unknown.

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


def _find_frames(reader: _Reader, packets: list[Packet]) -> tuple[av.VideoFrame, list[int]]:
    """The first frame, decoded, and for each frame that can be decoded the index of its packet."""
    start = _keyframes(packets)[0]
    origin = packets[start].pts
    order = sorted((i for i, packet in enumerate(packets) if packet.shown), key=lambda i: packets[i].pts)
    regular = [i for i in order if i >= start and packets[i].pts >= origin]
    # What follows the first keyframe in the file but is displayed before it may refer to frames cut away.
    leading = [i for i in order if i > start and packets[i].pts < origin]
    if not regular:
        raise reader.error("has no video frames")
    first, decoded = None, set()
    stop = max(regular[:1] + leading) + 1
    reader.expect(packets, _positions(packets))
    reader.can_seek = False  # no need to: it is near the start
    if start and reader.container.format.name != _MPEGTS:
        # A video may be cut out between keyframes, but what precedes the first may also be a damaged
        # keyframe, which the decoder refuses. A broadcast starts anywhere.
        for packet in reader.packets_between(0, start):
            _decode(reader.stream, packet)
    for packet in itertools.chain(reader.packets_between(start, stop), (None,)):
        try:
            frames = _decode(reader.stream, packet)
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
        raise reader.error("its first frame cannot be decoded")
    return first, [i for i in leading if packets[i].pts in decoded] + regular


def _keyframes(packets: Sequence[Packet]) -> list[int]:
    """Indices of the packets that decoding may start from; at least one."""
    return [i for i, packet in enumerate(packets) if packet.key] or [0]


def _decode_times(reader: _Reader) -> tuple[list[float], av.VideoFrame]:
    """Decode everything: times of all frames in seconds since the first, and the first frame."""
    first, pts = None, []
    for frame in reader.frames(threads=0):
        first = first or frame
        pts.append(frame.pts)
    if first is None:
        raise reader.error("has no video frames")
    if None not in pts and _nearly_sorted(pts):
        # Where decoding times stand for presentation times, they are the right ones, in the wrong order.
        pts.sort()
        return [float((p - pts[0]) * reader.stream.time_base) for p in pts], first
    return [i / reader.rate() for i in range(len(pts))], first


def _orientation(path: str, frame: av.VideoFrame) -> tuple[bool, bool, bool]:
    """How to display a frame: (transpose, then flip vertically, then flip horizontally)."""
    if SideDataType.DISPLAYMATRIX not in frame.side_data:
        return False, False, False
    # Row major [[a, b, u], [c, d, v], [x, y, w]]: a pixel at (x, y) is displayed at (a x + c y, b x + d y).
    a, b, _, c, d = struct.unpack_from("=5i", bytes(frame.side_data[SideDataType.DISPLAYMATRIX]))
    if a and d and not b and not c:
        return False, d < 0, a < 0
    if b and c and not a and not d:
        return True, b < 0, c < 0
    raise VideoError(f"{path}: is rotated by an angle that is no multiple of 90 degrees")


def _to_rgb(info: VideoInfo, frame: av.VideoFrame) -> np.ndarray:
    """uint8 [height, width, 3] as displayed."""
    image = frame.to_ndarray(format="rgb24")
    if info.transpose:
        image = image.transpose(1, 0, 2)
    if image.shape != (info.height, info.width, 3):
        raise VideoError(f"{info.path}: the frame size changes within the video")
    return image[:: -1 if info.flip_vertical else 1, :: -1 if info.flip_horizontal else 1]


def _read_from_start(info: VideoInfo, wanted: list[int], out: np.ndarray) -> None:
    row = 0
    with _Reader(info.path) as reader:
        for index, frame in enumerate(reader.frames()):
            if frame.is_corrupt:
                raise reader.error(f"frame {index} is damaged")
            if index == wanted[row]:
                out[row] = _to_rgb(info, frame)
                row += 1
                if row == len(wanted):
                    return
        raise reader.error(f"frame {wanted[row]} cannot be decoded")


class _Group(NamedTuple):
    """Frames to decode in one go."""

    rows: dict[int, int]  # pts of a frame -> its row in the result
    key: int  # start at this keyframe (a number among the keyframes)
    stop: int  # the packet after the last one needed
    frames: str  # what to call them


def _read_by_seeking(info: VideoInfo, wanted: list[int], out: np.ndarray, threads: int) -> None:
    keyframes, position = _keyframes(info.packets), _positions(info.packets)
    plan = _plan(info, keyframes, wanted)
    groups = iter(plan)

    def work() -> None:
        with _Reader(info.path) as reader:
            reader.expect(info.packets, position)
            try:
                for group in groups:  # shared by all threads: whichever is free takes the next
                    _read_group(reader, info, keyframes, group, out)
            finally:
                for _ in groups:  # after an error the rest is of no use
                    pass

    workers = min(threads, len(plan))
    if workers == 1:
        work()
        return
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(work) for _ in range(workers)]:
            done.result()


def _plan(info: VideoInfo, keyframes: list[int], wanted: list[int]) -> list[_Group]:
    """Split `wanted` into groups, a new one wherever a seek skips a packet, and in long runs at keyframes.

    So every packet decoded lies between a wanted frame and that frame's keyframe, and whether a frame is
    found damaged does not depend on what else is asked for.
    """
    groups: list[_Group] = []
    rows: dict[int, int] = {}
    key, stop = -1, -1

    def close() -> None:
        frames = f"{wanted[min(rows.values())]}..{wanted[max(rows.values())]}"
        groups.append(_Group(rows, key, stop, frames))

    for row, frame in enumerate(wanted):
        index = info.frame_packets[frame]
        own = bisect.bisect_right(keyframes, index) - 1
        # A frame displayed before the keyframe that precedes it in the file may refer to the group before.
        while own > 0 and info.packets[keyframes[own]].pts > info.packets[index].pts:
            own -= 1
        if rows and (keyframes[own] > stop or keyframes[own] >= keyframes[key] + _RUN):
            close()
            rows = {}
        if not rows:
            key, stop = own, index + 1
        rows[info.packets[index].pts] = row
        stop = max(stop, index + 1)
    close()
    return groups


def _read_group(reader: _Reader, info: VideoInfo, keyframes: list[int], group: _Group, out: np.ndarray) -> None:
    """Fill the group's rows of `out`. Raises VideoError."""
    back = 0
    while True:
        number = max(group.key - back, 0)
        try:
            return _decode_group(reader, info, keyframes[number], number == 0, group, out)
        except _SeekFailed:
            reader.can_seek = False
        except _Undecodable as error:
            # The keyframe may be none, as with intra refresh: then only an earlier one helps. If it is fine,
            # the data after it is damaged, or refers further back than it should: one more try.
            if number == 0 or (error.entered and back):
                raise reader.error(f"a frame among {group.frames} cannot be decoded: {error}") from error
            back = 2 * back + 1


def _decode_group(
    reader: _Reader, info: VideoInfo, start: int, is_first: bool, group: _Group, out: np.ndarray
) -> None:
    """Decode from the keyframe that is packet `start` and fill the group's rows of `out`.

    `is_first`: it is the first keyframe of the file, so there is no earlier one to decode from.

    Raises _Undecodable or _SeekFailed; the rows then hold nothing of use. VideoError as `read_frames`.
    """
    packets, key = info.packets, info.packets[start]
    unseen = {packet.pts for packet in packets[start : group.stop] if packet.shown}
    missing = set(group.rows)
    origin = packets[info.frame_packets[0]].pts if is_first else key.pts
    entered, latest = is_first or not key.shown, None
    # Nothing more is fed once the last wanted frame is in, so the decoder needs to be drained to give it out.
    for packet in itertools.chain(reader.packets_between(start, group.stop), (None,)):
        try:
            frames = _decode(reader.stream, packet)
        except av.error.FFmpegError as error:
            raise _Undecodable(error.strerror, entered) from error
        for frame in frames:
            if frame.pts is not None and frame.pts < origin:
                continue  # displayed before the keyframe: may lack what it refers to
            if frame.pts not in unseen or (latest is not None and frame.pts < latest):
                raise _Undecodable("frames come out of the decoder that the file does not announce", entered)
            if frame.is_corrupt:
                raise _Undecodable("the data is damaged", entered)
            unseen.remove(frame.pts)
            latest = frame.pts
            # The second field of an interlaced keyframe may be predicted from the first.
            if frame.pts == key.pts and (frame.pict_type in _INTRA or frame.interlaced_frame):
                entered = True
            if frame.pts in group.rows:
                out[group.rows[frame.pts]] = _to_rgb(info, frame)
                missing.remove(frame.pts)
    if missing or not entered:
        raise _Undecodable("the decoder does not give it out", entered)
