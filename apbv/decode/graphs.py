"""Decoding steps as CUDA graphs, which launch all kernels of a forward pass at once.

A graph repeats the same kernels with the same arguments. So what differs from step to step lies in memory that
stays where it is: tokens, positions, and how many rows of the KV count, in one small tensor; the KV in buffers
with room behind it (:class:`apbv.kv.cache.GrowingLayer`), which attention gets whole. Graphs are good for one
size of step and one set of buffers: a longer answer gets new buffers, and then new graphs.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Protocol

import torch
from torch import Tensor


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
            stream, cause = torch.cuda.current_stream(), None
            try:
                # Other threads go on meanwhile, and may do what this one must not.
                side = _recording_stream(self._device)
                with torch.cuda.graph(graph, self._pool, side, capture_error_mode="thread_local"):
                    try:
                        result = function()
                    except Exception as error:  # behind which comes another that does not say why
                        cause = error
                        raise
            except Exception as error:  # torch and every library that launches kernels have errors of their own
                self._leave_pool()
                cause = cause or error
                raise CaptureError(f"{type(cause).__name__}: {cause}".splitlines()[0]) from cause
            finally:
                torch.cuda.set_stream(stream)  # which a failed recording does not do

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


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream in which a GPU's graphs are recorded: cuBLAS keeps memory for each that it has seen."""
    return torch.cuda.Stream(device)


class RecordableStep(Protocol):
    """One kind of step, whose inputs stay where they are."""

    def compute(self) -> Tensor:
        """Run the model on the inputs, and return the logits."""


class RecordedSteps:
    """Runs steps of a model, from the second of a kind on as CUDA graphs.

    The first of a kind runs as it is: it compiles kernels, and lets libraries allocate what they keep.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Forget all steps; their pool of memory goes with the last graph."""
        self._steps: dict[tuple, RecordableStep] = {}
        self._computes: dict[tuple, Callable[[], Tensor]] = {}  # of those that have run: how to do it again
        self._recorder: GraphRecorder | None = None

    def of_kind(self, kind: tuple, make: Callable[[], RecordableStep]) -> RecordableStep:
        """Return the step of a kind; it is made if there is none."""
        if kind not in self._steps:
            self._steps[kind] = make()
        return self._steps[kind]

    def compute(self, kind: tuple) -> Tensor:
        """Compute a step, whose inputs are in place.

        Raises:
            CaptureError: it cannot be recorded; it has not run.
        """
        step = self._steps[kind]
        if self._computes.get(kind) == step.compute:
            self._recorder = self._recorder or GraphRecorder(self._device)
            self._computes[kind] = self._recorder.record(step.compute)
        logits = self._computes.get(kind, step.compute)()
        self._computes.setdefault(kind, step.compute)
        return logits
