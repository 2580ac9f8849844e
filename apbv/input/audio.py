"""The audio of a prompt, sharded over hosts window by window.

Audio is never pruned, neither by a draft nor by visual-token pruning. Its rows are therefore
counted separately from those of images and video, even if their tokens alternate.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.error import FFmpegError
from torch import Tensor

from ..hosts import HostGroup
from ..layout import intersect, split_evenly
from ..model.parts import ModelParts
from .container import best_stream, open_media
from .files import Source
from .visual import PromptError, RowStarts

# Spectrogram frames per token, after convolutions and pooling with two strides of two.
FRAMES_PER_TOKEN = 4
# Units that are encoded at a time. For Qwen2.5-Omni they are two minutes, whose activations take
# some 100 MB.
_UNITS_PER_CHUNK = 64
# FFmpeg's: the mix of all channels is not louder than one.
_RESAMPLING = {"rematrix_maxval": "1"}
# Seconds by which containers' clocks jitter; by which they never do, and a new recording's is
# behind, at least.
_JITTER = 0.015
_ANEW = 0.1
# Frames in a row that are away from where the sound is by nearly the same show a gap.
_IN_A_ROW = 4
# Streams without a container: what is not a frame, before the first or after the last, is not part
# of them.
_BARE = {"aac", "ac3", "dts", "eac3", "flac", "mp2", "mp3"}
# In these, damage is left out, as by FFmpeg: broadcasts lose packets and are cut anywhere, and tags
# lie between.
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


@dataclass(frozen=True)
class AudioInput(RowStarts):
    """Audio of a prompt, and this host's share of it.

    A *unit* is the smallest piece that can be encoded by itself
    (:attr:`~apbv.model.parts.ModelParts.audio_unit`). Units are numbered over all clips, in prompt
    order; the last one of a clip may be shorter. A row is an audio token's embedding; rows are
    numbered in prompt order.

    Attributes:
        lengths: the spectrogram frames of every clip.
        unit: the spectrogram frames of a unit.
        units: for every host, the units that it encodes; ascending with the host. One range of all
            where every host encodes everything.
        host: the host whose share this is, an index of ``units``.
        row_starts: U + 1 numbers: unit u has the rows row_starts[u] .. row_starts[u + 1].
        spectrograms: of every clip ``[mel bins, frames]``; None once encoded.
        sources: identities of the clips; None if the caller prepared them.
    """

    lengths: tuple[int, ...]
    unit: int
    units: tuple[range, ...]
    host: int
    row_starts: tuple[int, ...]
    spectrograms: tuple[Tensor, ...] | None = None
    sources: tuple[Source, ...] | None = None

    @property
    def is_shared_out(self) -> bool:
        """Whether each of several hosts encodes a share; else every host encodes everything."""
        return len(self.units) > 1

    @property
    def pieces(self) -> tuple[range, ...]:
        """The rows that each host encodes."""
        return tuple(self.rows_of(share) for share in self.units)

    def chunks(self, host: int) -> list[range]:
        """Return the units that a host encodes at a time."""
        share = self.units[host]
        return [
            share[start : start + _UNITS_PER_CHUNK]
            for start in range(0, len(share), _UNITS_PER_CHUNK)
        ]

    def frames_of(self, units: range) -> Iterator[Tensor]:
        """Cut the spectrograms of adjacent units: ``[mel bins, frames]`` for each clip that they
        are part of."""
        ends = accumulate((-(-length // self.unit) for length in self.lengths), initial=0)
        for spectrogram, (start, stop) in zip(self.spectrograms, pairwise(ends), strict=True):
            part = intersect(range(start, stop), units)
            if part:
                yield spectrogram[
                    :, (part.start - start) * self.unit : (part.stop - start) * self.unit
                ]


def audio_from_batch(
    parts: ModelParts, batch: Mapping[str, Any], input_ids: Tensor, hosts: HostGroup
) -> AudioInput:
    """Take a prompt's audio out of a processor's batch.

    Args:
        input_ids: ``[n]``, the prompt.
        hosts: this host alone, where every host encodes everything.

    Raises:
        PromptError: no spectrograms, or not those of the prompt's placeholders.
    """
    spectrograms = batch.get("input_features")
    mask = batch.get("feature_attention_mask")
    if spectrograms is None or mask is None:
        raise PromptError(
            "the prompt has placeholder tokens for audio, but no input_features and "
            "feature_attention_mask"
        )
    lengths = torch.as_tensor(mask).sum(dim=1).tolist()
    of_units = [
        min(parts.audio_unit, n - start) for n in lengths for start in range(0, n, parts.audio_unit)
    ]
    row_starts = list(accumulate(map(num_audio_tokens, of_units), initial=0))
    num_rows = int(parts.is_audio(input_ids).sum())
    if row_starts[-1] != num_rows:
        raise PromptError(
            f"the prompt has {num_rows} placeholder tokens for audio, but its spectrograms make "
            f"{row_starts[-1]}"
        )
    return AudioInput(
        lengths=tuple(lengths),
        unit=parts.audio_unit,
        units=tuple(split_evenly(range(len(row_starts) - 1), hosts.size)),
        host=hosts.rank,
        row_starts=tuple(row_starts),
        spectrograms=tuple(
            spectrogram[:, :length]
            for spectrogram, length in zip(spectrograms, lengths, strict=True)
        ),
    )


def num_audio_tokens(num_frames: int) -> int:
    """Return the number of tokens for a number of spectrogram frames, after two strides of two."""
    return max(0, ((num_frames - 1) // 2 + 1) // 2)


class AudioError(ValueError):
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
    """Decode a file's audio track: of several the one that FFmpeg takes of those that it can
    decode.

    Args:
        path: of a video, or of an audio file.
        rate: samples per second of what is returned.
        max_seconds: the longest audio that can be used.
        seconds: maximum length to return; None: all of it.
        clock: :attr:`~apbv.input.video.VideoInfo.clock` of a video: its audio begins with its first
            frame, what came before is left out, and silence stands for what is missing.
        start: seconds of the beginning that are left out.

    Returns:
        float32 ``[samples]``, the mean of all channels.

    Raises:
        AudioError: the track is missing, empty, damaged, or longer than ``max_seconds``.
    """
    most = round((max_seconds if seconds is None else min(seconds, max_seconds)) * rate)
    pieces = []
    left_out = round(start * rate)
    count = 0
    with _described(path), open_media(path, AudioError) as container:
        stream = best_stream(container, "audio")
        if stream is None:
            which = " that can be decoded" if container.streams.audio else ""
            raise AudioError(f"{path}: has no audio track{which}", is_missing=True)
        for piece in _placed(_from_zero(_frames(container, stream), clock), rate, left_out + most):
            begun = piece[left_out:]
            left_out = max(0, left_out - len(piece))
            pieces.append(begun)
            count += len(begun)
            if count > most:
                break
    if count > most and (seconds is None or seconds > max_seconds):
        raise AudioError(
            f"{path}: has more audio than the {max_seconds:,.0f} seconds that the prompt has room "
            "for"
        )
    if not count:
        raise AudioError(f"{path}: its audio track is empty", is_missing=True)
    return np.concatenate(pieces)[:most]


def _frames(
    container: "av.container.InputContainer", stream: "av.AudioStream"
) -> Iterator["av.AudioFrame"]:
    """Decode a track; an error is one only where sound follows, or the container counts its
    frames."""
    name = container.format.name
    found = False
    error = None
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except FFmpegError as raised:
            error = error or raised
            continue
        if frames and error is not None and name not in _LOSSY and (found or name not in _BARE):
            raise error
        error = error if not frames else None
        found |= bool(frames)
        for frame in frames:
            if name in _BARE:  # its times are guessed from the first one's rate
                frame.pts = None
            yield frame
    if error is not None and not (found and name in _BARE | _LOSSY):
        raise error


def _from_zero(
    frames: Iterator["av.AudioFrame"], clock: np.ndarray | None
) -> Iterator[tuple["av.AudioFrame", float | None]]:
    """Yield frames with the seconds since the first video frame; without a clock since the first of
    these frames.

    Where times begin anew, the clock's next recording begins; without a clock they go on.
    """
    number = 0
    shift = None if clock is None else clock[0, 1] - clock[0, 0]
    end = -np.inf
    for frame in frames:
        time = frame.time
        if time is not None:
            is_anew = time < end - _ANEW
            if clock is None:
                shift = -time if shift is None else shift + (end - time) * is_anew
            elif is_anew and number + 1 < len(clock):
                number += 1
                shift = clock[number, 1] - clock[number, 0]
            end = time + frame.samples / frame.sample_rate
            time += shift
        yield frame, time


def _placed(
    frames: Iterator[tuple["av.AudioFrame", float | None]], rate: int, most: int
) -> Iterator[np.ndarray]:
    """Resample frames, each at its time: silence where there are none, and nothing twice or before
    0.

    Args:
        most: samples after which no more are needed.
    """
    resampler = None
    setup = None
    begun = 0.0
    fed = 0.0
    given = 0
    ahead = 0
    # By how much frames are away from where the sound is.
    recent: deque[float] = deque(maxlen=_IN_A_ROW)

    def resampled(frame: "av.AudioFrame | None") -> Iterator[np.ndarray]:
        nonlocal given, ahead
        for each in resampler.resample(frame) if resampler is not None else ():
            samples = each.to_ndarray()[0]
            kept = samples[ahead:]
            ahead -= len(samples) - len(kept)
            given += len(kept)
            yield kept

    for frame, time in frames:
        found = frame.sample_rate, frame.layout.name, frame.format.name
        off = 0.0
        if time is not None:
            recent.append(time - begun - fed)
            mean = float(np.mean(recent))
            is_gap = abs(recent[-1]) > (0 if setup is None else _ANEW)
            are_steady = max(recent) - min(recent) < _JITTER
            are_away = len(recent) == _IN_A_ROW and are_steady and abs(mean) > _JITTER
            if is_gap:
                off = recent[-1]
            elif are_away:
                off = mean
        if found != setup or off:
            yield from resampled(None)
            begun = begun + fed + off
            fed = 0.0
            recent.clear()
            resampler = av.AudioResampler("flt", "mono", rate, options=_RESAMPLING)
            setup = found
            gap = round(begun * rate) - given
            ahead = max(0, -gap)
            if gap > 0:
                given += (silent := min(gap, most + 1 - given))
                yield np.zeros(silent, np.float32)
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
        raise AudioError(
            f"{path}: the audio cannot be decoded ({getattr(error, 'strerror', None) or error})"
        ) from error
    except OSError as error:
        raise AudioError(f"{path}: cannot be read ({error.strerror})") from error
