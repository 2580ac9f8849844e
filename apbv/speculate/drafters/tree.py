"""Draft trees, verified in one forward pass of the target.

A chain is a tree of one branch; others offer several guesses for every place. The shape is static,
as in the first EAGLE (Li et al., 2024). The draft runs once per level and the target once per tree,
both with tree attention (SpecInfer, Miao et al., 2023): a token sees the sequence so far and its
ancestors. HIPPO and ParallelVLM compare with this under the name SD-Tree.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import torch
from torch import Tensor

from ...config import SamplingParams
from ...decode.sampling import NotFiniteError, choose_each


@dataclass(frozen=True)
class Tree:
    """A draft tree's shape: node 0, the root, is the last new token, nodes 1 .. N are drafted.

    Attributes:
        parents: each node's parent, -1 for the root. Nodes are numbered level by level, and the
            children of a node one after the other, the likeliest first.
    """

    parents: tuple[int, ...]

    @classmethod
    def chain(cls, num_drafted: int) -> "Tree":
        """Return the tree of one branch."""
        return cls(tuple(range(-1, num_drafted)))

    @classmethod
    def of(cls, num_drafted: int, max_depth: int, max_children: int = sys.maxsize) -> "Tree":
        """Return the tree of the N nodes most likely to be accepted.

        The chain of first guesses is among them.

        That is where every guess for a place is right half as often as the one before it: the child
        of rank r (from 0) with probability 2^-(r + 1), and a whole path with 2^-(depth + sum of
        ranks). Of equals the deeper one is taken: it can gain more. 25 nodes on 5 levels come close
        to EAGLE's tree.

        Args:
            num_drafted: N >= 1; the tree has fewer where N do not fit in.
            max_depth: the largest number of levels below the root; the chain has as many, if N is
                large enough.
            max_children: the largest number of a node's children: the size of the vocabulary.
        """
        # Ranks, from the root on.
        longest = min(num_drafted, max_depth)
        paths: list[tuple[int, ...]] = [(0,) * depth for depth in range(1, longest + 1)]
        # (depth + sum of ranks, -depth, path)
        heap: list[tuple[int, int, tuple[int, ...]]] = [(1, -1, (0,))]
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
        """N, the nodes below the root."""
        return len(self.parents) - 1

    @property
    def depth(self) -> int:
        """The number of levels below the root."""
        return self.depths[-1]

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of each node; 0 for the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node, the likeliest first."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def inner_levels(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that have children, for each depth."""
        levels: list[list[int]] = [[] for _ in range(self.depth)]
        for node, children in enumerate(self.children):
            if children:
                levels[self.depths[node]].append(node)
        return tuple(map(tuple, levels))

    @cached_property
    def visible(self) -> Tensor:
        """The attention mask, bool ``[N + 1, N + 1]``: node i sees its ancestors and itself."""
        visible = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            visible[node] |= visible[parent]
        return visible

    def cut(self, depth: int) -> "Tree":
        """Return the tree of the levels up to a depth."""
        if depth >= self.depth:
            return self
        num_nodes = sum(1 for node_depth in self.depths if node_depth <= depth)
        return self.first(num_nodes - 1)

    def first(self, num_drafted: int) -> "Tree":
        """Return the tree of the first ``num_drafted`` drafted nodes."""
        if num_drafted >= self.num_drafted:
            return self
        return Tree(self.parents[: 1 + num_drafted])

    def child(self, tokens: Sequence[int], node: int, token: int) -> int | None:
        """Return the child of a node that has this token, where node i has ``tokens[i]``.

        None if none has.
        """
        for child in self.children[node]:
            if tokens[child] == token:
                return child
        return None


def verify_tree(
    tree: Tree, tokens: Sequence[int], logits: Tensor, index: int, config: SamplingParams
) -> tuple[list[int], int]:
    """Accept the path from the root along which the tree has the target's own tokens.

    At each node the target's next token is chosen as autoregressive decoding chooses it: the
    argmax, or a draw with the random number of that place in the sequence. If a child has this
    token, the path goes on there; else it ends, and the token follows the path. So the output is
    autoregressive decoding's, token for token, at every temperature: the draft decides only how
    many of these tokens come out of one forward pass.

    No other lossless verification of the same candidates accepts more often. The token that follows
    a node has to be distributed as the target's p; so it is one of the children with probability
    p(children) at most, and here it is one exactly that often. (The children are the draft's most
    probable tokens, not draws from q: there is no ratio p / q to accept by.)

    Args:
        tokens: the nodes' tokens.
        logits: the target's, ``[N + 1, V]``: row i is for what follows node i.
        index: the index in the sequence of the first drafted token.

    Returns:
        The accepted nodes, the root first, and the token after the last of them.
    """
    # For all nodes at once: otherwise every node of the path would need a GPU synchronization.
    choice, _ = choose_each(logits, [config] * len(tree), [index + depth for depth in tree.depths])
    chosen, are_finite = choice.fetch().wait()
    path = [0]
    while True:
        node = path[-1]
        if not are_finite[node]:
            raise NotFiniteError
        token = chosen[node]
        child = tree.child(tokens, node, token)
        if child is None:
            return path, token
        path.append(child)
