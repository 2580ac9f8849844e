"""Encodes a prompt's sound in parallel: each host runs the audio tower on its share of the windows."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..input.audio import AudioInput
from ..model.parts import ModelParts
from ..model.vision_attention import packed_attention
from ..stats import StageTimer


@dataclass(frozen=True)
class AudioTowerRows:
    """A source that runs a model's audio tower, chunk by chunk.

    Attributes:
        parts: the model.
        audio: the sound, with its spectrograms.
        timer: times the tower.
    """

    parts: ModelParts
    audio: AudioInput
    timer: StageTimer | None = None

    def chunks(self, chunks: Sequence[range]) -> Iterator[Tensor]:
        """Return an iterator over ``[rows, d]`` of each chunk of units."""
        for units in chunks:
            with nullcontext() if self.timer is None else self.timer.stage("encode"):
                rows = self._encode(list(self.audio.frames_of(units)))
            yield rows

    @torch.no_grad()
    def _encode(self, pieces: Sequence[Tensor]) -> Tensor:
        parts = self.parts
        lengths = torch.tensor([piece.shape[1] for piece in pieces])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        features = pieces[0].new_zeros(len(pieces), len(pieces[0]), mask.shape[1])
        for padded, piece in zip(features, pieces, strict=True):
            padded[:, : piece.shape[1]] = piece
        with packed_attention(parts.audio_tower, parts.backend):
            encoded = parts.model.model.get_audio_features(
                features.to(parts.device), feature_attention_mask=mask.to(parts.device), return_dict=True
            )
        return encoded.last_hidden_state.to(parts.dtype)


def encode_audio(parts: ModelParts, audio: AudioInput | None) -> Tensor | None:
    """Run the audio tower on this host's share of the sound.

    Returns:
        Rows ``[len(piece), d]`` in the model's dtype, none for an empty piece; None for a prompt without sound.
    """
    if audio is None:
        return None
    width = parts.language_model.config.hidden_size
    nothing = torch.empty(0, width, dtype=parts.dtype, device=parts.device)
    return torch.cat([nothing, *AudioTowerRows(parts, audio).chunks(audio.chunks(audio.host))])
