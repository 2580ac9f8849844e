"""This module defines a transformers cache that appends in place, and edits of the last rows of a cache.

Keys and values are ``[B, Hkv, T, D]``, post-RoPE.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from ..transfer import to_device

# Decoding appends a few rows per step; growing the buffers by many rows at once keeps that from copying the cache.
GROWTH_ROWS = 256


class GrowingLayer(DynamicLayer):
    """A GrowingLayer appends KV in place, where transformers' own layer copies all of its KV for every token.

    Attributes:
        buffers: where the rows lie, with room behind them, ``[B, Hkv, capacity, D]`` each; None where rows that
            are appended have to be copied to buffers first.
        places: int64 ``[S]`` on the device: where ``update`` writes S rows in the buffers, which it then returns
            whole, rows that do not count included; None: it appends. See :func:`writing_at`.
    """

    def __init__(self):
        super().__init__()
        self.buffers: tuple[Tensor, Tensor] | None = None
        self.places: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.places is not None:
            for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
                buffer.index_copy_(2, self.places, states)
            return self.buffers
        if not self.is_initialized:
            self.hold(key_states, value_states)
        else:
            self._append(key_states, value_states)
        return self.keys, self.values

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Start with these keys and values, and never write to them: appending copies them to a buffer."""
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values = keys, values
        self.is_initialized = True

    def reserve(self, like: Tensor, num_rows: int) -> None:
        """Start with ``num_rows`` rows that the caller fills in, in buffers that have room for more.

        Args:
            like: ``[B, Hkv, any, D]``, of the dtype and on the device of the rows.
        """
        self.buffers = (_buffer(like, num_rows), _buffer(like, num_rows))
        self.hold(*(buffer[:, :, :num_rows] for buffer in self.buffers))

    def take_over(self, other: "GrowingLayer") -> None:
        """Start with another layer's rows and buffers; that layer must not append any more."""
        self.hold(other.keys, other.values)
        self.buffers = other.buffers

    def has_room(self, count: int) -> bool:
        """Return whether the buffers hold the rows, which a caller may have replaced, and fit ``count`` more."""
        if self.buffers is None or self.buffers[0].shape[2] < self.keys.shape[2] + count:
            return False
        held = zip(self.buffers, (self.keys, self.values), strict=True)
        return all(buffer.data_ptr() == states.data_ptr() for buffer, states in held)

    def make_room(self, count: int) -> None:
        """Copy the rows to buffers that fit ``count`` more, unless they lie in such buffers."""
        if not self.has_room(count):
            self.buffers = tuple(_grown(states, states.shape[2] + count) for states in (self.keys, self.values))
            self.extend(0)

    def extend(self, count: int) -> None:
        """Count ``count`` rows that were written into the buffers behind the others."""
        num_rows = self.keys.shape[2] + count
        self.keys, self.values = (buffer[:, :, :num_rows] for buffer in self.buffers)

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        old, count = self.keys.shape[2], key_states.shape[2]
        self.make_room(count)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, old : old + count] = states
        self.extend(count)


def growing_cache(layers: Iterable[GrowingLayer]) -> DynamicCache:
    """Return a transformers cache that consists of these layers."""
    cache = DynamicCache()
    cache.layers = list(layers)
    return cache


def empty_cache(like: Iterable[Tensor]) -> DynamicCache:
    """Return a cache without rows that appends in place; its layers are like these keys, ``[B, Hkv, T, D]``."""
    layers = []
    for keys in like:
        layers.append(GrowingLayer())
        layers[-1].hold(keys[:, :, :0], keys[:, :, :0])
    return growing_cache(layers)


@contextmanager
def writing_at(cache: DynamicCache, places: Sequence[Tensor]) -> Iterator[None]:
    """Let a cache write at places that only the device knows, until the end of the block.

    Its layers, which have room there, return their whole buffers to attention. The rows count once
    :meth:`GrowingLayer.extend` is called. So addresses and shapes are the same from one forward pass to the next.

    Args:
        places: of every layer int64 ``[S]``, one for each new token.
    """
    for layer, rows in zip(cache.layers, places, strict=True):
        layer.places = rows
    try:
        yield
    finally:
        for layer in cache.layers:
            layer.places = None


def appending_in_place(cache: DynamicCache) -> DynamicCache:
    """Make a cache append in place from now on, and return it; the tensors that it holds are not written to."""
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, GrowingLayer):
            cache.layers[index] = GrowingLayer()
            if layer.is_initialized:
                cache.layers[index].hold(layer.keys, layer.values)
    return cache


def first_tokens(cache: DynamicCache, num_tokens: int, view: DynamicCache) -> DynamicCache:
    """Put the first tokens of a cache into the empty cache ``view``, which shares the memory, and return it.

    What is left out are the last tokens, which all layers have, also where later ones lack some before them.

    Args:
        num_tokens: how many the first layer keeps.
    """
    num_left_out = cache.layers[0].keys.shape[2] - num_tokens
    for index, layer in enumerate(cache.layers):
        empty = layer.keys[:, :, :0]
        view.update(empty, empty, index)
        num_rows = layer.keys.shape[2] - num_left_out
        view.layers[index].keys = layer.keys[:, :, :num_rows]
        view.layers[index].values = layer.values[:, :, :num_rows]
    return view


def rows_left_out(cache: Cache) -> list[int]:
    """Count for every layer how many rows it has less than the first."""
    num_rows = [layer.keys.shape[2] for layer in cache.layers]
    return [num_rows[0] - count for count in num_rows]


def last_rows(cache: Cache, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return views of every layer's last ``count`` keys and values, ``[1, Hkv, count, D]``."""
    rows = [(layer.keys.shape[2] - count, layer) for layer in cache.layers]
    return [(layer.keys[:, :, start:], layer.values[:, :, start:]) for start, layer in rows]


def replace_last(cache: Cache, count: int, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Replace every layer's last ``count`` rows by these keys and values, ``[1, Hkv, T, D]`` per layer."""
    if count:
        cache.crop(-count)
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)


def keep_of_last(cache: Cache, count: int, chosen: Sequence[int]) -> None:
    """Drop all of a cache's last ``count`` tokens, which a forward pass has just appended, but the chosen ones.

    Only these rows are moved: accepting a branch of a draft tree copies nothing of the KV before it.

    Args:
        cache: a ShardedCache, or a plain transformers DynamicCache.
        chosen: ascending numbers in 0 .. count - 1.
    """
    rows = None
    for layer in cache.layers:
        if list(chosen) != list(range(len(chosen))) and getattr(layer, "holds_newest", True):
            rows = to_device(chosen, layer.keys.device, torch.int64) if rows is None else rows
            _move_to_front(layer, count, rows)
        layer.crop(len(chosen) - count)


def _move_to_front(layer: DynamicLayer, count: int, rows: Tensor) -> None:
    """Move these of a layer's last ``count`` rows, int64 ``[N]``, to the front of them."""
    for states in (layer.keys, layer.values):
        tail = states[:, :, states.shape[2] - count :]
        tail[:, :, : len(rows)] = tail.index_select(2, rows)


def _buffer(like: Tensor, num_rows: int) -> Tensor:
    batch, heads, _, dim = like.shape
    return like.new_empty(batch, heads, num_rows + GROWTH_ROWS, dim)


def _grown(states: Tensor, num_rows: int) -> Tensor:
    """Copy rows to a buffer that has room for more than ``num_rows``."""
    buffer = _buffer(states, num_rows)
    buffer[:, :, : states.shape[2]] = states
    return buffer
