"""Carries out orders: every host's work for a request, led by host 0."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from threading import Event

from ...decode.answer import begin_answer
from ...engine import Engine
from ...hosts import HostGroup
from ...input.prompts.tokenized_prompt import TokenizedPrompt
from ...kv.offers import Offers
from ...kv.ticket import Ticket
from ...prefilling.result import PrefillResult
from ...request.request import Request
from ...request.result import GenerateResult
from ...speculate.loops.decode_loop import PrefilledRequest
from ..media.files import PrivateFiles, find_in_folder
from .decode_thread import Arrival, DecodeThread
from .links import Link, RemoteOutput
from .local_prefill import LocalPrefillPool
from .output import Failure, failure_unless_cancelled
from .work_order import WorkOrder, decode_order

AddCallbacks = Callable[[Request], Request]
Files = AbstractContextManager[Sequence[Path]]


class Command(IntEnum):
    """What all hosts do next, as host 0 says: idle, carry out an order, or shut down."""

    WAIT = 0
    CARRY_OUT = 1
    LEAVE = 2


@dataclass(frozen=True)
class OfferedKV:
    """A prompt's KV that waits for another server.

    Attributes:
        first_token: the answer's first token.
        ticket: names the KV to the other server.
    """

    first_token: int
    ticket: Ticket


# An answer; or a prefilled request, which its decode host decodes; or KV that waits for another
# server.
OrderResult = GenerateResult | PrefilledRequest | OfferedKV


def _without_callbacks(request: Request) -> Request:
    return request


@dataclass(frozen=True)
class Executor:
    """Carries out orders on this host; its methods are collective over all hosts.

    Attributes:
        engine: answers them.
        hosts: all hosts, a draft host included.
        offers: this process's exported KV; None if KV transfer is off.
    """

    engine: Engine
    hosts: HostGroup
    offers: Offers | None = None

    def carry_out(
        self,
        order: WorkOrder,
        files: Files,
        add_callbacks: AddCallbacks = _without_callbacks,
        prompt: TokenizedPrompt | None = None,
    ) -> OrderResult | None:
        """Answer an order, prefill it for its decode host, or export its prompt's KV.

        KV is exported from the hosts that computed it.

        Args:
            files: provides this host's paths of the order's files.
            add_callbacks: turns the request into one with host 0's callbacks.
            prompt: the part of the question that this host has already read.

        Returns:
            The order's result. Exported KV is returned on host 0; on the others None.

        Raises:
            StorageError: a host has no room for the KV, which is not the request's fault.
        """
        engine = self.engine
        with ExitStack() as stack:
            with self.hosts.local_stage("opening the files"):
                paths = stack.enter_context(files)
            request = add_callbacks(order.request(engine.hosts, paths, prompt))
            if not order.hands_over:
                return engine.answer(request) if engine.batching_obstacle else engine.begin(request)
            if not engine.prefills:
                return None
            begun = self._handing_over.begin(request)
        return self._offer(begun.read.request, begun.state)

    def _offer(self, request: Request, state: PrefillResult) -> OfferedKV | None:
        """Choose the answer's first token, and export the prompt's KV; on other hosts None.

        Raises:
            StorageError: a host has no room for the KV.
        """
        assert self.offers is not None, "host 0 refuses hand-overs where KV transfer is off"
        token = self._first_token(request, state)
        ticket = state.offer(self.offers)
        return None if ticket is None else OfferedKV(token, ticket)

    @cached_property
    def _handing_over(self) -> Engine:
        return self.engine.for_kv_export()

    def _first_token(self, request: Request, state: PrefillResult) -> int:
        """Choose the first token of an answer on the leader, and broadcast it.

        Raises:
            ModelOutputError: the logits are NaN or infinite; on every host.
        """
        hosts = state.kv.hosts
        chosen = None
        with hosts.local_stage("choosing the first token"):
            answer = begin_answer(self.engine.parts, state, replace(request, sink=None))
            if hosts.is_leader:
                chosen = answer.pick(answer.logits, answer.next_index).fetch(hosts.wait_for_device)
        token, _ = answer.agree(chosen)
        return token

    @property
    def is_usable(self) -> bool:
        """Whether the hosts can continue after a failed request."""
        return not (self.hosts.is_broken or self.engine.hosts.is_broken)


def exchange_commands(
    hosts: HostGroup, command: Command, wants_to_stop: bool
) -> tuple[Command, bool]:
    """Broadcast host 0's command, and gather whether any host was asked to stop; collective.

    Every host sends data, so that each detects one that has ended.
    """
    messages = hosts.gather_floats([command, wants_to_stop])
    return Command(int(messages[0][0])), any(stop for _, stop in messages)


def require_decoding(hosts: HostGroup, decoding: DecodeThread | None) -> None:
    """Raise the error that ended this host's decoding thread, if any, and break the group."""
    if decoding is not None and decoding.failure is not None:
        with hosts.collective_stage("decoding"):
            raise decoding.failure


def follow(
    executor: Executor,
    folder: Path | None,
    private_files: PrivateFiles,
    wants_to_stop: Event,
    link: Link | None = None,
) -> None:
    """Carry out host 0's commands until shutdown; runs on every other host.

    Args:
        folder: the folder that files are read from, as on host 0.
        private_files: storage for files whose bytes are sent.
        wants_to_stop: set when this process was asked to end; host 0 decides.
        link: this host's connection to host 0; None if only host 0 decodes alone.

    Raises:
        HostError: another host ended, or failed in an exchange.
    """
    decoding = None if link is None else _Decoding(executor.engine, link)
    thread = None if decoding is None else decoding.thread
    local_prefills = LocalPrefillPool(executor.engine, thread)
    follower = _Follower(executor, decoding, local_prefills, folder, private_files)
    with ExitStack() as stack:
        if thread is not None:
            stack.enter_context(thread)
        stack.enter_context(local_prefills)
        if link is not None:
            link.listen(follower.prefill_alone)
        while True:
            require_decoding(executor.hosts, thread)
            command, _ = exchange_commands(executor.hosts, Command.WAIT, wants_to_stop.is_set())
            follower.report_failures()
            if command == Command.LEAVE:
                return
            if command == Command.CARRY_OUT:
                follower.carry_out()


class _Decoding:
    """The answers that a host other than host 0 decodes.

    Args:
        link: this host's connection to host 0.

    Attributes:
        thread: decodes them.
    """

    def __init__(self, engine: Engine, link: Link):
        self._link = link
        self.thread = DecodeThread(engine, link.flush)

    def add(self, order: WorkOrder, arrival: Arrival) -> None:
        """Decode the answers of an order, or report that it failed."""
        self.thread.add(self.output(order), order, arrival)

    def output(self, order: WorkOrder) -> RemoteOutput:
        """Return a new output for an order's answers."""
        assert order.number is not None, "host 0 numbers the orders of other decode hosts"
        return RemoteOutput(self._link, order.number, order.request_id)


class _Follower:
    """Carries out host 0's orders on another host.

    Args:
        decoding: the answers of this host; None: all hosts decode together.
        local_prefills: prefills short prompts on this host alone.
        folder: the folder that files are read from.
        private_files: storage for files whose bytes are sent.
    """

    def __init__(
        self,
        executor: Executor,
        decoding: _Decoding | None,
        local_prefills: LocalPrefillPool,
        folder: Path | None,
        private_files: PrivateFiles,
    ):
        self._executor = executor
        self._decoding = decoding
        self._local_prefills = local_prefills
        self._folder = folder
        self._private_files = private_files
        self._failures: list[tuple[WorkOrder, Failure | None]] = []

    def prefill_alone(self, order: WorkOrder, sent_files: Iterator[bytes]) -> None:
        """Prefill a short prompt on this host, in a thread.

        Args:
            sent_files: the bytes of the files that host 0 sends.
        """
        output = self._own_decoding.output(order)
        self._local_prefills.prefill(order, output, self._opened(order, sent_files))

    def carry_out(self) -> None:
        """Receive an order, and carry it out together with all hosts."""
        executor = self._executor
        hosts = executor.hosts
        order = decode_order(hosts.broadcast_bytes(None))
        sent_files = [hosts.broadcast_bytes(None) for file in order.files if file is None]
        try:
            with self._local_prefills.giving_way():
                result = executor.carry_out(order, self._opened(order, iter(sent_files)))
        except Exception as error:
            if not executor.is_usable:
                raise
            failure = failure_unless_cancelled(error, order.request_id)
            self._failures.append((order, failure))
            return
        if isinstance(result, PrefilledRequest) and order.decode_host == hosts.rank:
            self._own_decoding.add(order, result)

    def report_failures(self) -> None:
        """Report the orders that failed here before host 0's latest command.

        A request that failed on host 0, too, was reported there before that command.
        """
        for order, failure in self._failures:
            # Of others host 0 tells the client.
            if order.number is not None and order.decode_host == self._executor.hosts.rank:
                self._own_decoding.add(order, failure)
        self._failures.clear()

    @property
    def _own_decoding(self) -> _Decoding:
        """The answers that this host decodes, where it is a request's decode host."""
        assert self._decoding is not None, "a decode host is connected to host 0"
        return self._decoding

    @contextmanager
    def _opened(self, order: WorkOrder, sent_files: Iterator[bytes]) -> Iterator[list[Path]]:
        """Provide this host's paths of an order's files."""
        paths = []
        with ExitStack() as stack:
            for file in order.files:
                if file is None:
                    path = stack.enter_context(self._private_files.holding(next(sent_files)))
                else:
                    path = find_in_folder(self._folder, file)
                paths.append(path)
            yield paths
