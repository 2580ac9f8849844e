"""Samples frames of a video and decodes them, in runs that begin at keyframes."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import av
import numpy as np
from av.video.reformatter import VideoReformatter

from ....config import FRAME_RATE
from ....errors import InvalidRequestError
from ....hosts import fair_share_of_cores
from ....reporting import warn_caller
from .file import NotWholeError, VideoError, VideoFile, VideoInfo

# A run of at least this many frames is split at a keyframe, for several threads to share.
_FRAMES_PER_RUN = 64
# Seconds by which equal times may differ: times are sums of a container's units.
_SAME_TIME = 1e-6
# Added to a number of grid times, so that a time half way between two frames, common at 2 of 25
# frames per second, goes to the same frame however times are rounded.
_TIE = 1e-6
# How many times as many pixels as the first an unannounced frame may have.
MOST_TIMES_LARGER = 16
# Makes a context in which a thread decodes.
AtWork = Callable[[], AbstractContextManager]


def sample_uniform(info_or_n: VideoInfo | int, num_frames: int) -> list[int]:
    """Spread ``min(n, num_frames)`` distinct indices evenly over all n frames; ascending.

    With k = ``min(n, num_frames)``, index i of k is i * (n - 1) / (k - 1), rounded to nearest,
    halves up, in integer arithmetic: both ends are included, steps differ by at most one. For k = 1
    it is frame 0. This is even in frame numbers; :func:`sample_fps` is even in time.

    Args:
        info_or_n: the video, or n.
        num_frames: how many indices to return.

    Raises:
        InvalidRequestError: ``num_frames`` < 1 or n < 0.
    """
    n = info_or_n.num_frames if isinstance(info_or_n, VideoInfo) else info_or_n
    if num_frames < 1 or n < 0:
        raise InvalidRequestError(f"cannot sample {num_frames} of {n} frames")
    k = min(n, num_frames)
    if k < 2:
        return [0] * k
    num_steps = k - 1
    # Doubled, so that adding half a step rounds to nearest.
    return [(2 * i * (n - 1) + num_steps) // (2 * num_steps) for i in range(k)]


def frames_within(info: VideoInfo, start: float | None, end: float | None) -> range:
    """Return the frames whose times lie from ``start`` to ``end``, both included.

    Args:
        start, end: seconds; None: no limit.

    Raises:
        VideoError: the video ends before ``start``, or has no frame there.
    """
    start = start or 0.0
    end = info.duration if end is None else end
    if start >= info.duration:
        raise VideoError(
            f"{info.path}: video_start is {start:g} s, but the video lasts {info.duration:.3f} s"
        )
    first = int(np.searchsorted(info.timestamps, start - _SAME_TIME, "left"))
    stop = int(np.searchsorted(info.timestamps, end + _SAME_TIME, "right"))
    if first >= stop:
        raise VideoError(
            f"{info.path}: has no frame between video_start {start:g} s and video_end {end:g} s "
            f"(the video lasts {info.duration:.3f} s)"
        )
    return range(first, stop)


def length_of(info: VideoInfo, frames: range) -> float:
    """Return for how many seconds adjacent frames are shown, the last up to the next one."""
    end = info.duration
    if frames.stop < info.num_frames:
        end = info.timestamps[frames.stop]
    return float(end - info.timestamps[frames.start])


def sample_fps(
    info: VideoInfo,
    fps: float,
    max_frames: int | None = None,
    min_frames: int = 1,
    within: range | None = None,
) -> list[int]:
    """Find the frames nearest to the times 0, 1/fps, 2/fps... up to the last.

    The frames are found by their timestamps, which also holds for variable frame rates; of two
    equally near frames the earlier is taken. Their indices are distinct and ascend. An ``fps`` well
    above the video's own gives every frame.

    Args:
        info: the video.
        fps: frames per second.
        max_frames: if the times give more frames than this, this number is sampled by
            :func:`sample_uniform` instead.
        min_frames: if the times give fewer frames than this, this number is sampled by
            :func:`sample_uniform` instead.
        within: the frames among which to sample, from the time of their first; None: all.

    Raises:
        InvalidRequestError: ``fps`` is not in 0 < fps <= MAX_FPS, or ``max_frames`` < 1.
    """
    requirement, is_valid = FRAME_RATE
    if not is_valid(fps):
        raise InvalidRequestError(f"fps must {requirement}, not {fps!r:.50}")
    if within is None:
        within = range(info.num_frames)
    times = np.asarray(info.timestamps)[within.start : within.stop]
    times = times - times[0]

    # A frame is nearest to the times from half way to the one before (excluded) to half way to the
    # next, and is taken if a grid time lies there. The grid may be long, so its times are counted
    # up to each of these edges: they are 0, 1/fps, 2/fps..., so the first is counted from -1.
    edges = np.concatenate([(times[1:] + times[:-1]) / 2, times[-1:]])
    last_grid_index = np.floor(edges * fps + _TIE)
    num_grid_times = np.diff(last_grid_index, prepend=-1)
    chosen = np.flatnonzero(num_grid_times > 0).tolist()

    # Take another number instead where this one is out of bounds.
    num_frames = max(len(chosen), min_frames)
    if max_frames is not None:
        num_frames = min(num_frames, max_frames)
    if num_frames != len(chosen):
        chosen = sample_uniform(len(within), num_frames)
    return [within[index] for index in chosen]


def read_frames(info: VideoInfo, indices: Sequence[int], threads: int = 0) -> np.ndarray:
    """Decode frames: uint8 ``[len(indices), height, width, 3]``, RGB as displayed.

    The result is bit-equal to decoding the whole file and picking the frames. Arguments and errors
    are as in :func:`iter_frames`, of which this is the only chunk.
    """
    # All of the iterator: an error may follow the chunk.
    chunks = list(iter_frames(info, indices, max(len(indices), 1), threads))
    return chunks[0] if chunks else np.empty((0, info.height, info.width, 3), np.uint8)


def iter_frames(
    info: VideoInfo,
    indices: Sequence[int],
    chunk_len: int,
    threads: int = 0,
    at_work: AtWork = nullcontext,
) -> Generator[np.ndarray, None, None]:
    """Decode frames chunk by chunk: uint8 ``[<= chunk_len, height, width, 3]``, RGB as displayed.

    Together the chunks are bit-equal to decoding the whole file and picking the frames. Decoding
    seeks wherever a keyframe lets it skip packets, skips frames that are neither requested nor
    needed by others, and goes on while a chunk is in use. In memory are the chunks that were
    yielded, at most two others, and in each thread one frame and those in its decoder. Closing the
    iterator ends the threads and closes the file.

    Args:
        info: the video, from :func:`apbv.input.media.video.probe`.
        indices: the frames' numbers, strictly ascending.
        chunk_len: frames in each chunk but the last.
        threads: how many runs of frames to decode at the same time, if there are several; 0: as
            many as this process's fair share of its machine's cores.
        at_work: makes a context, which each decoding thread enters while it works, but not while it
            waits for room.

    Raises:
        VideoError: a frame, or one that was decoded on the way to it, is missing, or is damaged so
            that the decoder notices; a frame is much larger than announced; or the file was
            changed. It may be raised before the frame's own chunk, and after the last.
        InvalidRequestError: the indices do not ascend, or chunk_len < 1; raised by the call itself.
        IndexError: an index is out of range; raised by the call itself.
    """
    frames = [int(index) for index in indices]
    if frames != sorted(set(frames)):
        raise ValueError("frame indices must be strictly ascending")
    if frames and (frames[0] < 0 or frames[-1] >= info.num_frames):
        raise IndexError(f"frame indices {frames[0]}..{frames[-1]} of {info.num_frames} frames")
    if chunk_len < 1:
        raise ValueError(f"need chunk_len >= 1, got {chunk_len}")
    threads = threads or fair_share_of_cores()
    return _decoded(info, frames, chunk_len, threads, at_work)


def plan_runs(info: VideoInfo, frames: Sequence[int]) -> list[range]:
    """Split frames into runs: wherever a seek skips a frame, and in long runs at keyframes.

    A frame is decoded from the last keyframe that is displayed no later, with which its group of
    pictures begins. A frame that precedes a keyframe in the file may be displayed after it, and
    need the group before.

    Args:
        info: the video.
        frames: indices of the frames to decode, ascending.

    Returns:
        The places of each run's frames in ``frames``.
    """
    if not frames:
        return []
    if not len(info.pts):
        return [range(len(frames))]
    keys = _keys_of(info, frames)
    # For every frame, the index of the frame with which its group begins.
    group_starts = np.searchsorted(info.pts, info.keys[keys, 0]).tolist()
    runs = []
    start = 0
    for place in range(1, len(frames)):
        skips_frames = group_starts[place] > frames[place - 1] + 1
        is_long = group_starts[place] >= group_starts[start] + _FRAMES_PER_RUN
        begins_group = group_starts[place] > group_starts[place - 1]
        if skips_frames or (is_long and begins_group):
            runs.append(range(start, place))
            start = place
    runs.append(range(start, len(frames)))
    return runs


def _keys_of(info: VideoInfo, frames: Sequence[int]) -> np.ndarray:
    """Return for each frame the number of the last keyframe that is displayed no later."""
    times = info.pts[list(frames)]
    num_no_later = np.searchsorted(info.keys[:, 0], times, side="right")
    return np.maximum(num_no_later - 1, 0)


def _run_frames(
    file: VideoFile, info: VideoInfo, frames: Sequence[int], check: Callable[[], None]
) -> Iterator[av.VideoFrame]:
    """Decode a run's frames, in their order."""
    if len(info.pts):
        return _frames_from_keys(file, info, frames, check)
    return _frames_from_start(file, frames, check)


def _frames_from_keys(
    file: VideoFile, info: VideoInfo, frames: Sequence[int], check: Callable[[], None]
) -> Iterator[av.VideoFrame]:
    """Decode a run's frames from a keyframe, and again from earlier ones until all have come."""
    remaining = deque(frames)
    key = int(_keys_of(info, [remaining[0]])[0])
    num_back = 1
    while remaining:
        # Several frames may have the same time. Of each time, the frames up to our last one have to
        # be decoded; a later entry of the same time replaces an earlier, smaller one.
        times = info.pts[list(remaining)]
        first_of_time = np.searchsorted(info.pts, times)
        counts = np.array(remaining) - first_of_time + 1
        num_wanted = dict(zip(times.tolist(), counts.tolist(), strict=True))
        try:
            for number_in_time, frame in file.frames_from(info.keys[key], num_wanted, check):
                assert frame.pts is not None  # it is one of the wanted times
                index = int(np.searchsorted(info.pts, frame.pts)) + number_in_time
                if index > remaining[0]:
                    raise NotWholeError(
                        f"{file.path}: a frame cannot be decoded: {remaining[0]} is missing"
                    )
                if index == remaining[0]:
                    remaining.popleft()
                    yield frame
        except (NotWholeError, av.error.FFmpegError) as error:
            # Go back to an earlier keyframe, each time twice as far.
            if key == 0:
                if isinstance(error, NotWholeError):
                    raise VideoError(str(error)) from error
                raise
            key = max(0, key - num_back)
            num_back = 2 * num_back


def _frames_from_start(
    file: VideoFile, frames: Sequence[int], check: Callable[[], None]
) -> Iterator[av.VideoFrame]:
    """Decode a run's frames from the start of the file."""
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
    """Raised in a decoding thread if its frames are no longer needed."""


class FrameChunks:
    """Chunks that several threads fill row by row, at most two at a time.

    A thread whose row is too far ahead waits. It cannot wait for ever: threads take the runs in
    order, so the first row that is missing is always being decoded by one that need not wait.

    Args:
        num_rows: the frames of all chunks.
        chunk_len: the frames of each chunk but the last.
        shape: ``(height, width, 3)`` of a frame.

    Attributes:
        error: the first error, which ended the decoding; None if there was none.
        are_scaled: whether a frame had to be scaled; a warning is given for the first.
    """

    def __init__(self, num_rows: int, chunk_len: int, shape: tuple[int, int, int]):
        self.error: BaseException | None = None
        self.are_scaled = False
        self._shape = shape
        self._chunk_len = chunk_len
        num_whole, rest = divmod(num_rows, chunk_len)
        self._num_missing = [chunk_len] * num_whole  # frames of each chunk
        if rest:
            self._num_missing.append(rest)
        self._arrays: dict[int, np.ndarray] = {}  # by the chunks' numbers
        self._next_chunk = 0  # the number of the chunk to be yielded next
        self._has_ended = False
        self._changed = threading.Condition()

    def check(self) -> None:
        """Raise _Unwanted if no more frames are needed."""
        if self._has_ended:
            raise _Unwanted

    def put(self, row: int, image: np.ndarray) -> None:
        """Store a frame once there is room for it.

        Raises:
            _Unwanted: it is no longer needed.
        """
        number, place = divmod(row, self._chunk_len)
        with self._changed:
            while number > self._next_chunk + 1 and not self._has_ended:
                self._changed.wait()
            self.check()
            if number not in self._arrays:
                # No frame has been stored: all of the chunk's are missing.
                shape = (self._num_missing[number], *self._shape)
                self._arrays[number] = np.empty(shape, np.uint8)
            array = self._arrays[number]
        array[place] = image
        with self._changed:
            self._num_missing[number] -= 1
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Stop all threads."""
        with self._changed:
            self.error = self.error or error
            self._has_ended = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the chunks, each once it is complete; raise the first error."""
        for number in range(len(self._num_missing)):
            with self._changed:
                self._next_chunk = number
                self._changed.notify_all()
                while self._num_missing[number]:
                    if self.error is not None:
                        raise self.error
                    self._changed.wait()
                chunk = self._arrays.pop(number)
            yield chunk
            del chunk  # or it would be in memory beside the next two


def _decoded(
    info: VideoInfo, frames: list[int], chunk_len: int, threads: int, at_work: AtWork
) -> Generator[np.ndarray, None, None]:
    """Yield the chunks of :func:`iter_frames`, decoded by up to ``threads`` threads."""
    runs = plan_runs(info, frames)
    remaining_runs = iter(runs)  # every thread takes the next
    chunks = FrameChunks(len(frames), chunk_len, (info.height, info.width, 3))
    workers = []
    try:
        for _ in range(min(threads, len(runs))):
            worker = threading.Thread(
                target=_work,
                args=(info, frames, remaining_runs, chunks, at_work),
                daemon=True,  # the process does not wait for it at its exit
            )
            workers.append(worker)
            worker.start()
        yield from chunks
        for worker in workers:
            worker.join()  # a packet after the last frame's may show that this frame is damaged
        if chunks.error is not None:
            raise chunks.error
    finally:
        chunks.end()
        for worker in workers:
            if worker is not threading.current_thread():  # in which the garbage collector may run
                worker.join()


def _work(
    info: VideoInfo,
    frames: list[int],
    remaining_runs: Iterator[range],
    chunks: FrameChunks,
    at_work: AtWork,
) -> None:
    """Decode runs, always the first that no other thread has taken, until none are left."""
    try:
        run = next(remaining_runs, None)
        if run is None:  # no file is opened for nothing
            return
        with VideoFile(info.path) as file:
            if file.num_bytes != info.num_bytes:
                raise file.error("changed since it was probed")
            size = (info.height, info.width) if info.transpose else (info.width, info.height)
            converter = VideoReformatter()  # shared, as making one takes time
            while run is not None:
                decoded = _run_frames(file, info, frames[run.start : run.stop], chunks.check)
                # None: after the last frame the decoder is drained, which may show that this frame
                # is damaged.
                for row in (*run, None):
                    with at_work():
                        frame = next(decoded, None)
                        if frame is not None:
                            image = _at_first_size(converter, frame, size, info, chunks)
                    if frame is not None:
                        chunks.put(row, _as_displayed(image, info))
                run = next(remaining_runs, None)
    except _Unwanted:
        pass
    except BaseException as error:
        chunks.end(error)


def _as_displayed(image: np.ndarray, info: VideoInfo) -> np.ndarray:
    """Return a stored image rotated and mirrored as the file says, without a copy."""
    if info.transpose:
        image = image.transpose(1, 0, 2)
    if info.flip_vertical:
        image = image[::-1]
    if info.flip_horizontal:
        image = image[:, ::-1]
    return image


def _at_first_size(
    converter: VideoReformatter,
    frame: av.VideoFrame,
    size: tuple[int, int],
    info: VideoInfo,
    chunks: FrameChunks,
) -> np.ndarray:
    """Return a frame in RGB, scaled to the size of the first one, as FFmpeg does.

    Args:
        converter: used for frames of the first one's size.
        frame: the frame.
        size: width and height of the first frame, as stored.
        info: the video.
        chunks: notes that a frame was scaled.

    Raises:
        VideoError: the frame is much larger than any that was announced.
    """
    width, height = size
    if (frame.width, frame.height) != size:
        # Probing reads the size of later frames in some codecs' headers only.
        max_pixels = max(info.most_pixels, MOST_TIMES_LARGER * width * height)
        if frame.width * frame.height > max_pixels:
            raise VideoError(
                f"{info.path}: the frame size grows from {width}x{height} to "
                f"{frame.width}x{frame.height}, which was not announced"
            )
        if not chunks.are_scaled:
            chunks.are_scaled = True
            warn_caller(
                f"{info.path}: the frame size changes within the video; frames are scaled to the "
                f"first one's, {width}x{height}"
            )
        converter = VideoReformatter()  # the other one is for frames of one size
    scaled = converter.reformat(frame, width, height, "rgb24", interpolation="BICUBIC", threads=1)
    return scaled.to_ndarray()
