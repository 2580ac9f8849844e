"""The audio of a prompt, sharded over hosts window by window.

Audio is never pruned, neither by a draft nor by visual-token pruning. Its rows are therefore counted separately
from those of images and video, even if their tokens alternate.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
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
from .container import open_media
from .files import Source
from .visual import PromptError, RowStarts

# Spectrogram frames per token, after convolutions and pooling with two strides of two.
FRAMES_PER_TOKEN = 4
# Units that are encoded at a time. For Qwen2.5-Omni they are two minutes, whose activations take some 100 MB.
_UNITS_PER_CHUNK = 64
# FFmpeg's: the mix of all channels is not louder than one; where a track's clock runs on without samples, for more
# seconds than clocks are imprecise, there is silence.
_RESAMPLING = {"rematrix_maxval": "1", "async": "1", "min_hard_comp": "0.1"}


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

    A *unit* is the smallest piece that can be encoded by itself (:attr:`~apbv.model.parts.ModelParts.audio_unit`).
    Units are numbered over all clips, in prompt order; the last one of a clip may be shorter. A row is an audio
    token's embedding; rows are numbered in prompt order.

    Attributes:
        lengths: the spectrogram frames of every clip.
        unit: the spectrogram frames of a unit.
        units: for every host, the units that it encodes; ascending with the host.
        host: the host whose share this is.
        row_starts: U + 1 numbers: unit u has the rows row_starts[u] .. row_starts[u + 1].
        spectrograms: of every clip ``[mel bins, frames]``; None once encoded.
        replicated: whether every host encodes everything.
        sources: identities of the clips; None if the caller prepared them.
    """

    lengths: tuple[int, ...]
    unit: int
    units: tuple[range, ...]
    host: int
    row_starts: tuple[int, ...]
    spectrograms: tuple[Tensor, ...] | None = None
    replicated: bool = False
    sources: tuple[Source, ...] | None = None

    @property
    def pieces(self) -> tuple[range, ...]:
        """The rows that each host encodes."""
        return tuple(self.rows_of(share) for share in self.units)

    def chunks(self, host: int) -> list[range]:
        """Return the units that a host encodes at a time."""
        share = self.units[host]
        return [share[start : start + _UNITS_PER_CHUNK] for start in range(0, len(share), _UNITS_PER_CHUNK)]

    def frames_of(self, units: range) -> Iterator[Tensor]:
        """Cut the spectrograms of adjacent units: ``[mel bins, frames]`` for each clip that they are part of."""
        ends = accumulate((-(-length // self.unit) for length in self.lengths), initial=0)
        for spectrogram, (start, stop) in zip(self.spectrograms, pairwise(ends), strict=True):
            part = intersect(range(start, stop), units)
            if part:
                yield spectrogram[:, (part.start - start) * self.unit : (part.stop - start) * self.unit]


def audio_from_batch(
    parts: ModelParts, batch: Mapping[str, Any], input_ids: Tensor, hosts: HostGroup, frame_parallel: bool
) -> AudioInput:
    """Take a prompt's audio out of a processor's batch.

    Args:
        input_ids: ``[n]``, the prompt.
        frame_parallel: each host encodes its share, instead of all.

    Raises:
        PromptError: no spectrograms, or not those of the prompt's placeholders.
    """
    spectrograms, mask = batch.get("input_features"), batch.get("feature_attention_mask")
    if spectrograms is None or mask is None:
        raise PromptError(
            "the prompt has placeholder tokens for audio, but no input_features and feature_attention_mask"
        )
    lengths = torch.as_tensor(mask).sum(dim=1).tolist()
    of_units = [min(parts.audio_unit, n - start) for n in lengths for start in range(0, n, parts.audio_unit)]
    row_starts = list(accumulate(map(num_audio_tokens, of_units), initial=0))
    num_rows = int(parts.is_audio(input_ids).sum())
    if row_starts[-1] != num_rows:
        raise PromptError(
            f"the prompt has {num_rows} placeholder tokens for audio, but its spectrograms make {row_starts[-1]}"
        )
    everything = range(len(row_starts) - 1)
    return AudioInput(
        lengths=tuple(lengths),
        unit=parts.audio_unit,
        units=tuple(split_evenly(everything, hosts.size) if frame_parallel else [everything] * hosts.size),
        host=hosts.rank,
        row_starts=tuple(row_starts),
        spectrograms=tuple(
            spectrogram[:, :length] for spectrogram, length in zip(spectrograms, lengths, strict=True)
        ),
        replicated=not frame_parallel,
    )


def num_audio_tokens(num_frames: int) -> int:
    """Return the number of tokens for a number of spectrogram frames, after two strides of two."""
    return max(0, ((num_frames - 1) // 2 + 1) // 2)


class AudioError(ValueError):
    """Raised if a file cannot be used as audio; the message names the file and the reason."""


def has_audio(path: str | Path) -> bool:
    """Return whether a file has an audio track.

    Raises:
        AudioError: it cannot be read.
    """
    with _described(path), open_media(path) as container:
        return bool(container.streams.audio)


def read_audio(
    path: str, rate: int, max_seconds: float, seconds: float | None = None, beside_video: bool = False
) -> np.ndarray:
    """Decode a file's best audio track.

    Args:
        path: of a video, or of an audio file.
        rate: samples per second of what is returned.
        max_seconds: the longest audio that can be used.
        seconds: maximum length to return; None: all of it.
        beside_video: whether the audio begins with the file's first video frame: what came before is left out, and
            silence stands for what is missing.

    Returns:
        float32 ``[samples]``, the mean of all channels.

    Raises:
        AudioError: there is no track, it is empty, damaged, or longer than ``max_seconds``.
    """
    most = round((max_seconds if seconds is None else min(seconds, max_seconds)) * rate)
    pieces, count = [np.zeros(0, np.float32)], 0
    with _described(path), open_media(path) as container:
        if not container.streams.audio:
            raise AudioError(f"{path}: has no audio track")
        for piece in _pieces(container, rate, beside_video):
            pieces.append(piece)
            count += len(piece)
            if count > most:
                break
    if count > most and (seconds is None or seconds > max_seconds):
        raise AudioError(
            f"{path}: has more audio than the {max_seconds:,.0f} seconds that the prompt has room for"
        )
    if not count:
        raise AudioError(f"{path}: its audio track is empty")
    return np.concatenate(pieces)[:most]


def _pieces(container: "av.container.InputContainer", rate: int, beside_video: bool) -> Iterator[np.ndarray]:
    """Decode and resample a track from its first sample, or from the first video frame."""
    stream = container.streams.best("audio")
    start = _start(container) if beside_video else None
    resampler, ahead = av.AudioResampler("flt", "mono", rate, options=_RESAMPLING), None
    for frame in chain(container.decode(stream), [None]):
        if ahead is None and frame is not None:  # samples that audio before the video
            known = start is not None and frame.time is not None
            ahead = round((start - frame.time) * rate) if known else 0
            yield np.zeros(max(0, -ahead), np.float32)
        for resampled in resampler.resample(frame):
            samples = resampled.to_ndarray()[0]
            yield samples[max(0, ahead) :]
            ahead -= len(samples)


def _start(container: "av.container.InputContainer") -> float | None:
    """Return the time of the first video frame, in seconds; None if that is unknown."""
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
