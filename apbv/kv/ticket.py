"""The ticket with which a consumer fetches a prompt's KV from the hosts that prefilled it.

A prefill worker puts it into the ``kv_transfer_params`` of its reply, and routers carry it unchanged to the
consumer. It says where the KV is, and all that a consumer's scheduler has to know to decide without any I/O
whether the KV fits a request. Other engines' processes import this module: it needs only torch and the standard
library.
"""

import secrets
from dataclasses import asdict, dataclass, field
from typing import Any

from .facts import KVFacts, StorageError, from_json, malformed

VERSION = 1
_ENTRY = "apbv"
_HEX_DIGITS = {"transfer": 32, "token": 64, "tokens_sha256": 64, "positions_sha256": 64}
_MOST_SOURCES = 1024  # a consumer has a thread for each


@dataclass(frozen=True, kw_only=True)
class Ticket(KVFacts):
    """Names KV that waits to be fetched, and describes it.

    Attributes:
        version: of the ticket's format and of the protocol that the sources speak.
        transfer: a random 128-bit number as hex digits, by which logs may name the transfer.
        token: a 256-bit secret as hex digits, which whoever fetches must present; no log may contain it.
        sources: address and port of every process that holds KV. The first is host 0's, which also takes the
            confirmation, and the order to drop the KV.

    Raises:
        StorageError: a value is not what it must be.
    """

    version: int = VERSION
    transfer: str
    token: str = field(repr=False)
    sources: tuple[tuple[str, int], ...]

    def __post_init__(self):
        super().__post_init__()
        for name, digits in _HEX_DIGITS.items():
            if len(value := getattr(self, name)) != digits or not set(value) <= set("0123456789abcdef"):
                raise malformed(name)
        are_sources = all(host and 0 < port < 65536 for host, port in self.sources)
        if not 0 < len(self.sources) <= _MOST_SOURCES or not are_sources:
            raise malformed("sources")

    def to_params(self) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` of a reply, which is all that a request for the consumer needs."""
        return {"do_remote_prefill": True, "do_remote_decode": False, _ENTRY: asdict(self)}

    @classmethod
    def from_params(cls, params: Any) -> "Ticket | None":
        """Read the ``kv_transfer_params`` of a request.

        Args:
            params: what JSON made of them.

        Returns:
            The ticket; None if there is none in them.

        Raises:
            StorageError: there is one, but it is malformed, or of another version.
        """
        record = params.get(_ENTRY) if isinstance(params, dict) else None
        if record is None:
            return None
        if not isinstance(record, dict):
            raise StorageError(f"the ticket is {type(record).__name__}, not an object")
        if (version := record.get("version")) != VERSION:
            raise StorageError(f"the ticket has version {version!r:.40}; this version reads {VERSION}")
        return from_json(cls, record)


def new_transfer() -> str:
    """Draw a number that no other transfer has, as hex digits."""
    return secrets.token_hex(_HEX_DIGITS["transfer"] // 2)


def new_token() -> str:
    """Draw the secret of a transfer, as hex digits."""
    return secrets.token_hex(_HEX_DIGITS["token"] // 2)
