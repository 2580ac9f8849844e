"""The sound of a file as a model hears it: decoded, mixed, and without its clock's jitter."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from av.error import FFmpegError

from ...errors import InvalidRequestError
from .container import best_stream, open_media
from .files import Source

# FFmpeg's: the mix of all channels is not louder than one.
_RESAMPLING = {"rematrix_maxval": "1"}
# Seconds by which containers' clocks jitter.
_JITTER = 0.015
# Seconds by which they never do: a larger step is a gap, or, backwards, a new recording.
_ANEW = 0.1
# This number of frames in a row that are off by nearly the same time show a gap.
_IN_A_ROW = 4
# Streams without a container: damage before the first frame or after the last is not part of them.
_BARE = {"aac", "ac3", "dts", "eac3", "flac", "mp2", "mp3"}
# In these, damage is left out, as FFmpeg does: broadcasts lose packets and are cut anywhere, and
# tags lie between frames.
_LOSSY = {"mpegts", "mp3"}


@dataclass(frozen=True, eq=False)
class Sound:
    """Decoded audio clip.

    Attributes:
        samples: float32 ``[samples]``, at the model's rate.
        source: identity of the file.
    """

    samples: np.ndarray
    source: Source


class AudioError(InvalidRequestError):
    """Raised if a file cannot be used as audio; the message names the file and the reason.

    Attributes:
        is_missing: whether the file has no audio track, or one without samples.
    """

    def __init__(self, message: str, is_missing: bool = False):
        super().__init__(message)
        self.is_missing = is_missing


def has_audio(path: str | Path) -> bool:
    """Return whether a file has an audio track that can be decoded.

    Raises:
        AudioError: it cannot be read.
    """
    with _described(path), open_media(path, AudioError) as container:
        return best_stream(container, "audio") is not None


def read_audio(
    path: str,
    rate: int,
    max_seconds: float,
    seconds: float | None = None,
    clock: np.ndarray | None = None,
    start: float = 0.0,
) -> np.ndarray:
    """Decode a file's audio track; if it has several, the one that FFmpeg prefers.

    Args:
        path: of a video, or of an audio file.
        rate: samples per second of what is returned.
        max_seconds: the longest audio that can be used.
        seconds: maximum length to return; None: all of it.
        clock: :attr:`~apbv.input.media.video.VideoInfo.clock` of a video: its audio begins with its
            first frame, what came before is left out, and silence stands for what is missing.
        start: the seconds to leave out at the beginning.

    Returns:
        float32 ``[samples]``, the mean of all channels.

    Raises:
        AudioError: the track is missing, empty, damaged, or longer than ``max_seconds``.
    """
    wanted_seconds = max_seconds
    if seconds is not None:
        wanted_seconds = min(seconds, max_seconds)
    max_samples = round(wanted_seconds * rate)
    num_skipped = round(start * rate)
    pieces = []
    num_samples = 0
    with _described(path), open_media(path, AudioError) as container:
        stream = best_stream(container, "audio")
        if stream is None:
            which = " that can be decoded" if container.streams.audio else ""
            raise AudioError(f"{path}: has no audio track{which}", is_missing=True)
        frames = _from_zero(_frames(container, stream), clock)
        for piece in _placed(frames, rate, num_skipped + max_samples):
            used = piece[num_skipped:]
            num_skipped = max(0, num_skipped - len(piece))
            pieces.append(used)
            num_samples += len(used)
            if num_samples > max_samples:
                break
    if num_samples > max_samples and (seconds is None or seconds > max_seconds):
        raise AudioError(
            f"{path}: has more audio than the {max_seconds:,.0f} seconds that the prompt has room "
            "for"
        )
    if not num_samples:
        raise AudioError(f"{path}: its audio track is empty", is_missing=True)
    return np.concatenate(pieces)[:max_samples]


def _frames(
    container: "av.container.InputContainer", stream: "av.AudioStream"
) -> Iterator["av.AudioFrame"]:
    """Decode a track, and raise an error of the decoder where it means that sound is missing.

    It does between frames, and before the first or after the last in a container, which tells where
    a track begins and ends; but never in formats that are known to lose data.
    """
    is_bare = container.format.name in _BARE
    is_lossy = container.format.name in _LOSSY
    has_sound = False
    error = None  # since the last frame
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except FFmpegError as raised:
            error = error or raised
            continue
        if frames:
            is_within = has_sound or not is_bare
            if error is not None and is_within and not is_lossy:
                raise error
            error = None
            has_sound = True
        for frame in frames:
            if is_bare:  # its times are guessed from the first one's rate
                frame.pts = None
            yield frame
    if error is not None:
        is_ignored = has_sound and (is_bare or is_lossy)
        if not is_ignored:
            raise error


def _from_zero(
    frames: Iterator["av.AudioFrame"], clock: np.ndarray | None
) -> Iterator[tuple["av.AudioFrame", float | None]]:
    """Yield frames with the seconds since the first video frame, or the first of these frames.

    Where times begin anew, the clock's next recording begins; without a clock they go on.

    Args:
        clock: of the video; None: there is no video.
    """
    recording = 0
    shift = None  # from the frames' times to the result's
    if clock is not None:
        shift = clock[0, 1] - clock[0, 0]
    end = -np.inf  # of the frame before
    for frame in frames:
        time = frame.time
        if time is not None:
            is_anew = time < end - _ANEW
            if shift is None:
                shift = -time
            elif is_anew and clock is None:
                shift += end - time
            elif is_anew and clock is not None and recording + 1 < len(clock):
                recording += 1
                shift = clock[recording, 1] - clock[recording, 0]
            end = time + frame.samples / frame.sample_rate
            time += shift
        yield frame, time


def _placed(
    frames: Iterator[tuple["av.AudioFrame", float | None]], rate: int, most: int
) -> Iterator[np.ndarray]:
    """Resample frames, each at its time; where there are none, there is silence.

    No sound comes twice, and none before 0.

    Args:
        most: samples after which no more are needed.
    """
    # A piece is a run of frames of one format without a gap; one resampler makes it.
    resampler = None
    format_of_piece = None
    start_of_piece = 0.0  # seconds
    fed = 0.0  # seconds of the piece that the resampler was given
    num_yielded = 0  # samples
    num_to_drop = 0  # samples that were there before
    # By how many seconds the last frames are away from where the sound is.
    offsets: deque[float] = deque(maxlen=_IN_A_ROW)

    def resampled(frame: "av.AudioFrame | None") -> Iterator[np.ndarray]:
        nonlocal num_yielded, num_to_drop
        if resampler is None:
            return
        for resampled_frame in resampler.resample(frame):
            samples = resampled_frame.to_ndarray()[0]
            new_samples = samples[num_to_drop:]
            num_to_drop -= len(samples) - len(new_samples)
            num_yielded += len(new_samples)
            yield new_samples

    for frame, time in frames:
        # Is there a gap, or an overlap, before this frame?
        offset = 0.0
        if time is not None:
            offsets.append(time - start_of_piece - fed)
            limit = 0 if resampler is None else _ANEW
            mean = float(np.mean(offsets))
            are_steady = max(offsets) - min(offsets) < _JITTER
            if abs(offsets[-1]) > limit:
                offset = offsets[-1]
            elif len(offsets) == _IN_A_ROW and are_steady and abs(mean) > _JITTER:
                offset = mean

        # Begin another piece there, and where the format changes.
        frame_format = (frame.sample_rate, frame.layout.name, frame.format.name)
        if frame_format != format_of_piece or offset:
            yield from resampled(None)
            start_of_piece = start_of_piece + fed + offset
            fed = 0.0
            offsets.clear()
            resampler = av.AudioResampler("flt", "mono", rate, options=_RESAMPLING)
            format_of_piece = frame_format
            gap = round(start_of_piece * rate) - num_yielded
            num_to_drop = max(0, -gap)
            if gap > 0:
                num_silent = min(gap, most + 1 - num_yielded)
                num_yielded += num_silent
                yield np.zeros(num_silent, np.float32)

        fed += frame.samples / frame.sample_rate
        yield from resampled(frame)
    yield from resampled(None)


@contextmanager
def _described(path: str | Path) -> Iterator[None]:
    try:
        yield
    except AudioError:
        raise
    except (FFmpegError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AudioError(f"{path}: the audio cannot be decoded ({reason})") from error
    except OSError as error:
        raise AudioError(f"{path}: cannot be read ({error.strerror})") from error
