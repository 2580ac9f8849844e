"""The ticket with which a consumer fetches a prompt's KV from the hosts that prefilled it.

A prefill instance puts it into the ``kv_transfer_params`` of its reply, and routers forward it
unchanged to the consumer. It has the KV's addresses and everything that a consumer's scheduler
needs to decide without I/O whether the KV fits a request. Other engines' processes import this
module: it needs only torch and the standard library.
"""

import secrets
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import StorageError
from .facts import KVFacts, from_json, malformed

VERSION = 1
_ENTRY = "apbv"
_HEX_DIGITS = {"transfer": 32, "token": 64, "tokens_sha256": 64, "positions_sha256": 64}
_MOST_SOURCES = 1024  # a consumer starts a thread for each


@dataclass(frozen=True, kw_only=True)
class Ticket(KVFacts):
    """Names and describes exported KV.

    Attributes:
        version: the version of the ticket's format and of the protocol that the sources speak.
        transfer: a random 128-bit number as hex digits, which may appear in logs.
        token: a 256-bit secret as hex digits, which readers must present; it must not appear in
            logs.
        sources: address and port of every process that holds KV. The first is host 0's, which also
            takes the confirmation, and the order to drop the KV.

    Raises:
        StorageError: a value is malformed.
    """

    version: int = VERSION
    transfer: str
    token: str = field(repr=False)
    sources: tuple[tuple[str, int], ...]

    def __post_init__(self):
        super().__post_init__()
        for name, num_digits in _HEX_DIGITS.items():
            value = getattr(self, name)
            if len(value) != num_digits or not set(value) <= set("0123456789abcdef"):
                raise malformed(name)
        if not 0 < len(self.sources) <= _MOST_SOURCES:
            raise malformed("sources")
        if not all(host and 0 < port < 65536 for host, port in self.sources):
            raise malformed("sources")

    def to_params(self) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` of a reply, for the request to the consumer."""
        return {"do_remote_prefill": True, "do_remote_decode": False, _ENTRY: asdict(self)}

    @classmethod
    def from_params(cls, params: Any) -> "Ticket | None":
        """Read the ``kv_transfer_params`` of a request.

        Args:
            params: the parsed JSON.

        Returns:
            The ticket; None if they have none.

        Raises:
            StorageError: the ticket is malformed, or of another version.
        """
        record = params.get(_ENTRY) if isinstance(params, dict) else None
        if record is None:
            return None
        if not isinstance(record, dict):
            raise StorageError(f"the ticket is {type(record).__name__}, not an object")
        version = record.get("version")
        if version != VERSION:
            raise StorageError(
                f"the ticket has version {version!r:.40}; this version reads {VERSION}"
            )
        return from_json(cls, record)


def new_transfer() -> str:
    """Draw a unique transfer id, as hex digits."""
    return secrets.token_hex(_HEX_DIGITS["transfer"] // 2)


def new_token() -> str:
    """Draw the secret of a transfer, as hex digits."""
    return secrets.token_hex(_HEX_DIGITS["token"] // 2)
