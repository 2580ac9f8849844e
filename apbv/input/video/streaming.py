"""Decoding chosen frames with PyAV chunk by chunk, by several threads, in bounded memory."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import av
import numpy as np
from av.video.reformatter import VideoReformatter

from .decoding import RunDecoder, frames_from_start
from .file import VideoFile
from .info import VideoError, VideoInfo
from .runs import FrameRun, plan_runs

# Seconds after which a thread that waits for room looks whether the program still runs.
_LOOK_UP = 1.0


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
    todo = deque(zip(rows, runs, strict=False))
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
    todo: deque[tuple[int, FrameRun]],
    chunks: _Chunks,
    at_work: Callable[[], AbstractContextManager],
) -> None:
    """Decode runs, always the first that no other thread has taken on, until there are none left."""
    row, taken = 0, _take(todo)

    def check() -> None:
        chunks.check(row)

    try:
        for row, run in taken:  # the first: no file is opened for nothing
            with VideoFile(info.path) as file:
                to_rgb = _RgbConverter(info)
                decoder = RunDecoder(file, info, check) if info.packets else None
                for row, run in itertools.chain([(row, run)], taken):  # noqa: B020
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


def _take(todo: deque[tuple[int, FrameRun]]) -> Iterator[tuple[int, FrameRun]]:
    while todo:
        try:
            yield todo.popleft()
        except IndexError:  # another thread was faster
            return


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
