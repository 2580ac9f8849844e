"""Places a prompt's KV: gathered on one host, mostly host 0, or sharded over all hosts.

Callers use the interface :class:`PlacedKV` for both.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from transformers import DynamicCache

from ..hosts import HostGroup
from ..layout import ContextLayout
from ..model.linear_attention import LinearStates
from .cache import ShardedCache, appending_in_place, first_tokens
from .select import collect_kv, select_kv

Layers = list[tuple[Tensor, Tensor]]  # of every decoder layer keys and values, [1, Hkv, T, D]


class PlacedKV:
    """KV of one prompt: the common interface of :class:`GatheredKV` and :class:`ShardedKV`.

    Attributes:
        hosts: the hosts that prefilled the prompt.
        cache: the KV that this host holds; None if it holds none.
        num_tokens: n, the tokens of the prompt.
        attending: the hosts over which attention to this KV has to be merged; None if one host has
            all of it.
        states: those of a hybrid's linear attention after the prompt, the same on every host; None:
            it has none.
    """

    hosts: HostGroup
    cache: DynamicCache | ShardedCache | None
    num_tokens: int
    attending: HostGroup | None
    states: LinearStates | None

    def continued(self) -> DynamicCache | ShardedCache | None:
        """Drop the tokens of an earlier answer; return the cache to which a new answer's are
        appended."""
        if (
            self.cache is not None
            and (surplus := self.cache.get_seq_length() - self.num_tokens) > 0
        ):
            self.cache.crop(-surplus)
        return self.cache

    @property
    def num_bytes(self) -> int:
        """The bytes that this KV keeps allocated on this host; a view counts as the whole
        underlying tensor."""
        layers = () if self.cache is None else self.cache.layers
        tensors = chain.from_iterable((layer.keys, layer.values) for layer in layers)
        tensors = chain(tensors, *(() if self.states is None else self.states.tensors))
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class GatheredKV(PlacedKV):
    """KV gathered on one host, its home, which attends to it alone. Methods that speak of host 0
    mean its home.

    Args:
        cache: ``[1, Hkv, n, D]`` per layer on the home, None elsewhere. An answer is appended to
            it.
        num_tokens: n.
        states: see :class:`PlacedKV`; the same on every host.
    """

    attending = None

    def __init__(
        self,
        cache: DynamicCache | None,
        num_tokens: int,
        hosts: HostGroup,
        states: LinearStates | None = None,
    ):
        self.cache = None if cache is None else appending_in_place(cache)
        self.hosts = hosts
        self.num_tokens = num_tokens
        self.states = states

    def to_dynamic_cache(self, host: int) -> DynamicCache | None:
        """Return a separate cache with the prompt's KV ``[1, Hkv, n, D]`` on one host, None
        elsewhere; collective.

        The cache may share memory with this KV.

        Raises:
            ValueError: the KV cannot be given to that host.
        """
        if host != 0:
            raise ValueError(
                f"the KV was gathered on host 0; prefill with kv='sharded' to get it on host {host}"
            )
        return self.whole

    @property
    def whole(self) -> DynamicCache | None:
        """The prompt's KV without a copy; None if not all of it is on this host. Not collective."""
        return (
            None
            if self.cache is None
            else first_tokens(self.cache, self.num_tokens, DynamicCache())
        )

    def held(self) -> tuple[Sequence[range], Layers] | None:
        """Return which of the prompt's tokens this host holds, in row order, and their KV; None: it
        holds none."""
        if self.cache is None:
            return None
        return [range(self.num_tokens)], [(layer.keys, layer.values) for layer in self.whole.layers]

    def prefix(self, num_tokens: int, layout: ContextLayout) -> "GatheredKV":
        """Return a view of the KV before the query; None if the query's KV is sharded, too."""
        view = None if self.cache is None else first_tokens(self.cache, num_tokens, DynamicCache())
        return GatheredKV(view, num_tokens, self.hosts)

    def behind(self, layout: ContextLayout) -> "GatheredKV":
        """Return this prefix's KV as that of a longer prompt, whose query is still to be appended.

        This KV itself is unchanged.
        """
        return GatheredKV(self.whole, layout.num_tokens, self.hosts)

    def select(self, chosen: Sequence[Tensor]) -> DynamicCache | None:
        """Copy some tokens' KV to host 0, and return None elsewhere; collective.

        Args:
            chosen: see :func:`apbv.kv.select.select_kv`.
        """
        return None if self.cache is None else select_kv(self.whole, chosen)

    def first_layers(self, count: int) -> DynamicCache | None:
        """Return the first layers' KV of all tokens on host 0, None elsewhere; collective. It may
        share memory."""
        cache = self.whole
        if cache is not None:
            cache.layers = cache.layers[:count]
        return cache


class ShardedKV(PlacedKV):
    """KV sharded over all hosts, whose partial attention results are merged (APB-V, Eq. 5).

    Its methods are those of :class:`GatheredKV`.
    """

    def __init__(self, cache: ShardedCache, hosts: HostGroup, states: LinearStates | None = None):
        self.cache = cache
        self.hosts = hosts
        self.attending = hosts
        self.states = states
        self.num_tokens = cache.layout.num_tokens

    def gathered(self) -> GatheredKV:
        """Gather the KV on its home, and free the shards; collective. This KV must not be used
        afterwards."""
        cache = self.cache.gather(self.hosts, self.cache.home, releases=True)
        return GatheredKV(cache, self.num_tokens, self.hosts, self.states)

    def to_dynamic_cache(self, host: int) -> DynamicCache | None:
        cache = self.cache.gather(self.hosts, host)
        return None if cache is None else first_tokens(cache, self.num_tokens, DynamicCache())

    def held(self) -> tuple[Sequence[range], Layers] | None:
        spans = self.cache.layout.cache_spans(self.hosts.rank)
        count = sum(map(len, spans))
        return (spans, self._rows(count)) if count else None

    def prefix(self, num_tokens: int, layout: ContextLayout) -> "ShardedKV | None":
        if layout.query != range(num_tokens, layout.num_tokens):
            return None  # the query is split over the hosts, too
        rows = sum(
            len(span) for span in layout.cache_spans(self.hosts.rank) if span != layout.query
        )
        return self._with_query_to_come(rows, layout)

    def behind(self, layout: ContextLayout) -> "ShardedKV":
        return self._with_query_to_come(None, layout)

    def select(self, chosen: Sequence[Tensor]) -> DynamicCache | None:
        return collect_kv(self.cache, chosen, self.hosts)

    def first_layers(self, count: int) -> DynamicCache | None:
        num_heads = self.cache.layers[0].keys.shape[1]
        all_tokens = torch.arange(self.num_tokens).expand(num_heads, -1)
        return self.select([all_tokens] * count)

    def _rows(self, count: int | None) -> Layers:
        return [
            (layer.keys[:, :, :count], layer.values[:, :, :count]) for layer in self.cache.layers
        ]

    def _with_query_to_come(self, num_rows: int | None, layout: ContextLayout) -> "ShardedKV":
        shares = ShardedCache.of_shares(
            self._rows(num_rows), layout, self.hosts.rank, holds_query=False
        )
        return ShardedKV(shares, self.hosts)
