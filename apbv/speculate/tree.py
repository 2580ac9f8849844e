"""A tree of drafted tokens, verified in one forward pass: several guesses for every place instead of one.

The shape is static, as in the first EAGLE (Li et al., 2024). The draft runs once per level and the target once per
tree, both with tree attention (SpecInfer, Miao et al., 2023): a token sees the sequence so far and its ancestors.
HIPPO and ParallelVLM compare with this under the name SD-Tree.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from ..config import SamplingConfig
from ..decode.decoder import NO_TOKEN, Decoder, Ending, Stop, choose_token, require_token, run_language_model
from ..decode.sampling import NotFiniteError, sample
from ..hosts import HostGroup
from ..kv.cache import appending_in_place, keep_of_last, replace_last
from ..model.attention import TreeAttention
from ..model.parts import ModelParts
from ..timeline import Recorder
from .draft_kv import forget_prompt
from .drafters import NewestKV, common_length, packed, unpacked
from .pace import Pace
from .serial import LOSING, SWITCHED_OFF, SpeculationStats, say


@dataclass(frozen=True)
class Tree:
    """The shape of a tree of N + 1 tokens: node 0, the root, is the last token said, the others are drafted.

    Attributes:
        parents: of each node, -1 for the root. Nodes are numbered level by level, and the children of a node one
            after the other, the likeliest first.
    """

    parents: tuple[int, ...]

    @classmethod
    def of(cls, num_drafted: int, max_depth: int, max_children: int = sys.maxsize) -> "Tree":
        """The chain of first guesses, and about it the nodes that are most likely to be right.

        That is, where every guess for a place is right half as often as the one before it: the child of rank r
        (from 0) with probability 2^-(r + 1), and a whole path with 2^-(depth + sum of ranks). Of equals the deeper
        one is taken: it can gain more. 25 nodes on 5 levels come close to EAGLE's tree.

        Args:
            num_drafted: N >= 1; fewer where so many do not fit in.
            max_depth: levels below the root, at most. The chain has as many, if there are as many nodes.
            max_children: of a node: there are no more tokens to guess.
        """
        paths = [(0,) * depth for depth in range(1, min(num_drafted, max_depth) + 1)]  # ranks, from the root on
        heap = [(1, -1, (0,))]  # (depth + sum of ranks, -depth, path)
        while len(paths) < num_drafted and heap:
            cost, _, path = heappop(heap)
            *above, rank = path
            if any(path):
                paths.append(path)
            if rank + 1 < max_children:
                heappush(heap, (cost + 1, -len(path), (*above, rank + 1)))
            if len(path) < max_depth:
                heappush(heap, (cost + 1, -len(path) - 1, (*path, 0)))
        paths = [(), *sorted(paths, key=lambda path: (len(path), path))]
        return cls(tuple(paths.index(path[:-1]) if path else -1 for path in paths))

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def num_drafted(self) -> int:
        return len(self.parents) - 1

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return self.depths[-1]

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each node; 0 for the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        nodes = range(len(self))
        return tuple(tuple(child for child in nodes if self.parents[child] == node) for node in nodes)

    @cached_property
    def inner_levels(self) -> tuple[tuple[int, ...], ...]:
        """For each depth the nodes that have children."""
        return tuple(
            tuple(n for n, children in enumerate(self.children) if children and self.depths[n] == depth)
            for depth in range(self.depth)
        )

    @cached_property
    def visible(self) -> Tensor:
        """bool ``[N + 1, N + 1]``: row i is what node i sees, itself and its ancestors."""
        visible = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            visible[node] |= visible[parent]
        return visible

    def is_leaf(self, node: int) -> bool:
        return not self.children[node]

    def cut(self, depth: int) -> "Tree":
        """Its first levels."""
        return self if depth >= self.depth else Tree(self.parents[: sum(d <= depth for d in self.depths)])

    def child(self, tokens: Sequence[int], node: int, token: int) -> int | None:
        """Which child of a node says this token, where node i says ``tokens[i]``; None: no one."""
        return next((child for child in self.children[node] if tokens[child] == token), None)


def verify_tree(
    tree: Tree, tokens: Sequence[int], logits: Tensor, index: int, config: SamplingConfig
) -> tuple[list[int], int]:
    """Walk down the tree for as long as it has what the target says.

    At each node the target's next token is chosen as autoregressive decoding chooses it: the argmax, or a draw
    with the random number of that place in the sequence. If a child says it, the walk goes on there; else it ends,
    and the token follows the path. So the output is autoregressive decoding's, token for token, at every
    temperature: what was drafted decides only how many of these tokens come out of one forward pass.

    Of the ways to verify the same candidates without loss, none accepts more often. Whatever it accepts at a node,
    or says instead, has to be distributed as the target's p; so it is one of the children with probability
    p(children) at most, and here it is one exactly that often. (The children are the draft's most probable tokens,
    not draws from q: there is no ratio p / q to accept by.)

    Args:
        tokens: of the nodes.
        logits: the target's, ``[N + 1, V]``: row i is for what follows node i.
        index: of the first drafted place in the sequence.

    Returns:
        The nodes that stand, the root first, and the token behind the last of them.
    """
    path = [0]
    while True:
        token = sample(logits[path[-1]], config, index + len(path) - 1)
        child = tree.child(tokens, path[-1], token)
        if child is None:
            return path, token
        path.append(child)


class TreeProposer(Protocol):
    """Fills a tree with guesses of how a sequence goes on."""

    def propose(self, tokens: Sequence[int], tree: Tree) -> list[int]:
        """What the nodes 1 .. N say, where the root is the last of all the new ``tokens`` (at least one).

        Raises:
            NotFiniteError: the draft's logits are NaN or infinite.
        """


class TreeDrafter:
    """A language model: the children of a node are the tokens that it finds most probable there.

    Its arguments are those of :class:`~apbv.speculate.drafters.ModelDrafter`. Like that it is told nothing but the
    tokens so far, and finds out by itself along which of its branches they went.
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
        self._behind: list[int] = []  # the nodes whose KV lies behind these
        self._newest_kv: NewestKV | None = None
        self._num_verified = 0  # so many new tokens in the cache with the target's KV

    def follow(self, newest_kv: NewestKV) -> None:
        """See :meth:`ModelDrafter.follow`."""
        self._newest_kv = newest_kv

    def propose(self, tokens: Sequence[int], tree: Tree) -> list[int]:
        self._keep_common(tokens)
        missing = list(tokens[len(self._cached) :])
        in_order = torch.ones(len(missing), len(missing), dtype=torch.bool).tril()
        logits = self._advance(missing, range(len(missing)), in_order)[-1:]
        self._cached += missing
        self._tree, self._drafted = tree, [tokens[-1]]
        for depth, nodes in enumerate(tree.inner_levels):
            if depth:
                self._behind += nodes
                level = [self._drafted[node] for node in nodes]
                logits = self._advance(level, [depth - 1] * len(nodes), tree.visible[list(nodes)][:, self._behind])
            counts = [len(tree.children[node]) for node in nodes]
            best = logits[:, : self._vocab_size].topk(max(counts), dim=-1)
            is_finite = best.values[:, :1].isfinite()  # NaN counts as the largest number
            rows = torch.cat([is_finite.long(), best.indices], dim=1).tolist()  # in one wait for the device
            if not all(row[0] for row in rows):
                raise NotFiniteError
            for (_, *row), count in zip(rows, counts, strict=True):
                self._drafted += row[:count]
        return self._drafted[1:]

    def forget_prompt(self, kept: Tensor) -> None:
        """Keep of the prompt's KV only these rows, ``[T]``, ascending; before anything is proposed."""
        self._cache = appending_in_place(forget_prompt(self._cache, kept, len(self._cached)))

    def _advance(self, tokens: Sequence[int], depths: Sequence[int], visible: Tensor) -> Tensor:
        """Logits after tokens that stand so far behind the cached ones, of the last of which they see some."""
        readable = [token if token < self._parts.vocab_size else 0 for token in tokens]
        position = self._position + len(self._cached)
        attention = TreeAttention(visible.to(self._parts.device), backend=self._parts.backend)
        return run_language_model(self._parts, readable, position, self._cache, attention, depths)

    def _keep_common(self, tokens: Sequence[int]) -> None:
        """Forget what was rejected, and at least the last token, whose logits are wanted."""
        known = tokens[:-1]
        common = common_length(self._cached, known)
        node, path = 0, []
        for token in known[common:] if common == len(self._cached) else ():
            node = self._tree.child(self._drafted, node, token)
            if node not in self._behind:
                break
            path.append(node)
        keep_of_last(self._cache, len(self._behind), [self._behind.index(node) for node in path])
        self._cache.crop(common - len(self._cached))
        self._cached = [*self._cached[:common], *(self._drafted[node] for node in path)]
        self._behind = []
        if self._newest_kv is not None:
            verified = self._num_verified
            replace_last(self._cache, len(self._cached) - verified, self._newest_kv(len(known) - verified))
            self._cached, self._num_verified = list(known), len(known)


def generate_by_tree(
    decoder: Decoder,
    drafter: TreeProposer | None,
    logits: Tensor,
    prompt_len: int,
    hosts: HostGroup,
    config: SamplingConfig,
    eos_token_ids: tuple[int, ...],
    tree: Tree,
    on_token: Callable[[int], None] | None = None,
    stop: Stop | None = None,
    drop_losing_draft: bool = False,
    adapts_depth: bool = False,
) -> tuple[list[int], SpeculationStats]:
    """:func:`apbv.speculate.serial.generate_speculatively` with a tree per round in place of a window.

    The tokens are those of decoding without a draft, also where they are sampled; see :func:`verify_tree`.

    Args:
        drafter: on the leader; None on the others.
        tree: what is drafted per round, on every host.
        drop_losing_draft: as there.
        adapts_depth: draft only as many levels of the tree as are expected to pay.

    Returns:
        The new tokens, and the statistics, in which a node of a tree is a drafted token.

    Raises:
        AgreedError: as there.
    """
    stats = SpeculationStats(record=Recorder("decoding", hosts.clock))
    pace = Pace("auto" if adapts_depth else tree.depth, drop_losing_draft)
    tokens: list[int] = []
    ending = Ending(eos_token_ids, config.max_new_tokens, stop)
    token, has_ended = choose_token(logits, prompt_len, tokens, hosts, config, ending)
    new, is_drafting = [token], True
    while True:
        say(new, tokens, on_token)
        if has_ended:
            return tokens, stats
        # The target adds one token to those that it accepts.
        shape, drafted = tree.cut(config.max_new_tokens - len(tokens) - 1), None
        if is_drafting and shape.num_drafted:
            with stats.record.span("draft") as details:
                shape, drafted = _fill(shape, drafter, tokens, hosts, pace, stats)
                details["tokens"] = shape.num_drafted
            is_drafting = drafted is not None
        else:
            shape = tree.cut(0)
        drafted = drafted or tokens[-1:]
        verdict = None
        with stats.record.span("verify", tokens=len(shape)) as details:
            rows = decoder.advance_tree(drafted, shape.depths, shape.visible)
            if hosts.is_leader:
                try:
                    path, token = verify_tree(shape, drafted, rows, prompt_len + len(tokens), config)
                    new, has_ended = ending.cut(tokens, [*(drafted[node] for node in path[1:]), token])
                    verdict = [token, len(new), has_ended, *packed(path, shape.depth + 1)]
                except NotFiniteError:
                    verdict = [NO_TOKEN, 1, True, *packed([0], shape.depth + 1)]
            token, num_new, has_ended, *path = hosts.broadcast_ints(verdict, shape.depth + 5)
            require_token(token, tokens)
            path = unpacked(path)
            new = [*(drafted[node] for node in path[1:]), token][:num_new]
            # All new tokens but the last are in the KV then, and no others.
            decoder.keep_path(len(shape), path[: len(new)])
            details["accepted"] = len(path) - 1
        stats.rounds += is_drafting
        stats.num_target_forwards += 1
        stats.num_drafted += shape.num_drafted
        stats.num_accepted += len(path) - 1
        stats.num_rejections += not shape.is_leaf(path[-1])
        if is_drafting:
            pace.learn(shape.depth, len(path) - 1, len(new), *stats.seconds_of_round())


def _fill(
    tree: Tree,
    drafter: TreeProposer | None,
    tokens: list[int],
    hosts: HostGroup,
    pace: Pace,
    stats: SpeculationStats,
) -> tuple[Tree, list[int] | None]:
    """The levels of a tree that are drafted, and what every node of them says, the root included; on every host.

    None instead where host 0 has switched the draft off.
    """
    numbers = None
    if hosts.is_leader:
        depth, said = SWITCHED_OFF, []
        if pace.is_losing():
            stats.switch_off(LOSING, len(tokens))
        else:
            depth = min(pace.next_window(), tree.depth)
            try:
                said = drafter.propose(tokens, tree.cut(depth)) if depth else []
            except NotFiniteError as error:
                stats.switch_off(f"it gave {error}", len(tokens))
                depth = SWITCHED_OFF
        numbers = [depth, *said, *[0] * (tree.num_drafted - len(said))]
    depth, *said = hosts.broadcast_ints(numbers, 1 + tree.num_drafted)
    if depth == SWITCHED_OFF:
        return tree.cut(0), None
    shape = tree.cut(depth)
    return shape, [tokens[-1], *said[: shape.num_drafted]]
