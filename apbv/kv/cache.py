"""This module defines a KV cache that is spread over the hosts; each token is owned by exactly one of them.

Keys and values are ``[B, Hkv, T, D]``, post-RoPE. Within a host, rows are in token order.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from ..hosts import Exchange, HostGroup
from ..layout import ContextLayout, intersect, offsets_within
from .growing import GrowingLayer, growing_cache


class ShardedLayer(GrowingLayer):
    """A ShardedLayer holds this host's rows of one layer's KV.

    The first ``update`` is the prefill's: it returns the keys and values of all local tokens to attention, and
    stores the rows that this host owns. Later updates are decoding's: host 0 appends the new tokens, the other
    hosts store nothing, and attention gets the host's own rows.

    Attributes:
        holds_newest: whether new tokens are appended to these rows, as they are on host 0.
    """

    def __init__(self, owned_rows: Iterable[range], num_prompt_tokens: int, num_fixed_tokens: int, appends: bool):
        super().__init__()
        self._owned_rows = [run for run in owned_rows if len(run)]
        self._num_fixed_tokens = num_fixed_tokens
        self.holds_newest = appends
        self.num_tokens = num_prompt_tokens

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self._store(key_states, value_states)
            return key_states, value_states
        self.num_tokens += key_states.shape[2]
        if self.holds_newest:
            self._append(key_states, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the number of tokens of the whole sequence so far, not only of this host's rows."""
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
        if self.holds_newest and tokens_to_remove:
            self.keys = self.keys[:, :, :tokens_to_remove]
            self.values = self.values[:, :, :tokens_to_remove]

    def release(self) -> None:
        """Free the rows, which another host has received."""
        self.keys = self.values = self.buffers = None

    def _store(self, key_states: Tensor, value_states: Tensor) -> None:
        """Copy the rows that this host owns, so that the other local rows can be freed."""
        num_rows = sum(map(len, self._owned_rows))
        if self.holds_newest:
            self.reserve(key_states, num_rows)
        else:
            shape = (*key_states.shape[:2], num_rows, key_states.shape[3])
            self.hold(key_states.new_empty(shape), value_states.new_empty(shape))
        row = 0
        for run in self._owned_rows:
            self.keys[:, :, row : row + len(run)] = key_states[:, :, run.start : run.stop]
            self.values[:, :, row : row + len(run)] = value_states[:, :, run.start : run.stop]
            row += len(run)


class ShardedCache(Cache):
    """A ShardedCache is a transformers cache that holds this host's share of a prompt's KV.

    Where tokens are dropped inside the model, later layers hold fewer tokens, in a layout of their own, which
    counts those that are left; answers are appended to all layers alike.

    Args:
        num_layers: decoder layers; more may follow by :meth:`add_layers`.
        layout: which tokens each host owns.
        host: this host's index.
        keep_query: False where the query runs in a later forward pass, which then appends its KV.

    Attributes:
        layouts: of every layer.
    """

    def __init__(self, num_layers: int, layout: ContextLayout, host: int, keep_query: bool = True):
        self.host = host
        self.layouts: list[ContextLayout] = []
        super().__init__(layers=[])
        self.add_layers(num_layers, layout, keep_query)

    def add_layers(self, count: int, layout: ContextLayout, keep_query: bool = True) -> None:
        """Add layers behind the others; the arguments are those of the class."""
        owned = [span for span in layout.cache_spans(self.host) if keep_query or span != layout.query]
        num_tokens = layout.num_tokens if keep_query else layout.query.start
        rows = offsets_within(layout.local_spans(self.host), owned)
        fixed, appends = layout.query.start, self.host == 0
        self.layers += [ShardedLayer(rows, num_tokens, fixed, appends) for _ in range(count)]
        self.layouts += [layout] * count

    @property
    def layout(self) -> ContextLayout:
        """The layout of the first layer, which holds the whole prompt."""
        return self.layouts[0]

    @classmethod
    def of_shares(
        cls,
        layers: Sequence[tuple[Tensor, Tensor]],
        layouts: Sequence[ContextLayout],
        host: int,
        holds_query: bool = True,
    ) -> "ShardedCache":
        """Build the cache from a host's keys and values of every layer.

        Args:
            layers: ``[B, Hkv, T, D]`` each, the tokens as in the layout's ``cache_spans``.
            layouts: of every layer.
            holds_query: False where the query is still to be appended.
        """
        cache = cls(0, layouts[0], host)
        for (keys, values), layout in zip(layers, layouts, strict=True):
            cache.add_layers(1, layout, keep_query=holds_query)
            cache.layers[-1].hold(keys, values)
        return cache

    def initialize_empty(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device) -> None:
        """Store no rows in the layers that have none yet, on a host that computes nothing in them."""
        empty = torch.empty(1, num_kv_heads, 0, head_dim, dtype=dtype, device=device)
        for layer in self.layers:
            if not layer.is_initialized:
                layer.hold(empty, empty)

    def owned_spans(self, host: int, index: int = 0) -> list[range]:
        """Return which of a layer's tokens a host holds now, generated tokens included, in row order."""
        layout, length = self.layouts[index], self.layers[index].num_tokens
        spans = [intersect(span, range(length)) for span in layout.cache_spans(host)]
        return [*spans, range(layout.num_tokens, length)] if host == 0 else spans

    def nbytes(self) -> int:
        """Return the bytes of keys and values on this host."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def gather(self, hosts: HostGroup, to_host: int = 0) -> DynamicCache | None:
        """Collect the whole KV on one host, in position order; collective.

        Returns:
            A transformers cache with ``[1, Hkv, n, D]`` per layer on ``to_host``, None elsewhere; n is the
            layer's own number of tokens.

        Raises:
            HostError: a host failed meanwhile.
        """
        if hosts.size == 1:
            return DynamicCache((layer.keys, layer.values) for layer in self.layers)
        return self._gather(hosts, to_host, releases=False)

    def release_to(self, hosts: HostGroup) -> DynamicCache | None:
        """Gather the whole KV on host 0, and free each layer's share as soon as it has been sent; collective.

        So host 0 never holds much more than one copy of the KV. This cache must not be used afterwards.
        """
        if hosts.size > 1:
            return self._gather(hosts, 0, releases=True)
        layers = [GrowingLayer() for _ in self.layers]
        for layer, share in zip(layers, self.layers, strict=True):
            layer.take_over(share)
        return growing_cache(layers)

    def _gather(self, hosts: HostGroup, to_host: int, releases: bool) -> DynamicCache | None:
        exchange, spans = self._start_gather(0, hosts, to_host)
        gathered = []
        for index, share in enumerate(self.layers):
            shares, owned = exchange.wait(), spans
            if releases:
                share.release()
            if index + 1 < len(self.layers):
                exchange, spans = self._start_gather(index + 1, hosts, to_host)
            if hosts.rank == to_host:
                gathered.append(_in_position_order(shares, owned))
        return growing_cache(gathered) if hosts.rank == to_host else None

    def _start_gather(self, index: int, hosts: HostGroup, to_host: int) -> tuple[Exchange, list[list[range]]]:
        """Start gathering a layer; return with it which of its tokens each host sends."""
        layer, spans = self.layers[index], [self.owned_spans(host, index) for host in range(hosts.size)]
        counts = [sum(map(len, owned)) for owned in spans]
        share = torch.stack([layer.keys, layer.values])
        _, batch, heads, _, dim = share.shape
        nothing = share.new_empty(0)
        sent = [share if host == to_host else nothing for host in range(hosts.size)]
        here = hosts.rank == to_host
        shapes = [(2, batch, heads, count, dim) if here else (0,) for count in counts]
        return hosts.all_to_all(sent, shapes), spans


def _in_position_order(shares: list[Tensor], spans: list[list[range]]) -> GrowingLayer:
    """Merge ``[2, B, Hkv, T_h, D]`` per host into one layer ``[B, Hkv, n, D]`` that has room for an answer.

    Args:
        spans: the token positions of each host's rows.
    """
    layer = GrowingLayer()
    layer.reserve(shares[0][0], sum(share.shape[3] for share in shares))
    for share, owned in zip(shares, spans, strict=True):
        row = 0
        for span in owned:
            rows = share[:, :, :, row : row + len(span)]
            layer.keys[:, :, span.start : span.stop], layer.values[:, :, span.start : span.stop] = rows
            row += len(span)
    return layer
