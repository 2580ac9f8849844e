"""Sources of a request's KV: a saved directory, or hosts that export it."""

import ipaddress
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.logger import init_logger
from vllm.v1.request import Request

from ...errors import InvalidRequestError, StorageError
from ...kv.facts import KVFacts
from ...kv.remote import RemoteKV
from ...kv.storage import SavedKV
from ...kv.ticket import Ticket

Layers = Generator[tuple[Tensor, Tensor], None, None]

logger = init_logger(f"vllm.{__name__}")  # vLLM shows only what is logged below its own name


@dataclass(frozen=True)
class Saved:
    """Saved KV in a directory.

    Attributes:
        path: the directory.
        generation: the save that the scheduler saw there.
        facts: the description of its KV.
        visual_uuid: the start of the identifiers of a request's video or images; None for a prompt
            of text.
    """

    path: str
    generation: str
    facts: KVFacts
    visual_uuid: str | None

    @classmethod
    def open(cls, path: Path) -> "Saved":
        """Find KV of a whole prompt, as vLLM reads it.

        Raises:
            StorageError: there is no usable KV in this directory, or visual tokens were pruned from
                the prompt.
        """
        manifest = SavedKV.open(path).manifest
        if manifest.reduction is not None:
            method = manifest.reduction.method
            raise StorageError(
                f"cannot use the KV in {path}: {method} pruned its prompt, which vLLM reads whole"
            )
        uuid = None if manifest.visual is None else manifest.generation
        return cls(str(path), manifest.generation, KVFacts.of(manifest), uuid)

    @property
    def salt(self) -> str:
        """Part of the ``cache_salt`` of requests with this KV.

        vLLM's prefix cache treats equal tokens under equal salts as equal KV. This KV is
        approximate and made for one question, so every save and every transfer has its own salt.
        """
        return f"apbv-{self.generation}"

    def read(self, tokens: range, kv_heads: range, layers: range) -> Layers:
        """Yield keys and values of each layer, ``[H, T, D]``, which are valid until the next.

        Raises:
            StorageError: the files are gone or were changed.
        """
        saved = SavedKV.open(self.path)
        if saved.manifest.generation != self.generation:
            raise StorageError(f"{self.path} was replaced after the request began")
        for index in layers:
            yield saved.layer(index, tokens, kv_heads)


@dataclass(frozen=True)
class Offered:
    """Exported KV on the hosts that prefilled it, for this request only.

    Attributes:
        ticket: the hosts, and the description of the KV.
        num_readers: the processes that will fetch a part of it.
        timeout: seconds for a host to answer.
    """

    ticket: Ticket
    num_readers: int
    timeout: float

    @property
    def facts(self) -> KVFacts:
        """The description of the KV."""
        return self.ticket

    @property
    def salt(self) -> str:
        """Part of the ``cache_salt`` of requests with this KV, like :attr:`Saved.salt`."""
        return f"apbv-{self.ticket.transfer}"

    def read(self, tokens: range, kv_heads: range, layers: range) -> Layers:
        """Yield keys and values of each layer, ``[H, T, D]``, which are valid until the next.

        After the last layer it confirms to the hosts that all have arrived.

        Raises:
            StorageError: the KV has ended, or a host cannot be reached or stops answering.
        """
        with RemoteKV(self.ticket, self.timeout, self.num_readers) as remote:
            yield from remote.layers(tokens, kv_heads, layers)
            try:
                remote.confirm()
            except StorageError as error:  # all KV has arrived, and the hosts' copy will expire
                logger.warning(
                    "cannot tell the prefill side that transfer %s is complete: %s",
                    self.ticket.transfer,
                    error,
                )


@dataclass(frozen=True)
class Load:
    """Data that a worker needs to write a request's KV into its blocks.

    Attributes:
        source: where the KV comes from.
        tokens: the tokens to load.
        block_ids: the request's blocks in the paged cache, from its first token on.
    """

    source: Saved | Offered
    tokens: range
    block_ids: tuple[int, ...] = ()


@dataclass
class LoadMetadata(KVConnectorMetadata):
    """Connector metadata of an engine step.

    Attributes:
        loads: the loads that begin, by request id.
        refused: the requests that must fail instead.
        abandoned: the requests whose load is no longer needed.
        is_idle: whether no request computes anything in this step.
    """

    loads: dict[str, Load] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    abandoned: set[str] = field(default_factory=set)
    is_idle: bool = False


class Sources:
    """The sources that requests may name, as ``kv_connector_extra_config`` says.

    Raises:
        InvalidRequestError: the configuration is invalid.
    """

    def __init__(self, vllm_config: VllmConfig):
        transfer = vllm_config.kv_transfer_config
        root = transfer.get_from_extra_config("root", None)
        networks = transfer.get_from_extra_config("networks", None)
        self._root = None if root is None else Path(root).resolve()
        self._networks = None
        if networks is not None:
            self._networks = [ipaddress.ip_network(network) for network in networks]
        self._timeout = float(transfer.get_from_extra_config("timeout", 30.0))
        self._num_readers = vllm_config.parallel_config.world_size

    def named_by(self, request: Request) -> Saved | Offered | None:
        """Return the KV that a request names by a ticket or by a directory; None if it names none.

        Raises:
            StorageError: the ticket is malformed, or there is no usable KV in the directory.
            InvalidRequestError: no request may name these hosts or this directory.
        """
        params = request.kv_transfer_params
        ticket = Ticket.from_params(params)
        if ticket is not None:
            for host, _ in ticket.sources:
                self._require_allowed(host)
            return Offered(ticket, self._num_readers, self._timeout)
        if not isinstance(params, dict) or "apbv_path" not in params:
            return None
        path = params["apbv_path"]
        if not isinstance(path, str):
            raise InvalidRequestError(f"apbv_path must be a string, not {path!r}")
        return Saved.open(self._inside_root(path))

    def _inside_root(self, path: str) -> Path:
        """Return a directory's path, relative to the root if there is one.

        Raises:
            InvalidRequestError: it is outside the root.
        """
        if self._root is None:
            return Path(path)
        if not (self._root / path).resolve().is_relative_to(self._root):
            raise InvalidRequestError(f"the folder {path} is outside {self._root}")
        return self._root / path

    def _require_allowed(self, host: str) -> None:
        """Raise InvalidRequestError if a ticket's host is outside the networks that may offer
        KV."""
        if self._networks is None:
            return
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            raise InvalidRequestError(f"the ticket has {host!r} instead of an IP address") from None
        if not any(address in network for network in self._networks):
            raise InvalidRequestError(
                f"the ticket's address {host} is in no network that may offer KV"
            )


def request_params(path: str | Path) -> dict[str, Any]:
    """Return the request parameters for saved KV.

    Args:
        path: the directory.

    Returns:
        ``kv_transfer_params``, a field of an OpenAI request's body (``extra_body``); offline it
        goes into ``SamplingParams(extra_args={"kv_transfer_params": …})``. For a prompt with a
        video or images also ``uuid``, by which the client asserts that vLLM gets the same video or
        images as apbv: a field of the message's ``video_url`` or ``image_url`` part (of each image,
        with a different suffix); offline the prompt's ``multi_modal_uuids``.

    Raises:
        StorageError: there is no usable KV in this directory, or visual tokens were pruned from its
            prompt.
    """
    path = Path(path).resolve()
    saved = Saved.open(path)
    params: dict[str, Any] = {"kv_transfer_params": {"apbv_path": str(path)}}
    if saved.visual_uuid is not None:
        params["uuid"] = saved.visual_uuid
    return params
