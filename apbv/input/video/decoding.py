"""Decoding chosen frames with PyAV: in runs that begin at keyframes, chunk by chunk, by several threads.

A frame is *good* if decoding it alone works: if the decoder, from the frame's keyframe on, finds no damage in what
that frame needs. Whether a frame is good does not depend on what else is asked for: a frame is given out only once
everything that it needs has come out of the decoder undamaged; one that is given out is final; and those that fail
when decoded with others are tried alone.
"""

import bisect
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import av
import numpy as np
from av.video.frame import PictureType
from av.video.reformatter import VideoReformatter

from .file import SeekFailed, VideoFile
from .info import VideoError, VideoInfo

# Pictures that refer to no other; decoders that do not say give NONE.
_INTRA = (PictureType.I, PictureType.SI, PictureType.NONE)
# Packets after which a run of wanted frames may be split at a keyframe, for several threads to share.
_PACKETS_PER_RUN = 64
# Seconds after which a thread that waits for room looks whether the program still runs.
_LOOK_UP = 1.0


@dataclass(frozen=True)
class FrameRun:
    """Wanted frames that are decoded in one go.

    Attributes:
        frames: their numbers in the video, ascending.
        key: the keyframe to start at, a number among the keyframes.
        stop: the packet after the last one needed.
    """

    frames: Sequence[int]
    key: int
    stop: int


def plan_runs(info: VideoInfo, wanted: Sequence[int]) -> list[FrameRun]:
    """Split the wanted frames into runs: a new one wherever a seek skips a packet, and in long runs at keyframes.

    So every packet that is read lies between a wanted frame and that frame's keyframe.
    """
    pts, keyframes = info.packets.pts, info.packets.keyframes.tolist()
    runs: list[FrameRun] = []
    frames: list[int] = []
    key, stop = -1, -1
    for frame in wanted:
        index = int(info.frame_packets[frame])
        own = bisect.bisect_right(keyframes, index) - 1
        # A frame displayed before the keyframe that precedes it in the file may refer to the group before.
        while own > 0 and pts[keyframes[own]] > pts[index]:
            own -= 1
        if frames and (keyframes[own] > stop or keyframes[own] >= keyframes[key] + _PACKETS_PER_RUN):
            runs.append(FrameRun(frames, key, stop))
            frames = []
        if not frames:
            key, stop = own, index + 1
        frames.append(frame)
        stop = max(stop, index + 1)
    return [*runs, FrameRun(frames, key, stop)] if frames else runs


class _Undecodable(Exception):
    """Decoding from a keyframe did not work out."""


class RunDecoder:
    """Decodes runs of an open file's frames.

    Args:
        check: called between packets; what it raises ends the decoding.
    """

    def __init__(self, file: VideoFile, info: VideoInfo, check: Callable[[], None]):
        self._file, self._info, self._check = file, info, check
        self._keyframes = info.packets.keyframes.tolist()
        file.expect(info.packets)

    def frames(self, run: FrameRun) -> Iterator[av.VideoFrame]:
        """Decode a run's frames, in their order.

        Raises:
            VideoError: the next frame is damaged or cannot be decoded; or the file holds other packets than those
                that were probed.
        """
        given = 0
        try:
            for frame in self._frames(run):
                given += 1
                yield frame
        except VideoError:
            if len(run.frames) == 1:
                raise
        for index in run.frames[given:]:
            yield from self._frames(plan_runs(self._info, [index])[0])

    def _frames(self, run: FrameRun) -> Iterator[av.VideoFrame]:
        """Decode a run's frames, with all that may help; VideoError where one of them does not come."""
        missing, skip = deque(run.frames), True
        while missing:
            try:
                for frame in self._attempt(run, missing, skip):
                    missing.popleft()
                    yield frame
            except SeekFailed:
                self._file.can_seek = False
            except _Undecodable as error:
                if not skip:
                    raise self._file.error(f"frame {missing[0]} cannot be decoded: {error}") from error
                skip = False  # which may have confused the order in which frames come out

    def _attempt(self, run: FrameRun, wanted: Sequence[int], skip: bool) -> Iterator[av.VideoFrame]:
        """Decode from a run's keyframe on, and give out the wanted frames.

        Args:
            wanted: the frames' numbers; it may lose those that are given out.
            skip: leave out frames that are neither wanted nor needed.

        Raises:
            _Undecodable, SeekFailed: the next wanted frame does not come.
        """
        packets, start, stop = self._info.packets, self._keyframes[run.key], run.stop
        pts, shown = packets.pts[start:stop], packets.shown[start:stop]
        indices = self._info.frame_packets[list(wanted)] - start
        # A frame is known to be good once all that was decoded before it, or with it, has come out.
        horizon = np.maximum.accumulate(np.where(shown, pts, pts[0]))[indices].tolist()
        waiting = deque(zip(pts[indices].tolist(), horizon, strict=True))
        held: deque[av.VideoFrame] = deque()
        needed, unseen = {time for time, _ in waiting}, set(pts[shown].tolist())
        key_time, latest = int(pts[0]), None
        fed_in_full = needed | {key_time}
        origin = key_time if run.key else int(packets.pts[self._info.frame_packets[0]])
        # Nothing more is fed once the last wanted frame is in, so the decoder needs to be drained to give it out.
        for packet in itertools.chain(self._file.packets_between(start, stop), (None,)):
            self._check()
            try:
                frames = self._file.decode(packet, not skip or packet is None or packet.pts in fed_in_full)
            except av.error.FFmpegError as error:
                raise _Undecodable(error.strerror) from error
            for frame in frames:
                time = frame.pts
                if time is not None and time < origin:
                    continue  # displayed before the keyframe: may lack what it refers to
                if time not in unseen or (latest is not None and time < latest):
                    raise _Undecodable("frames come out of the decoder that the file does not announce")
                # The second field of an interlaced keyframe may be predicted from the first.
                is_intra = frame.pict_type in _INTRA or frame.interlaced_frame
                if frame.is_corrupt or (run.key and time == key_time and not is_intra):
                    raise _Undecodable("the data is damaged")
                unseen.remove(time)
                latest = time
                if time in needed:
                    held.append(frame)
                    if waiting[len(held) - 1][0] != time:
                        raise _Undecodable("the decoder does not give it out")
                while held and waiting[0][1] <= time:
                    waiting.popleft()
                    yield held.popleft()
        if len(held) < len(waiting):
            raise _Undecodable("the decoder does not give it out")
        yield from held


def frames_from_start(
    file: VideoFile, wanted: Sequence[int], check: Callable[[], None]
) -> Iterator[av.VideoFrame]:
    """Decode a file whose packets tell nothing, and give out the wanted frames.

    Raises:
        VideoError: a frame up to the next wanted one is damaged, or there are too few.
    """
    missing = deque(wanted)
    for index, frame in enumerate(file.decode_all()):
        check()
        if frame.is_corrupt:
            raise file.error(f"frame {index} is damaged")
        if index == missing[0]:
            missing.popleft()
            yield frame
            if not missing:
                return
    raise file.error(f"frame {missing[0]} cannot be decoded")


class _Unwanted(Exception):
    """Nobody waits for these frames any more."""


class _Chunks:
    """The chunks that are being filled, row by row, by several threads.

    A thread whose row is too far ahead waits. It cannot wait for ever: threads take the runs in order, so the
    first row that is missing is always being decoded by one that need not wait.

    Args:
        num_rows: the number of frames in all.
        shape: of a frame.
    """

    def __init__(self, num_rows: int, chunk_len: int, shape: tuple[int, int, int]):
        self._shape, self._chunk_len = shape, chunk_len
        starts = range(0, num_rows, chunk_len)
        self._missing = [set(range(start, min(start + chunk_len, num_rows))) for start in starts]
        self._arrays: dict[int, np.ndarray] = {}
        self._end = num_rows  # nobody wants the rows from here on
        self._error: BaseException | None = None  # why there are no more
        self._taking = 0  # the number of the chunk that is asked for, or was given out last
        self._changed = threading.Condition()

    def check(self, row: int) -> None:
        """Raise _Unwanted if nobody wants a row any more."""
        if row >= self._end:
            raise _Unwanted

    def place(self, row: int) -> np.ndarray:
        """Return where a frame belongs, once there is room for it; _Unwanted if nobody wants it."""
        number, place = divmod(row, self._chunk_len)
        with self._changed:
            while number > self._taking + 1 and row < self._end:
                self._changed.wait(_LOOK_UP)
                if not threading.main_thread().is_alive():
                    self._end = 0  # the interpreter waits for its threads to end
            self.check(row)
            if number not in self._arrays:
                self._arrays[number] = np.empty((len(self._missing[number]), *self._shape), np.uint8)
            return self._arrays[number][place]

    def filled(self, row: int) -> None:
        """Say that a frame is in its place."""
        with self._changed:
            missing = self._missing[row // self._chunk_len]
            missing.remove(row)
            if not missing or self._error is not None:
                self._changed.notify_all()

    def fail(self, row: int, error: BaseException) -> None:
        """Say why there will be no such row, and none after it."""
        with self._changed:
            if row < self._end:
                self._end, self._error = row, error
                self._changed.notify_all()

    def close(self) -> None:
        """Let all threads end."""
        with self._changed:
            self._end = 0
            self._changed.notify_all()

    def __iter__(self) -> Iterator[np.ndarray]:
        """Give out the chunks, each once it is complete; raise the error of the first row that fails."""
        for number, missing in enumerate(self._missing):
            with self._changed:
                self._taking = number
                self._changed.notify_all()
                while min(missing, default=self._end) < self._end:
                    self._changed.wait()
                if missing:
                    raise self._error
                chunk = self._arrays.pop(number)
            yield chunk
            del chunk


def pyav_chunks(
    info: VideoInfo,
    wanted: list[int],
    chunk_len: int,
    threads: int,
    at_work: Callable[[int], AbstractContextManager],
) -> Iterator[np.ndarray]:
    """Decode frames chunk by chunk, as :func:`apbv.input.video.iter_frames`, by up to so many threads."""
    runs = plan_runs(info, wanted) if info.packets else [FrameRun(wanted, 0, 0)]
    rows = itertools.accumulate((len(run.frames) for run in runs), initial=0)
    todo = iter(list(zip(rows, runs, strict=False)))  # of which every thread takes the next
    chunks = _Chunks(len(wanted), chunk_len, (info.height, info.width, 3))
    workers = [
        threading.Thread(target=_work, args=(info, todo, chunks, partial(at_work, number)))
        for number in range(min(threads, len(runs)))
    ]
    try:
        for worker in workers:
            worker.start()
        yield from chunks
    finally:
        chunks.close()
        for worker in workers:
            # The garbage collector may close this in any thread, if its user has not.
            if worker.ident is not None and worker is not threading.current_thread():
                worker.join()


def _work(
    info: VideoInfo,
    todo: Iterator[tuple[int, FrameRun]],
    chunks: _Chunks,
    at_work: Callable[[], AbstractContextManager],
) -> None:
    """Decode runs, always the first that no other thread has taken on, until there are none left."""
    row = 0

    def check() -> None:
        chunks.check(row)

    try:
        for row, run in todo:  # the first: no file is opened for nothing
            with VideoFile(info.path) as file:
                to_rgb = _RgbConverter(info)
                decoder = RunDecoder(file, info, check) if info.packets else None
                for row, run in itertools.chain([(row, run)], todo):  # noqa: B020
                    frames = decoder.frames(run) if decoder else frames_from_start(file, run.frames, check)
                    for _ in run.frames:
                        place = chunks.place(row)
                        with at_work():
                            to_rgb(next(frames), place)
                        chunks.filled(row)
                        row += 1
    except _Unwanted:
        pass
    except BaseException as error:
        chunks.fail(row, error)


class _RgbConverter:
    """Converts frames to RGB as displayed.

    One ffmpeg converter does all, in the thread that calls: to make one for every frame costs more than it saves.
    """

    def __init__(self, info: VideoInfo):
        self._info, self._reformatter = info, VideoReformatter()

    def __call__(self, frame: av.VideoFrame, out: np.ndarray) -> None:
        """Convert a frame into ``out``, uint8 ``[height, width, 3]``.

        Raises:
            VideoError: it has another size.
        """
        info = self._info
        image = self._reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
        if info.transpose:
            image = image.transpose(1, 0, 2)
        if image.shape != out.shape:
            raise VideoError(f"{info.path}: the frame size changes within the video")
        out[:] = image[:: -1 if info.flip_vertical else 1, :: -1 if info.flip_horizontal else 1]
