"""What all processes of a group tell each other by way of host memory: small values, and whether they failed."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .exchange import Exchange, HostError, describe_error


class Statuses:
    """The part of a HostGroup that exchanges no data: who is who, and what all its processes are told.

    Attributes: those of :class:`.group.HostGroup`.
    """

    @property
    def is_leader(self) -> bool:
        """Whether this is the one process that samples, drafts and prints: the first member of host 0."""
        return self.rank == 0 and self.tensor_parallel_rank == 0

    @property
    def num_processes(self) -> int:
        """H * T."""
        return self.size * self.tensor_parallel_size

    @property
    def name(self) -> str:
        """What messages call this process."""
        return self.name_of(self.rank * self.tensor_parallel_size + self.tensor_parallel_rank)

    def name_of(self, process: int) -> str:
        """Return what messages call one of the H * T processes."""
        host, member = divmod(process, self.tensor_parallel_size)
        host = host if self._numbers is None else self._numbers[host]
        return f"host {host}" + (f", member {member}" if self.tensor_parallel_size > 1 else "")

    def start_broadcast(self, tensor: Tensor, source: int) -> Exchange:
        """Start sending a tensor in host memory from one host to all; shape and dtype are the same everywhere.

        The result is the tensor. On the source it has ended when everybody takes part.
        """
        if self.num_processes == 1:
            return Exchange(lambda: tensor)
        exchange = self._control.broadcast(tensor, source)

        def finish() -> Tensor:
            exchange.wait()
            self.bytes_received += tensor.nbytes if self.rank != source else 0
            return tensor

        return Exchange(finish, exchange.has_ended)

    def broadcast_ints(self, values: Sequence[int] | None, count: int) -> list[int]:
        """Send ``count`` 64-bit integers from the leader to everybody; only the leader's ``values`` matter."""
        if self.num_processes == 1:
            return list(values)
        tensor = torch.tensor(values if self.is_leader else [0] * count, dtype=torch.int64)
        return self._control.broadcast(tensor, 0).wait().tolist()

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Send any number of bytes from the leader to everybody; only the leader's ``data`` matters."""
        if self.num_processes == 1:
            return data
        (length,) = self.broadcast_ints([len(data)] if self.is_leader else None, 1)
        if not length:
            return b""
        if not self.is_leader:
            return self.start_broadcast(torch.empty(length, dtype=torch.uint8), 0).wait().numpy().tobytes()
        self.start_broadcast(as_tensor(data), 0).wait()
        return data

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Gather the same number of floats from every process, on every process: one list per process."""
        return self._gather_control(torch.tensor(values, dtype=torch.float64)).tolist()

    def gather_json(self, value: Any) -> list[Any]:
        """Gather JSON-ready values of any size from every process, on every process; collective."""
        return [json.loads(data) for data in self._gather_bytes(json.dumps(value).encode())]

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        lengths = self._gather_control(torch.tensor([len(mine)])).flatten().tolist()
        if not any(lengths):
            return [b""] * len(lengths)
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        if mine:
            padded[: len(mine)] = as_tensor(mine)
        rows = zip(self._gather_control(padded), lengths, strict=True)
        return [row[:length].numpy().tobytes() for row, length in rows]

    def mean_over_members(self, tensor: Tensor) -> Tensor:
        """Return, on every process, the mean over host 0's members of a small fp32 tensor in host memory."""
        if self.tensor_parallel_size == 1:
            return tensor
        return self._gather_control(tensor)[: self.tensor_parallel_size].mean(dim=0)

    def require_same(self, what: str, value: bytes) -> None:
        """Make sure that every process holds the same value; collective.

        Raises:
            HostError: it differs from the first one's, on every process. Going on would mix two prompts into one.
        """
        digests = self._gather_control(as_tensor(hashlib.sha256(value).digest()))
        different = [process for process, digest in enumerate(digests) if not torch.equal(digest, digests[0])]
        if different:
            raise HostError(f"{what} of {self.name_of(different[0])} differs from that of {self.name_of(0)}")

    def start_gathering(self, tensor: Tensor) -> Exchange:
        """Start gathering a small tensor in host memory from every process; the result is ``[H * T, *shape]``."""
        return Exchange(lambda: tensor[None]) if self.num_processes == 1 else self._control.all_gather(tensor)

    def _gather_control(self, tensor: Tensor) -> Tensor:
        return self.start_gathering(tensor).wait()

    def working(self, stage: str) -> AbstractContextManager:
        """Return a context for long work outside a stage, so that other hosts go on waiting for this one."""
        return self._watch.working(stage)

    @contextmanager
    def local_stage(self, name: str) -> Iterator[None]:
        """Run a stage without exchanges inside; at its end all hosts raise, or none does. Every host enters it.

        A host that failed raises its own error, the others a HostError that quotes it.
        """
        error = None
        with self._on_device(), self.working(name):
            try:
                yield
            except HostError:
                raise
            except Exception as caught:
                error = caught
            # Also an error without words is not the same as none.
            mine = b"" if error is None else b"!" + describe_error(error).encode()[:4096]
            messages = self._gather_bytes(mine)
            if error is not None:
                raise error
            for process, message in enumerate(messages):
                if message:
                    text = message[1:].decode(errors="replace")
                    raise HostError(f"{self.name_of(process)} failed in {name}: {text}")

    def _on_device(self) -> AbstractContextManager:
        """Return a context in which this group's GPU is the current one, also in a thread of the caller's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def as_tensor(data: bytes) -> Tensor:
    """Copy one or more bytes to a tensor, uint8 ``[n]``."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
