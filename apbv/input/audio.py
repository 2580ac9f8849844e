"""The sound of a prompt, and how hosts share the work on it, window by window.

Sound is no visual input: all of it is read, and nothing of it is left out, neither by a draft nor by what reduces
visual tokens. So its rows are counted apart from those of images and video, also where their tokens alternate.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..hosts import HostGroup
from ..layout import intersect, split_evenly
from ..model.parts import ModelParts
from .files import FileIdentity
from .visual import PromptError

# Convolutions and pooling make one token of so many spectrogram frames, by two strides of two.
FRAMES_PER_TOKEN = 4
# So many units are encoded at a time. Of Qwen2.5-Omni they are two minutes, whose activations take some 100 MB.
_UNITS_PER_CHUNK = 64


@dataclass(frozen=True)
class AudioSource:
    """What a clip's samples come from.

    Attributes:
        file: the audio file or the video, as it was when it was read.
        num_samples: how many of its track.
    """

    file: FileIdentity
    num_samples: int


@dataclass(frozen=True, eq=False)
class Sound:
    """A sound that was decoded.

    Attributes:
        samples: float32 ``[samples]``, at the model's rate.
        source: what they come from.
    """

    samples: np.ndarray
    source: AudioSource


@dataclass(frozen=True)
class AudioInput:
    """The sound of a prompt, and this host's share of the work on it.

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
        sources: what identifies the clips; None where the caller prepared them.
    """

    lengths: tuple[int, ...]
    unit: int
    units: tuple[range, ...]
    host: int
    row_starts: tuple[int, ...]
    spectrograms: tuple[Tensor, ...] | None = None
    replicated: bool = False
    sources: tuple[AudioSource, ...] | None = None

    @property
    def num_rows(self) -> int:
        """The audio tokens in the prompt."""
        return self.row_starts[-1]

    @property
    def pieces(self) -> tuple[range, ...]:
        """The rows that each host encodes."""
        return tuple(self.rows_of(share) for share in self.units)

    def rows_of(self, units: range) -> range:
        """Return the rows of adjacent units."""
        return range(self.row_starts[units.start], self.row_starts[units.stop])

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

    def without_spectrograms(self) -> "AudioInput":
        """Return the same with the spectrograms released."""
        return replace(self, spectrograms=None)


def audio_from_batch(
    parts: ModelParts, batch: Mapping[str, Any], input_ids: Tensor, hosts: HostGroup, frame_parallel: bool
) -> AudioInput:
    """Take a prompt's sound out of a processor's batch.

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
    row_starts, num_rows = _row_starts(lengths, parts.audio_unit), int(parts.is_audio(input_ids).sum())
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
    """Return how many tokens a tower makes of so many spectrogram frames, which two strides of two leave."""
    return max(0, ((num_frames - 1) // 2 + 1) // 2)


def _row_starts(lengths: Sequence[int], unit: int) -> list[int]:
    """Return where the rows of every unit start, and where the last one's end."""
    of_units = [min(unit, length - start) for length in lengths for start in range(0, length, unit)]
    return list(accumulate(map(num_audio_tokens, of_units), initial=0))
