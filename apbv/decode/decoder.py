"""This module runs a language model over new tokens, on top of a prompt's KV."""

from collections.abc import Sequence

from torch import Tensor
from transformers import DynamicCache

from ..kv.cache import ShardedCache
from ..kv.growing import keep_of_last, last_rows
from ..kv.placement import PlacedKV
from ..model.parts import ModelParts
from .runner import ModelRunner
from .step import NewTokens


class Decoder:
    """A Decoder runs the model over tokens that are already chosen, and rolls the last of them back. Collective.

    Host 0 keeps the new tokens' KV. Where the prompt's KV is sharded, every host runs the new tokens against its
    own share; else host 0 runs them alone.

    Args:
        kv: the prompt's KV, to which the new tokens' is appended.
        next_position: rotary position of the first new token.

    Attributes:
        runs_ahead: whether this process alone runs the model, on a GPU, which can then be given a step before the
            host knows the token of the step before.
    """

    def __init__(self, parts: ModelParts, kv: PlacedKV, next_position: int):
        self._position = next_position
        self._cache = kv.continued()
        self._runner = None if self._cache is None else ModelRunner(parts, self._cache, kv.attending)
        self.hosts = kv.hosts
        is_alone = kv.attending is None and parts.tensor_parallel[1] == 1
        self.runs_ahead = self._cache is not None and is_alone and parts.device.type == "cuda"

    def advance(self, tokens: Sequence[int] | Tensor, last_only: bool = False) -> Tensor | None:
        """Run the model on S tokens.

        Args:
            tokens: a tensor ``[S]`` on the device is not waited for.

        Returns:
            The logits after each token, ``[S, V]``, or after the last, ``[1, V]``; None on hosts that run nothing.
        """
        logits = self._run(NewTokens(tokens, self._position), last_only)
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
        return self._run(NewTokens(tokens, self._position, depths, visible))

    def keep_path(self, count: int, path: Sequence[int]) -> None:
        """Keep of a tree's ``count`` tokens only a path from the root: roll the others back."""
        if self._cache is not None:
            keep_of_last(self._cache, count, path)
        self._position += len(path)

    @property
    def cache(self) -> DynamicCache | ShardedCache | None:
        """The cache that tokens are appended to; None on hosts that run nothing."""
        return self._cache

    @property
    def next_position(self) -> int:
        """The rotary position of the next token."""
        return self._position

    def newest_kv(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return the last ``count`` tokens' KV, ``[1, Hkv, count, D]`` per layer; on host 0, not collective."""
        return last_rows(self._cache, count)

    def _run(self, new: NewTokens, last_only: bool = False) -> Tensor | None:
        return None if self._runner is None else self._runner.run(new, last_only)
