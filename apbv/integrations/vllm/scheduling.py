"""The scheduler's half of the connector: decides which requests load KV, and which must fail."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ...kv.remote import drop
from ...kv.ticket import Ticket
from .admission import Admission
from .sources import Load, LoadMetadata, Offered, Sources

# Threads that tell hosts to drop KV: one unreachable host must not delay messages to the others.
_DROPPERS = 4

logger = init_logger(f"vllm.{__name__}")  # vLLM shows only what is logged below its own name


@dataclass
class Entry:
    """Scheduler state of a request that names KV.

    Attributes:
        load: the KV to load; None if the request must fail.
        is_loaded: whether the KV has arrived.
    """

    load: Load | None
    is_loaded: bool = False

    @property
    def ticket(self) -> Ticket | None:
        """The ticket of exported KV, which can be fetched once; None for other KV."""
        if self.load is None or not isinstance(self.load.source, Offered):
            return None
        return self.load.source.ticket


class Scheduling:
    """The scheduler's half of the connector, which decides about requests as they arrive.

    A connector can reject a request only by a load that fails. So under the policy ``fail`` a
    request that does not fit its KV waits for a load like every other, the load fails at once, and
    vLLM ends this request with finish reason ``error`` (HTTP 500) and continues with the others.
    The reason is in vLLM's log; no field of the response could carry it. Under ``recompute`` such a
    request is treated as one without KV, and vLLM prefills it itself.
    """

    def __init__(self, vllm_config: VllmConfig):
        self._recomputes = vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
        self._sources = Sources(vllm_config)
        self._admission = Admission(vllm_config)
        self._entries: dict[str, Entry] = {}
        self._starting = LoadMetadata()
        self._droppers = ThreadPoolExecutor(_DROPPERS, thread_name_prefix="apbv-drop")

    def add(self, request: Request) -> None:
        """Decide whether a new request may have the KV that it names, if it names any."""
        source = None
        began = time.time()
        try:
            source = self._sources.named_by(request)
            if source is None:
                return
            load = self._admission.admit(request, source)
        except Exception as error:  # a bad request must not affect the others
            if isinstance(source, Offered):
                self._drop(source.ticket)
            self._report(request, reason_of(error))
            if self._recomputes:
                return
            # vLLM drops the loads of requests that skip its prefix cache, so that this one would
            # run and not fail.
            request.skip_reading_prefix_cache = False
            load = None
        logger.debug(
            "request %s: named its KV at %.6f, checked in %.6f s",
            request.request_id,
            began,
            time.time() - began,
        )
        self._entries[request.request_id] = Entry(load)

    def count_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Count the tokens that the request is to load after those that vLLM has."""
        entry = self._entries.get(request.request_id)
        if entry is None:
            return 0
        if entry.load is not None:
            count = max(0, entry.load.tokens.stop - num_computed_tokens)
            is_spent = entry.is_loaded and entry.ticket is not None
            if count == 0 or not is_spent:
                return count
            self._report(
                request, "vLLM preempted it after its KV had been fetched, and KV is given out once"
            )
            if self._recomputes:
                del self._entries[request.request_id]
                return 0
            entry.load = None
        # A rejected request announces all its tokens, so that vLLM starts the load whatever it has
        # cached.
        return max(0, request.num_tokens - num_computed_tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Begin the request's load with the next step, into these blocks."""
        entry = self._entries.get(request.request_id)
        if entry is None or num_external_tokens == 0:
            return
        if entry.load is None:
            self._starting.refused.add(request.request_id)
            return
        (block_ids,) = blocks.get_block_ids()
        stop = entry.load.tokens.stop
        tokens = range(stop - num_external_tokens, stop)
        self._starting.loads[request.request_id] = replace(
            entry.load, tokens=tokens, block_ids=tuple(block_ids)
        )

    def take_metadata(self, scheduler_output: SchedulerOutput) -> LoadMetadata:
        """Return the metadata for the workers in this step."""
        metadata = self._starting
        self._starting = LoadMetadata()
        metadata.is_idle = scheduler_output.total_num_scheduled_tokens == 0
        return metadata

    def update(self, output: KVConnectorOutput) -> None:
        """Record the loads that have ended on all workers."""
        failed_ids = output.failed_recving or ()
        for request_id in output.finished_recving or ():
            entry = self._entries.get(request_id)
            if entry is None:
                continue
            entry.is_loaded = request_id not in failed_ids
            if not entry.is_loaded and self._recomputes:
                self.remove(request_id)
                logger.warning("vLLM prefills request %s itself", request_id)

    def remove(self, request_id: str) -> None:
        """Drop a request; KV that it has not fetched is released."""
        entry = self._entries.pop(request_id, None)
        if entry is not None and entry.ticket is not None and not entry.is_loaded:
            self._starting.abandoned.add(request_id)
            self._drop(entry.ticket)

    def close(self) -> None:
        """Stop notifying hosts of KV that will not be fetched, which then expires."""
        self._droppers.shutdown(wait=False, cancel_futures=True)

    def _report(self, request: Request, reason: str) -> None:
        """Log why a request cannot use its KV, and what becomes of it."""
        outcome = "vLLM prefills it itself" if self._recomputes else "it is refused"
        logger.error(
            "request %s cannot use the KV that it names: %s; %s",
            request.request_id,
            reason,
            outcome,
        )

    def _drop(self, ticket: Ticket) -> None:
        """Tell the hosts that this KV will not be fetched, in the background."""
        self._droppers.submit(_drop, ticket)


def _drop(ticket: Ticket) -> None:
    try:
        drop(ticket)
    except Exception as error:  # the KV then expires
        logger.warning(
            "the KV of transfer %s cannot be dropped: %s", ticket.transfer, reason_of(error)
        )


def reason_of(error: Exception) -> str:
    """Return an error's text for vLLM's log: a ValueError's explains itself."""
    return str(error) if isinstance(error, ValueError) else repr(error)
