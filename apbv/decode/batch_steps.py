"""Forward passes over the newest tokens of several answers, each with its own KV."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..kernels import BufferTable, SequenceBuffers
from ..kernels.backends import choose
from ..kv.cache import GrowingLayer
from ..model.attention import BatchAttention
from ..model.parts import ModelParts
from ..transfer import fill, to_device
from .graphs import RecordedSteps, Step, may_record
from .runner import forward

# Batch sizes with a graph; graphs also differ by the KV length, up to 1,024, 4,096, 16,384, … rows.
_SIZES = (1, 2, 4, *range(8, 65, 8), *range(96, 513, 32))
_ROWS = tuple(1024 * 4**power for power in range(12))

Tokens = Sequence[int] | Tensor


class OwnKV:
    """KV of one answer in a batch, in buffers that the batch writes to.

    Args:
        layers: the prompt's KV; rows of the answer are written after it, and not counted there.
        position: the rotary position of the answer's first token.

    Attributes:
        num_run: number of the answer's tokens that the model has processed. Less: the last rows are
            taken back.
        place: a new object whenever the buffers change.
    """

    def __init__(self, layers: Sequence[GrowingLayer], position: int):
        for layer in layers:
            layer.make_room(1)
        self._layers = layers
        self._prompt_rows = layers[0].keys.shape[2]
        self._first_position = position
        self.num_run, self.place = 0, object()

    @property
    def capacity(self) -> int:
        """The number of rows that the buffers hold."""
        return self._layers[0].buffers[0].shape[2]

    @property
    def num_rows(self) -> int:
        """Rows of the prompt, and of the tokens that were run."""
        return self._prompt_rows + self.num_run

    @property
    def position(self) -> int:
        """The rotary position of the next token."""
        return self._first_position + self.num_run

    @property
    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer, ``[1, Hkv, capacity, D]``."""
        return [layer.buffers for layer in self._layers]

    def make_room(self, count: int = 1) -> None:
        """Make room for more rows, copying all rows to larger buffers if needed."""
        if self.capacity >= self.num_rows + count:
            return
        self.place = object()
        for layer in self._layers:
            layer.extend(self.num_rows - layer.keys.shape[2])
            layer.make_room(count)

    def copy_newest(self, other: "OwnKV", count: int) -> None:
        """Append ``count`` rows that another KV has for the same tokens of the answer; there must
        be room."""
        first = self.num_rows
        theirs = other.num_rows + self.num_run - other.num_run
        for layer in zip(self.buffers, other.buffers, strict=True):
            for mine, source in zip(*layer, strict=True):
                mine[:, :, first : first + count] = source[:, :, theirs : theirs + count]
        self.num_run += count


class BatchRunner:
    """Runs a language model over one new token of each of several answers, or over several.

    On a GPU passes of one batch size and number of tokens are captured as a CUDA graph, which stays
    valid while answers come and go: the addresses of their KV are looked up on the GPU. These
    numbers are rounded up to a few.

    Args:
        parts: the model.
    """

    def __init__(self, parts: ModelParts):
        self._parts = parts
        like = torch.empty(0, dtype=parts.dtype, device=parts.device)
        self._looks_up = choose(parts.backend, like) == "triton"
        records = self._looks_up and may_record(parts, None)
        self._recorded = RecordedSteps(parts) if records else None

    @torch.no_grad()
    def run(self, ids: Tokens, kvs: Sequence[OwnKV], counts: Sequence[int] | None = None) -> Tensor:
        """Run the model on S tokens, append each to its KV, and return their logits ``[S, V]``.

        Args:
            ids: a tensor ``[S]`` on the device is not waited for.
            kvs: those of R answers, which have room.
            counts: how many tokens of each answer there are, one answer's after the other's; None:
                one of each.
        """
        counts = None if counts is None or max(counts) == 1 else counts
        run = self._run_there if self._looks_up else self._run_here
        logits = run(ids, kvs, counts)
        for kv, count in zip(kvs, counts or [1] * len(kvs), strict=True):
            kv.num_run += count
        return logits

    def _run_here(self, ids: Tokens, kvs: Sequence[OwnKV], counts: Sequence[int] | None) -> Tensor:
        """Run the model with KV addresses passed by the CPU."""
        parts = self._parts
        lengths = [kv.num_rows for kv in kvs]
        buffers = zip(*(kv.buffers for kv in kvs), strict=True)
        layers = [
            SequenceBuffers(*zip(*of_all, strict=True), lengths, counts) for of_all in buffers
        ]
        positions = to_device(_positions(kvs, counts), parts.device)
        attention = BatchAttention(parts.backend, layers)
        return forward(
            parts, to_device(ids, parts.device), positions, None, attention, last_only=False
        )

    def _run_there(self, ids: Tokens, kvs: Sequence[OwnKV], counts: Sequence[int] | None) -> Tensor:
        """Run the model with KV addresses looked up on the device."""
        most_rows = max(kv.capacity for kv in kvs)
        most_new = 1 << (max(counts or [1]) - 1).bit_length()
        if self._recorded is not None and len(ids) <= _SIZES[-1]:
            size, num_tokens = (_rounded_up(len(each), _SIZES) for each in (kvs, ids))
            kind = size, num_tokens, most_new, _rounded_up(most_rows, _ROWS)
            return self._recorded.run(kind, lambda: _Step(self._parts, *kind), ids, kvs, counts)[
                : len(ids)
            ]
        step = _Step(self._parts, len(kvs), len(ids), most_new, most_rows)
        step.take(ids, kvs, counts)
        return step.compute()


class _Step(Step):
    """Forward pass for up to R answers, with inputs at fixed addresses.

    Args:
        size: R.
        num_tokens: the largest number of tokens.
        most_new: the largest number of one answer's tokens, a power of 2.
        most_rows: the largest number of an answer's rows.
    """

    def __init__(
        self, parts: ModelParts, size: int, num_tokens: int, most_new: int, most_rows: int
    ):
        super().__init__(parts, num_tokens, num_tokens + 2 * size + 1)
        self._most_rows = most_rows
        self._most_new = most_new
        self._positions, self._lengths, self._starts = self._others.split(
            [num_tokens, size, size + 1]
        )
        self._places = self._numbers.new_zeros(parts.num_layers, 3, size)
        self._held: list[object] = []

    def take(self, ids: Tokens, kvs: Sequence[OwnKV], counts: Sequence[int] | None) -> None:
        """Copy the inputs of the next pass, without synchronization."""
        rest = len(self._lengths) - len(kvs)
        no_token = [0] * (len(self._ids) - len(ids))
        starts = accumulate([*(counts or [1] * len(kvs)), *[0] * rest], initial=0)
        lengths = [kv.num_rows for kv in kvs] + [-1] * rest
        self.hold(ids, [*_positions(kvs, counts), *no_token, *lengths, *starts])
        held = [kv.place for kv in kvs]
        if held != self._held:
            buffers = zip(*(kv.buffers for kv in kvs), strict=True)
            layers = [SequenceBuffers(*zip(*of_all, strict=True), ()) for of_all in buffers]
            fill(self._places, [[row + [0] * rest for row in layer.places] for layer in layers])
            self._held = held

    def compute(self) -> Tensor:
        """Run the model on these inputs, write the new KV into the buffers, and return logits
        ``[R, V]``."""
        tables = [
            BufferTable(places, self._lengths, self._most_rows, self._starts, self._most_new)
            for places in self._places
        ]
        attention = BatchAttention(self._parts.backend, tables)
        return forward(self._parts, self._ids, self._positions, None, attention, last_only=False)


def _positions(kvs: Sequence[OwnKV], counts: Sequence[int] | None) -> list[int]:
    """Return the rotary positions of answers' next tokens."""
    counts = counts or [1] * len(kvs)
    return [
        kv.position + place for kv, count in zip(kvs, counts, strict=True) for place in range(count)
    ]


def _rounded_up(count: int, steps: Sequence[int]) -> int:
    """Return the batch size, or the number of tokens or rows, of the smallest graph that fits."""
    return next(step for step in steps if step >= count)
