"""This module runs the draft in a thread of the target's process, with the pipeline of :mod:`.pipeline`.

On a GPU target and draft share the device, each with a CUDA stream of its own; on a CPU they share its cores and
Python's lock. Measure whether that is faster than taking turns (benchmarks/speculative.py).
"""

import queue
import threading
import warnings
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..config import DecodeConfig, SamplingConfig, SpeculativeConfig
from ..hosts import Exchange, HostError, HostGroup
from ..input.model_inputs import ModelInputs
from ..model.parts import ModelParts
from ..stats import StageTimer
from .link import DRAFT, TARGET, Link
from .pair import Pair, draft_request


class LocalChannel:
    """A LocalChannel is one end of a one-way channel between two threads, used by :class:`Link` like a group.

    Args:
        rank: the rank of this end.
        messages: the queue that both ends share.
        timeout: seconds to wait for a message.
    """

    def __init__(self, rank: int, messages: queue.Queue, timeout: float):
        self.rank, self.bytes_received = rank, 0
        self._messages, self._timeout = messages, timeout
        self._received: dict[int, Tensor] = {}
        self._num_requested = self._num_received = 0

    def start_broadcast(self, tensor: Tensor, source: int) -> Exchange:
        """Send or receive as :class:`HostGroup` does: the nth message requested is the nth message sent."""
        if self.rank == source:
            self._messages.put(tensor.clone())
            return Exchange(lambda: tensor)
        number, self._num_requested = self._num_requested, self._num_requested + 1

        def finish() -> Tensor:
            if not self._fetch(number, self._timeout):
                raise HostError(f"the other thread did not answer within {self._timeout:g} s")
            self.bytes_received += tensor.nbytes
            return self._received.pop(number)

        return Exchange(finish, lambda: self._fetch(number, 0.0))

    def _fetch(self, number: int, timeout: float) -> bool:
        """Return whether this message has arrived, or arrives in time."""
        while self._num_received <= number:
            try:
                self._received[self._num_received] = self._messages.get(timeout > 0, timeout or None)
            except queue.Empty:
                return False
            self._num_received += 1
        return True


class DraftThread:
    """A DraftThread runs the draft beside the target in the same process.

    Attributes:
        pair: the target's end.
    """

    def __init__(self, draft: ModelParts, hosts: HostGroup, config: SpeculativeConfig):
        # Its steps are not recorded while the other thread has kernels of its own to launch and to record.
        self._draft = replace(draft, decode=DecodeConfig(cuda_graphs="off"))
        self._hosts, self._config = hosts, config
        self._thread: threading.Thread | None = None
        self._stream = torch.cuda.Stream(hosts.device) if hosts.device.type == "cuda" else None
        self.pair, self._pair = self._ends()

    def _ends(self) -> tuple[Pair, Pair]:
        """Return new ends of a pair, the target's and the draft's."""
        config, hosts = self._config, self._hosts
        to_target, to_draft = queue.Queue(), queue.Queue()

        def link(rank: int) -> Link:
            # The draft waits while the target prefills, however long that takes.
            patience = threading.TIMEOUT_MAX
            return Link(
                LocalChannel(rank, to_target, config.draft_timeout), LocalChannel(rank, to_draft, patience)
            )

        return Pair(hosts, is_draft=False, link=link(TARGET)), Pair(hosts, is_draft=True, link=link(DRAFT))

    def start(self, inputs: ModelInputs, sampling: SamplingConfig) -> None:
        """Start to draft for a request that the target is about to begin."""
        if self.pair.link is None:  # an earlier request failed, and its thread knows
            self.pair, self._pair = self._ends()
        self._thread = threading.Thread(target=self._run, args=(self._pair, inputs, sampling), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the thread has ended, unless the target has given it up."""
        if self._thread is not None and self.pair.link is not None:
            self._thread.join()
        self._thread = None

    def _run(self, pair: Pair, inputs: ModelInputs, sampling: SamplingConfig) -> None:
        config = self._config
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                with pair.beginning(config, self._draft.vocab_size, sampling.temperature > 0):
                    pass
                draft_request(pair, self._draft, inputs, config, sampling, StageTimer(self._hosts))
        except HostError:  # the target has given up on it, or on the request
            pass
        except Exception as error:  # the target has been told that there will be no draft
            warnings.warn(f"the draft failed: {type(error).__name__}: {error}", stacklevel=2)
