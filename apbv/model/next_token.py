"""The multi-token prediction layer of a checkpoint, with which its model drafts by itself.

It predicts the token after next: from the hidden state behind token i, which the model has after
its last norm, and from the embedding of token i + 1. Both are normed and joined; one decoder layer
and a norm follow, and the model's head. Fed with its own output and the token that it has
predicted, it drafts the next one.

Two forms are published. Qwen3-Next's and Qwen3.5's (``mtp.*``) feed the hidden state behind the
last norm; GLM's (a layer behind the decoder's last one) feed the one before it, and the embedding
that goes with the first token of a prompt is zero. The order of steps is that of vLLM's programs
``qwen3_next_mtp`` and ``glm4_moe_mtp``.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.versions import CACHE_ARGUMENT
from .attention import apbv_attention
from .modules import decoder_layers, rotary_embedding
from .parts import ModelParts

_ROWS_AT_ONCE = 4096  # of a prompt, so that few are joined at the same time


class NextTokenInput(nn.Module):
    """Joins embeddings and hidden states.

    Attributes:
        embedding_norm, hidden_norm: norms of rows ``[..., d]``.
        projection: ``[..., 2 d]`` to ``[..., d]``.
    """

    def __init__(self, embedding_norm: nn.Module, hidden_norm: nn.Module, projection: nn.Linear):
        super().__init__()
        self.embedding_norm = embedding_norm
        self.hidden_norm = hidden_norm
        self.projection = projection

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Return rows ``[..., d]`` of embeddings and hidden states of this shape."""
        normed = (self.embedding_norm(embeddings), self.hidden_norm(hidden))
        return self.projection(torch.cat(normed, dim=-1))


class NormedHead(nn.Module):
    """A head behind a norm, for layers that feed what comes before it."""

    def __init__(self, norm: nn.Module, head: nn.Module):
        super().__init__()
        self.norm = norm
        self.head = head
        self.out_features = head.out_features

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))


@dataclass(frozen=True)
class NextTokenModel:
    """The layer, as a decoder of one layer beside its target.

    Attributes:
        parts: the decoder and its head. What the decoder returns is fed to it again.
        join: makes the decoder's input.
        zeroes_first: whether the embedding beside the hidden state of a prompt's first token counts
            as zero.
    """

    parts: ModelParts
    join: NextTokenInput
    zeroes_first: bool

    @classmethod
    def beside(
        cls,
        target: ModelParts,
        layer: nn.Module,
        norm: nn.Module,
        join: NextTokenInput,
        head: nn.Module | None = None,
        *,
        feeds_normed: bool,
    ) -> "NextTokenModel":
        """Put the layer beside its target.

        Args:
            layer: a decoder layer with attention, of the target's class, and of layer 0 of a cache.
            norm: the norm behind it.
            head: its head; None: the target's.
            feeds_normed: whether it is fed what comes behind the norm, as Qwen's, or before it, as
                GLM's.
        """
        head = head or target.lm_head
        decoder = copy.copy(target.language_model)
        last = norm
        if not feeds_normed:
            last = nn.Identity()
            head = NormedHead(norm, head)
        decoder._modules = {
            **target.language_model._modules,
            "layers": nn.ModuleList([layer]),
            "norm": last,
        }
        parts = replace(target, language_model=decoder, lm_head=head)
        parts._set("num_layers", 1)
        parts._set("num_kv_layers", 1)
        return cls(parts, join, zeroes_first=not feeds_normed)

    @torch.no_grad()
    def keys_and_values(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Compute the layer's KV of a prompt's tokens, for which it needs no attention.

        Args:
            embeddings: ``[T, d]`` of the tokens after them.
            hidden: ``[T, d]`` behind them.
            positions: the tokens' rotary positions, ``[1, T]``, or ``[3, 1, T]`` with M-RoPE.

        Returns:
            ``[T, 2, Hkv, D]``: keys, post-RoPE, and values.
        """
        parts = self.parts
        decoder = parts.language_model
        layer: Any = decoder_layers(decoder)[0]
        chunks = [
            torch.empty(
                0, 2, parts.num_kv_heads, parts.head_dim, dtype=hidden.dtype, device=hidden.device
            )
        ]
        for start in range(0, len(hidden), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            joined = self.join(embeddings[None, rows], hidden[None, rows])
            written = _Written()
            with apbv_attention(decoder):
                layer.self_attn(
                    layer.input_layernorm(joined),
                    position_embeddings=rotary_embedding(decoder)(joined, positions[..., rows]),
                    attention_mask=None,
                    apbv=_no_attention,
                    **{CACHE_ARGUMENT: written},
                )
            chunk = torch.stack([written.keys[0], written.values[0]])  # [2, Hkv, T, D]
            chunks.append(chunk.permute(2, 0, 1, 3))
        return torch.cat(chunks)


class _Written:
    """Takes the place of a cache, and has what the latest layer has written.

    Attributes:
        keys, values: ``[1, Hkv, S, D]``.
    """

    keys: Tensor
    values: Tensor

    def update(
        self, keys: Tensor, values: Tensor, layer: int, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys = keys
        self.values = values
        return keys, values


def _no_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
    """Stand in for attention whose result nobody reads."""
    return torch.zeros_like(q)
