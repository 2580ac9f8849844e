"""A prompt's KV where it is placed: gathered on one host, or sharded over all hosts.

Callers use the interface :class:`PlacedKV` for both.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from ..errors import InvalidConfigError
from ..hosts import HostGroup
from ..layout import ContextLayout
from ..model.linear_attention import LinearStates
from .cache import ShardedCache, appending_in_place, first_rows, first_tokens, kv_layers
from .select import collect_kv, select_kv

Layers = list[tuple[Tensor, Tensor]]  # keys and values [1, Hkv, T, D] of every decoder layer


class PlacedKV(ABC):
    """KV of one prompt: the common interface of :class:`GatheredKV` and :class:`ShardedKV`.

    The KV of a :class:`GatheredKV` is on its decode host, which the methods below call host 0.

    Attributes:
        hosts: the hosts that prefilled the prompt.
        cache: the KV that this host holds; None if it holds none.
        num_tokens: n, the tokens of the prompt.
        attending: the hosts over which attention to this KV has to be merged; None if one host has
            all of it.
        states: a hybrid's states of linear attention after the prompt, the same on every host;
            None: the model has none.
    """

    hosts: HostGroup
    cache: DynamicCache | ShardedCache | None
    num_tokens: int
    attending: HostGroup | None
    states: LinearStates | None

    @property
    @abstractmethod
    def num_dropped(self) -> Sequence[int]:
        """How many of the prompt's tokens have no KV in each layer.

        The prefill has dropped them before that layer. Empty: none in any layer.
        """

    @property
    def holds_all_tokens(self) -> bool:
        """Whether all layers have the KV of all tokens, and are thus equally long."""
        return not any(self.num_dropped)

    def require_all_tokens(self, use: str) -> None:
        """Reject KV whose layers differ in length.

        Args:
            use: what cannot be done with it, such as "saved".

        Raises:
            InvalidConfigError: a layer has no KV of some tokens.
        """
        if not self.holds_all_tokens:
            raise InvalidConfigError(
                f"KV from which tokens were dropped between layers cannot be {use}: its layers "
                "differ in length"
            )

    def continued(self) -> DynamicCache | ShardedCache | None:
        """Drop an earlier answer's tokens, and return the cache to append a new answer to."""
        if self.cache is None:
            return None
        num_answer_tokens = self._length() - self.num_tokens
        if num_answer_tokens > 0:
            self.cache.crop(-num_answer_tokens)
        return self.cache

    @abstractmethod
    def _length(self) -> int:
        """Return the number of tokens of prompt and answer in the cache of this host."""

    @property
    def num_bytes(self) -> int:
        """The bytes that this KV keeps allocated on this host.

        A view counts as the whole underlying tensor.
        """
        tensors = []
        if self.cache is not None:
            for layer in kv_layers(self.cache):
                tensors += [layer.keys, layer.values]
        if self.states is not None:
            tensors += self.states.all_tensors
        return sum(int(tensor.untyped_storage().nbytes()) for tensor in tensors)

    @abstractmethod
    def to_dynamic_cache(self, host: int) -> DynamicCache | None:
        """Return a separate cache with the prompt's KV on one host, None elsewhere; collective.

        The cache has ``[1, Hkv, n, D]`` per layer, and may share memory with this KV.

        Raises:
            InvalidConfigError: the KV cannot be given to that host.
        """

    @abstractmethod
    def local_kv(self) -> tuple[Sequence[range], Layers] | None:
        """Return the prompt's tokens whose KV this host holds, in row order, and this KV.

        None if it holds none.
        """

    @abstractmethod
    def prefix(self, num_tokens: int, layout: ContextLayout) -> "PlacedKV | None":
        """Return a view of the KV before the query, with the states there.

        None if the query's KV is sharded, too, or no states from before it were kept.

        Args:
            num_tokens: the tokens before the query.
            layout: the layout of the prompt.
        """

    @abstractmethod
    def behind(self, layout: ContextLayout) -> "PlacedKV":
        """Return this KV as the prefix of a longer prompt, whose query is still to be appended.

        This KV itself is unchanged.

        Args:
            layout: the layout of the longer prompt.
        """

    @abstractmethod
    def select(self, chosen: Sequence[Tensor]) -> DynamicCache | None:
        """Copy some tokens' KV to host 0, and return None elsewhere; collective.

        Args:
            chosen: per layer ``[Hkv, T]``, ascending token numbers
                (:func:`apbv.kv.select.select_kv`).
        """

    @abstractmethod
    def first_layers(self, count: int) -> DynamicCache | None:
        """Return the first layers' KV of all tokens on host 0, None elsewhere; collective.

        It has ``[1, Hkv, n, D]`` per layer, and may share memory with this KV.
        """


class GatheredKV(PlacedKV):
    """KV gathered on one host, its decode host, which attends to it alone.

    Args:
        cache: ``[1, Hkv, n, D]`` per layer on the decode host, None elsewhere. An answer is
            appended to it.
        num_tokens: n, the tokens of the prompt.
        states: a hybrid's states of linear attention, the same on every host.
        num_dropped: see :class:`PlacedKV`.
    """

    cache: DynamicCache | None
    attending = None
    num_dropped: Sequence[int] = ()

    def __init__(
        self,
        cache: DynamicCache | None,
        num_tokens: int,
        hosts: HostGroup,
        states: LinearStates | None = None,
        num_dropped: Sequence[int] = (),
    ):
        self.cache = None if cache is None else appending_in_place(cache)
        self.hosts = hosts
        self.num_tokens = num_tokens
        self.states = states
        self.num_dropped = num_dropped

    def _length(self) -> int:
        assert self.cache is not None, "this host has the KV"
        num_rows = self.cache.get_seq_length()  # of its first layer
        return num_rows + self.num_dropped[0] if self.num_dropped else num_rows

    def to_dynamic_cache(self, host: int) -> DynamicCache | None:
        if host != 0:
            raise InvalidConfigError(
                f"the KV was gathered on host 0; prefill with kv='sharded' to get it on host {host}"
            )
        self.require_all_tokens("given to transformers")
        return self.whole

    @property
    def whole(self) -> DynamicCache | None:
        """The prompt's KV without a copy; None if not all of it is on this host. Not collective."""
        return self._first_tokens(self.num_tokens)

    def _first_tokens(self, num_tokens: int) -> DynamicCache | None:
        """Return a view of the first tokens' KV; None if this host has no KV."""
        if self.cache is None:
            return None
        counts = [num_tokens] * len(self.cache.layers)
        for layer, dropped in enumerate(self.num_dropped):
            counts[layer] -= dropped
        return first_rows(self.cache, counts, DynamicCache())

    def local_kv(self) -> tuple[Sequence[range], Layers] | None:
        self.require_all_tokens("saved or sent")
        whole = self.whole
        if whole is None:
            return None
        return [range(self.num_tokens)], [(layer.keys, layer.values) for layer in kv_layers(whole)]

    def prefix(self, num_tokens: int, layout: ContextLayout) -> "GatheredKV | None":
        self.require_all_tokens("kept for another question")
        states = None
        if self.states is not None:
            states = self.states.before_question
            if states is None:
                return None  # the question was split over the hosts
        return GatheredKV(self._first_tokens(num_tokens), num_tokens, self.hosts, states)

    def behind(self, layout: ContextLayout) -> "GatheredKV":
        return GatheredKV(
            self.whole, layout.num_tokens, self.hosts, self.states, num_dropped=self.num_dropped
        )

    def select(self, chosen: Sequence[Tensor]) -> DynamicCache | None:
        self.require_all_tokens("selected for a draft")
        whole = self.whole
        return None if whole is None else select_kv(whole, chosen)

    def first_layers(self, count: int) -> DynamicCache | None:
        cache = self.whole
        if cache is not None:
            cache.layers = cache.layers[:count]
        return cache


class ShardedKV(PlacedKV):
    """KV sharded over all hosts, whose partial attention results are merged (APB-V, Eq. 5)."""

    cache: ShardedCache

    def __init__(self, cache: ShardedCache, hosts: HostGroup, states: LinearStates | None = None):
        self.cache = cache
        self.hosts = hosts
        self.attending = hosts
        self.states = states
        self.num_tokens = cache.layout.num_tokens

    @property
    def num_dropped(self) -> Sequence[int]:
        return [layer.num_dropped for layer in self.cache.shards]

    def _length(self) -> int:
        return self.cache.get_seq_length()

    def gathered(self) -> GatheredKV:
        """Gather the KV on its decode host, and free the shards; collective.

        This KV must not be used afterwards.
        """
        num_dropped = self.num_dropped
        cache = self.cache.gather(self.hosts, self.cache.decode_host, releases=True)
        return GatheredKV(cache, self.num_tokens, self.hosts, self.states, num_dropped)

    def to_dynamic_cache(self, host: int) -> DynamicCache | None:
        self.require_all_tokens("given to transformers")
        cache = self.cache.gather(self.hosts, host)
        return None if cache is None else first_tokens(cache, self.num_tokens, DynamicCache())

    def local_kv(self) -> tuple[Sequence[range], Layers] | None:
        self.require_all_tokens("saved or sent")
        spans = self.cache.layout.cache_spans(self.hosts.rank)
        num_rows = sum(len(span) for span in spans)
        if num_rows == 0:
            return None
        return spans, self._rows(num_rows)

    def prefix(self, num_tokens: int, layout: ContextLayout) -> "ShardedKV | None":
        if layout.query != range(num_tokens, layout.num_tokens):
            return None  # the query is split over the hosts, too
        self.require_all_tokens("kept for another question")
        num_rows = 0
        for span in layout.cache_spans(self.hosts.rank):
            if span != layout.query:
                num_rows += len(span)
        states = None
        if self.states is not None:
            states = self.states.before_question
            if states is None:
                return None  # they were not kept
        return self._before_query(num_rows, layout, states)

    def behind(self, layout: ContextLayout) -> "ShardedKV":
        self.require_all_tokens("continued by another question")
        return self._before_query(None, layout, self.states)

    def select(self, chosen: Sequence[Tensor]) -> DynamicCache | None:
        self.require_all_tokens("selected for a draft")
        return collect_kv(self.cache, chosen, self.hosts)

    def first_layers(self, count: int) -> DynamicCache | None:
        num_heads = self.cache.shards[0].keys.shape[1]
        all_tokens = torch.arange(self.num_tokens).expand(num_heads, -1)
        return self.select([all_tokens] * count)

    def _rows(self, count: int | None) -> Layers:
        """Return every layer's first rows on this host; None: all rows."""
        layers = []
        for layer in self.cache.shards:
            layers.append((layer.keys[:, :, :count], layer.values[:, :, :count]))
        return layers

    def _before_query(
        self, num_rows: int | None, layout: ContextLayout, states: LinearStates | None
    ) -> "ShardedKV":
        """Return the KV of a prompt's first rows, to which the query is still to be appended.

        Args:
            states: a hybrid's states behind these rows.
        """
        rows = self._rows(num_rows)
        cache = ShardedCache.of_shares(rows, layout, self.hosts.rank, holds_query=False)
        return ShardedKV(cache, self.hosts, states)
