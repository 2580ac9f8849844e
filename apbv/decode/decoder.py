"""This module runs a language model over new tokens, on top of a prompt's KV."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kv.growing import keep_of_last, last_rows
from ..kv.placement import PlacedKV
from ..model.attention import LayerAttention, NewTokenAttention, apbv_attention
from ..model.parts import ModelParts


class Decoder:
    """A Decoder runs the model over tokens that are already chosen, and rolls the last of them back. Collective.

    Host 0 keeps the new tokens' KV. Where the prompt's KV is sharded, every host runs the new tokens against its
    own share; else host 0 runs them alone.

    Args:
        kv: the prompt's KV, to which the new tokens' is appended.
        next_position: rotary position of the first new token.
    """

    def __init__(self, parts: ModelParts, kv: PlacedKV, next_position: int):
        self._parts, self._position = parts, next_position
        self._cache, self._attending = kv.continued(), kv.attending
        self.hosts = kv.hosts

    def advance(self, tokens: Sequence[int], last_only: bool = False) -> Tensor | None:
        """Run the model on S tokens.

        Returns:
            The logits after each token, ``[S, V]``, or after the last, ``[1, V]``; None on hosts that run nothing.
        """
        logits = self._run(tokens, None, None, last_only)
        self._position += len(tokens)
        return logits

    def take_back(self, count: int) -> None:
        """Roll back the last ``count`` tokens: drop their KV."""
        if self._cache is not None and count:
            self._cache.crop(-count)
        self._position -= count

    def advance_tree(self, tokens: Sequence[int], depths: Sequence[int], visible: Tensor) -> Tensor | None:
        """Run the model on S tokens that form a tree, as :meth:`advance` does; :meth:`keep_path` has to follow.

        Args:
            depths: the depth of each token in the tree; 0 for the root, which follows the sequence.
            visible: bool ``[S, S]``: row i is what token i attends to, its ancestors and itself.
        """
        return self._run(tokens, depths, visible.to(self._parts.device))

    def keep_path(self, count: int, path: Sequence[int]) -> None:
        """Keep of a tree's ``count`` tokens only a path from the root: roll the others back."""
        if self._cache is not None:
            keep_of_last(self._cache, count, path)
        self._position += len(path)

    def newest_kv(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return the last ``count`` tokens' KV, ``[1, Hkv, count, D]`` per layer; on host 0, not collective."""
        return last_rows(self._cache, count)

    def _run(
        self,
        tokens: Sequence[int],
        depths: Sequence[int] | None,
        visible: Tensor | None,
        last_only: bool = False,
    ) -> Tensor | None:
        if self._cache is None:
            return None
        attention = NewTokenAttention(self._parts.backend, visible, self._attending)
        return run_language_model(
            self._parts, tokens, self._position, self._cache, attention, depths=depths, last_only=last_only
        )


@torch.no_grad()
def run_language_model(
    parts: ModelParts,
    tokens: Sequence[int],
    position: int,
    cache,
    attention: LayerAttention,
    *,
    depths: Sequence[int] | None = None,
    last_only: bool = False,
) -> Tensor:
    """Run a language model on S text tokens, append their KV to the cache, and return logits ``[S, V]``.

    Text continues one position at a time; for M-RoPE models time, height and width advance together.

    Args:
        position: the rotary position of the first token.
        attention: computes the new tokens' attention. The model's own would copy the KV heads of grouped queries,
            and need a mask for several tokens.
        depths: by how much each token's position exceeds ``position``; None: they are consecutive.
        last_only: compute the logits after the last token only, ``[1, V]``.
    """
    input_ids = torch.tensor([list(tokens)], device=parts.device)
    depths = range(len(tokens)) if depths is None else depths
    position_ids = torch.tensor([[position + depth for depth in depths]], device=parts.device)
    if parts.uses_mrope:
        position_ids = position_ids.expand(3, -1, -1)
    with apbv_attention(parts.language_model):
        hidden = parts.language_model(
            inputs_embeds=parts.embed_tokens(input_ids),
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            apbv=attention,
        ).last_hidden_state
    return parts.logits(hidden[:, -1:] if last_only else hidden)[0]
