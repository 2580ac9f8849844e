"""Carries out orders: the work of every host for a request, led by host 0."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from threading import Event

from ..engine import Engine
from ..generated import GenerateResult
from ..hosts import HostError, HostGroup
from ..input.request import Request
from ..input.skeleton import Skeleton
from ..kv.facts import StorageError
from ..kv.offers import Offers
from ..kv.ticket import Ticket
from ..prefilling.result import PrefillResult
from ..speculate.ways import Begun
from .decode_thread import DecodeThread
from .links import Link, Links, RemoteOutput
from .local_prefill import LocalPrefillPool
from .media import PrivateFiles, find_in_folder
from .work_order import WorkOrder, decode_order

Asked = Callable[[Request], Request]
Files = AbstractContextManager[Sequence[Path]]


class Command(IntEnum):
    """What all hosts do next, as host 0 says: idle, carry out an order, or shut down."""

    WAIT, CARRY_OUT, LEAVE = range(3)


@dataclass(frozen=True)
class Executor:
    """Carries out orders on this host; its methods are collective over all hosts.

    Attributes:
        engine: answers them.
        hosts: all hosts, a draft host included.
        offers: this process's exported KV; None if KV transfer is off.
        link: of :func:`~.links.connect_hosts`; None if no other host than host 0 decodes alone.
    """

    engine: Engine
    hosts: HostGroup
    offers: Offers | None = None
    link: Links | Link | None = None

    def carry_out(
        self,
        order: WorkOrder,
        files: Files,
        asked: Asked = lambda request: request,
        prompt: Skeleton | None = None,
    ) -> "GenerateResult | Begun | tuple[int, Ticket] | None":
        """Answer an order, prefill it with all KV on its home, or export its KV from the hosts that
        computed it.

        Args:
            files: provides this host's paths of the order's files.
            asked: turns the request into one with host 0's callbacks.
            prompt: the part of the question that this host has already read.

        Returns:
            The answer; or what its home goes on with; or the answer's first token and the ticket
            for fetching the KV, on host 0.

        Raises:
            RuntimeError: a host has no room for the KV, which is not the request's fault.
        """
        engine = self.engine
        with ExitStack() as stack:
            with self.hosts.local_stage("opening the files"):
                paths = stack.enter_context(files)
            request = asked(order.request(engine.hosts, paths, prompt))
            if not order.hands_over:
                return engine.answer(request) if engine.why_one_by_one else engine.begin(request)
            if not self.engine.prefills:
                return None
            begun = self._handing_over.begin(request)
        request = begun.read.request
        state = begun.state
        token = self._first_token(request, state)
        try:
            ticket = state.offer(self.offers)
        except (StorageError, HostError) as error:
            if not self.is_usable:
                raise
            raise RuntimeError(f"the KV cannot be offered: {error}") from error
        return None if ticket is None else (token, ticket)

    @cached_property
    def _handing_over(self) -> Engine:
        return self.engine.handing_over()

    def _first_token(self, request: Request, state: PrefillResult) -> int:
        """Choose the first token of an answer on the leader, and broadcast it.

        Raises:
            AgreedError: the logits are NaN or infinite; on every host.
        """
        hosts = state.kv.hosts
        chosen = None
        with hosts.local_stage("choosing the first token"):
            answer = state.begin_answer(self.engine.parts, replace(request, stop=None))
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
    """Raise what ended this host's decoding thread, if anything did, and break the group with the
    reason."""
    if decoding is not None and decoding.failure is not None:
        with hosts.collective_stage("decoding"):
            raise decoding.failure


def follow(
    executor: Executor, folder: Path | None, private_files: PrivateFiles, wants_to_stop: Event
) -> None:
    """Carry out host 0's commands until shutdown; runs on every other host.

    Args:
        folder: the folder that files are read from, as on host 0.
        private_files: storage for files whose bytes are sent. wants_to_stop: set when this process
            was asked to end; host 0 decides.

    Raises:
        HostError: another host ended, or failed in an exchange.
    """
    hosts = executor.hosts
    link = executor.link
    decoding = None if link is None else DecodeThread(executor.engine, link.flush)
    alone = LocalPrefillPool(executor.engine, decoding)
    failed: list[tuple[WorkOrder, Exception]] = []

    @contextmanager
    def opened(order: WorkOrder, sent: Iterator[bytes]) -> Iterator[list[Path]]:
        with ExitStack() as stack:
            yield [
                stack.enter_context(private_files.holding(next(sent)))
                if file is None
                else find_in_folder(folder, file)
                for file in order.files
            ]

    def prefill_alone(order: WorkOrder, sent: Iterator[bytes]) -> None:
        alone.prefill(order, RemoteOutput(link, order.number), opened(order, sent))

    def carry_out() -> None:
        order = decode_order(hosts.broadcast_bytes(None))
        sent = iter([hosts.broadcast_bytes(None) for file in order.files if file is None])
        try:
            with alone.giving_way():
                done = executor.carry_out(order, opened(order, sent))
        except Exception as error:
            if not executor.is_usable:
                raise
            failed.append((order, error.with_traceback(None)))
            return
        if isinstance(done, Begun) and order.home == hosts.rank:
            decoding.add(RemoteOutput(link, order.number), order, done)

    with decoding or nullcontext(), alone:
        if link is not None:
            link.listen(prefill_alone)
        while True:
            require_decoding(hosts, decoding)
            command, _ = exchange_commands(hosts, Command.WAIT, wants_to_stop.is_set())
            for (
                order,
                error,
            ) in failed:  # if it failed on host 0, too, it was reported there before this command
                if order.number is not None and order.home == hosts.rank:
                    decoding.add(RemoteOutput(link, order.number), order, error)
            failed.clear()
            if command == Command.LEAVE:
                return
            if command != Command.WAIT:
                carry_out()
