"""CUDA graphs of decode steps, which launch all kernels of a forward pass at once.

A graph replays the same kernels with the same arguments. Data that changes from step to step is
therefore at fixed addresses: tokens, positions and the number of valid KV rows in one small tensor;
the KV in buffers with spare room (:class:`apbv.kv.cache.GrowingLayer`), which attention gets whole.
A graph is valid for one step size and one set of buffers: a longer answer gets new buffers, and
then new graphs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..device.copies import fill, side_stream
from ..hosts import HostGroup
from ..kernels.backends import choose
from ..model.parts import ModelParts
from ..reporting import warn_caller


class CaptureError(Exception):
    """Raised if a step cannot be captured; nothing was computed."""


def record(function: Callable[[], Tensor], device: torch.device, pool: Any) -> Callable[[], Tensor]:
    """Capture the kernels that a function launches as a CUDA graph, without running them.

    Args:
        pool: of :func:`torch.cuda.graph_pool_handle`, memory that graphs share;
            their results must therefore be used before another one runs.

    Returns:
        A function that replays them and returns their result in a new tensor.

    Raises:
        CaptureError: the function does something that cannot be captured, such as waiting for the
            GPU.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        # A graph's kernels keep the priority of the stream that they were captured in.
        side = side_stream(device, "recording", torch.cuda.current_stream().priority)
        cause = None
        try:
            # Not by torch.cuda.graph, which first waits for the whole GPU, and empties the
            # allocator's cache.
            with torch.cuda.stream(side):
                # Other threads continue meanwhile, and may do things that this one must not.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    result = function()
                except Exception as error:
                    # A vaguer one follows.
                    cause = error
                    raise
                finally:
                    graph.capture_end()
        except Exception as error:  # torch and libraries of kernels have errors of their own
            # PyTorch's allocator would otherwise treat the capture as running for ever: it would
            # not free what several streams used, and torch.cuda.empty_cache() would raise. Not
            # every supported PyTorch ends it by itself, and no public function does.
            with suppress(RuntimeError):  # where it has ended
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            cause = cause or error
            raise CaptureError(f"{type(cause).__name__}: {cause}".splitlines()[0]) from cause

    def replay() -> Tensor:
        with torch.cuda.device(device):
            graph.replay()
        return result.clone()

    return replay


class Step(ABC):
    """Decode step of one shape, with inputs at fixed addresses.

    Args:
        size: maximum number of tokens.
        num_others: number of other inputs.
    """

    def __init__(self, parts: ModelParts, size: int, num_others: int):
        self._parts = parts
        self._numbers = torch.zeros(size + num_others, dtype=torch.int64, device=parts.device)
        self._ids, self._others = self._numbers.split([size, num_others])

    def hold(self, ids: Sequence[int] | Tensor, others: Sequence[int]) -> None:
        """Copy tokens and all other inputs, without synchronization.

        Tokens may be on the device.
        """
        if isinstance(ids, Tensor):
            self._ids[: len(ids)].copy_(ids)
            fill(self._others, others)
        else:
            num_unused = len(self._ids) - len(ids)
            fill(self._numbers, [*ids, *[0] * num_unused, *others])

    @abstractmethod
    def take(self, *inputs: Any) -> None:
        """Copy the inputs of the next step, without synchronization."""

    @abstractmethod
    def compute(self) -> Tensor:
        """Run the model on the inputs; return the logits."""


@dataclass
class _ShapeOfSteps:
    """The steps of one shape.

    Attributes:
        step: holds their inputs.
        has_run: whether one has run eagerly, so that the next can be captured.
        replay: runs the captured graph; None: none is captured.
    """

    step: Step
    has_run: bool = False
    replay: Callable[[], Tensor] | None = None


class RecordedSteps:
    """Runs a model's steps, from the second of each shape on as CUDA graphs.

    The first step of each shape runs eagerly: it compiles kernels and lets libraries allocate
    workspaces. If a capture fails, a warning gives the reason, and all further steps run eagerly.
    """

    def __init__(self, parts: ModelParts):
        self._parts = parts
        self._records = True
        self.clear()

    def clear(self) -> None:
        """Drop all steps; their memory pool is freed with the last graph."""
        self._shapes: dict[tuple, _ShapeOfSteps] = {}
        self._pool: Any = None  # torch does not name its type; None: none yet

    def run(self, kind: tuple, make: Callable[[], Step], *inputs: Any) -> Tensor:
        """Run the step of a shape, creating it if needed, on its next inputs."""
        if kind not in self._shapes:
            self._shapes[kind] = _ShapeOfSteps(make())
        shape = self._shapes[kind]
        shape.step.take(*inputs)
        if self._records and shape.has_run and shape.replay is None:
            self._capture(shape)
        if shape.replay is not None:
            return shape.replay()
        logits = shape.step.compute()
        shape.has_run = True
        return logits

    def _capture(self, shape: _ShapeOfSteps) -> None:
        """Capture the steps of a shape; if that fails, none is captured or replayed any more."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            shape.replay = record(shape.step.compute, self._parts.device, self._pool)
        except CaptureError as error:
            self._records = False
            self._pool = None
            for each in self._shapes.values():
                each.replay = None
            # Another answer may have enough memory.
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                self._parts.capture_failures.append(str(error))
            warn_caller(f"decoding continues without CUDA graphs: {error}")


# Drafts and trees are shorter; longer inputs, such as a prompt's end, rarely have equal lengths.
MOST_CAPTURED = 64


def may_record(parts: ModelParts, hosts: HostGroup | None) -> bool:
    """Return whether steps are captured as graphs; warn if this is requested but not possible."""
    if parts.decode.cuda_graphs == "off" or parts.device.type != "cuda":
        return False
    obstacle = capture_obstacle(parts, hosts)
    if obstacle is not None:
        warn_caller(f"decoding without CUDA graphs: {obstacle}")
    return obstacle is None


def capture_obstacle(parts: ModelParts, hosts: HostGroup | None) -> str | None:
    """Return why a model's steps cannot be captured on its GPU, or None if they can."""
    if hosts is not None:
        return "the KV is sharded, and hosts exchange results in every layer"
    if parts.tensor_parallel[1] > 1:
        return "the members of a host exchange results in every layer"
    if parts.rope_by_length is not None:
        return (
            f"rotary frequencies that depend on the length of a sequence ({parts.rope_by_length}) "
            "wait for it"
        )
    if parts.capture_failures:
        return parts.capture_failures[0]
    backend = choose(parts.backend, torch.empty(0, dtype=parts.dtype, device=parts.device))
    if backend != "triton":
        return f"the {backend} attention waits for the number of keys"
    return None
