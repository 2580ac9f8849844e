"""The engine loop on host 0: takes requests from HTTP, and leads all hosts through them."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from ...decode.answer import finish_reason
from ...errors import RequestCancelled, StorageError
from ...request.result import GenerateResult
from ..api_error import ApiError
from ..media.files import PrivateFiles
from .answer_stream import AnswerStream
from .decode_thread import DecodeThread
from .executor import Command, Executor, OfferedKV, exchange_commands, require_decoding
from .job import Job
from .links import Links
from .local_prefill import LocalPrefillPool
from .output import JobOutput, failure_of
from .ready_request import ReadyRequest
from .scheduler import Scheduler
from .work_order import WorkOrder, encode_order

# Seconds without a request after which host 0 sends the others an idle command. This is less than
# the hosts' own wait, so that a wait between two requests is a single one.
_IDLE_SECONDS = 0.5
_SILENCE_SECONDS = 10.0  # without a step: another host does not answer


# Reads a request, with a stack that keeps its files open, and asks whether it is still wanted.
ReadRequest = Callable[[ExitStack, Callable[[], bool]], ReadyRequest]


class Worker:
    """Engine loop: reads requests and has all hosts carry them out, in a thread.

    All collectives of the hosts happen in this thread. It prefills prompts in the scheduler's
    order, one after another, while other threads of each host prefill short ones and decode; if
    answers cannot be batched, all hosts decode each before it takes the next. The methods are
    called from the thread that speaks HTTP, or from those that read requests.

    Args:
        executor: carries orders out, together with the other hosts' executors.
        scheduler: the request queue and limits.
        private_files: the files that requests bring.
        links: the connections to the other hosts; None if only host 0 decodes alone.

    Attributes:
        batching_obstacle: why answers are not batched; None if they are.
        failure: the error that ended the thread prematurely.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        private_files: PrivateFiles,
        links: Links | None = None,
    ):
        self._executor = executor
        self._scheduler = scheduler
        self._private_files = private_files
        self._links = links
        self.batching_obstacle = executor.engine.batching_obstacle
        self._decoding = None if self.batching_obstacle else DecodeThread(executor.engine)
        self._local_prefills = LocalPrefillPool(executor.engine, self._decoding)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._last_step_at = time.monotonic()
        self._is_busy = False
        self.failure: BaseException | None = None

    def start(self, on_stop: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Start the engine's threads.

        Args:
            on_stop: called when another host was asked to end.
            on_end: called when the threads have ended.
        """
        self._on_stop = on_stop
        self._on_end = on_end
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    def reason_unavailable(self) -> str | None:
        """Return why no request can be answered; None if they can."""
        if self.failure is not None:
            return "a host has failed"
        if self._scheduler.is_stopping or not self.is_running:
            return "the server is stopping"
        if not self._is_busy and time.monotonic() - self._last_step_at > _SILENCE_SECONDS:
            return "a host does not answer"
        return None

    def admit(self, *jobs: Job) -> None:
        """Give new requests places in the queue, all or none of them.

        Raises:
            ApiError: with status 503 if no request can be answered, with 429 if the queue is full,
                with 400 if it is too short for them.
        """
        try:
            reason = self.reason_unavailable()
            if reason is not None:
                raise ApiError(503, reason)
            self._scheduler.admit(*jobs)
        except ApiError:
            for job in jobs:
                job.record.outcome = "rejected"
                self._scheduler.metrics.observe_end(job.record)
            raise

    def submit(self, job: Job, read: ReadRequest, hands_over: bool) -> None:
        """Read a request, which may take long, and put it into the queue.

        An error becomes its last event.

        Args:
            read: reads it.
            hands_over: whether the prompt's KV is to be transferred to another server.
        """

        def is_wanted() -> bool:
            return not (job.is_cancelled or self._scheduler.is_stopping)

        try:
            if hands_over and self._executor.offers is None:
                message = "this server does not transfer KV: it was started without --kv-transfer"
                raise ApiError(400, message, param="kv_transfer_params")
            job.read = read(job.files, is_wanted)
            self._scheduler.make_ready(job)
        except ApiError as error:
            self._end_unread(job, error)
        except Exception as error:
            failure = failure_of(error, job.record.id)
            self._end_unread(job, ApiError(failure.status, failure.message))

    def _end_unread(self, job: Job, error: ApiError) -> None:
        """End a request that could not be read."""
        if job.is_cancelled:
            self._scheduler.end(job, None, "cancelled")
        elif self._scheduler.is_stopping:
            self._scheduler.end(job, ApiError(503, "the server is stopping"), "rejected")
        elif error.status == 429:
            self._scheduler.end(job, error, "rejected")
        elif error.status < 500:
            self._scheduler.end(job, error, "invalid")
        else:
            self._scheduler.end(job, error, "failed")

    def finish(self, seconds: float) -> None:
        """Reject waiting and new requests, finish the running ones, and shut down all hosts.

        This includes waiting until exported KV has been fetched.

        Args:
            seconds: until running requests are aborted.
        """
        self._scheduler.stop()
        self._thread.join(seconds)
        if self.is_running:
            self._scheduler.cut_short()
        self._thread.join()

    def cut_short(self) -> None:
        """Abort running requests while :meth:`finish` waits for them, and delete clients' files."""
        self._scheduler.cut_short()
        self._private_files.close()

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                stack.enter_context(self._executor.hosts.on_device())
                if self._decoding is not None:
                    stack.enter_context(self._decoding)
                stack.enter_context(self._local_prefills)
                threading.Thread(target=self._hand_out, name="short prompts", daemon=True).start()
                while self._step():
                    pass
        except BaseException as error:
            self.failure = error
        finally:
            self._scheduler.close(None if self.failure is None else "a host has failed")
            self._on_end()

    def _step(self) -> bool:
        """Carry out the next request, or send an idle command; False after shutdown."""
        job = self._scheduler.take(_IDLE_SECONDS)
        require_decoding(self._executor.hosts, self._decoding)
        has_stopped = job is None and self._scheduler.has_stopped
        if has_stopped:
            self._send_command(Command.LEAVE)
        elif job is None:
            self._send_command(Command.WAIT)
        else:
            self._is_busy = True
            self._lead(job)
        if self._links is not None and self._links.failure is not None and not has_stopped:
            self._send_command(Command.WAIT)  # raises the reason of a host that has failed
            raise self._links.failure
        self._last_step_at = time.monotonic()
        self._is_busy = False
        return not has_stopped

    def _send_command(self, command: Command) -> None:
        _, must_stop = exchange_commands(self._executor.hosts, command, wants_to_stop=False)
        if must_stop and command != Command.LEAVE:
            self._on_stop()

    def _hand_out(self) -> None:
        """Give short prompts to their decode hosts, in a thread.

        Whatever all hosts prefill, these do not wait for it.
        """
        while not self._scheduler.has_stopped and self.failure is None:
            job = self._scheduler.take(_IDLE_SECONDS, is_short=True)
            if job is None:
                continue
            output = JobOutput(job, self._scheduler)
            is_sent = job.decode_host != 0
            try:
                file_bytes = _sent_file_bytes(job) if is_sent else []
                order = self._addressed_order(job, output)
                if is_sent:
                    self._links_to_hosts.send(order, file_bytes)
                else:
                    self._local_prefills.prefill(order, output, job.read.paths, job.read.prompt)
            except Exception as error:
                output.fail(error)
                output.release()

    def _addressed_order(self, job: Job, output: JobOutput) -> WorkOrder:
        """Return a request's order, with its id, its decode host, and the number by which that
        names the output."""
        order = job.read.order
        if job.decode_host is None or job.decode_host == 0:
            return order.addressed(job.record.id)
        number = self._links_to_hosts.add(output)
        return order.addressed(job.record.id, job.decode_host, number)

    @property
    def _links_to_hosts(self) -> Links:
        """The connections to the other hosts, where one of these is a request's decode host."""
        assert self._links is not None, "decode hosts are connected to host 0"
        return self._links

    def _lead(self, job: Job) -> None:
        """Lead all hosts through a request, to its end or until a decoding thread has it."""
        hosts = self._executor.hosts
        output = JobOutput(job, self._scheduler)
        try:
            file_bytes = _sent_file_bytes(job) if hosts.num_processes > 1 else []
        except StorageError as error:
            output.fail(error)
            output.release()
            return
        order = self._addressed_order(job, output)
        self._send_command(Command.CARRY_OUT)
        hosts.broadcast_bytes(encode_order(order))
        for data in file_bytes:
            hosts.broadcast_bytes(data)
        with self._local_prefills.giving_way():
            self._carry_out(job, order, output)

    def _carry_out(self, job: Job, order: WorkOrder, output: JobOutput) -> None:
        """Carry out an order on this host."""
        executor = self._executor
        stream = AnswerStream(output, order, executor.engine.tokenizer.decode)
        try:
            result = executor.carry_out(
                order, job.read.paths, stream.request_for_answer, job.read.prompt
            )
            if isinstance(result, OfferedKV):
                self._hand_over(job, result, stream, output)
            elif isinstance(result, GenerateResult):
                stream.finish(
                    result.token_ids,
                    result.logprobs,
                    result.finish_reason,
                    result.stats["speculation"],
                )
            else:
                # Its decode host decodes it, and releases the output.
                if order.decode_host == 0:
                    assert self._decoding is not None, "requests only begin where a batch decodes"
                    self._decoding.add(output, order, result)
                return
        except RequestCancelled:
            pass
        except Exception as error:
            if not executor.is_usable:
                raise
            # All hosts have rejected the request alike, or this one alone.
            output.fail(error)
        output.release()

    def _hand_over(
        self, job: Job, offered: OfferedKV, stream: AnswerStream, output: JobOutput
    ) -> None:
        """Send a client its KV ticket, or drop the KV if the client has disconnected."""
        ticket = offered.ticket
        offers = self._executor.offers
        assert offers is not None, "KV was offered"
        self._scheduler.hold_offer(ticket.transfer, ticket.num_bytes)
        job.record.transfer = ticket.transfer
        output.kv_params = ticket.to_params()
        tokens = [offered.first_token]
        eos_token_ids = self._executor.engine.parts.eos_token_ids
        reason = finish_reason(tokens, job.read.order.settings.sampling, eos_token_ids)
        if not stream.finish(tokens, [], reason):
            offers.drop(ticket.transfer)


def _sent_file_bytes(job: Job) -> list[bytes]:
    """Read a request's files that other hosts cannot open themselves.

    Raises:
        StorageError: a temporary file cannot be read.
    """
    paths = [file.path for file in job.read.media if file.relative is None]
    try:
        return [path.read_bytes() for path in paths]
    except OSError as error:
        raise StorageError(f"cannot read a temporary file: {error.strerror}") from error
