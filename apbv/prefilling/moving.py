"""Moves rows of tokens from the hosts that have them to the hosts that need them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..hosts import Exchange, HostGroup
from ..transfer import to_device


def move_rows(
    rows: Tensor, held: Sequence[Tensor], wanted: Sequence[Tensor], hosts: HostGroup
) -> Tensor:
    """Send every host the rows of the tokens that it wants, and return them; collective; see
    :func:`start_moving`."""
    found = start_moving(rows, held, wanted, hosts).wait()
    if len(found) == 1:
        return found[0][1]
    result = rows.new_empty(len(wanted[hosts.rank]), *rows.shape[1:])
    for places, arrived in found:
        result[to_device(places, rows.device)] = arrived
    return result


def start_moving(
    rows: Tensor, held: Sequence[Tensor], wanted: Sequence[Tensor], hosts: HostGroup
) -> Exchange:
    """Start sending every host the rows of the tokens that it wants; collective, and without cost
    if all have them.

    Args:
        rows: ``[T, ...]`` of this host.
        held: for every host the tokens whose rows it alone has, in their order; int64.
        wanted: for every host the tokens that it wants, in the order that it wants them in.

    The result is a list of pairs: the places of wanted tokens, ascending, and their rows. One pair
    has them all if every host has its own, else there is a pair for every host that they come from.
    """
    here, num_tokens = hosts.rank, max((int(own.max()) + 1 for own in held if len(own)), default=0)
    place, sender = torch.zeros(2, num_tokens, dtype=torch.long)
    for host, own in enumerate(held):
        place[own] = torch.arange(len(own))
        sender[own] = host
    sent = [place[asked[sender[asked] == here]] for asked in wanted]
    outgoing = [rows[to_device(places, rows.device)] for places in sent]
    coming = [(sender[wanted[here]] == host).nonzero().flatten() for host in range(hosts.size)]
    mine = outgoing[here]
    outgoing[here] = rows[:0]
    if all(bool((sender[asked] == host).all()) for host, asked in enumerate(wanted)):
        return Exchange(lambda: [(coming[here], mine)])

    def completed(received: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        received[here] = mine
        return list(zip(coming, received, strict=True))

    shapes = [
        (0 if host == here else len(places), *rows.shape[1:]) for host, places in enumerate(coming)
    ]
    return hosts.all_to_all(outgoing, shapes).then(completed)
