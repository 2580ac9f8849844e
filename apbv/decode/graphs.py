"""This module runs decoding steps as CUDA graphs, which launch all kernels of a forward pass at once.

A graph repeats the same kernels with the same arguments. So what differs from step to step lies in memory that
stays where it is: tokens, positions, and how many rows of the KV count, in one small tensor; the KV in buffers
with room behind it (:class:`apbv.kv.growing.GrowingLayer`), which attention gets whole. Graphs are good for one
size of step and one set of buffers: a longer answer gets new buffers, and then new graphs.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor
from transformers import DynamicCache

from ..kv.growing import rows_left_out, writing_at
from ..model.attention import ChosenKV, NewTokenAttention
from ..model.parts import ModelParts
from ..transfer import fill
from .step import NewTokens, forward


class CaptureError(Exception):
    """A CaptureError says why the kernels of a step could not be recorded; nothing was computed."""


class GraphRecorder:
    """A GraphRecorder records kernel launches, in graphs that share one pool of memory.

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


class CapturedSteps:
    """A CapturedSteps runs a model's steps behind one cache, from the second of a kind on as CUDA graphs.

    The first of a kind runs as it is: it compiles kernels, and lets libraries allocate what they keep.

    Args:
        cache: of layers that append in place (:class:`apbv.kv.growing.GrowingLayer`).
        prompt: the KV of a prompt that is not in the cache; None: it is.
    """

    def __init__(self, parts: ModelParts, cache: DynamicCache, prompt: ChosenKV | None = None):
        self._parts, self._cache, self._prompt = parts, cache, prompt
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._steps: dict[tuple, _Step] = {}
        self._recorder: GraphRecorder | None = None

    def run(self, new: NewTokens, last_only: bool) -> Tensor:
        """Run the model as :meth:`apbv.decode.runner.ModelRunner.run` does.

        Raises:
            CaptureError: the step cannot be recorded; it has not run, and no token was appended.
        """
        layers = self._cache.layers
        self._make_room(len(new))
        kind = len(new), last_only, None if new.visible is None else new.visible.shape[1]
        step = self._steps.get(kind)
        if step is None:
            step = self._steps[kind] = _Step(self._parts, self._cache, self._prompt, kind)
        step.take(new, layers[0].keys.shape[2])
        if step.has_run and step.replay is None:
            self._recorder = self._recorder or GraphRecorder(self._parts.device)
            step.replay = self._recorder.record(step.compute)
        logits = step.compute() if step.replay is None else step.replay()
        step.has_run = True
        for layer in layers:
            layer.extend(len(new))
        return logits

    def _make_room(self, count: int) -> None:
        """Have the KV in buffers with room for ``count`` tokens, and no graphs of other buffers."""
        layers = self._cache.layers
        has_room = all(layer.has_room(count) for layer in layers)
        if not has_room or [id(layer.buffers) for layer in layers] != [id(pair) for pair in self._buffers]:
            # Before there are new buffers: with the old ones a second copy of the KV would be in memory. The pool
            # goes with the last graph.
            self._steps, self._buffers, self._recorder = {}, [], None
        for layer in layers if not has_room else ():
            layer.make_room(count)
        self._buffers = [layer.buffers for layer in layers]


class _Step:
    """A _Step is one kind of step: its inputs at fixed addresses, and the forward pass over them.

    Attributes:
        has_run: whether it has been computed before.
        replay: computes it as a graph; None until that is recorded.
    """

    def __init__(
        self, parts: ModelParts, cache: DynamicCache, prompt: ChosenKV | None, kind: tuple[int, bool, int | None]
    ):
        """Allocate the inputs of ``kind``: S, whether only the last logits are wanted, the mask's N."""
        self._parts, self._cache, self._prompt = parts, cache, prompt
        count, self._last_only, num_masked = kind
        numbers = torch.zeros(3 * count + 1, dtype=torch.int64, device=parts.device)
        self._numbers, (self._ids, self._positions, self._places, self._num_keys) = (
            numbers,
            numbers.split([count, count, count, 1]),
        )
        self._visible = None if num_masked is None else numbers.new_empty(count, num_masked, dtype=torch.bool)
        left_out = rows_left_out(cache)
        # Of a prompt from which tokens were dropped inside the model, later layers have fewer rows.
        self._left_out = torch.tensor(left_out, device=parts.device) if any(left_out) else None
        self.has_run, self.replay = False, None

    def take(self, new: NewTokens, num_rows: int) -> None:
        """Take the inputs of the next step, behind ``num_rows`` rows of the cache; the host waits for nothing."""
        stop = num_rows + len(new)
        known = [*new.positions, *range(num_rows, stop), stop]
        if isinstance(new.ids, Tensor):
            self._ids.copy_(new.ids)
            fill(self._numbers[len(new) :], known)
        else:
            fill(self._numbers, [*new.ids, *known])
        if self._visible is not None:
            fill(self._visible, new.visible)

    def compute(self) -> Tensor:
        """Run the model on what was taken, write the new KV into the cache's buffers, and return the logits."""
        if self._left_out is None:
            num_layers = len(self._cache.layers)
            places, num_keys = [self._places] * num_layers, [self._num_keys.int()] * num_layers
        else:
            places = (self._places - self._left_out[:, None]).unbind()
            num_keys = (self._num_keys - self._left_out).int().split(1)
        attention = NewTokenAttention(self._parts.backend, self._visible, prompt=self._prompt, num_keys=num_keys)
        with writing_at(self._cache, places):
            return forward(
                self._parts, self._ids, self._positions, self._cache, attention, last_only=self._last_only
            )
