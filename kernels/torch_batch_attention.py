"""Batch decode attention with torch's own attention, one sequence at a time."""

import torch
from torch import Tensor

from .library_attention import attend_with
from .sequences import SequenceBuffers
from .torch_attention import verify_attention


def batch_decode_attention(
    q: Tensor, k: Tensor, v: Tensor, buffers: SequenceBuffers, scale: float
) -> Tensor:
    """Attend as :func:`apbv.kernels.batch_decode_attention` does."""
    if buffers.counts is not None:
        return _attend_in_windows(q, k, v, buffers, scale)
    attend = attend_with("torch", q, k)
    # The heads of a group are queries of one head, which see the same keys: [R, 1, Hkv, G, D].
    queries = q[0].transpose(0, 1).unflatten(1, (k.shape[1], -1))[:, None]
    # [R, Hkv, D]
    new_keys = k[0].transpose(0, 1)
    new_values = v[0].transpose(0, 1)
    outs = []
    for query, key, value, keys, values, length in zip(
        queries.unbind(),
        new_keys.unbind(),
        new_values.unbind(),
        buffers.keys,
        buffers.values,
        buffers.lengths,
        strict=True,
    ):
        keys.select(2, length)[0] = key
        values.select(2, length)[0] = value
        seen_keys = keys.narrow(2, 0, length + 1)
        seen_values = values.narrow(2, 0, length + 1)
        out, _ = attend(query, seen_keys, seen_values, scale, False)
        outs.append(out)
    return torch.cat(outs).flatten(1, 2).transpose(0, 1)[None]


def _attend_in_windows(
    q: Tensor, k: Tensor, v: Tensor, buffers: SequenceBuffers, scale: float
) -> Tensor:
    """Attend where sequences have several new tokens."""
    queries = q.split(buffers.counts, dim=2)
    new_keys = k.split(buffers.counts, dim=2)
    new_values = v.split(buffers.counts, dim=2)
    outs = []
    for query, key, value, keys, values, length in zip(
        queries,
        new_keys,
        new_values,
        buffers.keys,
        buffers.values,
        buffers.lengths,
        strict=True,
    ):
        stop = length + query.shape[2]
        keys[:, :, length:stop] = key
        values[:, :, length:stop] = value
        out, _ = verify_attention(query, keys[:, :, :stop], values[:, :, :stop], scale)
        outs.append(out)
    return torch.cat(outs, dim=2)
