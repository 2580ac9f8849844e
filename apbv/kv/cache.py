"""KV caches: one that appends in place, and one that is sharded over the hosts.

Keys and values are ``[B, Hkv, T, D]``, post-RoPE. In a sharded cache each token is owned by exactly
one host; within a host, rows are in token order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ..device.copies import to_device
from ..errors import InvalidRequestError
from ..hosts import HostGroup, Pending
from ..layout import ContextLayout, intersect

# Decoding appends a few rows per step; growing the buffers by many rows at once keeps that from
# copying the cache.
GROWTH_ROWS = 256


class KVLayer(Protocol):
    """What every layer of a KV cache has.

    Attributes:
        keys, values: ``[B, Hkv, T, D]`` each.
    """

    keys: Tensor
    values: Tensor

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens; their number is negative, as transformers' caches take it."""


def kv_layers(cache: Cache) -> Sequence[KVLayer]:
    """Return the layers of a cache that holds keys and values in all of them."""
    return cast("Sequence[KVLayer]", cache.layers)  # transformers declares other kinds, too


class GrowingLayer(DynamicLayer):
    """Cache layer that appends KV in place.

    Transformers' own layer copies all of its KV for every token.

    Attributes:
        buffers: storage of the rows, with spare room, ``[B, Hkv, capacity, D]`` each; None if rows
            must be copied to buffers before appending.
        places: int64 ``[S]`` on the device, the places in the buffers at which ``update`` writes S
            rows (:func:`writing_at`). It then returns whole buffers, including rows that do not
            count. None: it appends.
    """

    keys: Tensor  # once it is initialized
    values: Tensor
    buffers: tuple[Tensor, Tensor] | None = None
    places: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values ``[B, Hkv, S, D]``, and return all of them for attention."""
        places = self.places
        if places is not None:
            buffers = self.buffers
            assert buffers is not None  # they have room there
            key_buffer, value_buffer = buffers
            key_buffer.index_copy_(2, places, key_states)
            value_buffer.index_copy_(2, places, value_states)
            return buffers
        if not self.is_initialized:
            self.hold(key_states, value_states)
            return self.keys, self.values
        num_rows = self.keys.shape[2]
        count = key_states.shape[2]
        self.make_room(count)
        assert self.buffers is not None  # they have room now
        key_buffer, value_buffer = self.buffers
        key_buffer[:, :, num_rows : num_rows + count] = key_states
        value_buffer[:, :, num_rows : num_rows + count] = value_states
        self.extend(count)
        return self.keys, self.values

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Start with these keys and values, which are never written to.

        Appending copies them to a buffer.
        """
        self.dtype = keys.dtype
        self.device = keys.device
        self.keys = keys
        self.values = values
        self.is_initialized = True

    def reserve(self, like: Tensor, num_rows: int) -> None:
        """Start with ``num_rows`` rows that the caller fills in, in buffers with room for more.

        Args:
            like: ``[B, Hkv, any, D]``, of the dtype and on the device of the rows.
        """
        batch, heads, _, dim = like.shape
        shape = (batch, heads, num_rows + GROWTH_ROWS, dim)
        keys = like.new_empty(shape)
        values = like.new_empty(shape)
        self.buffers = (keys, values)
        self.hold(keys[:, :, :num_rows], values[:, :, :num_rows])

    def has_room(self, count: int) -> bool:
        """Return whether the buffers still hold the rows, and have room for ``count`` more."""
        if self.buffers is None or self.buffers[0].shape[2] < self.keys.shape[2] + count:
            return False
        key_buffer, value_buffer = self.buffers
        has_keys = key_buffer.data_ptr() == self.keys.data_ptr()
        has_values = value_buffer.data_ptr() == self.values.data_ptr()
        return has_keys and has_values

    def make_room(self, count: int) -> None:
        """Make sure that the rows are in buffers with room for ``count`` more, by a copy if not."""
        if self.has_room(count):
            return
        keys = self.keys
        values = self.values
        num_rows = keys.shape[2]
        self.reserve(keys, num_rows + count)
        self.keys = self.keys[:, :, :num_rows].copy_(keys)
        self.values = self.values[:, :, :num_rows].copy_(values)

    def extend(self, count: int) -> None:
        """Count ``count`` more rows that were written into the buffers."""
        num_rows = self.keys.shape[2] + count
        assert self.buffers is not None  # the rows were written there
        keys, values = self.buffers
        self.keys = keys[:, :, :num_rows]
        self.values = values[:, :, :num_rows]

    def release(self) -> None:
        """Free the rows; the layer must not be used afterwards."""
        del self.keys
        del self.values
        self.buffers = None


def growing_layers(cache: Cache) -> Sequence[GrowingLayer]:
    """Return the layers of a cache that appends in place (:func:`appending_in_place`)."""
    return cast("Sequence[GrowingLayer]", cache.layers)


@contextmanager
def writing_at(cache: Cache, places: Sequence[Tensor]) -> Iterator[None]:
    """Make a cache write at places that only the device knows, until the end of the block.

    Its layers, which have room there, return their whole buffers to attention. The rows count once
    :meth:`GrowingLayer.extend` is called. Addresses and shapes thus stay the same across forward
    passes.

    Args:
        places: of every layer int64 ``[S]``, one for each new token.
    """
    layers = growing_layers(cache)
    for layer, places_in_layer in zip(layers, places, strict=True):
        layer.places = places_in_layer
    try:
        yield
    finally:
        for layer in layers:
            layer.places = None


def appending_in_place(cache: DynamicCache) -> DynamicCache:
    """Make a cache append in place from now on, and return it.

    Its current tensors are not modified.
    """
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, GrowingLayer):
            continue
        growing = GrowingLayer()
        cache.layers[index] = growing
        if isinstance(layer, CacheLayerMixin) and layer.is_initialized:
            assert layer.keys is not None  # it is initialized
            assert layer.values is not None
            growing.hold(layer.keys, layer.values)
    return cache


def first_rows(cache: DynamicCache, counts: Sequence[int], view: DynamicCache) -> DynamicCache:
    """Put the first rows of a cache into an empty one that shares the memory, and return it.

    Args:
        counts: the number of rows of each layer.
        view: the empty cache.
    """
    for index, (layer, count) in enumerate(zip(kv_layers(cache), counts, strict=True)):
        empty = layer.keys[:, :, :0]
        view.update(empty, empty, index)
        view_layer = kv_layers(view)[index]
        view_layer.keys = layer.keys[:, :, :count]
        view_layer.values = layer.values[:, :, :count]
    return view


def first_tokens(cache: DynamicCache, num_tokens: int, view: DynamicCache) -> DynamicCache:
    """Put the first tokens of a cache whose layers hold all of them into an empty one.

    See :func:`first_rows`.
    """
    return first_rows(cache, [num_tokens] * len(cache.layers), view)


def keep_of_last(cache: Cache, count: int, chosen: Sequence[int]) -> None:
    """Drop a cache's last tokens, which a forward pass has just appended, except the chosen ones.

    Only these rows are moved: accepting a branch of a draft tree copies no earlier KV.

    Args:
        cache: a ShardedCache, or a plain transformers DynamicCache.
        count: the number of last tokens.
        chosen: ascending numbers in 0 .. count - 1.
    """
    are_first = list(chosen) == list(range(len(chosen)))
    rows = None
    for layer in kv_layers(cache):
        if not are_first and getattr(layer, "holds_newest", True):
            if rows is None:
                rows = to_device(chosen, layer.keys.device, torch.int64)
            for states in (layer.keys, layer.values):
                tail = states[:, :, states.shape[2] - count :]
                tail[:, :, : len(chosen)] = tail.index_select(2, rows)
        layer.crop(len(chosen) - count)


class ShardedLayer(GrowingLayer):
    """Holds this host's rows of one layer's KV.

    The first ``update`` is the prefill's: it returns the keys and values of all local tokens to
    attention, and stores the rows that this host owns. Later updates are decoding's: host 0 appends
    the new tokens, the other hosts store nothing, and attention gets the rows stored here.

    Args:
        owned_rows: runs of the local tokens whose rows are stored.
        num_prompt_tokens: the tokens of the whole prompt, or before the query if the query runs in
            a later forward pass.
        num_fixed_tokens: how many of the first tokens cannot be removed.
        appends: see ``holds_newest``.

    Attributes:
        holds_newest: whether new tokens are appended to these rows, as they are on host 0.
        num_tokens: the tokens of the whole sequence so far.
        num_dropped: how many of them have no row here, because a prefill has dropped them before
            this layer.
    """

    def __init__(
        self,
        owned_rows: Sequence[range],
        num_prompt_tokens: int,
        num_fixed_tokens: int,
        appends: bool,
    ):
        super().__init__()
        self._owned_rows = owned_rows or [range(0)]
        self._num_fixed_tokens = num_fixed_tokens
        self.holds_newest = appends
        self.num_tokens = num_prompt_tokens
        self.num_dropped = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            self.num_tokens += key_states.shape[2]
            if self.holds_newest:
                return super().update(key_states, value_states)
            return self.keys, self.values
        # The rows that this host owns are copied, so that the other local rows can be freed.
        if not self.holds_newest:
            keys = [key_states[:, :, rows.start : rows.stop] for rows in self._owned_rows]
            values = [value_states[:, :, rows.start : rows.stop] for rows in self._owned_rows]
            self.hold(torch.cat(keys, dim=2), torch.cat(values, dim=2))
            return key_states, value_states
        # On host 0 they are copied into buffers with room for the tokens that follow.
        owned_rows = self._owned_rows
        num_local = key_states.shape[2]
        if num_local < owned_rows[-1].stop:  # a layer before has dropped some
            assert len(owned_rows) == 1, "rows are dropped on a host that computes all tokens"
            self.num_dropped = owned_rows[0].stop - num_local
            owned_rows = [range(num_local)]
        self.reserve(key_states, sum(len(run) for run in owned_rows))
        row = 0
        for run in owned_rows:
            stop = row + len(run)
            self.keys[:, :, row:stop] = key_states[:, :, run.start : run.stop]
            self.values[:, :, row:stop] = value_states[:, :, run.start : run.stop]
            row = stop
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the number of tokens of the whole sequence so far, on all hosts together."""
        return self.num_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of the sequence.

        Args:
            tokens_to_remove: minus their number, as transformers' caches take it.

        Raises:
            InvalidRequestError: the count is positive, or reaches beyond the query into the
                context.
        """
        if tokens_to_remove > 0:
            raise InvalidRequestError(
                f"crop needs minus the number of tokens to remove, not {tokens_to_remove}"
            )
        num_croppable = self.num_tokens - self._num_fixed_tokens
        if -tokens_to_remove > num_croppable:
            raise InvalidRequestError(
                f"cannot remove {-tokens_to_remove} tokens: only the last {num_croppable} of "
                f"{self.num_tokens} are kept in order on host 0"
            )
        self.num_tokens += tokens_to_remove
        if self.holds_newest and tokens_to_remove:
            self.keys = self.keys[:, :, :tokens_to_remove]
            self.values = self.values[:, :, :tokens_to_remove]


class ShardedCache(Cache):
    """A transformers cache that holds this host's share of a prompt's KV.

    Args:
        num_layers: the model's layers that have KV.
        layout: which tokens each host owns.
        host: this host's index.
        keep_query: False if the query runs in a later forward pass, which then appends its KV.
        decode_host: the host that :meth:`gather_by_layer` sends the KV to.

    Attributes:
        shards: its layers.
    """

    def __init__(
        self,
        num_layers: int,
        layout: ContextLayout,
        host: int,
        keep_query: bool = True,
        decode_host: int = 0,
    ):
        rows = layout.cache_rows(host)
        num_tokens = layout.num_tokens
        appends = host == 0
        if not keep_query:
            num_tokens = layout.query.start
            if appends:  # the query is the last of its rows
                rows = rows[:-1]
        self.shards: list[ShardedLayer] = []
        for _ in range(num_layers):
            self.shards.append(ShardedLayer(rows, num_tokens, layout.query.start, appends))
        super().__init__(layers=list(self.shards))
        self.decode_host = decode_host
        self.layout = layout
        self._gather: LayerGather | None = None  # begun by a forward pass

    @classmethod
    def of_shares(
        cls,
        layers: Sequence[tuple[Tensor, Tensor]],
        layout: ContextLayout,
        host: int,
        holds_query: bool = True,
    ) -> "ShardedCache":
        """Build the cache from a host's keys and values of every layer.

        Args:
            layers: ``[B, Hkv, T, D]`` each, the tokens as in the layout's ``cache_spans``.
            layout: which tokens each host owns.
            holds_query: False if the query is still to be appended.
        """
        cache = cls(len(layers), layout, host, keep_query=holds_query)
        for layer, (keys, values) in zip(cache.shards, layers, strict=True):
            layer.hold(keys, values)
        return cache

    def owned_spans(self, host: int) -> list[range]:
        """Return which tokens a host holds now, generated tokens included, in row order."""
        layout = self.layout
        length = self.get_seq_length()
        spans = [intersect(span, range(length)) for span in layout.cache_spans(host)]
        if host == 0:
            spans.append(range(layout.num_tokens, length))
        return spans

    def gather(
        self, hosts: HostGroup, to_host: int = 0, releases: bool = False
    ) -> DynamicCache | None:
        """Collect the whole KV on one host, in position order; collective.

        Args:
            releases: free each layer's share as soon as it has been sent, so that ``to_host`` never
                holds much more than one copy of the KV. This cache must not be used afterwards.

        Returns:
            A transformers cache with ``[1, Hkv, n, D]`` per layer on ``to_host``, None elsewhere.

        Raises:
            HostError: a host failed meanwhile.
        """
        if hosts.size == 1:
            gathered = DynamicCache()
            for share in self.shards:
                layer = GrowingLayer()
                layer.hold(share.keys, share.values)
                layer.buffers = share.buffers if releases else None
                gathered.layers.append(layer)
            return gathered
        gather = self._gather
        self._gather = None
        if gather is None:
            gather = self._start_gather(hosts, to_host, releases)
        return gather.finish()

    def gather_by_layer(self, hosts: HostGroup) -> "LayerGather":
        """Begin to send the KV to its decode host, layer by layer in a forward pass; collective.

        The pass calls :meth:`LayerGather.send_next` as soon as a layer's KV is complete, behind its
        attention: the transfer then overlaps with the layer's MLP, when there is no other
        communication. :meth:`gather` waits for the last transfer.
        """
        self._gather = self._start_gather(hosts, self.decode_host, releases=True)
        return self._gather

    def _start_gather(self, hosts: HostGroup, to_host: int, releases: bool) -> "LayerGather":
        spans = [self.owned_spans(host) for host in range(hosts.size)]
        return LayerGather(self.shards, spans, hosts, to_host, releases)


class LayerGather:
    """Sends layers to a cache on one host, one after the other; collective.

    A layer's transfer is waited for when the next one is sent. This object does not refer to the
    cache that sends, which refers to it: a cancelled prefill's KV is freed at once.

    Args:
        layers: this host's shares.
        spans: the token positions of each host's rows.
        hosts: the hosts.
        to_host: the one that gets the layers.
        releases: whether a share is freed as soon as it has been sent.
    """

    def __init__(
        self,
        layers: Sequence[ShardedLayer],
        spans: list[list[range]],
        hosts: HostGroup,
        to_host: int,
        releases: bool,
    ):
        self._layers = layers
        self._spans = spans
        self._counts = []  # of each host's rows
        for host_spans in spans:
            self._counts.append(sum(len(span) for span in host_spans))
        self._hosts = hosts
        self._to_host = to_host
        self._releases = releases
        self._gathered = DynamicCache()
        self._num_sent = 0
        self._exchange: Pending[list[Tensor]] | None = None  # of the newest layer

    def __del__(self):
        # A buffer in transfer must not be freed, also if the prefill has ended early.
        if self._exchange is not None:
            self._exchange.wait()

    def send_next(self) -> None:
        """Start to send the next layer, whose KV is complete, after waiting for the one before."""
        shares = self._receive()
        layer = self._layers[self._num_sent]
        rows = torch.stack([layer.keys, layer.values])
        self._exchange = self._hosts.gather_rows(rows, self._counts, self._to_host, dim=3)
        self._num_sent += 1
        self._place(shares)

    def finish(self) -> DynamicCache | None:
        """Send what has not been sent, and return the cache on its host, None elsewhere."""
        while self._num_sent < len(self._layers):
            self.send_next()
        self._place(self._receive())
        return self._gathered if self._hosts.rank == self._to_host else None

    def _receive(self) -> list[Tensor] | None:
        """Wait for the newest layer's transfer, and free its share; None: there is none."""
        if self._exchange is None:
            return None
        shares = self._exchange.wait()
        self._exchange = None
        if self._releases:
            self._layers[self._num_sent - 1].release()
        return shares

    def _place(self, shares: list[Tensor] | None) -> None:
        """Add a received layer to the cache."""
        if shares is not None and self._hosts.rank == self._to_host:
            self._gathered.layers.append(_in_position_order(shares, self._spans))


def _in_position_order(shares: list[Tensor], spans: list[list[range]]) -> GrowingLayer:
    """Merge the hosts' shares into one layer ``[B, Hkv, n, D]`` that has room for an answer.

    Args:
        shares: keys and values ``[2, B, Hkv, T_h, D]`` of each host.
        spans: the token positions of each host's rows.
    """
    layer = GrowingLayer()
    layer.reserve(shares[0][0], sum(share.shape[3] for share in shares))
    for share, host_spans in zip(shares, spans, strict=True):
        row = 0
        for span in host_spans:
            keys, values = share[:, :, :, row : row + len(span)]
            layer.keys[:, :, span.start : span.stop] = keys
            layer.values[:, :, span.start : span.stop] = values
            row += len(span)
    return layer
