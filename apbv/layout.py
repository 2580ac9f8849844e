"""Plans which tokens are anchor, context blocks and query, and which host owns them.

It does not need torch.
A run of consecutive token positions is a ``range`` with step 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .errors import InvalidRequestError

# The shortest default anchor and passing block of a prompt that is split: with shorter ones a
# pretrained model's answers were less accurate (docs/accuracy.md).
FEWEST_ANCHOR = 128
FEWEST_PASSING = 256
# A passing block of n / 32 was closer to full attention than the default at 16,384 and 32,000
# tokens on 8 hosts.
ACCURATE_PASSING = 32


class LayoutError(InvalidRequestError):
    """Requested lengths do not fit the input; the message names every number involved."""


def split_evenly(items: range, num_runs: int) -> list[range]:
    """Cut a run into runs whose lengths differ by at most one, longer ones first (Eq. 6)."""
    length, num_longer = divmod(len(items), num_runs)
    runs = []
    start = items.start
    for number in range(num_runs):
        stop = start + length
        if number < num_longer:
            stop += 1
        runs.append(range(start, stop))
        start = stop
    return runs


def can_share_kv_heads(num_kv_heads: int, num_members: int) -> bool:
    """Return whether a host's T processes can share KV heads, or replicate them, evenly."""
    return num_kv_heads % num_members == 0 or num_members % num_kv_heads == 0


def kv_heads_of_member(num_kv_heads: int, member: int, num_members: int) -> range:
    """Return the KV heads that one of a host's T processes has.

    Fewer heads than processes are replicated: each process has the head of its query heads, which
    are 1/T of all in their order.

    Args:
        num_kv_heads: of the whole model; see :func:`can_share_kv_heads`.
        member: the number of the process.
        num_members: T.
    """
    if num_kv_heads >= num_members:
        return split_evenly(range(num_kv_heads), num_members)[member]
    head = member * num_kv_heads // num_members
    return range(head, head + 1)


def take(runs: Sequence[range], part: range) -> tuple[range, ...]:
    """Return a part of several runs that follow one another, by places in all of them."""
    taken = []
    first = 0
    for run in runs:
        inside = intersect(range(first, first + len(run)), part)
        if len(inside) > 0:
            taken.append(run[inside.start - first : inside.stop - first])
        first += len(run)
    return tuple(taken)


def intersect(a: range, b: range) -> range:
    """Return the common run of two runs; empty where they do not overlap."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


@dataclass(frozen=True)
class ContextLayout:
    """Splits n prompt tokens over H hosts: ``[anchor | context block 0 .. V-1 | query]``.

    With zigzag there are V = 2H virtual hosts, and host h holds blocks h and 2H-1-h; without, V = H
    and host h holds block h. A layout without blocks is a prompt that host 0 computes alone, all of
    it "query". Methods that give every token of the prompt to one host have blocks only: no anchor,
    and an empty query at n.

    Attributes:
        num_hosts: H.
        anchor: token positions of the anchor block, which every host sees.
        blocks: token positions of the context block of every virtual host.
        query: token positions of the query block, replicated on every host; ends at n.
        passing_len: l_p, the largest number of KV pairs that a block passes on, per layer and KV
            head.
        anchor_copy: prompt tokens that are computed once more, in front of each host's own, as the
            anchor of all blocks but the first: the prefix, the question, and the start of the
            context. Nothing of it is kept. Empty where ``anchor`` is the anchor, which else is
            empty.
        passing_schedule: l_p in each of equally long runs of the layers with attention, from the
            first. Empty: ``passing_len`` in all layers.
        splits_anchor: whether each host computes a part of the anchor, or of its copy, whose keys
            and values all hosts exchange in every layer; else every host computes all of it.
    """

    num_hosts: int
    anchor: range
    blocks: tuple[range, ...]
    query: range
    passing_len: int
    anchor_copy: tuple[range, ...] = ()
    passing_schedule: tuple[int, ...] = ()
    splits_anchor: bool = False

    @property
    def num_tokens(self) -> int:
        """n, the tokens of the prompt."""
        return self.query.stop

    @property
    def is_split(self) -> bool:
        """Whether the hosts share the prompt; False if host 0 computes it alone."""
        return bool(self.blocks)

    @property
    def last_token_host(self) -> int | None:
        """The host that alone computes the prompt's last token; None if every host does."""
        if not self.is_split:
            return 0
        if len(self.query) > 0:
            return None
        return 0 if self.zigzag else self.num_hosts - 1

    @property
    def zigzag(self) -> bool:
        """Whether there are two virtual hosts on every host."""
        return len(self.blocks) == 2 * self.num_hosts

    def virtual_hosts(self, host: int) -> tuple[int, ...]:
        """Return a host's virtual hosts in token order: (h, 2H-1-h) with zigzag, (h,) without."""
        if not self.is_split:
            return ()
        if self.zigzag:
            return (host, len(self.blocks) - 1 - host)
        return (host,)

    def blocks_of(self, host: int) -> tuple[range, ...]:
        """Return the tokens of a host's blocks, in token order."""
        return tuple(self.blocks[virtual_host] for virtual_host in self.virtual_hosts(host))

    def num_passed(self, virtual_host: int) -> int:
        """Return k_v, how many KV pairs a virtual host's block passes on, per layer and KV head."""
        return min(self.passing_len, len(self.blocks[virtual_host]))

    @property
    def longest_block(self) -> int:
        """The tokens of the longest block; 0 without blocks."""
        return max((len(block) for block in self.blocks), default=0)

    @property
    def max_passed(self) -> int:
        """The rows of an exchange buffer: the largest k_v of all virtual hosts."""
        return min(self.passing_len, self.longest_block)

    @property
    def passing_lengths(self) -> tuple[int, ...]:
        """l_p in each run of the layers with attention; a single one without a schedule."""
        return self.passing_schedule or (self.passing_len,)

    @property
    def early(self) -> "ContextLayout":
        """The layout in the first run of the layers with attention."""
        return replace(self, passing_len=self.passing_lengths[0])

    @property
    def most_passing(self) -> "ContextLayout":
        """The layout in the layers whose blocks pass on most."""
        return replace(self, passing_len=max(self.passing_lengths))

    def in_layer(self, layer: int, num_layers: int) -> "ContextLayout":
        """Return the layout that a layer with attention has.

        Args:
            layer: its number among the layers with attention, from 0.
            num_layers: how many of these there are.
        """
        if not self.passing_schedule:
            return self
        run = layer * len(self.passing_schedule) // num_layers
        return replace(self, passing_len=self.passing_schedule[run])

    @property
    def passing_is_complete(self) -> bool:
        """Whether blocks pass on everything, which is full attention unless the anchor is a copy.

        l_p is at least a block in every layer then, and the anchor no copy.
        """
        return min(self.passing_lengths) >= self.longest_block and not self.anchor_copy

    @property
    def anchor_len(self) -> int:
        """l_a, the tokens of the anchor, or of its copy."""
        return sum(len(span) for span in self._seen_anchor)

    @property
    def _seen_anchor(self) -> tuple[range, ...]:
        """The tokens of the anchor that blocks see: the anchor, or its copy."""
        return self.anchor_copy or (self.anchor,)

    def anchor_part(self, host: int) -> range:
        """Return which part of the anchor, or of its copy, a host computes: places in 0 .. l_a."""
        whole = range(self.anchor_len)
        if self.splits_anchor:
            return split_evenly(whole, self.num_hosts)[host]
        return whole

    @property
    def longest_anchor_part(self) -> int:
        """The places of the longest part of the anchor that a host computes."""
        return len(self.anchor_part(0))

    def anchor_slice(self, host: int) -> range:
        """Return the slice of the anchor that a host attends the query to (App. B.2) and caches."""
        return split_evenly(self.anchor, self.num_hosts)[host]

    def local_spans(self, host: int) -> tuple[range, ...]:
        """Return the tokens that a host computes: anchor, or its part of it, its blocks, query.

        They are in token order, but for a copy.
        """
        if not self.is_split:
            return (self.query,) if host == 0 else ()
        anchor = self._seen_anchor
        if self.splits_anchor:
            anchor = take(anchor, self.anchor_part(host))
        return (*anchor, *self.blocks_of(host), self.query)

    def cache_spans(self, host: int) -> tuple[range, ...]:
        """Return the tokens whose KV a host keeps, in token order.

        Over all hosts each token occurs once.
        """
        if not self.is_split:
            return (self.query,) if host == 0 else ()
        spans = (self.anchor_slice(host), *self.blocks_of(host))
        if host == 0:
            return (*spans, self.query)
        return spans

    def block_rows(self, host: int) -> tuple[range, ...]:
        """Return where the blocks of a host, and then the query, lie among its local tokens."""
        rows = []
        start = len(self.anchor_part(host))
        for span in (*self.blocks_of(host), self.query):
            rows.append(range(start, start + len(span)))
            start += len(span)
        return tuple(rows)

    def kept_anchor_rows(self, host: int) -> range:
        """Return where the slice of the anchor that a host caches lies among its local tokens."""
        kept = self.anchor_slice(host)
        if self.splits_anchor:  # it computes no other anchor token
            return range(len(kept))
        return kept

    def cache_rows(self, host: int) -> tuple[range, ...]:
        """Return where the tokens of :meth:`cache_spans` lie among the local tokens, by span."""
        if not self.is_split:
            return self.cache_spans(host)
        *block_rows, query_rows = self.block_rows(host)
        rows = (self.kept_anchor_rows(host), *block_rows)
        if host == 0:
            return (*rows, query_rows)
        return rows


def plan_layout(
    *,
    num_hosts: int,
    num_tokens: int,
    context_start: int,
    query_start: int,
    anchor_len: int | None,
    passing_len: int | None,
    zigzag: bool,
    early_passing_len: int | None = None,
    passing_budget: float | None = None,
    passing_weights: Sequence[float] | None = None,
) -> ContextLayout:
    """Split ``[prefix | context | query]`` over the hosts.

    Args:
        num_hosts: H.
        num_tokens: n, the whole prompt.
        context_start: the first visual token; all tokens before it belong to the anchor.
        query_start: first token of the query block, after the last visual token.
        anchor_len: l_a. None takes ``max(128, ceil(n / 64))``, at most a quarter of the prompt
            (below n = 512 the floor alone would leave nothing to split). 0 makes the prefix context
            too.
        passing_len: l_p. None takes ``max(256, ceil(n / 128))``, or ``ceil(n / 64)`` without
            zigzag.
        zigzag: cut the context into 2H blocks; else into H.
        early_passing_len: l_p in the first quarter of the layers, where it is more.
        passing_budget: what all blocks together pass on, as a share of the prompt, instead of l_p:
            each block passes on an equal part of it, rounded up.
        passing_weights: one number for each of equally long runs of the layers, from the first. A
            run's l_p is to l_p as its weight to the mean weight, rounded.

    Returns:
        The layout; it has no blocks where the context is too short to give every virtual host a
        token.

    Raises:
        LayoutError: the query is empty, or a given anchor length leaves no context.
    """
    if not 0 <= context_start <= query_start < num_tokens:
        raise LayoutError(
            "a prompt needs 0 <= context_start <= query_start < num_tokens, or its query is "
            f"empty, got context_start={context_start}, query_start={query_start}, "
            f"num_tokens={num_tokens}"
        )
    if anchor_len is not None and anchor_len >= query_start > 0:
        raise LayoutError(
            f"anchor_len={anchor_len} leaves no context: only {query_start} of the prompt's "
            f"{num_tokens} tokens come before the query"
        )
    if anchor_len is None:
        anchor_len = default_anchor_len(num_tokens)
    if anchor_len == 0:
        anchor = range(0)
    else:
        anchor = range(max(context_start, anchor_len))
    num_blocks = num_hosts * (2 if zigzag else 1)
    if passing_budget is not None:
        passing_len = math.ceil(passing_budget * num_tokens / num_blocks)
    if passing_len is None:
        divisor = 128 if zigzag else 64
        passing_len = max(FEWEST_PASSING, -(-num_tokens // divisor))
    if query_start - anchor.stop < num_blocks:
        return single_host_layout(num_hosts, num_tokens)
    return ContextLayout(
        num_hosts=num_hosts,
        anchor=anchor,
        blocks=tuple(split_evenly(range(anchor.stop, query_start), num_blocks)),
        query=range(query_start, num_tokens),
        passing_len=passing_len,
        passing_schedule=_passing_schedule(passing_len, early_passing_len, passing_weights),
    )


def _passing_schedule(
    passing_len: int, early_len: int | None, weights: Sequence[float] | None
) -> tuple[int, ...]:
    """Return l_p in each run of the layers; empty where it is the same in all."""
    if early_len is not None and early_len > passing_len:
        return (early_len, passing_len, passing_len, passing_len)
    if weights is None:
        return ()
    mean = sum(weights) / len(weights)
    return tuple(round(passing_len * weight / mean) for weight in weights)


def default_anchor_len(num_tokens: int) -> int:
    """Return the default l_a of a prompt of n tokens."""
    return min(max(FEWEST_ANCHOR, -(-num_tokens // 64)), num_tokens // 4)


def with_question_in_anchor(
    layout: ContextLayout, context_start: int, anchor_len: int | None
) -> ContextLayout:
    """Give a layout APB's anchor: a copy of the prompt's start with the question in front.

    The copy is the prefix, the question, and then the start of the context. A single block needs
    none.

    Args:
        layout: what :func:`plan_layout` returns for ``anchor_len=0``.
        context_start: see :func:`plan_layout`.
        anchor_len: l_a, the copy's tokens; at least prefix and question are copied. None: the
            default of :func:`plan_layout`.
    """
    if len(layout.blocks) < 2:
        return layout
    if anchor_len is None:
        anchor_len = default_anchor_len(layout.num_tokens)
    stop = min(max(context_start, anchor_len - len(layout.query)), layout.query.start)
    prefix = range(context_start)
    start_of_context = range(context_start, stop)
    return replace(layout, anchor_copy=(prefix, layout.query, start_of_context))


def shared_out_layout(num_hosts: int, num_tokens: int, zigzag: bool) -> ContextLayout:
    """Give every token of the prompt to exactly one host, in 2H blocks (zigzag) or H.

    The layout has no blocks where there are too few tokens to give every block one.
    """
    num_blocks = num_hosts * (2 if zigzag else 1)
    if num_tokens < num_blocks:
        return single_host_layout(num_hosts, num_tokens)
    blocks = tuple(split_evenly(range(num_tokens), num_blocks))
    return ContextLayout(num_hosts, range(0), blocks, range(num_tokens, num_tokens), passing_len=0)


def star_layout(num_hosts: int, num_tokens: int, query_start: int) -> ContextLayout:
    """Cut the context into Star Attention's H equal blocks; the first is every host's anchor.

    The layout has no blocks where there are too few tokens to give every block one.

    Raises:
        LayoutError: the query is empty.
    """
    if query_start >= num_tokens:
        raise LayoutError(f"the query after the context of {query_start} tokens is empty")
    if query_start < num_hosts:
        return single_host_layout(num_hosts, num_tokens)
    anchor, *others = split_evenly(range(query_start), num_hosts)
    # Host 0's block is the anchor itself.
    blocks = (range(anchor.stop, anchor.stop), *others)
    return ContextLayout(num_hosts, anchor, blocks, range(query_start, num_tokens), passing_len=0)


def single_host_layout(num_hosts: int, num_tokens: int) -> ContextLayout:
    """Return the layout in which host 0 computes and keeps the whole prompt."""
    return ContextLayout(num_hosts, range(0), (), range(num_tokens), passing_len=0)
