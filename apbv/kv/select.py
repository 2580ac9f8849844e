"""Copies part of a prompt's KV, for a draft that sees less of the prompt than the target."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from ..hosts import HostGroup
from ..transfer import numbers_in
from .cache import ShardedCache


def select_kv(cache: DynamicCache, chosen: Sequence[Tensor]) -> DynamicCache:
    """Copy some of a cache's tokens.

    Args:
        cache: ``[1, Hkv, n, D]`` per layer.
        chosen: per layer ``[Hkv, T]``, ascending token numbers, which may differ between KV heads.
            For fewer layers than the cache has, the copy has only the first ones.
    """
    copy = DynamicCache()
    for index, (layer, tokens) in enumerate(zip(cache.layers[: len(chosen)], chosen, strict=True)):
        rows = tokens.to(layer.keys.device)[None, :, :, None].expand(
            -1, -1, -1, layer.keys.shape[3]
        )
        copy.update(layer.keys.gather(2, rows), layer.values.gather(2, rows), index)
    return copy


def collect_kv(
    shards: ShardedCache, chosen: Sequence[Tensor], hosts: HostGroup
) -> DynamicCache | None:
    """Copy some tokens of a sharded KV to host 0; collective. Only the chosen rows are sent.

    Args:
        chosen: as for :func:`select_kv`; the same on every host.

    Returns:
        The chosen KV on host 0, None elsewhere.
    """
    length = shards.get_seq_length()
    owner = torch.empty(length, dtype=torch.long)
    row = torch.empty(length, dtype=torch.long)
    for host in range(hosts.size):
        tokens = numbers_in(*shards.owned_spans(host))
        owner[tokens], row[tokens] = host, torch.arange(len(tokens))
    copy = DynamicCache()
    for index, (layer, tokens) in enumerate(zip(shards.layers[: len(chosen)], chosen, strict=True)):
        heads, places = (owner[tokens] == hosts.rank).nonzero(as_tuple=True)
        rows = row[tokens[heads, places]]
        share = torch.stack([states[0, heads, rows] for states in (layer.keys, layer.values)])
        counts = [int((owner[tokens] == host).sum()) for host in range(hosts.size)]
        received = hosts.gather_rows(share, counts, to=0, dim=1).wait()
        if hosts.rank == 0:
            states = share.new_empty(2, *tokens.shape, share.shape[2])
            for host, theirs in enumerate(received):
                states[:, owner[tokens] == host] = theirs
            copy.update(*states[:, None], index)
    return copy if hosts.rank == 0 else None
