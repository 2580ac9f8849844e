"""Moves rows of tokens from the hosts that have them to the hosts that need them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..device.copies import to_device
from . import HostGroup, Pending


def move_rows(
    rows: Tensor,
    tokens_of: Sequence[Tensor],
    tokens_for: Sequence[Tensor],
    hosts: HostGroup,
) -> Tensor:
    """Send every host the rows of the tokens that it needs; collective.

    Args:
        rows, tokens_of, tokens_for: see :func:`start_moving`.

    Returns:
        ``[len(tokens_for[this host]), ...]``, in that order.
    """
    parts = start_moving(rows, tokens_of, tokens_for, hosts).wait()
    if len(parts) == 1:
        return parts[0].rows
    result = rows.new_empty(len(tokens_for[hosts.rank]), *rows.shape[1:])
    for part in parts:
        result[to_device(part.places, rows.device)] = part.rows
    return result


class MovedRows(NamedTuple):
    """Rows that have come from one host.

    Attributes:
        places: int64 ``[m]``, ascending: the places of their tokens among those that this host
            needs.
        rows: ``[m, ...]``.
    """

    places: Tensor
    rows: Tensor


def start_moving(
    rows: Tensor,
    tokens_of: Sequence[Tensor],
    tokens_for: Sequence[Tensor],
    hosts: HostGroup,
) -> Pending[list[MovedRows]]:
    """Start sending every host the rows of the tokens that it needs.

    Collective, and without cost if all have them.

    Args:
        rows: ``[T, ...]`` of this host.
        tokens_of: for every host the tokens whose rows it alone has, in their order; int64.
        tokens_for: for every host the tokens that it needs, in the order of the result.

    The result is a list of :class:`MovedRows`: a single one with all rows if every host has what it
    needs, else one for every host.
    """
    rank = hosts.rank
    num_tokens = max((int(tokens.max()) + 1 for tokens in tokens_of if len(tokens)), default=0)

    # Where every token's row is.
    owner_of_token = torch.zeros(num_tokens, dtype=torch.long)
    row_of_token = torch.zeros(num_tokens, dtype=torch.long)
    for owner, tokens in enumerate(tokens_of):
        owner_of_token[tokens] = owner
        row_of_token[tokens] = torch.arange(len(tokens))

    # What this host gives to every host.
    outgoing = []
    for tokens in tokens_for:
        tokens_from_here = tokens[owner_of_token[tokens] == rank]
        outgoing.append(rows[to_device(row_of_token[tokens_from_here], rows.device)])

    # Where what comes from every host belongs.
    owners = owner_of_token[tokens_for[rank]]
    places_from = [(owners == sender).nonzero().flatten() for sender in range(hosts.size)]

    local_rows = outgoing[rank]
    every_host_has_its_own = all(
        bool((owner_of_token[tokens] == host).all()) for host, tokens in enumerate(tokens_for)
    )
    if every_host_has_its_own:
        return Pending(lambda: [MovedRows(places_from[rank], local_rows)])

    # A host's own rows are not sent.
    outgoing[rank] = rows[:0]
    shapes = []
    for sender, places in enumerate(places_from):
        num_received = 0 if sender == rank else len(places)
        shapes.append((num_received, *rows.shape[1:]))

    def with_places(received: list[Tensor]) -> list[MovedRows]:
        received[rank] = local_rows
        return [
            MovedRows(places, of_sender)
            for places, of_sender in zip(places_from, received, strict=True)
        ]

    return hosts.all_to_all(outgoing, shapes).then(with_places)
