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
    newest = (states[0].transpose(0, 1) for states in (k, v))  # [R, Hkv, D]
    outs = []
    for query, key, value, keys, values, length in zip(
        queries.unbind(), *newest, buffers.keys, buffers.values, buffers.lengths, strict=True
    ):
        keys.select(2, length)[0] = key
        values.select(2, length)[0] = value
        seen = (states.narrow(2, 0, length + 1) for states in (keys, values))
        outs.append(attend(query, *seen, scale, False)[0])
    return torch.cat(outs).flatten(1, 2).transpose(0, 1)[None]


def _attend_in_windows(
    q: Tensor, k: Tensor, v: Tensor, buffers: SequenceBuffers, scale: float
) -> Tensor:
    """Attend where sequences have several new tokens."""
    outs = []
    newest = (states.split(buffers.counts, dim=2) for states in (q, k, v))
    for query, key, value, keys, values, length in zip(
        *newest, buffers.keys, buffers.values, buffers.lengths, strict=True
    ):
        stop = length + query.shape[2]
        keys[:, :, length:stop] = key
        values[:, :, length:stop] = value
        outs.append(verify_attention(query, keys[:, :, :stop], values[:, :, :stop], scale)[0])
    return torch.cat(outs, dim=2)
