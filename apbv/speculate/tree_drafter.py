"""This module drafts trees of tokens with a language model."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from ..decode.decoder import run_language_model
from ..decode.sampling import NotFiniteError
from ..kv.growing import appending_in_place, keep_of_last
from ..model.attention import NewTokenAttention
from ..model.parts import ModelParts
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
        self._parts, self._cache, self._position, self._vocab_size = (
            parts,
            appending_in_place(cache),
            next_position,
            vocab_size,
        )
        self._cached: list[int] = []  # the new tokens whose KV the cache holds, up to the root of the last tree
        self._tree, self._drafted = Tree((-1,)), [-1]
        self._nodes_in_cache: list[int] = []  # the nodes of the last tree whose KV follows that of these tokens
        self._verified_kv: VerifiedKV | None = None

    def take_target_kv(self, newest_kv: NewestKV) -> None:
        """Replace this drafter's KV of verified tokens by the target's, as :meth:`ModelDrafter.take_target_kv`."""
        self._verified_kv = VerifiedKV(newest_kv)

    def propose(self, tokens: Sequence[int], tree: Tree) -> list[int]:
        self._roll_back(tokens)
        missing = list(tokens[len(self._cached) :])
        in_order = torch.ones(len(missing), len(missing), dtype=torch.bool).tril()
        logits = self._advance(missing, range(len(missing)), in_order)[-1:]
        self._cached += missing
        self._tree, self._drafted = tree, [tokens[-1]]
        for depth, nodes in enumerate(tree.inner_levels):
            if depth:
                self._nodes_in_cache += nodes
                level = [self._drafted[node] for node in nodes]
                logits = self._advance(
                    level, [depth - 1] * len(nodes), tree.visible[list(nodes)][:, self._nodes_in_cache]
                )
            counts = [len(tree.children[node]) for node in nodes]
            best = logits[:, : self._vocab_size].topk(max(counts), dim=-1)
            is_finite = best.values[:, :1].isfinite()  # NaN counts as the largest number
            rows = torch.cat([is_finite.long(), best.indices], dim=1).tolist()  # in one wait for the device
            if not all(row[0] for row in rows):
                raise NotFiniteError
            for (_, *row), count in zip(rows, counts, strict=True):
                self._drafted += row[:count]
        return self._drafted[1:]

    def prune_prompt(self, rows: Tensor) -> None:
        """Drop all of the prompt's KV but these rows, ``[T]`` ascending; called before anything is drafted."""
        self._cache = appending_in_place(prune_prompt(self._cache, rows, len(self._cached)))

    def _advance(self, tokens: Sequence[int], depths: Sequence[int], visible: Tensor) -> Tensor:
        """Run the model on S tokens at these depths after the cached ones; return logits ``[S, V]``.

        Args:
            visible: bool ``[S, T]``: which of the last T cached tokens, these among them, each one sees.
        """
        readable = [token if token < self._parts.vocab_size else 0 for token in tokens]
        position = self._position + len(self._cached)
        attention = NewTokenAttention(self._parts.backend, visible.to(self._parts.device))
        return run_language_model(self._parts, readable, position, self._cache, attention, depths=depths)

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
