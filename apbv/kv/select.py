"""Copies part of a prompt's KV, for a draft that sees less of the prompt than the target."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from ..device.copies import numbers_in
from ..hosts import HostGroup
from .cache import ShardedCache, kv_layers


def select_kv(cache: DynamicCache, chosen: Sequence[Tensor]) -> DynamicCache:
    """Copy some of a cache's tokens.

    Args:
        cache: ``[1, Hkv, n, D]`` per layer.
        chosen: per layer ``[Hkv, T]``, ascending token numbers, which may differ between KV heads.
            For fewer layers than the cache has, the copy has only the first ones.
    """
    copy = DynamicCache()
    for index, tokens in enumerate(chosen):
        layer = kv_layers(cache)[index]
        head_dim = layer.keys.shape[3]
        rows = tokens.to(layer.keys.device)[None, :, :, None].expand(-1, -1, -1, head_dim)
        copy.update(layer.keys.gather(2, rows), layer.values.gather(2, rows), index)
    return copy


def collect_kv(
    shards: ShardedCache, chosen: Sequence[Tensor], hosts: HostGroup
) -> DynamicCache | None:
    """Copy some tokens of a sharded KV to host 0; collective. Only the chosen rows are sent.

    Args:
        chosen: per layer ``[Hkv, T]``, ascending token numbers, the same on every host.

    Returns:
        The chosen KV on host 0, None elsewhere.
    """
    # Of each token, the host that has it, and its row there.
    num_tokens = shards.get_seq_length()
    owner_of_token = torch.empty(num_tokens, dtype=torch.long)
    row_of_token = torch.empty(num_tokens, dtype=torch.long)
    for host in range(hosts.size):
        tokens = numbers_in(*shards.owned_spans(host))
        owner_of_token[tokens] = host
        row_of_token[tokens] = torch.arange(len(tokens))

    copy = DynamicCache()
    for index, tokens in enumerate(chosen):
        # Send this host's rows of the layer.
        layer = shards.shards[index]
        owners = owner_of_token[tokens]  # [Hkv, T]
        heads, columns = (owners == hosts.rank).nonzero(as_tuple=True)
        rows = row_of_token[tokens[heads, columns]]
        share = torch.stack([layer.keys[0, heads, rows], layer.values[0, heads, rows]])
        counts = [int((owners == host).sum()) for host in range(hosts.size)]
        received = hosts.gather_rows(share, counts, to=0, dim=1).wait()
        if hosts.rank != 0:
            continue

        # Merge all hosts' rows, [2, Hkv, T, D].
        states = share.new_empty(2, *tokens.shape, share.shape[2])
        for host, host_share in enumerate(received):
            states[:, owners == host] = host_share
        keys, values = states
        copy.update(keys[None], values[None], index)
    return copy if hosts.rank == 0 else None
