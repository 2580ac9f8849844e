"""This module defines a transformers cache that appends in place, and edits of the last rows of a cache.

Keys and values are ``[B, Hkv, T, D]``, post-RoPE.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

# Decoding appends a few rows per step; growing the buffers by many rows at once keeps that from copying the cache.
_GROWTH_ROWS = 256


class GrowingLayer(DynamicLayer):
    """A GrowingLayer appends KV in place, where transformers' own layer copies all of its KV for every token."""

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
        """Start with these keys and values, and never write to them: appending copies them to a buffer."""
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values = keys, values
        self.is_initialized = True

    def reserve(self, like: Tensor, num_rows: int) -> None:
        """Start with ``num_rows`` rows that the caller fills in, in buffers that have room for more.

        Args:
            like: ``[B, Hkv, any, D]``, of the dtype and on the device of the rows.
        """
        self._buffers = (_buffer(like, num_rows), _buffer(like, num_rows))
        self.hold(*(buffer[:, :, :num_rows] for buffer in self._buffers))

    def take_over(self, other: "GrowingLayer") -> None:
        """Start with another layer's rows and buffers; that layer must not append any more."""
        self.hold(other.keys, other.values)
        self._buffers = other._buffers

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        old, new = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        if not self._has_room(new):
            self._buffers = tuple(_grown(states, new) for states in (self.keys, self.values))
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, old:new] = states
        self.keys, self.values = (buffer[:, :, :new] for buffer in self._buffers)

    def _has_room(self, num_rows: int) -> bool:
        """Return whether the buffers fit ``num_rows`` and hold the rows, which a caller may have replaced."""
        if self._buffers is None or self._buffers[0].shape[2] < num_rows:
            return False
        held = zip(self._buffers, (self.keys, self.values), strict=True)
        return all(buffer.data_ptr() == states.data_ptr() for buffer, states in held)


def growing_cache(layers: Iterable[GrowingLayer]) -> DynamicCache:
    """Return a transformers cache that consists of these layers."""
    cache = DynamicCache()
    cache.layers = list(layers)
    return cache


def appending_in_place(cache: DynamicCache) -> DynamicCache:
    """Make a cache append in place from now on, and return it; the tensors that it holds are not written to."""
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, GrowingLayer):
            cache.layers[index] = GrowingLayer()
            if layer.is_initialized:
                cache.layers[index].hold(layer.keys, layer.values)
    return cache


def first_tokens(cache: DynamicCache, num_tokens: int, view: DynamicCache) -> DynamicCache:
    """Put the first tokens of a cache into the empty cache ``view``, which shares the memory, and return it."""
    for index, layer in enumerate(cache.layers):
        empty = layer.keys[:, :, :0]
        view.update(empty, empty, index)
        view.layers[index].keys = layer.keys[:, :, :num_tokens]
        view.layers[index].values = layer.values[:, :, :num_tokens]
    return view


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
    for layer in cache.layers:
        if getattr(layer, "holds_newest", True):
            _move_to_front(layer, count, chosen)
        layer.crop(len(chosen) - count)


def _move_to_front(layer: DynamicLayer, count: int, chosen: Sequence[int]) -> None:
    """Move the chosen rows to the front of a layer's last ``count`` ones."""
    if list(chosen) == list(range(len(chosen))):
        return
    for states in (layer.keys, layer.values):
        tail = states[:, :, states.shape[2] - count :]
        tail[:, :, : len(chosen)] = tail[:, :, list(chosen)]


def _buffer(like: Tensor, num_rows: int) -> Tensor:
    batch, heads, _, dim = like.shape
    return like.new_empty(batch, heads, num_rows + _GROWTH_ROWS, dim)


def _grown(states: Tensor, num_rows: int) -> Tensor:
    """Copy rows to a buffer that has room for more than ``num_rows``."""
    buffer = _buffer(states, num_rows)
    buffer[:, :, : states.shape[2]] = states
    return buffer
