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

    Args:
        rows: ``[T, ...]`` of this host.
        held: for every host the tokens whose rows it alone has, in their order; int64.
        wanted: for every host the tokens that it wants, in the order that it wants them in.

    The result is ``[tokens wanted here, ...]``.
    """
    here, num_tokens = hosts.rank, max((int(own.max()) + 1 for own in held if len(own)), default=0)
    place, sender = torch.zeros(2, num_tokens, dtype=torch.long)
    for host, own in enumerate(held):
        place[own], sender[own] = torch.arange(len(own)), host
    sent = [place[asked[sender[asked] == here]] for asked in wanted]
    outgoing = [rows[to_device(places, rows.device)] for places in sent]
    mine = outgoing[here]
    if all(bool((sender[asked] == host).all()) for host, asked in enumerate(wanted)):
        return Exchange(lambda: mine)
    outgoing[here] = rows[:0]
    coming = [(sender[wanted[here]] == host).nonzero().flatten() for host in range(hosts.size)]

    def completed(received: list[Tensor]) -> Tensor:
        result = rows.new_empty(len(wanted[here]), *rows.shape[1:])
        for host, places in enumerate(coming):
            result[to_device(places, rows.device)] = mine if host == here else received[host]
        return result

    shapes = [(0 if host == here else len(places), *rows.shape[1:]) for host, places in enumerate(coming)]
    return hosts.all_to_all(outgoing, shapes).then(completed)
