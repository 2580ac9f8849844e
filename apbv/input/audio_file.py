"""Reading sound: the audio track of a video, or of an audio file, as samples of one channel."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import av
import numpy as np
from av.error import FFmpegError

# FFmpeg's: all channels together are no louder than one; where a track's clock runs on without samples, for more
# seconds than clocks are imprecise, there is silence.
_RESAMPLING = {"rematrix_maxval": "1", "async": "1", "min_hard_comp": "0.1"}


class AudioError(ValueError):
    """The file cannot be used as audio; the message names the file and the reason."""


@dataclass(frozen=True)
class AudioClip:
    """An AudioClip says what of a file is heard.

    Attributes:
        path: a video, or an audio file.
        seconds: no more than so many; None: all of it.
        beside_video: whether the sound begins with the file's first video frame: what came before is left out, and
            silence stands for what is missing.
    """

    path: str
    seconds: float | None = None
    beside_video: bool = False


def has_audio(path: str | Path) -> bool:
    """Return whether a file has an audio track.

    Raises:
        AudioError: it cannot be read.
    """
    with _described(path), av.open(str(path)) as container:
        return bool(container.streams.audio)


def read_audio(clip: AudioClip, rate: int, max_seconds: float) -> np.ndarray:
    """Decode a file's best audio track.

    Args:
        rate: samples per second of what is returned.
        max_seconds: the longest audio that can be used.

    Returns:
        float32 ``[samples]``, the mean of all channels.

    Raises:
        AudioError: there is no track, it is empty, damaged, or longer than ``max_seconds``.
    """
    limit = max_seconds if clip.seconds is None else min(clip.seconds, max_seconds)
    most = round(limit * rate)
    pieces, count = [np.zeros(0, np.float32)], 0
    with _described(clip.path), av.open(clip.path) as container:
        if not container.streams.audio:
            raise AudioError(f"{clip.path}: has no audio track")
        for piece in _pieces(container, rate, clip.beside_video):
            pieces.append(piece)
            count += len(piece)
            if count > most:
                break
    samples = np.concatenate(pieces)
    if count > most and (clip.seconds is None or clip.seconds > max_seconds):
        raise AudioError(
            f"{clip.path}: has more audio than the {max_seconds:,.0f} seconds that the prompt has room for"
        )
    if not count:
        raise AudioError(f"{clip.path}: its audio track is empty")
    return samples[:most]


def _pieces(container: "av.container.InputContainer", rate: int, beside_video: bool) -> Iterator[np.ndarray]:
    """Decode and resample a track from its first sample, or from the first video frame."""
    stream = container.streams.best("audio")
    start = _start(container) if beside_video else None
    resampler, ahead = av.AudioResampler("flt", "mono", rate, options=_RESAMPLING), None
    for frame in chain(container.decode(stream), [None]):
        if ahead is None and frame is not None:  # samples that sound before the video
            known = start is not None and frame.time is not None
            ahead = round((start - frame.time) * rate) if known else 0
            yield np.zeros(max(0, -ahead), np.float32)
        for resampled in resampler.resample(frame):
            samples = resampled.to_ndarray()[0]
            yield samples[max(0, ahead) :]
            ahead -= len(samples)


def _start(container: "av.container.InputContainer") -> float | None:
    """Return the time of the first video frame, in seconds; None where that is unknown."""
    video = next(iter(container.streams.video), None)
    return None if video is None or video.start_time is None else float(video.start_time * video.time_base)


@contextmanager
def _described(path: str | Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise AudioError(f"{path}: no such file") from error
    except FFmpegError as error:
        raise AudioError(f"{path}: the audio cannot be decoded ({error.strerror or error})") from error
    except OSError as error:
        raise AudioError(f"{path}: cannot be read ({error.strerror})") from error
