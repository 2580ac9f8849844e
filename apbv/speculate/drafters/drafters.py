"""Drafters, which propose tokens for the target to verify. They run on host 0.

A drafter is not told which of its tokens were accepted: it gets all tokens so far, keeps the KV
that it has already computed for them, and rolls the rest back. There is thus no second record of
accepted tokens that could be wrong.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from ...config import SamplingParams
from ...decode.sampling import PURPOSE_DRAFT, Choice, Penalties, choose_each
from ...device.copies import to_device
from ...kv.cache import appending_in_place, keep_of_last, kv_layers
from ...kv.select import select_kv
from ...model.linear_attention import LinearStates
from ...model.parts import ModelParts
from ...runner.answer_states import AnswerStates
from ...runner.decoder import Decoder, ModelRunner
from .tree import Tree

_LONGEST_NGRAM = 3  # the number of tokens that are looked up first; then fewer


@dataclass(frozen=True)
class Proposal:
    """Proposed tokens.

    Attributes:
        tokens: the tokens of nodes 1, 2, … of the requested tree; for a chain possibly fewer than
            requested.
        q: ``[len(tokens), Vq]`` in fp64, on any device, the distributions that the tokens were
            drawn from; None if they were not drawn.
    """

    tokens: list[int]
    q: Tensor | None = None


def pack_tokens(tokens: Sequence[int], most: int) -> list[int]:
    """Encode at most ``most`` tokens as ``1 + most`` numbers: count, tokens, and zeros."""
    padding = [0] * (most - len(tokens))
    return [len(tokens), *tokens, *padding]


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
    """Proposes tokens."""

    def propose(self, tokens: Sequence[int], tree: Tree) -> Proposal:
        """Draft the continuation of an answer.

        Args:
            tokens: all tokens since the prompt, at least one; the last is the tree's root.
            tree: the nodes to propose tokens for.

        Raises:
            NotFiniteError: the draft's logits are NaN or infinite; then the draft is useless for
                this prompt.
        """
        raise NotImplementedError

    def stream(
        self, tokens: Sequence[int], num_verified: int | None = None
    ) -> Iterator[tuple[int, Tensor | None]]:
        """Yield drafted tokens, each with its distribution ``[Vq]``; None if it was not drawn.

        Args:
            tokens: all tokens since the prompt, drafted ones included.
            num_verified: how many of them, the first, are verified; None: all.
        """
        raise NotImplementedError

    def learn(self, tokens: Sequence[int], logits: Tensor) -> None:
        """Learn from the S tokens that a round has added, and the target's logits ``[S, V]``.

        By default nothing is learnt. The first new token, which the prefill chose, is never among
        them. Only with sequential drafting.
        """


class ReadPrompt(NamedTuple):
    """What a model that drafts has of a prompt that it has read.

    Attributes:
        cache: the KV, a plain transformers cache.
        states: a hybrid's states of linear attention behind it; None: the model has none.
    """

    cache: DynamicCache
    states: LinearStates | None = None


class ModelDrafter(Drafter):
    """Drafts with a language model, on its own KV of the prompt.

    In a chain every token is drawn as the answer's are. In another tree the children of a node are
    its most probable next tokens. A batch of answers takes the model and :attr:`cache`, to which it
    appends, and drafts by itself.

    Attributes:
        parts, cache, vocab_size: see below.
        prompt_states: a hybrid's states of linear attention behind the prompt; None: the model has
            none.
        states: those behind the new tokens.
        position: the rotary position of the first new token.
        target: if the draft is the target itself on less of the prompt, the target's decoder: its
            KV of verified tokens, and its states, replace this drafter's own (STD: dense KV for
            sparse).

    Args:
        parts: the model; it may be the target itself on a smaller KV.
        prompt: its KV and states behind the prompt. New tokens are appended and rolled back; the
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
        prompt: ReadPrompt,
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
        self.prompt_states = prompt.states
        self.states = None if prompt.states is None else AnswerStates(prompt.states)
        self._continue(prompt.cache)
        self._prompt_len = prompt_len
        self._config = config
        self.vocab_size = vocab_size
        # The place among the new tokens at which the answer begins.
        self._penalties: Penalties | None = None
        self._answer_start = 0
        if config.penalises:
            assert prompt_ids is not None, "penalties depend on the prompt"
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
        self.target: Decoder | None = None
        self._num_replaced = 0

    def propose(self, tokens: Sequence[int], tree: Tree) -> Proposal:
        missing = self._roll_back(tokens)
        if self._drafts_trees:
            return self._branches(tokens, missing, tree)
        return self._chain(tokens, missing, tree)

    def _chain(
        self, tokens: Sequence[int], missing: Sequence[int] | Tensor, tree: Tree
    ) -> Proposal:
        """Draft a chain, as deep as the tree.

        Args:
            missing: the last of ``tokens``, which the cache lacks.
        """
        choices: list[Choice] = []
        distributions = []
        for _ in range(tree.depth):
            drafted_so_far = [choice.tokens for choice in choices]
            choice, distribution = self._next(missing, tokens, drafted_so_far)
            choices.append(choice)
            if distribution is not None:
                distributions.append(distribution)
            missing = choice.tokens  # which the CPU does not know yet
        drafted = Choice.joined(choices).read() if choices else []
        self._cached = [*tokens, *drafted][: self._num_cached]
        q = torch.stack(distributions) if distributions else None
        return Proposal(drafted, q)

    def _branches(self, tokens: Sequence[int], missing: Sequence[int], tree: Tree) -> Proposal:
        """Draft a tree, level by level.

        Args:
            missing: the last of ``tokens``, which the cache lacks.
        """
        logits = self._read(missing)
        self._cached = list(tokens)
        self._tree = tree
        levels: list[Choice] = []  # of each level the tokens, chosen on the device
        for depth, parents in enumerate(tree.inner_levels):
            if depth:
                first_of_level = tree.children[tree.inner_levels[depth - 1][0]][0]
                places = [node - first_of_level for node in parents]
                parent_tokens = levels[-1].tokens.index_select(0, self._indices(places))
                logits = self._run_nodes(parents, parent_tokens, depth)
            if self._penalties is not None:
                drafted = torch.cat([level.tokens for level in levels]) if levels else ()
                is_ancestor = tree.visible[list(parents), 1 : 1 + len(drafted)]
                answer = tokens[self._answer_start :]
                logits = self._penalties.penalised(logits, answer, drafted, is_ancestor)
            num_children = [len(tree.children[node]) for node in parents]
            levels.append(self._choose_children(logits, num_children))
        drafted_tokens = Choice.joined(levels).read() if levels else []
        self._drafted = [tokens[-1], *drafted_tokens]
        return Proposal(drafted_tokens)

    def _run_nodes(self, nodes: Sequence[int], tokens: Tensor, depth: int) -> Tensor:
        """Run nodes of one level of the tree, cache their KV, and return their logits ``[S, V]``.

        Args:
            tokens: the nodes' tokens, ``[S]``.
            depth: their distance from the root.
        """
        self._nodes_in_cache += nodes
        visible = self._tree.visible[list(nodes)][:, self._nodes_in_cache]
        position = self.position + self._num_cached + depth - 1
        logits = self._runner.run(tokens, [position] * len(nodes), visible)
        return logits[:, : self.vocab_size]

    def _choose_children(self, logits: Tensor, counts: Sequence[int]) -> Choice:
        """Choose for each row of logits ``[S, V]`` its most probable tokens, concatenated.

        Args:
            counts: how many, for each row.
        """
        most = max(counts)
        best = logits.topk(most, dim=-1)
        # NaN counts as the largest number.
        is_finite = best.values[:, :1].isfinite().expand(-1, most)
        places: list[int] = []
        for row, count in enumerate(counts):
            places.extend(range(row * most, row * most + count))
        indices = self._indices(places)
        return Choice(
            best.indices.flatten().index_select(0, indices),
            is_finite.flatten().index_select(0, indices),
        )

    def _indices(self, numbers: list[int]) -> Tensor:
        return to_device(numbers, self.parts.device)

    def stream(
        self, tokens: Sequence[int], num_verified: int | None = None
    ) -> Iterator[tuple[int, Tensor | None]]:
        sequence = list(tokens)
        missing = self._roll_back(tokens, num_verified)
        while True:
            choice, distribution = self._next(missing, sequence)
            self._cached = sequence[: self._num_cached]
            missing = choice.read()
            sequence += missing
            yield missing[0], distribution

    def prune_prompt(self, rows: Tensor) -> None:
        """Keep only these rows of the prompt's KV, ``[T]`` ascending; new tokens' KV stays."""
        length = self.cache.get_seq_length()
        num_heads = kv_layers(self.cache)[0].keys.shape[1]
        rows = torch.cat([rows, torch.arange(length - self._num_cached, length)])
        rows_of_heads = rows.expand(num_heads, -1)
        self._continue(select_kv(self.cache, [rows_of_heads] * len(self.cache.layers)))

    def _continue(self, cache: DynamicCache) -> None:
        """Go on with this cache."""
        self.cache = appending_in_place(cache)
        self._runner = ModelRunner(self.parts, self.cache, states=self.states)

    def _next(
        self, missing: Sequence[int] | Tensor, tokens: Sequence[int], drafted: Sequence[Tensor] = ()
    ) -> tuple[Choice, Tensor | None]:
        """Run tokens that the cache lacks, and choose the next one.

        Args:
            tokens: the new tokens.
            drafted: the drafted tokens after them, ``[1]`` each.

        Returns:
            The choice, and the distribution ``[Vq]`` it was drawn from, or None if it was not.
        """
        logits = self._read(missing)
        if self._penalties is not None:
            answer = tokens[self._answer_start :]
            drafted_tokens = torch.cat(list(drafted)) if drafted else ()
            logits = self._penalties.penalised(logits, answer, drafted_tokens)
        place = self._prompt_len + self._num_cached
        choice, distributions = choose_each(logits, [self._config], [place], PURPOSE_DRAFT)
        return choice, distributions[0]

    def _read(self, missing: Sequence[int] | Tensor) -> Tensor:
        """Run tokens that the cache lacks, and return the logits after the last."""
        if not isinstance(missing, Tensor):
            missing = [token if token < self.parts.vocab_size else 0 for token in missing]
        logits = self._run(missing)
        self._num_cached += len(missing)
        return logits

    def _run(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Run the model, cache the KV, and return the logits ``[1, Vq]`` after the last token."""
        first = self.position + self._num_cached
        logits = self._runner.run(tokens, range(first, first + len(tokens)), last_only=True)
        return logits[:, : self.vocab_size]

    def _roll_back(self, tokens: Sequence[int], num_verified: int | None = None) -> list[int]:
        """Roll back rejected tokens, and at least the last token, whose logits are needed.

        Args:
            num_verified: how many of the tokens are never rolled back; None: all.

        Returns:
            The tokens that the cache lacks then.
        """
        known = tokens[:-1]
        num_common = common_length(self._cached, known)
        accepted_nodes = []
        if num_common == len(self._cached):
            accepted_nodes = self._accepted(known[num_common:])

        # Of the tree's nodes keep the accepted ones.
        if self._nodes_in_cache:
            places = [self._nodes_in_cache.index(node) for node in accepted_nodes]
            keep_of_last(self.cache, len(self._nodes_in_cache), places)
            self._nodes_in_cache = []

        # Of the tokens before the tree keep those that are in the answer.
        if num_common < len(self._cached):
            self.cache.crop(num_common - len(self._cached))
        accepted_tokens = [self._drafted[node] for node in accepted_nodes]
        self._cached = [*self._cached[:num_common], *accepted_tokens]

        if self.states is not None:
            self.states.num_run = len(self._cached)
            self.states.num_certain = len(tokens) if num_verified is None else num_verified
        if self.target is not None:
            self._take_newest_kv(known, self.target)
        self._num_cached = len(self._cached)
        return list(tokens[self._num_cached :])

    def _take_newest_kv(self, known: Sequence[int], target: Decoder) -> None:
        """Replace this drafter's KV of verified tokens, and its states, by the target's.

        Args:
            known: the tokens whose KV the target has.
            target: has them.
        """
        if len(self._cached) > self._num_replaced:
            self.cache.crop(self._num_replaced - len(self._cached))
        layers = target.newest_kv(len(known) - self._num_replaced)
        for index, (keys, values) in enumerate(layers):
            self.cache.update(keys, values, index)
        self._cached = list(known)
        self._num_replaced = len(known)
        if self.states is not None:
            assert target.states is not None, "the target is this model"
            self.states.take_over(target.states)

    def _accepted(self, following: Sequence[int]) -> list[int]:
        """Return the cached nodes, from the last tree's root on, that have these tokens."""
        node = 0
        path = []
        for token in following:
            child = self._tree.child(self._drafted, node, token)
            if child is None or child not in self._nodes_in_cache:
                break
            path.append(child)
            node = child
        return path


class NgramDrafter(Drafter):
    """Drafts by prompt lookup.

    It proposes the tokens that followed the latest earlier occurrence of the last ones.

    Args:
        prompt: the prompt's token ids.
    """

    def __init__(self, prompt: Sequence[int]):
        self._prompt = list(prompt)
        # Where the latest occurrence of an n-gram ends.
        self._end_of: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, tokens: Sequence[int], tree: Tree) -> Proposal:
        sequence = [*self._prompt, *tokens]
        # Verified tokens are never rolled back, so the index stays valid. The last token has no
        # successor yet.
        for end in range(self._indexed + 1, len(sequence)):
            for length in range(1, min(_LONGEST_NGRAM, end) + 1):
                self._end_of[tuple(sequence[end - length : end])] = end
        self._indexed = len(sequence) - 1
        for length in range(min(_LONGEST_NGRAM, len(sequence)), 0, -1):
            follower = self._end_of.get(tuple(sequence[-length:]))
            if follower is not None:
                return Proposal(sequence[follower : follower + tree.depth])
        return Proposal([])
