"""Decoding chosen frames with PyAV: in runs that begin at keyframes, chunk by chunk, by several threads."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import av
import numpy as np
from av.video.reformatter import VideoReformatter

from .file import VideoFile, VideoInfo

# Frames after which a run of wanted frames may be split at a keyframe, for several threads to share.
_FRAMES_PER_RUN = 64
AtWork = Callable[[int], AbstractContextManager]


def plan_runs(info: VideoInfo, wanted: Sequence[int]) -> list[range]:
    """Split the wanted frames into runs: a new one wherever a seek skips a frame, and in long runs at keyframes.

    A frame is decoded from the last keyframe that is displayed no later. One that comes before it in the file may
    be displayed behind it, and need the group before.

    Returns:
        The place of each run's frames in ``wanted``.
    """
    if not len(info.pts) or not wanted:
        return [range(len(wanted))] * bool(wanted)
    keys = np.searchsorted(info.keys[:, 0], info.pts[list(wanted)], side="right") - 1
    starts = np.searchsorted(info.pts, info.keys[keys, 0]).tolist()  # the frames with which their groups begin
    cuts = [0]
    for place in range(1, len(wanted)):
        is_long = starts[place] >= starts[cuts[-1]] + _FRAMES_PER_RUN
        if starts[place] > wanted[place - 1] + 1 or (is_long and starts[place] > starts[place - 1]):
            cuts.append(place)
    return [range(start, stop) for start, stop in zip(cuts, [*cuts[1:], len(wanted)], strict=True)]


def _run_frames(
    file: VideoFile, info: VideoInfo, frames: Sequence[int], check: Callable[[], None]
) -> Iterator[av.VideoFrame]:
    """Decode a run's frames, in their order."""
    if len(info.pts):
        times = info.pts[list(frames)]
        key = info.keys[np.searchsorted(info.keys[:, 0], times[0], side="right") - 1]
        yield from file.frames_from(key, set(times.tolist()), check)
        return
    missing = set(frames)
    for number, frame in enumerate(file.decode_all()):
        check()
        if frame.is_corrupt:
            raise file.error(f"frame {number} cannot be decoded: the data is damaged")
        if number in missing:
            missing.remove(number)
            yield frame
        if not missing:
            return
    raise file.error(f"frame {min(missing)} cannot be decoded")


class _Unwanted(Exception):
    """Nobody waits for these frames any more."""


class _Chunks:
    """The chunks that are being filled, row by row, by several threads; no more than two at a time.

    A thread whose row is too far ahead waits. It cannot wait for ever: threads take the runs in order, so the
    first row that is missing is always being decoded by one that need not wait.

    Attributes:
        error: why there will be no more.
    """

    def __init__(self, num_rows: int, chunk_len: int, shape: tuple[int, int, int]):
        self.error: BaseException | None = None
        self._shape, self._chunk_len = shape, chunk_len
        self._missing = [min(chunk_len, num_rows - start) for start in range(0, num_rows, chunk_len)]
        self._arrays: dict[int, np.ndarray] = {}
        self._taking, self._has_ended = 0, False
        self._changed = threading.Condition()

    def check(self) -> None:
        """Raise _Unwanted if nobody wants any more frames."""
        if self._has_ended:
            raise _Unwanted

    def put(self, row: int, image: np.ndarray) -> None:
        """Put a frame in its place, once there is room for it; _Unwanted if nobody wants it."""
        number, place = divmod(row, self._chunk_len)
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or number <= self._taking + 1)
            self.check()
            if number not in self._arrays:
                self._arrays[number] = np.empty((self._missing[number], *self._shape), np.uint8)
            array = self._arrays[number]
        array[place] = image
        with self._changed:
            self._missing[number] -= 1
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Let all threads end."""
        with self._changed:
            self.error, self._has_ended = self.error or error, True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[np.ndarray]:
        """Give out the chunks, each once it is complete; raise the first error."""
        for number in range(len(self._missing)):
            with self._changed:
                self._taking = number
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.error or not self._missing[number])  # noqa: B023
                if self._missing[number]:
                    raise self.error
                chunk = self._arrays.pop(number)
            yield chunk
            del chunk


def pyav_chunks(
    info: VideoInfo, wanted: list[int], chunk_len: int, threads: int, at_work: AtWork
) -> Iterator[np.ndarray]:
    """Decode frames chunk by chunk, as :func:`apbv.input.video.iter_frames`, by up to so many threads."""
    runs = plan_runs(info, wanted)
    todo = iter(runs)  # of which every thread takes the next
    chunks = _Chunks(len(wanted), chunk_len, (info.height, info.width, 3))
    workers = [
        # No program waits for them in order to end.
        threading.Thread(target=_work, args=(info, wanted, todo, chunks, at_work, number), daemon=True)
        for number in range(min(threads, len(runs)))
    ]
    try:
        for worker in workers:
            worker.start()
        yield from chunks
        for worker in workers:
            worker.join()  # what is fed behind the last frame may show that this one is damaged
        if chunks.error is not None:
            raise chunks.error
    finally:
        chunks.end()
        for worker in workers:
            if worker is not threading.current_thread():  # in which the garbage collector may run
                worker.join()


def _work(
    info: VideoInfo, wanted: list[int], todo: Iterator[range], chunks: _Chunks, at_work: AtWork, number: int
) -> None:
    """Decode runs, always the first that no other thread has taken on, until there are none left."""
    try:
        run = next(todo, None)
        if run is None:  # no file is opened for nothing
            return
        with VideoFile(info.path) as file:
            if file.num_bytes != info.num_bytes:
                raise file.error("changed since it was probed")
            converter = VideoReformatter()  # to make one for every frame costs more than it saves
            while run is not None:
                frames = _run_frames(file, info, wanted[run.start : run.stop], chunks.check)
                for row in (*run, None):
                    with at_work(number):
                        frame = next(frames, None)
                        image = None if frame is None else _to_rgb(converter, frame, file, info)
                    if image is not None:
                        chunks.put(row, image)
                run = next(todo, None)
    except _Unwanted:
        pass
    except BaseException as error:
        chunks.end(error)


def _to_rgb(converter: VideoReformatter, frame: av.VideoFrame, file: VideoFile, info: VideoInfo) -> np.ndarray:
    """Convert a frame to RGB as displayed, uint8 ``[height, width, 3]``, in the thread that calls.

    Raises:
        VideoError: it has another size than the first.
    """
    image = converter.reformat(frame, format="rgb24", threads=1).to_ndarray()
    if info.transpose:
        image = image.transpose(1, 0, 2)
    if image.shape[:2] != (info.height, info.width):
        raise file.error("the frame size changes within the video")
    return image[:: -1 if info.flip_vertical else 1, :: -1 if info.flip_horizontal else 1]
