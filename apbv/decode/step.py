"""This module defines a decoding step: a forward pass of a language model over a few new tokens behind a cache."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..model.attention import LayerAttention, apbv_attention
from ..model.parts import ModelParts


@dataclass(frozen=True)
class NewTokens:
    """A NewTokens holds S text tokens that a model is to run.

    Attributes:
        ids: the tokens. A tensor ``[S]`` lies on the device, and the host need not know what it holds.
        position: rotary position of the first.
        depths: by how much each token's position exceeds that; None: they are consecutive.
        visible: bool ``[S, N]``: which of the last N tokens in the cache, these included, each one sees; None:
            those up to itself.
    """

    ids: Sequence[int] | Tensor
    position: int
    depths: Sequence[int] | None = None
    visible: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def positions(self) -> list[int]:
        """The rotary position of each token; for M-RoPE time, height and width advance together."""
        depths = range(len(self)) if self.depths is None else self.depths
        return [self.position + depth for depth in depths]


def forward(
    parts: ModelParts, ids: Tensor, positions: Tensor, cache, attention: LayerAttention, last_only: bool
) -> Tensor:
    """Run a language model on S tokens, let the cache have their KV, and return logits ``[S, V]``.

    Args:
        ids, positions: int64 ``[S]`` on the device.
        cache: what the model appends to; None where ``attention`` appends by itself.
        attention: computes the new tokens' attention. The model's own would copy the KV heads of grouped queries,
            and need a mask for several tokens.
        last_only: compute the logits after the last token only, ``[1, V]``.
    """
    position_ids = positions[None]
    with apbv_attention(parts.language_model):
        hidden = parts.language_model(
            inputs_embeds=parts.embed_tokens(ids[None]),
            position_ids=position_ids.expand(3, -1, -1) if parts.uses_mrope else position_ids,
            past_key_values=cache,
            use_cache=cache is not None,
            apbv=attention,
        ).last_hidden_state
    return parts.logits(hidden[:, -1:] if last_only else hidden)[0]
