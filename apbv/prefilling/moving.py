"""Moves rows of tokens from the hosts that have them to the hosts that need them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..hosts import Exchange, HostGroup
from ..transfer import to_device


def move_rows(rows: Tensor, held: Sequence[Tensor], wanted: Sequence[Tensor], hosts: HostGroup) -> Tensor:
    """Send every host the rows of the tokens that it needs; collective; see :func:`start_moving`."""
    return start_moving(rows, held, wanted, hosts).wait()


def start_moving(rows: Tensor, held: Sequence[Tensor], wanted: Sequence[Tensor], hosts: HostGroup) -> Exchange:
    """Start sending every host the rows of the tokens that it needs; collective, and without cost if all have them.

    A host that has a token's row, as all have an anchor's, uses its own. Otherwise exactly one host has it.

    Args:
        rows: ``[T, ...]`` of this host.
        held: for every host the tokens whose rows it has, in their order; int64.
        wanted: for every host the tokens that it wants, in the order that it wants them in.

    The result is ``[tokens wanted here, ...]``.
    """
    here, num_tokens = hosts.rank, max((int(own.max()) + 1 for own in held if len(own)), default=0)
    sender = torch.zeros(num_tokens, dtype=torch.long)
    missing = []  # for every host a mask of the wanted tokens that it has not
    for host, (own, asked) in enumerate(zip(held, wanted, strict=True)):
        sender[own] = host
        has = torch.zeros(num_tokens, dtype=torch.bool)
        has[own] = True
        missing.append(~has[asked])
    place = torch.zeros(num_tokens, dtype=torch.long)
    place[held[here]] = torch.arange(len(held[here]))
    if not any(mask.any() for mask in missing):
        found = rows[to_device(place[wanted[here]], rows.device)]
        return Exchange(lambda: found)
    asked, mask = wanted[here], missing[here]
    result = rows.new_empty(len(asked), *rows.shape[1:])
    kept = (~mask).nonzero().flatten()
    result[to_device(kept, rows.device)] = rows[to_device(place[asked[kept]], rows.device)]
    outgoing = []
    for theirs, lacking in zip(wanted, missing, strict=True):
        tokens = theirs[lacking]
        outgoing.append(rows[to_device(place[tokens[sender[tokens] == here]], rows.device)])
    coming = [(mask & (sender[asked] == host)).nonzero().flatten() for host in range(hosts.size)]

    def completed(received: list[Tensor]) -> Tensor:
        for places, arrived in zip(coming, received, strict=True):
            if len(places):
                result[to_device(places, rows.device)] = arrived
        return result

    return hosts.all_to_all(outgoing, [(len(places), *rows.shape[1:]) for places in coming]).then(completed)
