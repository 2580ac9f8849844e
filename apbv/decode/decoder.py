"""Next-token loops over the KV that prefill left: gathered on host 0, or spread over all hosts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from ..config import SamplingConfig
from ..hosts import AgreedError, HostGroup
from ..kv.cache import ShardedCache, appending_in_place, keep_of_last, last_rows
from ..model.attention import LayerAttention, PlainAttention, ShardedAttention, TreeAttention, apbv_attention
from ..model.parts import ModelParts
from .sampling import NotFiniteError, sample

NO_TOKEN = -1  # what host 0 tells the others where the model's logits allow none

# Asked on host 0 with all new tokens so far; true ends the answer there.
Stop = Callable[[Sequence[int]], bool]


@dataclass(frozen=True)
class Ending:
    """Where an answer ends, as host 0 sees it, which tells the others.

    Attributes:
        eos_token_ids: an end token is the answer's last.
        max_new_tokens: at most so many tokens.
        stop: what else may end it.
    """

    eos_token_ids: tuple[int, ...]
    max_new_tokens: int
    stop: Stop | None = None

    def cut(self, tokens: Sequence[int], new: Sequence[int]) -> tuple[list[int], bool]:
        """Of at least one new token, which follow others, those up to the answer's end; and whether it ends."""
        for count, token in enumerate(new, start=1):
            if (
                token in self.eos_token_ids
                or len(tokens) + count >= self.max_new_tokens
                or (self.stop is not None and self.stop([*tokens, *new[:count]]))
            ):
                return list(new[:count]), True
        return list(new), False


class Decoder(Protocol):
    """Advances a sequence by tokens that are already chosen, and takes the last of them back. Collective."""

    def advance(self, tokens: Sequence[int]) -> Tensor | None:
        """Run the model on S tokens; returns the logits after each, ``[S, V]``, on host 0 at least."""

    def take_back(self, count: int) -> None:
        """Forget the last ``count`` tokens."""

    def advance_tree(self, tokens: Sequence[int], depths: Sequence[int], visible: Tensor) -> Tensor | None:
        """:meth:`advance` by S tokens that form a tree; :meth:`keep_path` has to follow.

        Args:
            depths: of each token, 0 for the first, which follows the sequence.
            visible: bool ``[S, S]``, which of them each one sees: its ancestors and itself.
        """

    def keep_path(self, count: int, path: Sequence[int]) -> None:
        """Of the ``count`` tokens of a tree keep those of a path from its root, and forget the others."""

    def newest_kv(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """On host 0: the KV of the last ``count`` new tokens, ``[1, Hkv, count, D]`` per layer. Not collective."""


class GatheredDecoder:
    """Host 0 decodes alone over a plain DynamicCache."""

    def __init__(self, parts: ModelParts, cache: DynamicCache | None, next_position: int, hosts: HostGroup):
        self._cache = None if cache is None else appending_in_place(cache)
        self._parts, self._position, self._hosts = parts, next_position, hosts

    def advance(self, tokens: Sequence[int]) -> Tensor | None:
        if self._hosts.rank != 0:
            return None
        logits = run_language_model(self._parts, tokens, self._position, self._cache)
        self._position += len(tokens)
        return logits

    def take_back(self, count: int) -> None:
        if self._hosts.rank == 0 and count:
            self._cache.crop(-count)
            self._position -= count

    def advance_tree(self, tokens: Sequence[int], depths: Sequence[int], visible: Tensor) -> Tensor | None:
        if self._hosts.rank != 0:
            return None
        attention = TreeAttention(visible.to(self._parts.device), backend=self._parts.backend)
        return run_language_model(self._parts, tokens, self._position, self._cache, attention, depths)

    def keep_path(self, count: int, path: Sequence[int]) -> None:
        if self._hosts.rank == 0:
            keep_of_last(self._cache, count, path)
            self._position += len(path)

    def newest_kv(self, count: int) -> list[tuple[Tensor, Tensor]]:
        return last_rows(self._cache, count)


class ShardedDecoder:
    """Every host runs the new tokens against its own share of the KV; host 0 keeps the new tokens' KV."""

    def __init__(self, parts: ModelParts, cache: ShardedCache, next_position: int, hosts: HostGroup):
        self._parts, self._cache, self._position = parts, cache, next_position
        self._attention, self._hosts = ShardedAttention(hosts, parts.backend), hosts

    def advance(self, tokens: Sequence[int]) -> Tensor | None:
        logits = run_language_model(self._parts, tokens, self._position, self._cache, self._attention)
        self._position += len(tokens)
        return logits

    def take_back(self, count: int) -> None:
        self._cache.crop(-count)
        self._position -= count

    def advance_tree(self, tokens: Sequence[int], depths: Sequence[int], visible: Tensor) -> Tensor | None:
        attention = TreeAttention(visible.to(self._parts.device), self._hosts, self._parts.backend)
        return run_language_model(self._parts, tokens, self._position, self._cache, attention, depths)

    def keep_path(self, count: int, path: Sequence[int]) -> None:
        keep_of_last(self._cache, count, path)
        self._position += len(path)

    def newest_kv(self, count: int) -> list[tuple[Tensor, Tensor]]:
        return last_rows(self._cache, count)


@torch.no_grad()
def run_language_model(
    parts: ModelParts,
    tokens: Sequence[int],
    position: int,
    cache,
    attention: LayerAttention | None = None,
    depths: Sequence[int] | None = None,
    last_only: bool = False,
) -> Tensor:
    """Logits ``[S, V]`` after each of S text tokens, or ``[1, V]``; their KV goes into the cache.

    Text continues one position at a time; for M-RoPE models time, height and width advance together.

    Args:
        attention: of the new tokens; None: over all of the cache, and causal among themselves. It is not the
            model's own, which copies the KV heads of grouped queries, and needs a mask for several tokens.
        depths: how far behind ``position`` each token stands; None: they are consecutive.
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
            apbv=attention or PlainAttention(parts.backend),
        ).last_hidden_state
    return parts.logits(hidden[:, -1:] if last_only else hidden)[0]


def generate_tokens(
    decoder: Decoder,
    logits: Tensor,
    prompt_len: int,
    hosts: HostGroup,
    config: SamplingConfig,
    eos_token_ids: tuple[int, ...],
    on_token: Callable[[int], None] | None = None,
    stop: Stop | None = None,
) -> list[int]:
    """Choose and append tokens until an end token, which is included, ``max_new_tokens``, or ``stop``.

    The leader chooses, so that every host continues with the same token. Collective.

    Args:
        logits: ``[V]``, for the first new token.
        prompt_len: n; a token's random number depends on the seed and its index in the sequence.
        on_token: called on every host with each token as soon as it is chosen.
        stop: see :data:`Stop`; matters on host 0 only.

    Raises:
        AgreedError: the model's logits are NaN or infinite; on every host.
    """
    ending = Ending(eos_token_ids, config.max_new_tokens, stop)
    tokens: list[int] = []
    while True:
        token, has_ended = choose_token(logits, prompt_len, tokens, hosts, config, ending)
        tokens.append(token)
        if on_token is not None:
            on_token(token)
        if has_ended:
            return tokens
        rows = decoder.advance([token])
        logits = None if rows is None else rows[-1]


def choose_token(
    logits: Tensor | None,
    prompt_len: int,
    tokens: Sequence[int],
    hosts: HostGroup,
    config: SamplingConfig,
    ending: Ending,
) -> tuple[int, bool]:
    """The token that follows, and whether the answer ends with it; on every host.

    Args:
        logits: ``[V]`` on host 0.
        tokens: the answer so far.
    """
    chosen = None
    if hosts.is_leader:
        try:
            token = sample(logits, config, prompt_len + len(tokens))
            chosen = [token, ending.cut(tokens, [token])[1]]
        except NotFiniteError:
            chosen = [NO_TOKEN, True]
    token, has_ended = hosts.broadcast_ints(chosen, 2)
    require_token(token, tokens)
    return token, bool(has_ended)


def require_token(token: int, tokens: Sequence[int]) -> None:
    """Refuse :data:`NO_TOKEN` behind all tokens so far; called on every host with what host 0 has told.

    Raises:
        AgreedError: it is that.
    """
    if token == NO_TOKEN:
        raise AgreedError(f"the model gave NaN or infinite logits behind {len(tokens)} tokens of its answer")
