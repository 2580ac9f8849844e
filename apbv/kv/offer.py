"""This module says what one offer of KV is, how it may end, and what whoever comes later is told."""

import socket
from dataclasses import dataclass, field

from .manifest import StorageError
from .offered_folder import OfferedFolder
from .sending import Share
from .ticket import Ticket

# How an offer ends, and what who comes later is told of its KV.
ENDINGS = {
    "fetched": "has been fetched already",
    "dropped": "was dropped by its consumer",
    "expired": "has expired",
    "displaced": "had to make room for other KV",
    "closed": "is gone, because its server is ending",
}


@dataclass(eq=False)
class Offer:
    """An Offer is KV that waits to be fetched.

    Attributes:
        transfer, token: as in the ticket.
        share: the KV that this process holds; None where it lies in a folder, and once it is free.
        folder: the KV of all hosts on disk.
        began: when it was offered, in seconds of the monotonic clock.
        lives_until: when it ends by itself.
        ticket: on host 0, once every process has its share.
        readers: who began to fetch.
        confirmed: who has all.
        how: its ending; None while it is offered.
        streams: the connections that are reading from it.
    """

    transfer: str
    token: str
    share: Share | None
    folder: OfferedFolder | None
    began: float
    lives_until: float
    ticket: Ticket | None = None
    readers: set[str] = field(default_factory=set)
    confirmed: set[str] = field(default_factory=set)
    how: str | None = None
    ended: float = 0.0
    streams: set[socket.socket] = field(default_factory=set)


class AlreadyFetched(StorageError):
    """An AlreadyFetched is the error of KV that all its readers have confirmed."""


def gone(transfer: str, how: str) -> StorageError:
    """Return the error of who asks for KV that has ended."""
    kind = AlreadyFetched if how == "fetched" else StorageError
    return kind(f"the KV of transfer {transfer} {ENDINGS[how]}")
