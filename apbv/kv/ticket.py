"""This module defines the ticket with which a consumer fetches a prompt's KV from the hosts that prefilled it.

A prefill worker puts it into the ``kv_transfer_params`` of its reply, and routers carry it unchanged to the
consumer. It says where the KV is, and all that a consumer's scheduler has to know to decide without any I/O
whether the KV fits a request. Other engines' processes import this module: it needs only torch and the standard
library.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from .manifest import StorageError

VERSION = 1
_ENTRY = "apbv"
_DTYPES = ("float32", "float16", "bfloat16")
_HEX_DIGITS = {"transfer": 32, "token": 64, "tokens_sha256": 64, "positions_sha256": 64}
_MOST_SOURCES = 1024  # a consumer has a thread for each
_AT_LEAST_ONE = ("num_tokens", "num_layers", "num_kv_heads", "head_dim")


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """A Ticket names KV that waits to be fetched, and describes it.

    Attributes:
        version: of the ticket's format and of the protocol that the sources speak.
        transfer: a random 128-bit number as hex digits, by which logs may name the transfer.
        token: a 256-bit secret as hex digits, which whoever fetches must present; no log may contain it.
        sources: address and port of every process that holds KV. The first is host 0's, which also takes the
            confirmation, and the order to drop the KV.
        path: the directory that holds the KV, as :mod:`apbv.kv.reader` reads it; None where it comes from the
            sources' memory.
        num_tokens: n, the tokens whose KV there is.
        tokens_sha256: :func:`digest_of_tokens` of the prompt.
        positions_sha256: :func:`digest_of_positions` of its rotary positions.
        position_rule: the rule that gave them, ``"transformers"`` or ``"vllm"``.
        model: where the model was loaded from.
        config_sha256, weights_sha256: as in :class:`apbv.kv.manifest.ModelIdentity`.
        dtype: of keys and values, as torch names it.
        num_layers, num_kv_heads, head_dim: sizes of the whole KV.
        method: the prefill method that ran.
        exact: whether its KV is that of full attention.

    Raises:
        StorageError: a value is not what it must be.
    """

    version: int = VERSION
    transfer: str
    token: str = field(repr=False)
    sources: tuple[tuple[str, int], ...]
    path: str | None = None
    num_tokens: int
    tokens_sha256: str
    positions_sha256: str
    position_rule: str
    model: str
    config_sha256: str
    weights_sha256: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    method: str
    exact: bool

    def __post_init__(self):
        if self.version != VERSION:
            raise StorageError(f"the ticket has version {self.version!r}; this version reads {VERSION}")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.type in (int, str, bool) and type(value) is not entry.type:
                raise _malformed(entry.name)
        for name, digits in _HEX_DIGITS.items():
            if len(value := getattr(self, name)) != digits or not set(value) <= set("0123456789abcdef"):
                raise _malformed(name)
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise _malformed(name)
        if self.dtype not in _DTYPES:
            raise _malformed("dtype")
        if self.path is not None and not (isinstance(self.path, str) and self.path):
            raise _malformed("path")
        if not 0 < len(self.sources) <= _MOST_SOURCES or not all(map(_is_source, self.sources)):
            raise _malformed("sources")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of keys and values."""
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        """The bytes of all keys and values."""
        rows = self.num_layers * self.num_kv_heads * self.num_tokens
        return 2 * rows * self.head_dim * self.torch_dtype.itemsize

    def to_params(self) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` of a reply, which is all that a request for the consumer needs."""
        return {"do_remote_prefill": True, "do_remote_decode": False, _ENTRY: asdict(self)}

    @classmethod
    def from_params(cls, params: Any) -> "Ticket | None":
        """Read the ``kv_transfer_params`` of a request.

        Args:
            params: what JSON made of them.

        Returns:
            The ticket; None where there is none in them.

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
        known = {entry.name for entry in fields(cls)}
        if set(record) != known:
            wrong = ", ".join(sorted(set(map(str, record)) ^ known))
            raise StorageError(f"the ticket lacks fields, or has unknown ones: {wrong:.200}")
        try:
            sources = tuple((host, port) for host, port in record["sources"])
        except (TypeError, ValueError):
            raise _malformed("sources") from None
        return cls(**{**record, "sources": sources})


def new_transfer() -> str:
    """Draw a number that no other transfer has, as hex digits."""
    return secrets.token_hex(_HEX_DIGITS["transfer"] // 2)


def new_token() -> str:
    """Draw the secret of a transfer, as hex digits."""
    return secrets.token_hex(_HEX_DIGITS["token"] // 2)


def digest_of_tokens(token_ids: Tensor | Sequence[int]) -> str:
    """Compute the SHA-256 of token ids ``[n]`` as little-endian int64."""
    return _digest(torch.as_tensor(token_ids, dtype=torch.int64))


def digest_of_positions(positions: Tensor) -> str:
    """Compute the SHA-256 of rotary positions, ``[3, n]`` or ``[n]``, row by row as little-endian int64."""
    return _digest(positions.to(torch.int64))


def _digest(numbers: Tensor) -> str:
    values = numbers.detach().cpu().contiguous().numpy().astype("<i8", copy=False)
    return hashlib.sha256(values.tobytes()).hexdigest()


def _is_source(source: Any) -> bool:
    host, port = source
    return isinstance(host, str) and bool(host) and type(port) is int and 0 < port < 65536


def _malformed(name: str) -> StorageError:
    return StorageError(f"the ticket is malformed: its {name} is not what it must be")
