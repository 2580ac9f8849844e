"""The audio of a prompt, sharded over hosts window by window.

Audio is never pruned, neither by a draft nor by visual-token pruning. Its rows are therefore
counted separately from those of images and video, even if their tokens alternate.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...errors import PromptError
from ...hosts import HostGroup
from ...layout import intersect, split_evenly
from ...model.parts import ModelParts
from ..media.files import Source
from .visual import RowStarts

# Units that are encoded at a time. For Qwen2.5-Omni they are two minutes, whose activations take
# some 100 MB.
_UNITS_PER_CHUNK = 64


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
        """Cut the spectrograms of adjacent units: ``[mel bins, frames]`` per clip."""
        assert self.spectrograms is not None  # they are not encoded yet
        first_unit = 0  # of the clip
        for spectrogram, length in zip(self.spectrograms, self.lengths, strict=True):
            num_units = -(-length // self.unit)
            part = intersect(range(first_unit, first_unit + num_units), units)
            if part:
                start = (part.start - first_unit) * self.unit
                stop = (part.stop - first_unit) * self.unit
                yield spectrogram[:, start:stop]
            first_unit += num_units


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
    rows_of_units = []
    for length in lengths:
        for start in range(0, length, parts.audio_unit):
            num_frames = min(parts.audio_unit, length - start)
            rows_of_units.append(parts.family.num_audio_rows(num_frames))
    row_starts = list(accumulate(rows_of_units, initial=0))
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
