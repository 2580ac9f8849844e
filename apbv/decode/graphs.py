"""Decoding steps as CUDA graphs, which launch all kernels of a forward pass at once.

A graph repeats the same kernels with the same arguments. So what differs from step to step lies in memory that
stays where it is: tokens, positions, and how many rows of the KV count, in one small tensor; the KV in buffers
with room after it (:class:`apbv.kv.cache.GrowingLayer`), which attention gets whole. Graphs are good for one size
of step and one set of buffers: a longer answer gets new buffers, and then new graphs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ..hosts import HostGroup
from ..kernels.backends import choose
from ..model.parts import ModelParts
from ..transfer import fill, side_stream
from ..warn import warn_caller


class CaptureError(Exception):
    """Says why the kernels of a step could not be recorded; nothing was computed."""


class GraphRecorder:
    """Records kernel launches, in graphs that share one pool of memory.

    So their results must be used before another one runs. On a GPU.
    """

    def __init__(self, device: torch.device):
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record the kernels that a function launches, which do not run yet.

        Returns:
            A function that runs them, and returns what they have computed, as a tensor of the caller's own.

        Raises:
            CaptureError: the function does what cannot be recorded, such as waiting for the GPU.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            # A graph's kernels keep the priority of the stream that they were recorded in.
            side = side_stream(self._device, "recording", torch.cuda.current_stream().priority)
            cause = None
            try:
                # Not by torch.cuda.graph, which first waits for the whole GPU, and empties the allocator's cache.
                with torch.cuda.stream(side):
                    # Other threads go on meanwhile, and may do what this one must not.
                    graph.capture_begin(self._pool, capture_error_mode="thread_local")
                    try:
                        result = function()
                    except Exception as error:  # after which comes another that does not say why
                        cause = error
                        raise
                    finally:
                        graph.capture_end()
            except Exception as error:  # torch and every library that launches kernels have errors of their own
                self._leave_pool()
                cause = cause or error
                raise CaptureError(f"{type(cause).__name__}: {cause}".splitlines()[0]) from cause

        def replay() -> Tensor:
            with torch.cuda.device(self._device):
                graph.replay()
            return result.clone()

        return replay

    def _leave_pool(self) -> None:
        """End a recording that failed for PyTorch's allocator, which would take it for one under way for ever.

        Then it frees nothing that several streams have used, and ``torch.cuda.empty_cache()`` raises. Not every
        supported PyTorch ends it by itself, and there is no public function for it.
        """
        with suppress(RuntimeError):  # where it has ended
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)


class Step(ABC):
    """One kind of step, whose inputs stay where they are.

    Args:
        size: the largest number of tokens that it runs.
        num_others: how many numbers it needs besides them.
    """

    def __init__(self, parts: ModelParts, size: int, num_others: int):
        self._parts = parts
        self._numbers = torch.zeros(size + num_others, dtype=torch.int64, device=parts.device)
        self._ids, self._others = self._numbers.split([size, num_others])

    def hold(self, ids: Sequence[int] | Tensor, others: Sequence[int]) -> None:
        """Take tokens, which may lie on the device, and all other numbers; the host waits for nothing."""
        if isinstance(ids, Tensor):
            self._ids[: len(ids)].copy_(ids)
            fill(self._others, others)
        else:
            fill(self._numbers, [*ids, *[0] * (len(self._ids) - len(ids)), *others])

    @abstractmethod
    def compute(self) -> Tensor:
        """Run the model on the inputs, and return the logits."""


class RecordedSteps:
    """Runs steps of a model, from the second of a kind on as CUDA graphs.

    The first of a kind runs as it is: it compiles kernels, and lets libraries allocate what they keep. Where one
    cannot be recorded, a warning says why, and all run as they are from then on.
    """

    def __init__(self, parts: ModelParts):
        self._parts, self._records = parts, True
        self.clear()

    def clear(self) -> None:
        """Forget all steps; their pool of memory goes with the last graph."""
        self._steps: dict[tuple, Step] = {}
        self._computes: dict[tuple, Callable[[], Tensor]] = {}  # of those that have run: how to do it again
        self._recorder: GraphRecorder | None = None

    def of_kind(self, kind: tuple, make: Callable[[], Step]) -> Step:
        """Return the step of a kind; it is made if there is none."""
        if kind not in self._steps:
            self._steps[kind] = make()
        return self._steps[kind]

    def compute(self, kind: tuple) -> Tensor:
        """Compute a step, whose inputs are in place."""
        step = self._steps[kind]
        if self._records and self._computes.get(kind) == step.compute:
            self._recorder = self._recorder or GraphRecorder(self._parts.device)
            try:
                self._computes[kind] = self._recorder.record(step.compute)
            except CaptureError as error:
                self._records, self._computes, self._recorder = False, {}, None
                if not isinstance(error.__cause__, torch.OutOfMemoryError):  # which another answer may be spared
                    self._parts.capture_failures.append(str(error))
                warn_caller(f"decoding goes on without CUDA graphs: {error}")
        logits = self._computes.get(kind, step.compute)()
        self._computes.setdefault(kind, step.compute)
        return logits


# Windows and trees are shorter; of longer inputs, such as a prompt's end, hardly two are equally long.
MOST_CAPTURED = 64


def may_record(parts: ModelParts, hosts: HostGroup | None) -> bool:
    """Return whether steps are captured as graphs; warn where they are wanted, and cannot be."""
    if not parts.wants_graphs:
        return False
    obstacle = why_not_captured(parts, hosts)
    if obstacle is not None:
        warn_caller(f"decoding without CUDA graphs: {obstacle}")
    return obstacle is None


def why_not_captured(parts: ModelParts, hosts: HostGroup | None) -> str | None:
    """Return what keeps a model's steps from being captured on its GPU, or None if nothing does."""
    if hosts is not None:
        return "the KV lies in shares, over which hosts exchange results in every layer"
    if parts.tensor_parallel[1] > 1:
        return "the members of a host exchange results in every layer"
    if parts.capture_failures:
        return parts.capture_failures[0]
    backend = choose(parts.backend, torch.empty(0, dtype=parts.dtype, device=parts.device))
    if backend != "triton":
        return f"the {backend} attention waits for the number of keys"
    return None
