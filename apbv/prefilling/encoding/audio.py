"""Encodes audio in parallel: each host runs the audio tower on its share of the windows."""

from collections.abc import Generator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...input.prompts.audio_input import AudioInput
from ...model.parts import ModelParts
from ...model.vision_attention import packed_attention
from ...stats import StageTimer
from .vision import all_rows


def audio_rows(
    parts: ModelParts, audio: AudioInput, timer: StageTimer | None, chunks: Sequence[range]
) -> Generator[Tensor, None, None]:
    """Run the model's audio tower on each chunk of units; yields ``[rows, d]``.

    Args:
        timer: times the tower; None: nothing is timed.
    """
    for units in chunks:
        with nullcontext() if timer is None else timer.stage("encode"):
            rows = _encode(parts, list(audio.frames_of(units)))
        yield rows


@torch.no_grad()
def _encode(parts: ModelParts, pieces: Sequence[Tensor]) -> Tensor:
    """Run the audio tower on spectrograms ``[mel bins, frames]``, and return ``[rows, d]``."""
    lengths = torch.tensor([piece.shape[1] for piece in pieces])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    padded = pad_sequence([piece.T for piece in pieces], batch_first=True)
    features = padded.transpose(1, 2).contiguous()  # [pieces, mel bins, frames]
    with packed_attention(parts.audio_tower):
        rows = parts.family.encode_audio(
            parts.model,
            features.to(parts.device),
            mask.to(parts.device),
        )
    return rows.to(parts.dtype)


def encode_audio(parts: ModelParts, audio: AudioInput) -> Tensor:
    """Run the audio tower on this host's share of the audio.

    Returns:
        Rows ``[rows of the share, d]`` in the model's dtype.
    """
    source = partial(audio_rows, parts, audio, None)
    streams = all_rows(parts, audio, audio.chunks(audio.host), source, [parts.hidden_size])
    return streams[0]
