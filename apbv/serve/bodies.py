"""Reads request bodies, without letting slow clients block others."""

import asyncio
from codecs import BOM_UTF8
from collections import Counter
from email.message import EmailMessage

from starlette.requests import Request

from .requests import ApiError

_BODY_SECONDS = 60.0
_MOST_WHOLE = 4  # bodies of the largest size that may be half read at once
_MOST = 256  # bodies that may be half read at once, of any size


class Bodies:
    """Reads bodies with a bound on half-read ones; used in the event loop's thread.

    If room is needed, the oldest body of the client with the most data is dropped. Slow clients therefore block no
    others, and clients with several addresses get no more than their share.

    Args:
        max_bytes: the largest body that is read.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        # The data so far and the client, by reading task, in order of arrival.
        self._reading: dict[asyncio.Task, tuple[bytearray, str]] = {}

    async def read(self, request: Request) -> bytes:
        """Read a whole body.

        Returns:
            Its UTF-8, without a byte order mark.

        Raises:
            ApiError: with status 413 if its header, or the data so far, shows that it is too large; with 408 if it
                takes too long, also because others need its room; with 415 if it is compressed, or no UTF-8.
            ClientDisconnect: the client has gone.
        """
        about = EmailMessage()
        about["Content-Type"] = request.headers.get("content-type", "application/json")
        if (found := request.headers.get("content-encoding", "identity").lower()) not in ("", "identity"):
            raise ApiError(415, f"the body must not be compressed, but its Content-Encoding is {found:.50}")
        if (found := about.get_content_charset("utf-8")) not in ("utf-8", "utf8", "us-ascii", "ascii"):
            raise ApiError(415, f"the body must be in UTF-8, but its charset is {found:.50}")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise self._too_large()
        reading = asyncio.create_task(self._read(request))
        try:
            await asyncio.wait({reading}, timeout=_BODY_SECONDS)
        finally:
            reading.cancel()
        try:
            return (await reading).removeprefix(BOM_UTF8)
        except asyncio.CancelledError as error:
            message = f"the body took too long (at most {_BODY_SECONDS:g} s, less while others need the room)"
            raise ApiError(408, message, headers={"Connection": "close"}) from error

    async def _read(self, request: Request) -> bytes:
        task, data = asyncio.current_task(), bytearray()
        self._reading[task] = data, request.client.host if request.client else ""
        try:
            self._make_room()
            async for piece in request.stream():
                data += piece
                if len(data) > self._max_bytes:
                    raise self._too_large()
                self._make_room()
            return bytes(data)
        finally:
            self._reading.pop(task, None)

    def _make_room(self) -> None:
        """Drop half-read bodies while they are too many or too large."""
        most, least = _MOST_WHOLE * self._max_bytes, _MOST_WHOLE * self._max_bytes // _MOST
        while sum(len(data) + least for data, _ in self._reading.values()) > most:
            held = Counter()
            for data, client in self._reading.values():
                held[client] += len(data) + least
            (greediest, _), *_ = held.most_common(1)
            dropped = next(task for task, (_, client) in self._reading.items() if client == greediest)
            del self._reading[dropped]
            dropped.cancel()

    def _too_large(self) -> ApiError:
        message, headers = f"the body may have at most {self._max_bytes} bytes", {"Connection": "close"}
        return ApiError(413, message, code="body_too_large", headers=headers)
