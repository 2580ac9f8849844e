"""Exports KV: holds it, serves it to consumers that present its secret, and frees it.

Every process of a prefill instance has an :class:`Offers`. Host 0's decides when an offer ends, and
notifies the others.
"""

import hmac
import logging
import math
import socket
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidConfigError, StorageError
from ..hosts import HostGroup
from ..reporting import raised_as
from .sending import Listener, Share
from .ticket import Ticket
from .wire import (
    ask,
    range_of,
    reachable_address,
    read_message,
    reader_of,
    send_message,
    send_rows,
    sever,
)

OnEnd = Callable[[str, str, int], None]

_logger = logging.getLogger(__name__)

IDLE_SECONDS = 60.0  # timeout for a reader that takes nothing
REQUEST_SECONDS = 10.0  # for a request to arrive
_NOTIFYING_SECONDS = 5.0  # timeout for notifying another host that an offer has ended
# Time for a current reader to be notified, between two layers, that an offer has ended.
GRACE_SECONDS = 1.0
_REMEMBERED = 1024  # ended offers whose ending is known
# How an offer ends, and the reason that later fetches get.
ENDINGS = {
    "fetched": "was already fetched",
    "dropped": "was dropped by its consumer",
    "expired": "has expired",
    "closed": "is gone: its server is shutting down",
}


@dataclass(eq=False)
class Offer:
    """Exported KV, available or ended.

    Attributes:
        transfer, token: its id and its secret, which the ticket has, too.
        share: the KV that this process holds; None once it is free.
        lives_until: when it expires, or when readers of an ended offer are cut off, by the
            monotonic clock.
        ticket: its ticket, on host 0, once every process has its share.
        readers: the readers that began to fetch.
        confirmed: the readers that have received everything.
        how: how it has ended, a key of :data:`ENDINGS`; None while it is available.
        streams: the connections that are reading from it.
    """

    transfer: str
    token: str
    share: Share | None
    lives_until: float
    ticket: Ticket | None = None
    readers: set[str] = field(default_factory=set)
    confirmed: set[str] = field(default_factory=set)
    how: str | None = None
    streams: set[socket.socket] = field(default_factory=set)

    def require_alive(self) -> None:
        """Raise StorageError if it has ended."""
        if self.how is not None:
            raise StorageError(f"the KV of transfer {self.transfer} {ENDINGS[self.how]}")


class Offers(AbstractContextManager):
    """This process's exported KV, and the port that serves it.

    An offer ends when all its readers have confirmed (``"fetched"``), when its consumer or
    :meth:`drop` drops it (``"dropped"``), after its lifetime (``"expired"``) or at :meth:`close`
    (``"closed"``). Its memory is then free.

    Construct it on all processes of a group; this is collective.

    Args:
        hosts: the group.
        host: the address to listen on.
        port: the port of the first process; process p of the group listens on ``port + p``. 0: any
            free one.
        advertised: the address that consumers get; None: ``host``, or for a wildcard address the
            one by which others reach the machine.
        seconds: lifetime of an offer; doubled once a reader has begun to fetch.
        on_end: called on the leader with an offer's transfer, how it ended, and the bytes of its KV
            on all hosts, once they are free here. It may be called from any thread, and must not
            block.

    Attributes:
        address: where this process serves KV.

    Raises:
        OSError: a process cannot listen there.
        HostError: on the others.
    """

    def __init__(
        self,
        hosts: HostGroup,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised: str | None = None,
        seconds: float = 120.0,
        on_end: OnEnd | None = None,
    ):
        self._seconds = seconds
        self._on_end = on_end
        self._leads = hosts.is_leader
        self._offers: dict[str, Offer] = {}  # the oldest first
        self._past: OrderedDict[str, Offer] = OrderedDict()  # ended offers, the latest last
        self._changed = threading.Condition()
        self._is_closed = False
        self._actions = {
            "fetch": self._fetch,
            "done": self._confirm,
            "drop": self._drop_for_consumer,
            "end": self._end_for_leader,
        }
        with ExitStack() as undo:
            with hosts.local_stage("listening for consumers of KV"):
                if port:
                    port += hosts.rank * hosts.tensor_parallel_size + hosts.tensor_parallel_rank
                failure = f"cannot listen on {host}:{port} for consumers of KV"
                with raised_as(InvalidConfigError, failure, OSError, OverflowError, UnicodeError):
                    reachable_host = advertised or reachable_address(host)
                    listener = Listener((host, port), self._serve, IDLE_SECONDS)
                undo.callback(listener.close)  # if another process cannot listen
            undo.pop_all()
        self._listener = listener
        self.address = (reachable_host, listener.server_address[1])
        self._clock = threading.Thread(target=self._watch, name="kv-offers", daemon=True)
        self._clock.start()

    def __exit__(self, *error) -> None:
        self.close()

    def hold(self, transfer: str, token: str, share: Share) -> None:
        """Export this process's share of a transfer's KV.

        Raises:
            StorageError: the server is shutting down.
        """
        # Host 0 decides when it expires, once it is published; the others expire it themselves only
        # if they are not notified.
        lives_until = math.inf if self._leads else time.monotonic() + 3 * self._seconds
        with self._changed:
            if self._is_closed:
                raise StorageError("cannot export KV: the server is shutting down")
            self._offers[transfer] = Offer(transfer, token, share, lives_until)
            self._changed.notify_all()

    def publish(self, ticket: Ticket) -> None:
        """Complete an offer on the leader; its lifetime begins now.

        Raises:
            StorageError: it has ended.
        """
        with self._changed:
            offer = self._offers.get(ticket.transfer)
            if offer is None:
                raise StorageError(f"the KV of transfer {ticket.transfer} is no longer available")
            offer.ticket = ticket
            offer.lives_until = time.monotonic() + self._seconds
            self._changed.notify_all()

    def drop(self, transfer: str) -> None:
        """End an offer that will not be fetched; do nothing if it has ended.

        On the leader this notifies the other processes.
        """
        offer = self._offers.get(transfer)
        if offer is not None:
            self._end(offer, "dropped")

    def close(self) -> None:
        """End all offers and stop listening; each process closes its own."""
        with self._changed:
            self._is_closed = True
            offers = list(self._offers.values())
            self._changed.notify_all()
        for offer in offers:
            self._end(offer, "closed")
        self._listener.close()
        self._clock.join()

    # How offers end.

    def _end(self, offer: Offer, how: str) -> None:
        """End an offer, and free it once nobody reads from it; do nothing if it has ended."""
        with self._changed:
            if offer.how is not None:
                return
            offer.how = how
            offer.lives_until = time.monotonic() + GRACE_SECONDS
            self._past[offer.transfer] = self._offers.pop(offer.transfer)
            if len(self._past) > _REMEMBERED:
                self._past.popitem(last=False)
            if offer.streams:
                self._changed.notify_all()
                return  # the last of them frees it
        self._free(offer)

    def _free(self, offer: Offer) -> None:
        """Free an ended offer's memory; the leader notifies the others, and whoever counts it."""
        offer.share = None
        if offer.ticket is None:
            return
        if offer.how != "closed":  # then all processes close theirs
            self._notify_others(offer)
        if self._on_end is not None:
            assert offer.how is not None  # it has ended
            try:
                self._on_end(offer.transfer, offer.how, offer.ticket.num_bytes)
            except Exception:
                _logger.exception("the clean-up of an ended KV transfer failed")

    def _notify_others(self, offer: Offer) -> None:
        """Have the other processes end an offer, too."""
        request = {
            "do": "end",
            "transfer": offer.transfer,
            "token": offer.token,
            "how": offer.how,
        }
        assert offer.ticket is not None  # it is only here that others are known
        for source in offer.ticket.sources[1:]:
            try:
                ask(source, request, _NOTIFYING_SECONDS)
            except StorageError as error:
                _logger.warning("the memory of ended KV transfers may be freed late: %s", error)

    def _watch(self) -> None:
        """End expired offers, and cut off readers of ended ones."""
        while True:
            with self._changed:
                if self._is_closed:
                    return
                offers = list(self._offers.values())
                offers += [offer for offer in self._past.values() if offer.streams]
                now = time.monotonic()
                late = [offer for offer in offers if offer.lives_until <= now]
                if not late:
                    seconds = min((offer.lives_until - now for offer in offers), default=math.inf)
                    self._changed.wait(min(seconds, threading.TIMEOUT_MAX))
                for offer in late:
                    if offer.how is not None:  # it has ended, and its readers' time is over
                        offer.lives_until = math.inf
                        for connection in offer.streams:
                            sever(connection)
            for offer in late:
                self._end(offer, "expired")

    # Requests of other processes.

    def _serve(self, connection: socket.socket, trust: Callable[[], None]) -> None:
        """Answer a connection's request."""
        try:
            request = read_message(connection, REQUEST_SECONDS)
            action = self._actions.get(str(request.get("do")))
            if action is None:
                raise StorageError(f"unknown KV request {request.get('do')!r:.40}")
            offer = self._find(request)
            trust()
            # A reader repeats its confirmation if the answer was lost.
            is_repeated = offer.how == "fetched" and request["do"] == "done"
            if not is_repeated:
                offer.require_alive()
                action(connection, request, offer)
            if request["do"] != "fetch":  # which was answered with the KV
                send_message(connection, {})
        except StorageError as error:
            send_message(connection, {"error": str(error)})

    def _fetch(self, connection: socket.socket, request: dict[str, Any], offer: Offer) -> None:
        """Send the requested part; free an ended offer after its last reader."""
        reader, _ = reader_of(request)
        with self._changed:
            offer.require_alive()
            offer.streams.add(connection)
            if self._leads and not offer.readers:
                offer.lives_until += self._seconds
            offer.readers.add(reader)
        try:
            self._send(connection, request, offer)
        except BaseException as error:
            # The frames' local variables hold KV that has to be free now.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            with self._changed:
                offer.streams.discard(connection)
                is_last = offer.how is not None and not offer.streams
            if is_last:
                self._free(offer)

    def _send(self, connection: socket.socket, request: dict[str, Any], offer: Offer) -> None:
        """Send the requested part, unless the offer ends meanwhile."""
        share = offer.share
        assert share is not None  # it stays while a reader is there
        tokens = range_of(request, "tokens")
        kv_heads = range_of(request, "kv_heads")
        layers = range_of(request, "layers")
        part = share.part(tokens, kv_heads, layers)
        send_message(connection, {"tokens": part.runs, "kv_heads": part.kv_heads})
        for index, states in zip(layers, part.layers, strict=True):
            offer.require_alive()
            send_message(connection, {"layer": index})
            send_message(connection, {"crc32": send_rows(connection, states)})

    def _confirm(self, connection: socket.socket, request: dict[str, Any], offer: Offer) -> None:
        """Note that a reader has everything; the last one ends the offer."""
        reader, num_readers = reader_of(request)
        with self._changed:
            offer.confirmed.add(reader)
            is_complete = len(offer.confirmed) >= num_readers
        if is_complete:
            self._end(offer, "fetched")

    def _drop_for_consumer(
        self, connection: socket.socket, request: dict[str, Any], offer: Offer
    ) -> None:
        self._end(offer, "dropped")

    def _end_for_leader(
        self, connection: socket.socket, request: dict[str, Any], offer: Offer
    ) -> None:
        how = str(request.get("how"))
        if how not in ENDINGS:
            raise StorageError(f"unknown end of a KV transfer: {how!r:.40}")
        self._end(offer, how)

    def _find(self, request: dict[str, Any]) -> Offer:
        """Return the offer that a request names, which may have ended.

        Raises:
            StorageError: the transfer is unknown, or the request has a wrong secret.
        """
        transfer = request.get("transfer")
        token = request.get("token")
        if not isinstance(transfer, str) or not isinstance(token, str):
            raise StorageError("a request must name its transfer and its token")
        with self._changed:
            offer = self._offers.get(transfer) or self._past.get(transfer)
        if offer is None:
            raise StorageError(f"unknown KV transfer {transfer:.40}")
        if not hmac.compare_digest(offer.token.encode(), token.encode(errors="replace")):
            raise StorageError(f"the token for transfer {transfer} is wrong")
        return offer
