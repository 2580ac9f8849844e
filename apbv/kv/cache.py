"""ShardedCache: the KV of a prompt, every token of it kept by exactly one host.

Keys and values are ``[B, Hkv, T, D]``, post-RoPE. Within a host, rows are in token order.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from ..hosts import HostGroup
from ..layout import ContextLayout, intersect, offsets_within

# Decoding appends one row per step; growing the buffers by many rows at once keeps that from copying the cache.
_GROWTH_ROWS = 256


class GrowingLayer(DynamicLayer):
    """A layer of a plain cache that appends in place; transformers' own copies all of its KV for every token."""

    def __init__(self):
        super().__init__()
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.hold(key_states, value_states)
        else:
            self._append(key_states, value_states)
        return self.keys, self.values

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Begin with these, which stay as they are: the first new token copies them to a larger buffer."""
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values = keys, values
        self.is_initialized = True

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        old, new = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        if not self._has_room(new):
            self._buffers = tuple(_grown(states, new + _GROWTH_ROWS) for states in (self.keys, self.values))
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, old:new] = states
        self.keys, self.values = (buffer[:, :, :new] for buffer in self._buffers)

    def _has_room(self, num_rows: int) -> bool:
        """Whether these rows, which somebody may have replaced, lie in a buffer of so many."""
        if self._buffers is None or self._buffers[0].shape[2] < num_rows:
            return False
        held = zip(self._buffers, (self.keys, self.values), strict=True)
        return all(buffer.data_ptr() == states.data_ptr() for buffer, states in held)


def appending_in_place(cache: DynamicCache) -> DynamicCache:
    """The same cache, whose layers will from now on append in place; the tensors that they hold are left alone."""
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, GrowingLayer):
            cache.layers[index] = GrowingLayer()
            if layer.is_initialized:
                cache.layers[index].hold(layer.keys, layer.values)
    return cache


class ShardedLayer(GrowingLayer):
    """One layer's share of the KV.

    The first ``update`` is the prefill: attention gets the full local K and V back, the layer keeps the rows
    that this host owns. Later updates are decoding: host 0 appends the new tokens, the others leave them to
    host 0, and attention gets the host's own share back.
    """

    def __init__(self, kept_rows: Iterable[range], num_prompt_tokens: int, num_fixed_tokens: int, appends: bool):
        super().__init__()
        self._kept_rows = [run for run in kept_rows if len(run)]
        self._num_fixed_tokens = num_fixed_tokens
        self._appends = appends
        self.num_tokens = num_prompt_tokens

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.hold(self._keep(key_states), self._keep(value_states))
            return key_states, value_states
        self.num_tokens += key_states.shape[2]
        if self._appends:
            self._append(key_states, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens of the whole sequence so far, not only this host's."""
        return self.num_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens of the sequence (a count <= 0, as in transformers).

        Raises:
            ValueError: the count is positive, or reaches beyond the query into the context.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, not {tokens_to_remove}")
        croppable = self.num_tokens - self._num_fixed_tokens
        if -tokens_to_remove > croppable:
            raise ValueError(
                f"cannot remove {-tokens_to_remove} tokens: only the last {croppable} of {self.num_tokens} are "
                "kept in order on host 0"
            )
        self.num_tokens += tokens_to_remove
        if self._appends and tokens_to_remove:
            self.keys = self.keys[:, :, :tokens_to_remove]
            self.values = self.values[:, :, :tokens_to_remove]

    def keep_of_last(self, count: int, kept: Sequence[int]) -> None:
        """Of the last ``count`` tokens keep these, and drop the others; see :func:`keep_of_last`."""
        if self._appends:
            _move_to_front(self, count, kept)
        self.crop(len(kept) - count)

    def _keep(self, states: Tensor) -> Tensor:
        rows = [states[:, :, run.start : run.stop] for run in self._kept_rows]
        return torch.cat(rows, dim=2) if rows else states[:, :, :0].clone()


class ShardedCache(Cache):
    """A transformers cache that holds this host's share of a prompt's KV.

    Args:
        num_layers: decoder layers.
        layout: who keeps what.
        host: this host's index.
        keep_query: False where the query will run in a forward pass of its own, which then appends it.
    """

    def __init__(self, num_layers: int, layout: ContextLayout, host: int, keep_query: bool = True):
        self.layout = layout
        self.host = host
        kept = [span for span in layout.cache_spans(host) if keep_query or span != layout.query]
        num_tokens = layout.num_tokens if keep_query else layout.query.start
        rows = offsets_within(layout.local_spans(host), kept)
        fixed = layout.query.start
        super().__init__(
            layers=[ShardedLayer(rows, num_tokens, fixed, appends=host == 0) for _ in range(num_layers)]
        )

    @classmethod
    def of_shares(
        cls, layers: Sequence[tuple[Tensor, Tensor]], layout: ContextLayout, host: int, holds_query: bool = True
    ) -> "ShardedCache":
        """With a host's keys and values of every layer, ``[B, Hkv, T, D]``, its tokens as in ``cache_spans``.

        Args:
            holds_query: False where the query is still to be appended.
        """
        cache = cls(len(layers), layout, host, keep_query=holds_query)
        for layer, (keys, values) in zip(cache.layers, layers, strict=True):
            layer.hold(keys, values)
        return cache

    def initialize_empty(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device) -> None:
        """Hold no rows: the share of a host that takes no part in the prefill."""
        empty = torch.empty(1, num_kv_heads, 0, head_dim, dtype=dtype, device=device)
        for layer in self.layers:
            layer.update(empty, empty)

    def owned_spans(self, host: int) -> list[range]:
        """Token positions whose KV a host holds now, generated tokens included, in row order."""
        length = self.get_seq_length()
        spans = [intersect(span, range(length)) for span in self.layout.cache_spans(host)]
        return [*spans, range(self.layout.num_tokens, length)] if host == 0 else spans

    def nbytes(self) -> int:
        """Bytes of keys and values on this host."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def gather(self, hosts: HostGroup, to_host: int = 0) -> DynamicCache | None:
        """Collect the whole KV on one host, in position order; collective.

        Returns:
            A plain transformers DynamicCache with ``[1, Hkv, n, D]`` per layer on ``to_host``, None elsewhere.

        Raises:
            HostError: a host failed meanwhile.
        """
        if hosts.size == 1:
            return DynamicCache((layer.keys, layer.values) for layer in self.layers)
        counts = [sum(map(len, self.owned_spans(host))) for host in range(hosts.size)]
        exchange = self._start_gather(0, hosts, to_host, counts)
        gathered = DynamicCache()
        for index in range(len(self.layers)):
            received = exchange.wait()
            if index + 1 < len(self.layers):
                exchange = self._start_gather(index + 1, hosts, to_host, counts)
            if hosts.rank == to_host:
                gathered.update(*self._in_position_order(received), index)
        return gathered if hosts.rank == to_host else None

    def _start_gather(self, index: int, hosts: HostGroup, to_host: int, counts: list[int]):
        layer = self.layers[index]
        share = torch.stack([layer.keys, layer.values])
        _, batch, heads, _, dim = share.shape
        nothing = share.new_empty(0)
        parts = [share if host == to_host else nothing for host in range(hosts.size)]
        here = hosts.rank == to_host
        return hosts.all_to_all(parts, [(2, batch, heads, count, dim) if here else (0,) for count in counts])

    def _in_position_order(self, shares: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Merge ``[2, B, Hkv, T_h, D]`` per host into keys and values ``[B, Hkv, n, D]``."""
        runs = []
        for host, share in enumerate(shares):
            spans = self.owned_spans(host)
            lengths = [len(span) for span in spans]
            runs += zip((span.start for span in spans), share.split(lengths, dim=3), strict=True)
        runs = [rows for _, rows in sorted(runs, key=lambda run: run[0]) if rows.shape[3]]
        keys, values = zip(*runs, strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)


def keep_of_last(cache: Cache, count: int, kept: Sequence[int]) -> None:
    """Of a cache's last ``count`` tokens, which a forward pass has just appended, keep some and drop the others.

    Only these rows are touched: a branch of a tree becomes the sequence without a copy of what lies before it.

    Args:
        cache: a ShardedCache, or a plain transformers DynamicCache.
        kept: ascending numbers in 0 .. count - 1.
    """
    for layer in cache.layers:
        if isinstance(layer, ShardedLayer):
            layer.keep_of_last(count, kept)
        else:
            _move_to_front(layer, count, kept)
            layer.crop(len(kept) - count)


def last_rows(cache: Cache, count: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the last ``count`` rows of every layer, ``[1, Hkv, count, D]``, where they lie."""
    rows = [(layer.keys.shape[2] - count, layer) for layer in cache.layers]
    return [(layer.keys[:, :, start:], layer.values[:, :, start:]) for start, layer in rows]


def replace_last(cache: Cache, count: int, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Put these keys and values of every layer, ``[1, Hkv, T, D]``, in place of the last ``count`` rows."""
    if count:
        cache.crop(-count)
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)


def _move_to_front(layer: DynamicLayer, count: int, kept: Sequence[int]) -> None:
    """Within a layer's last ``count`` rows."""
    if list(kept) == list(range(len(kept))):
        return
    for states in (layer.keys, layer.values):
        tail = states[:, :, states.shape[2] - count :]
        tail[:, :, : len(kept)] = tail[:, :, list(kept)]


def _grown(states: Tensor, rows: int) -> Tensor:
    batch, heads, old, dim = states.shape
    buffer = states.new_empty(batch, heads, rows, dim)
    buffer[:, :, :old] = states
    return buffer
