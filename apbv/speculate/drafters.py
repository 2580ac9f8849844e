"""Drafters, which propose tokens for the target to verify. They run on host 0.

A drafter is not told which of its tokens were accepted: it gets all tokens so far, keeps the KV
that it has already computed for them, and rolls the rest back. There is thus no second record of
accepted tokens that could be wrong.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from ..config import SamplingParams
from ..decode.runner import ModelRunner
from ..decode.sampling import PURPOSE_DRAFT, Choice, Penalties, choose_each
from ..kv.cache import appending_in_place, keep_of_last
from ..kv.select import select_kv
from ..model.parts import ModelParts
from ..transfer import to_device
from .tree import Tree

# Returns the target's KV of a number of last tokens; see Decoder.newest_kv.
NewestKV = Callable[[int], Sequence[tuple[Tensor, Tensor]]]
_LONGEST_NGRAM = 3  # the number of tokens that are looked up first; then fewer


@dataclass(frozen=True)
class Proposal:
    """Draft: proposed tokens.

    Attributes:
        tokens: of nodes 1, 2, … of the requested tree; for a chain possibly fewer than requested.
        q: ``[len(tokens), Vq]`` in fp64, on any device, the distributions that the tokens were
            drawn from; None if they were not drawn.
    """

    tokens: list[int]
    q: Tensor | None = None


def pack_tokens(tokens: Sequence[int], most: int) -> list[int]:
    """Encode at most ``most`` tokens as a message of ``1 + most`` numbers: their count, the tokens,
    and zeros."""
    return [len(tokens), *tokens, *[0] * (most - len(tokens))]


def unpack_tokens(numbers: Sequence[int]) -> list[int]:
    """Decode the tokens of a message of :func:`pack_tokens`."""
    count, *tokens = numbers
    return tokens[:count]


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    shorter = min(len(first), len(second))
    for place in range(shorter):
        if first[place] != second[place]:
            return place
    return shorter


class Drafter:
    """Interface of a drafter."""

    def propose(self, tokens: Sequence[int], tree: Tree) -> Proposal:
        """Draft the continuation of all new ``tokens`` (at least one) since the prompt; the last is
        the root.

        Raises:
            NotFiniteError: the draft's logits are NaN or infinite; then the draft is useless for
                this prompt.
        """
        raise NotImplementedError

    def learn(self, tokens: Sequence[int], logits: Tensor) -> None:
        """Learn from the S tokens that a round has added, and the target's logits ``[S, V]``; by
        default nothing.

        The first new token, which the prefill chose, is never among them. Only with sequential
        drafting.
        """


class ModelDrafter(Drafter):
    """Drafts with a language model, on its own KV of the prompt.

    In a chain every token is drawn as the answer's are. In another tree the children of a node are
    its most probable next tokens. A batch of answers takes the model and :attr:`cache`, to which it
    appends, and drafts by itself.

    Attributes:
        parts, cache, position, vocab_size: as below; the position is that of the first new token.
        newest_kv: if the draft is the target itself on less of the prompt, returns the target's KV
            of verified tokens, which replaces this drafter's own (STD: dense KV for sparse).

    Args:
        parts: the model; it may be the target itself on a smaller KV.
        cache: plain transformers cache of the prompt. New tokens are appended and rolled back; the
            prompt's KV stays.
        next_position: rotary position of the first new token, which may exceed the number of cached
            tokens.
        prompt_len: the prompt's tokens before the new ones, on which random numbers depend: n, or
            one less where the prompt's last token is run again.
        config: how tokens are drawn.
        vocab_size: only tokens below it are drafted: the target has no others. The draft reads the
            target's tokens beyond its own vocabulary as token 0, which can cost acceptance, but
            keeps decoding lossless.
        drafts_trees: whether trees are drafted, level by level, and not chains.
        prompt_ids: the prompt's tokens, for penalties, int64 ``[1, n]``.
    """

    def __init__(
        self,
        parts: ModelParts,
        cache: DynamicCache,
        next_position: int,
        prompt_len: int,
        config: SamplingParams,
        vocab_size: int,
        drafts_trees: bool = False,
        prompt_ids: Tensor | None = None,
    ):
        self.parts = parts
        self.position = next_position
        self._drafts_trees = drafts_trees
        self._continue(cache)
        self._prompt_len = prompt_len
        self._config = config
        self.vocab_size = vocab_size
        # The place among the new tokens at which the answer begins.
        self._penalties: Penalties | None = None
        self._answer_start = 0
        if config.penalises:
            self._penalties = Penalties(config, prompt_ids[0], vocab_size, parts.device)
            self._answer_start = prompt_ids.shape[1] - prompt_len
        # The new tokens whose KV the cache holds, of a tree up to its root.
        self._cached: list[int] = []
        # Their number, also while a window is drafted whose tokens are not read yet.
        self._num_cached = 0
        self._tree = Tree.chain(0)
        self._drafted = [-1]
        # The nodes of the last tree whose KV follows that of these tokens.
        self._nodes_in_cache: list[int] = []
        self.newest_kv: NewestKV | None = None
        self._num_replaced = 0

    def propose(self, tokens: Sequence[int], tree: Tree) -> Proposal:
        missing = self._roll_back(tokens)
        if self._drafts_trees:
            return self._branches(tokens, missing, tree)
        return self._chain(tokens, missing, tree)

    def _chain(
        self, tokens: Sequence[int], missing: Sequence[int] | Tensor, tree: Tree
    ) -> Proposal:
        choices = []
        rows = []
        for _ in range(tree.depth):
            choice, row = self._next(missing, tokens, [choice.tokens for choice in choices])
            choices.append(choice)
            if row is not None:
                rows.append(row)
            missing = choice.tokens  # which the CPU does not know yet
        drafted = Choice.joined(choices).read() if choices else []
        self._cached = [*tokens, *drafted][: self._num_cached]
        return Proposal(drafted, torch.stack(rows) if rows else None)

    def _branches(self, tokens: Sequence[int], missing: Sequence[int], tree: Tree) -> Proposal:
        logits, levels = self._read(missing), []  # of each level the tokens, chosen on the device
        self._cached = list(tokens)
        self._tree = tree
        for depth, nodes in enumerate(tree.inner_levels):
            if depth:
                self._nodes_in_cache += nodes
                # The first node of their level.
                above = tree.children[tree.inner_levels[depth - 1][0]][0]
                ids = levels[-1].tokens.index_select(
                    0, self._indices(node - above for node in nodes)
                )
                visible = tree.visible[list(nodes)][:, self._nodes_in_cache]
                positions = [self.position + self._num_cached + depth - 1] * len(nodes)
                logits = self._runner.run(ids, positions, visible)[:, : self.vocab_size]
            if self._penalties is not None:
                drafted = torch.cat([level.tokens for level in levels]) if levels else ()
                precede = tree.visible[list(nodes), 1 : 1 + len(drafted)]
                logits = self._penalties.penalised(
                    logits, tokens[self._answer_start :], drafted, precede
                )
            levels.append(
                self._choose_children(logits, [len(tree.children[node]) for node in nodes])
            )
        drafted = Choice.joined(levels).read() if levels else []
        self._drafted = [tokens[-1], *drafted]
        return Proposal(drafted)

    def _choose_children(self, logits: Tensor, counts: Sequence[int]) -> Choice:
        """Choose for each row of logits ``[S, V]`` a number of most probable tokens,
        concatenated."""
        most = max(counts)
        best = logits.topk(most, dim=-1)
        # NaN counts as the largest number.
        is_finite = best.values[:, :1].isfinite().expand(-1, most)
        wanted = self._indices(
            row * most + rank for row, count in enumerate(counts) for rank in range(count)
        )
        return Choice(
            *(each.flatten().index_select(0, wanted) for each in (best.indices, is_finite))
        )

    def _indices(self, numbers: Iterable[int]) -> Tensor:
        return to_device(list(numbers), self.parts.device)

    def stream(self, tokens: Sequence[int]) -> Iterator[tuple[int, Tensor | None]]:
        """Yield drafted tokens, each with the distribution ``[Vq]`` it was drawn from, or None if
        greedy."""
        sequence = list(tokens)
        missing = self._roll_back(tokens)
        while True:
            choice, row = self._next(missing, sequence)
            self._cached = sequence[: self._num_cached]
            missing = choice.read()
            sequence += missing
            yield missing[0], row

    def prune_prompt(self, rows: Tensor) -> None:
        """Drop all of the prompt's KV but these rows, ``[T]`` ascending; the new tokens' KV
        stays."""
        length = self.cache.get_seq_length()
        heads = self.cache.layers[0].keys.shape[1]
        rows = torch.cat([rows, torch.arange(length - self._num_cached, length)])
        self._continue(select_kv(self.cache, [rows.expand(heads, -1)] * len(self.cache.layers)))

    def _continue(self, cache: DynamicCache) -> None:
        """Go on with this cache."""
        self.cache = appending_in_place(cache)
        self._runner = ModelRunner(self.parts, self.cache)

    def _next(
        self, missing: Sequence[int] | Tensor, tokens: Sequence[int], drafted: Sequence[Tensor] = ()
    ) -> tuple[Choice, Tensor | None]:
        """Run tokens that the cache lacks, and choose the next one; return its distribution
        ``[Vq]``, too.

        Args:
            tokens: the new tokens, and ``drafted``, ``[1]`` each, those after them.
        """
        logits = self._read(missing)
        if self._penalties is not None:
            answer = tokens[self._answer_start :]
            logits = self._penalties.penalised(
                logits, answer, torch.cat(drafted) if drafted else ()
            )
        place = self._prompt_len + self._num_cached
        choice, (row,) = choose_each(logits, [self._config], [place], PURPOSE_DRAFT)
        return choice, row

    def _read(self, missing: Sequence[int] | Tensor) -> Tensor:
        """Run tokens that the cache lacks, and return the logits after the last."""
        if not isinstance(missing, Tensor):
            missing = [token if token < self.parts.vocab_size else 0 for token in missing]
        logits = self._run(missing)
        self._num_cached += len(missing)
        return logits

    def _run(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Run the model on these tokens, cache their KV, and return the logits ``[1, Vq]`` after
        the last."""
        first = self.position + self._num_cached
        logits = self._runner.run(tokens, range(first, first + len(tokens)), last_only=True)
        return logits[:, : self.vocab_size]

    def _roll_back(self, tokens: Sequence[int]) -> list[int]:
        """Roll back rejected tokens, and at least the last token, whose logits are needed.

        Returns:
            The tokens that the cache lacks then.
        """
        known = tokens[:-1]
        common = common_length(self._cached, known)
        path = self._accepted(known[common:]) if common == len(self._cached) else []
        if self._nodes_in_cache:
            places = [self._nodes_in_cache.index(node) for node in path]
            keep_of_last(self.cache, len(self._nodes_in_cache), places)
            self._nodes_in_cache = []
        if common < len(self._cached):
            self.cache.crop(common - len(self._cached))
        self._cached = [*self._cached[:common], *(self._drafted[node] for node in path)]
        if self.newest_kv is not None:
            if len(self._cached) > self._num_replaced:
                self.cache.crop(self._num_replaced - len(self._cached))
            for index, (keys, values) in enumerate(self.newest_kv(len(known) - self._num_replaced)):
                self.cache.update(keys, values, index)
            self._cached, self._num_replaced = list(known), len(known)
        self._num_cached = len(self._cached)
        return list(tokens[self._num_cached :])

    def _accepted(self, following: Sequence[int]) -> list[int]:
        """Return the nodes in the cache, from the root of the last tree on, that have these
        tokens."""
        node = 0
        path = []
        for token in following:
            node = self._tree.child(self._drafted, node, token)
            if node not in self._nodes_in_cache:
                break
            path.append(node)
        return path


class NgramDrafter(Drafter):
    """Drafts by prompt lookup: the tokens that followed the latest earlier occurrence of the last
    ones.

    Args:
        prompt: the prompt's token ids.
    """

    def __init__(self, prompt: Sequence[int]):
        self._prompt = list(prompt)
        self._followed: dict[tuple[int, ...], int] = {}  # n-gram: the end of its latest occurrence
        self._indexed = 0

    def propose(self, tokens: Sequence[int], tree: Tree) -> Proposal:
        sequence = [*self._prompt, *tokens]
        # Verified tokens are never rolled back, so the index stays valid. The last token has no
        # successor yet.
        for end in range(self._indexed + 1, len(sequence)):
            for length in range(1, min(_LONGEST_NGRAM, end) + 1):
                self._followed[tuple(sequence[end - length : end])] = end
        self._indexed = len(sequence) - 1
        for length in range(min(_LONGEST_NGRAM, len(sequence)), 0, -1):
            end = self._followed.get(tuple(sequence[-length:]))
            if end is not None:
                return Proposal(sequence[end : end + tree.depth])
        return Proposal([])
