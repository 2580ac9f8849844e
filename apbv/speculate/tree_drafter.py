"""This module drafts trees of tokens with a language model."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor
from transformers import DynamicCache

from ..decode.runner import ModelRunner
from ..decode.sampling import Choice
from ..decode.step import NewTokens
from ..kv.growing import appending_in_place, keep_of_last
from ..model.parts import ModelParts
from ..transfer import to_device
from .draft_kv import prune_prompt
from .drafters import NewestKV, VerifiedKV, common_length
from .tree import Tree


class TreeProposer(Protocol):
    """A TreeProposer fills draft trees with tokens."""

    def propose(self, tokens: Sequence[int], tree: Tree) -> list[int]:
        """Return the tokens of nodes 1 .. N, where the root is the last of all new ``tokens`` (at least one).

        Raises:
            NotFiniteError: the draft's logits are NaN or infinite.
        """


class TreeDrafter:
    """A TreeDrafter drafts with a language model: the children of a node are its most probable next tokens.

    The arguments are those of :class:`~apbv.speculate.drafters.ModelDrafter`. Like that it is given only the
    tokens so far, and finds out by itself which branch of its last tree was accepted.
    """

    def __init__(self, parts: ModelParts, cache: DynamicCache, next_position: int, vocab_size: int):
        self._parts, self._position, self._vocab_size = parts, next_position, vocab_size
        self._continue(cache)
        self._cached: list[int] = []  # the new tokens whose KV the cache holds, up to the root of the last tree
        self._tree, self._drafted = Tree((-1,)), [-1]
        self._nodes_in_cache: list[int] = []  # the nodes of the last tree whose KV follows that of these tokens
        self._verified_kv: VerifiedKV | None = None

    def take_target_kv(self, newest_kv: NewestKV) -> None:
        """Replace this drafter's KV of verified tokens by the target's, as :meth:`ModelDrafter.take_target_kv`."""
        self._verified_kv = VerifiedKV(newest_kv)

    def propose(self, tokens: Sequence[int], tree: Tree) -> list[int]:
        self._roll_back(tokens)
        missing = tokens[len(self._cached) :]
        readable = [token if token < self._parts.vocab_size else 0 for token in missing]
        logits = self._runner.run(NewTokens(readable, self._next_position))[-1:]
        self._cached += missing
        self._tree = tree
        levels = []  # the tokens of each, chosen on the device
        for depth, nodes in enumerate(tree.inner_levels):
            if depth:
                self._nodes_in_cache += nodes
                above = tree.children[tree.inner_levels[depth - 1][0]][0]  # the first node of their level
                ids = levels[-1].tokens.index_select(0, self._indices(node - above for node in nodes))
                visible = tree.visible[list(nodes)][:, self._nodes_in_cache]
                new = NewTokens(ids, self._next_position, [depth - 1] * len(nodes), visible)
                logits = self._runner.run(new)
            levels.append(self._choose_children(logits, [len(tree.children[node]) for node in nodes]))
        self._drafted = [tokens[-1], *(Choice.read_all(levels) if levels else ())]
        return self._drafted[1:]

    def _choose_children(self, logits: Tensor, counts: Sequence[int]) -> Choice:
        """Choose for each row of logits ``[S, V]`` so many most probable tokens, in a row."""
        most = max(counts)
        best = logits[:, : self._vocab_size].topk(most, dim=-1)
        is_finite = best.values[:, :1].isfinite().expand(-1, most)  # NaN counts as the largest number
        wanted = self._indices(row * most + rank for row, count in enumerate(counts) for rank in range(count))
        return Choice(*(each.flatten().index_select(0, wanted) for each in (best.indices, is_finite)))

    def _indices(self, numbers: Iterable[int]) -> Tensor:
        return to_device(list(numbers), self._parts.device)

    def prune_prompt(self, rows: Tensor) -> None:
        """Drop all of the prompt's KV but these rows, ``[T]`` ascending; called before anything is drafted."""
        self._continue(prune_prompt(self._cache, rows, len(self._cached)))

    def _continue(self, cache: DynamicCache) -> None:
        """Go on with this cache."""
        self._cache = appending_in_place(cache)
        self._runner = ModelRunner(self._parts, self._cache)

    @property
    def _next_position(self) -> int:
        """The rotary position behind the tokens whose KV the cache holds."""
        return self._position + len(self._cached)

    def _roll_back(self, tokens: Sequence[int]) -> None:
        """Roll back what was rejected, and the last token, whose logits are wanted."""
        known = tokens[:-1]
        common = common_length(self._cached, known)
        node, path = 0, []
        for token in known[common:] if common == len(self._cached) else ():
            node = self._tree.child(self._drafted, node, token)
            if node not in self._nodes_in_cache:
                break
            path.append(node)
        keep_of_last(self._cache, len(self._nodes_in_cache), [self._nodes_in_cache.index(node) for node in path])
        self._cache.crop(common - len(self._cached))
        self._cached = [*self._cached[:common], *(self._drafted[node] for node in path)]
        self._nodes_in_cache = []
        if self._verified_kv is not None:
            self._cached = self._verified_kv.put_into(self._cache, len(self._cached), known)
