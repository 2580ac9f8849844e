"""Reads request bodies, without letting slow clients block others."""

import asyncio
from codecs import BOM_UTF8
from collections import Counter
from typing import NamedTuple

from starlette.requests import Request

from ..api_error import ApiError

_BODY_SECONDS = 60.0
_MOST_WHOLE = 4  # bodies of the largest size that may be half read at once
MOST_HALF_READ = 256  # bodies of any size that may be half read at once


class _HalfRead(NamedTuple):
    """A body of which some data has arrived, and its client's address."""

    data: bytearray
    client: str


class Bodies:
    """Reads bodies with a bound on half-read ones; used in the event loop's thread.

    If room is needed, the oldest body of the client with the most data is dropped. Slow clients
    therefore block no others, and clients with several addresses get no more than their share.

    Args:
        max_bytes: the largest body that is read.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        # By the body's time limit, in order of arrival.
        self._half_read: dict[asyncio.Timeout, _HalfRead] = {}

    async def read(self, request: Request) -> bytearray:
        """Read a whole body, and note its size in the request's state as ``num_body_bytes``.

        Returns:
            Its bytes, without a byte order mark. JSON is in UTF-8 (RFC 8259), whatever charset the
            headers name.

        Raises:
            ApiError: with status 413 if its header, or the data so far, shows that it is too large;
                with 408 if it takes too long, also because others need its room; with 415 if it is
                compressed.
            ClientDisconnect: the client has gone.
        """
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding not in ("", "identity"):
            message = f"the body must not be compressed, but its Content-Encoding is {encoding:.50}"
            raise ApiError(415, message)
        declared_length = request.headers.get("content-length", "")
        if declared_length.isdecimal() and int(declared_length) > self._max_bytes:
            raise self._too_large()
        data = bytearray()
        client = request.client.host if request.client else ""
        try:
            async with asyncio.timeout(_BODY_SECONDS) as limit:
                self._half_read[limit] = _HalfRead(data, client)
                self._make_room()
                async for piece in request.stream():
                    data += piece
                    if len(data) > self._max_bytes:
                        raise self._too_large()
                    self._make_room()
        except TimeoutError as error:
            message = (
                f"the body took too long (at most {_BODY_SECONDS:g} s, less while others need the "
                "room)"
            )
            raise ApiError(408, message, headers={"Connection": "close"}) from error
        finally:
            self._half_read.pop(limit, None)
            request.state.num_body_bytes = len(data)
        if data.startswith(BOM_UTF8):
            del data[: len(BOM_UTF8)]
        return data

    def _make_room(self) -> None:
        """Drop half-read bodies while they are too many or too large."""
        most_bytes = _MOST_WHOLE * self._max_bytes
        # Each body counts this much more than its data: there are never more than MOST_HALF_READ.
        extra_bytes = most_bytes // MOST_HALF_READ
        while sum(len(body.data) + extra_bytes for body in self._half_read.values()) > most_bytes:
            bytes_of_clients: Counter[str] = Counter()
            for body in self._half_read.values():
                bytes_of_clients[body.client] += len(body.data) + extra_bytes
            greediest, _ = bytes_of_clients.most_common(1)[0]
            self._drop_oldest_of(greediest)

    def _drop_oldest_of(self, client: str) -> None:
        """Drop the oldest half-read body of a client."""
        for limit, body in self._half_read.items():
            if body.client == client:
                del self._half_read[limit]
                if not limit.expired():
                    limit.reschedule(0.0)  # a moment that is over
                return

    def _too_large(self) -> ApiError:
        message = f"the body may have at most {self._max_bytes} bytes"
        headers = {"Connection": "close"}
        return ApiError(413, message, code="body_too_large", headers=headers)
