"""Who may use which memory when: CUDA streams, events, exchanges under way, and copies that nobody
has waited for.

Everything in here happens at once on the CPU. What a GPU would do later, and in which order, is
kept as how far each stream has been told to come, and which points of other streams it has been
told to wait for (vector clocks).
"""

import threading
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

DEFAULT_STREAM = 0
POOL_SIZE = 32  # PyTorch's streams of a GPU and a priority, which it hands out round robin

Moment = Counter  # how far each stream has come, by its number


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first number to behind its last one; nothing on meta, or
    without numbers."""
    if tensor.device.type == "meta" or not tensor.numel():
        return 0, 0
    first = tensor.data_ptr()
    steps = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first, first + (steps + 1) * tensor.element_size()


# An exchange's buffer, from its start until it is waited for; kept, so that its memory is not
# another's meanwhile.
Transfer = namedtuple("Transfer", "start stop receives work place keeps")


class Transfers:
    """The buffers of exchanges under way."""

    def __init__(self) -> None:
        self.under_way: list[Transfer] = []

    def begin(self, tensor: Tensor, receives: bool, work: object, place: str) -> None:
        self.under_way.append(Transfer(*_extent(tensor), receives, work, place, tensor))

    def end(self, work: object) -> None:
        """Forget an exchange's buffers."""
        self.under_way = [transfer for transfer in self.under_way if transfer.work is not work]

    def faults(self, tensor: Tensor, is_written: bool, user: str) -> Iterator[str]:
        """Yield what is wrong with using a tensor now."""
        if not self.under_way:
            return
        start, stop = _extent(tensor)
        for transfer in self.under_way:
            if (
                start < transfer.stop
                and transfer.start < stop
                and (transfer.receives or is_written)
            ):
                use = "writes" if is_written else "reads"
                role = "receives" if transfer.receives else "is sent"
                yield (
                    f"{user} {use} a buffer that {role} since {transfer.place}, before the "
                    "exchange was awaited"
                )


@dataclass
class _Uses:
    """Where in which stream a piece of memory was last written, and read since then.

    Attributes:
        owner: the stream that it was allocated for, which may have it back as soon as it is free;
            None: nobody is known to.
        strangers: the last uses in other streams of which the allocator was not told.
        told: the streams of which it was.
    """

    written: tuple[int, int]
    read: dict[int, int] = field(default_factory=dict)
    owner: int | None = None
    strangers: dict[int, int] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)


class Streams:
    """How far the streams have come, as far as anybody has been told."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._position = Counter()
        # Of each stream: the points of others that it comes behind.
        self._known: dict[int, Moment] = {}
        self._host = Moment()
        self._uses: dict[int, _Uses] = {}
        self._later: list[tuple[int, int, Callable[[], None]]] = []
        self._shared: dict[int, tuple[StorageWeakRef, _Uses]] = {}  # memory with strangers
        # GPU, priority and place in the pool of the streams in use.
        self._pool: list[tuple[int, int, int]] = []
        self.num_taken = Counter()  # of a GPU's pool of a priority

    def take(self, device: int, priority: int) -> int:
        """Hand out a stream as PyTorch does: the 33rd of a GPU and a priority is the first
        again."""
        place = self.num_taken[device, priority] % POOL_SIZE
        self.num_taken[device, priority] += 1
        if (device, priority, place) not in self._pool:
            self._pool.append((device, priority, place))
        return 1 + self._pool.index((device, priority, place))

    def priority_of(self, stream: int) -> int:
        """Return a stream's priority; -1 comes before 0."""
        return 0 if stream == DEFAULT_STREAM else self._pool[stream - 1][1]

    @property
    def current(self) -> int:
        """The stream that this thread's launches go to."""
        return getattr(self._local, "stream", DEFAULT_STREAM)

    @current.setter
    def current(self, stream: int) -> None:
        self._local.stream = stream

    def launch(self, reads: Iterable[Tensor], writes: Iterable[Tensor], user: str) -> Iterator[str]:
        """Put a kernel into the current stream; yields what is wrong with that."""
        stream = self.current
        self._position[stream] += 1
        position = self._position[stream]
        if self.priority_of(stream) < 0 and not self.host_is_behind(
            self._known.get(stream, Moment())
        ):
            yield (
                f"{user} in stream {stream}, which is to be quick, waits for what may be far from "
                "done"
            )
        for tensor in reads:
            uses = self._uses.setdefault(_memory(tensor), _Uses((stream, position)))
            if not self._is_behind(stream, *uses.written):
                yield (
                    f"{user} in stream {stream} reads what stream {uses.written[0]} may still write"
                )
            uses.read[stream] = position
            self._note_stranger(tensor, uses, stream, position)
        for tensor in writes:
            key = _memory(tensor)
            uses = self._uses.get(key)
            before = [] if uses is None else [uses.written, *uses.read.items()]
            for other, point in before:
                if not self._is_behind(stream, other, point):
                    yield f"{user} in stream {stream} writes what stream {other} may still use"
            uses = uses or _Uses((stream, position))
            self._uses[key] = uses = replace(uses, written=(stream, position), read={})
            self._note_stranger(tensor, uses, stream, position)

    def allocate(self, tensor: Tensor, is_ours: bool = True) -> None:
        """Begin the life of new memory, which may lie where other memory was.

        Args:
            is_ours: whether the allocator gives it to the current stream again once it is free.
        """
        self._shared.pop(_memory(tensor), None)
        owner = self.current if is_ours else None
        self._uses[_memory(tensor)] = _Uses(
            (self.current, self._position[self.current]), owner=owner
        )

    def tell_allocator(self, tensor: Tensor, stream: int) -> None:
        """Let memory wait, once it is free, for what a stream does with it until then."""
        if uses := self._uses.get(_memory(tensor)):
            uses.strangers.pop(stream, None)
            uses.told.add(stream)

    def freed_too_soon(self) -> Iterator[str]:
        """Yield what is wrong with memory that was freed since this was last asked."""
        for key, (memory, uses) in list(self._shared.items()):
            if not memory.expired():
                continue
            del self._shared[key]
            for stream, position in uses.strangers.items():
                if not self._is_behind(uses.owner, stream, position):
                    yield (
                        f"memory of stream {uses.owner} is free while stream {stream} may still "
                        "use it: record_stream was not called"
                    )

    def _note_stranger(self, tensor: Tensor, uses: _Uses, stream: int, position: int) -> None:
        if uses.owner is not None and stream != uses.owner and stream not in uses.told:
            uses.strangers[stream] = position
            self._shared[_memory(tensor)] = StorageWeakRef(tensor.untyped_storage()), uses

    def moment(self, stream: int | None = None) -> Moment:
        """Return how far everything will be when a stream is through with what it has been
        given."""
        stream = self.current if stream is None else stream
        return self._known.get(stream, Moment()) | Moment({stream: self._position[stream]})

    def everything(self) -> Moment:
        """Return how far everything will be when all streams are through."""
        return Moment(self._position)

    def wait(self, moment: Moment, stream: int | None = None) -> None:
        """Let a stream's later kernels come behind a moment."""
        stream = self.current if stream is None else stream
        self._known[stream] = self._known.get(stream, Moment()) | moment

    def host_waits(self, moment: Moment) -> None:
        """Let the host wait for a moment."""
        self._host |= moment
        ready = [entry for entry in self._later if self._host[entry[0]] >= entry[1]]
        self._later = [entry for entry in self._later if entry not in ready]
        for _, _, happen in ready:
            happen()

    def host_is_behind(self, moment: Moment) -> bool:
        """Tell whether the host has waited for a moment."""
        return moment <= self._host

    def later(self, happen: Callable[[], None]) -> None:
        """Have something happen in host memory once the host has waited for what is in the current
        stream now."""
        stream = self.current
        self._position[stream] += 1
        self._later.append((stream, self._position[stream], happen))

    def _is_behind(self, stream: int, other: int, position: int) -> bool:
        known = self._known.get(stream, Moment())
        return other == stream or max(known[other], self._host[other]) >= position


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
