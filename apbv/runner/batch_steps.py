"""Forward passes over the newest tokens of several answers, each with its own KV."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..device.copies import fill, to_device
from ..kernels import BufferTable, SequenceBuffers
from ..kernels.backends import choose
from ..kv.cache import GrowingLayer
from ..model.attention import BatchAttention
from ..model.forward import LayerStep
from ..model.parts import ModelParts
from .answer_states import AnswerStates, RunStates
from .decoder import forward
from .graphs import RecordedSteps, Step, may_record
from .outputs import LatestOutput, TokenOutputs

# Batch sizes with a graph; graphs also differ by the KV length, up to 1,024, 4,096, 16,384, … rows.
_SIZES = (1, 2, 4, *range(8, 65, 8), *range(96, 513, 32))
_ROWS = tuple(1024 * 4**power for power in range(12))

Tokens = Sequence[int] | Tensor


class OwnKV:
    """KV of one answer in a batch, in buffers that the batch writes to.

    Args:
        layers: the prompt's KV; rows of the answer are written after it, and not counted there.
        position: the rotary position of the answer's first token.
        states: a hybrid's states of linear attention; None: the model has none.

    Attributes:
        states: as above.
        outputs: keeps the output of the last norm, for a draft that reads it; None: it is not kept.
        num_run: number of the answer's tokens that the model has processed. Less: the last rows are
            taken back.
        place: a new object whenever the buffers change.
        capacity: the largest number of rows that a layer's buffers hold.
    """

    def __init__(
        self, layers: Sequence[GrowingLayer], position: int, states: AnswerStates | None = None
    ):
        for layer in layers:
            layer.make_room(1)
        self._layers = layers
        # A prefill may have dropped tokens between layers.
        self._prompt_rows = [layer.keys.shape[2] for layer in layers]
        self._longest_prompt = max(self._prompt_rows)
        self._first_position = position
        self.states = states
        self.outputs: TokenOutputs | None = None
        self.num_run = 0
        self._measure()

    def _measure(self) -> None:
        """Note what every step asks about the buffers, whenever these change."""
        self.place = object()
        capacities = [keys.shape[2] for keys, _ in self.buffers]
        self.capacity = max(capacities)
        # How many of the answer's rows fit into every layer.
        self._most_run = min(
            capacity - rows for capacity, rows in zip(capacities, self._prompt_rows, strict=True)
        )

    @property
    def num_rows(self) -> int:
        """The longest layer's rows of the prompt, and of the tokens that were run."""
        return self._longest_prompt + self.num_run

    @property
    def num_dropped(self) -> list[int]:
        """How many rows each layer has less than the longest one."""
        return [self._longest_prompt - rows for rows in self._prompt_rows]

    def rows_in(self, layer: int) -> int:
        """Return a layer's rows of the prompt, and of the tokens that were run."""
        return self._prompt_rows[layer] + self.num_run

    @property
    def position(self) -> int:
        """The rotary position of the next token."""
        return self._first_position + self.num_run

    @property
    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer, ``[1, Hkv, capacity, D]``."""
        buffers = []
        for layer in self._layers:
            assert layer.buffers is not None  # room was made
            buffers.append(layer.buffers)
        return buffers

    def make_room(self, count: int = 1) -> None:
        """Make room for more rows, copying all rows to larger buffers if needed."""
        if self.num_run + count <= self._most_run:
            return
        for number, layer in enumerate(self._layers):
            layer.extend(self.rows_in(number) - layer.keys.shape[2])
            layer.make_room(count)
        self._measure()

    def copy_newest(self, other: "OwnKV", count: int) -> None:
        """Append ``count`` rows that another KV has for the same tokens of the answer.

        There must be room. States are then the other's.
        """
        for layer, buffers in enumerate(self.buffers):
            first = self.rows_in(layer)
            # The same token's row there: the prompts may have different lengths.
            source_first = other.rows_in(layer) + self.num_run - other.num_run
            rows = slice(first, first + count)
            source_rows = slice(source_first, source_first + count)
            for states, source in zip(buffers, other.buffers[layer], strict=True):
                states[:, :, rows] = source[:, :, source_rows]
        self.num_run += count
        if self.states is not None:
            assert other.states is not None, "both are of one model"
            other.states.num_run = other.num_run
            self.states.take_over(other.states)


class BatchRunner:
    """Runs a language model over one or more new tokens of each of several answers.

    On a GPU passes of one batch size and number of tokens are captured as a CUDA graph, which stays
    valid while answers come and go: the addresses of their KV are looked up on the GPU. Batch sizes
    and numbers of tokens are rounded up, so that few graphs are needed.

    Args:
        parts: the model.
        keeps_outputs: whether the output of the last norm is kept, in :attr:`output` and where an
            answer's KV has a place for it. Then no passes are captured.

    Attributes:
        output: that of the latest pass; None: it is not kept.
    """

    def __init__(self, parts: ModelParts, keeps_outputs: bool = False):
        self._parts = parts
        self.output = LatestOutput() if keeps_outputs else None
        self._steps = () if self.output is None else (self.output,)
        like = torch.empty(0, dtype=parts.dtype, device=parts.device)
        self._looks_up = choose(parts.backend, like) == "triton"
        # The addresses of an answer's states change.
        is_hybrid = parts.sizes.linear is not None
        can_record = self._looks_up and not is_hybrid and not keeps_outputs
        records = can_record and may_record(parts, None)
        self._recorded = RecordedSteps(parts) if records else None

    @torch.no_grad()
    def run(
        self,
        ids: Tokens,
        kvs: Sequence[OwnKV],
        counts: Sequence[int] | None = None,
        follows_drafted: bool = False,
    ) -> Tensor:
        """Run the model on S tokens, append each to its KV, and return their logits ``[S, V]``.

        Args:
            ids: a tensor ``[S]`` on the device is not waited for.
            kvs: those of R answers, which have room.
            counts: how many tokens of each answer there are, one answer's after the other's; None:
                one of each.
            follows_drafted: whether tokens of the runs before, since one without this, may still be
                taken back.
        """
        if counts is not None and max(counts) == 1:
            counts = None
        linear = _prepared_states(kvs, counts, follows_drafted)
        if self._looks_up:
            logits = self._run_with_lookups(ids, kvs, counts, linear)
        else:
            logits = self._run_with_addresses(ids, kvs, counts, linear)
        counts = _counts_or_ones(kvs, counts)
        if self.output is not None:
            assert self.output.rows is not None, "a pass has run"
            for kv, rows in zip(kvs, self.output.rows.split(list(counts)), strict=True):
                if kv.outputs is not None:
                    kv.outputs.write(kv.num_run, rows)
        for kv, count in zip(kvs, counts, strict=True):
            kv.num_run += count
        return logits

    def _embedded(self, ids: Tensor) -> Tensor:
        """Return the first layer's input ``[1, S, d]`` of ids ``[1, S]``."""
        return self._parts.embed_tokens(ids)

    def _run_with_addresses(
        self,
        ids: Tokens,
        kvs: Sequence[OwnKV],
        counts: Sequence[int] | None,
        linear: RunStates | None,
    ) -> Tensor:
        """Run the model with KV addresses passed by the CPU."""
        parts = self._parts
        layers = []
        for number, (keys, values) in enumerate(_buffers_by_layer(kvs)):
            lengths = [kv.rows_in(number) for kv in kvs]
            layers.append(SequenceBuffers(keys, values, lengths, counts))
        positions = to_device(_positions(kvs, counts), parts.device)
        attention = BatchAttention(parts.backend, layers)
        new_ids = to_device(ids, parts.device)
        return forward(
            parts,
            new_ids,
            positions,
            None,
            attention,
            last_only=False,
            linear=linear,
            steps=self._steps,
            embed=self._embedded,
        )

    def _run_with_lookups(
        self,
        ids: Tokens,
        kvs: Sequence[OwnKV],
        counts: Sequence[int] | None,
        linear: RunStates | None,
    ) -> Tensor:
        """Run the model with KV addresses looked up on the device."""
        most_rows = max(kv.capacity for kv in kvs)
        most_new_tokens = _next_power_of_2(max(_counts_or_ones(kvs, counts)))
        if self._recorded is None or len(ids) > _SIZES[-1]:
            step = _Step(
                self._parts,
                len(kvs),
                len(ids),
                most_new_tokens,
                most_rows,
                linear,
                self._steps,
                self._embedded,
            )
            step.take(ids, kvs, counts)
            return step.compute()
        shape = (
            _rounded_up(len(kvs), _SIZES),
            _rounded_up(len(ids), _SIZES),
            most_new_tokens,
            _rounded_up(most_rows, _ROWS),
        )
        logits = self._recorded.run(shape, lambda: _Step(self._parts, *shape), ids, kvs, counts)
        return logits[: len(ids)]


class _Step(Step):
    """Forward pass for up to R answers, with inputs at fixed addresses.

    Args:
        size: R.
        num_tokens: the largest number of tokens.
        most_new: the largest number of one answer's tokens, a power of 2.
        most_rows: the largest number of an answer's rows.
        linear: computes a hybrid's linear attention in this pass.
        steps, embed: see :func:`.decoder.forward`.
    """

    def __init__(
        self,
        parts: ModelParts,
        size: int,
        num_tokens: int,
        most_new: int,
        most_rows: int,
        linear: RunStates | None = None,
        steps: Sequence[LayerStep] = (),
        embed: Callable[[Tensor], Tensor] | None = None,
    ):
        super().__init__(parts, num_tokens, num_tokens + 2 * size + 1)
        self._steps = steps
        self._embed = embed
        self._linear = linear
        self._most_rows = most_rows
        self._most_new = most_new
        # In the order of `take`.
        self._positions, self._lengths, self._starts = self._others.split(
            [num_tokens, size, size + 1]
        )
        # Addresses of every layer's keys and values, and their capacities.
        self._places = self._numbers.new_zeros(parts.num_kv_layers, 3, size)
        # How many rows a layer has less than an answer's longest one.
        self._dropped = self._numbers.new_zeros(parts.num_kv_layers, size)
        self._places_of: list[object] = []  # the buffers that they are the addresses of

    def take(self, ids: Tokens, kvs: Sequence[OwnKV], counts: Sequence[int] | None) -> None:
        """Copy the inputs of the next pass, without synchronization."""
        num_unused = len(self._lengths) - len(kvs)  # rows for further answers
        num_tokens_unused = len(self._ids) - len(ids)

        # Numbers.
        positions = _positions(kvs, counts) + [0] * num_tokens_unused
        lengths = [kv.num_rows for kv in kvs] + [-1] * num_unused
        starts = [0]
        for count in [*_counts_or_ones(kvs, counts), *[0] * num_unused]:
            starts.append(starts[-1] + count)
        self.hold(ids, [*positions, *lengths, *starts])

        # Addresses, if they have changed.
        places_of = [kv.place for kv in kvs]
        if places_of != self._places_of:
            places_by_layer = []
            for keys, values in _buffers_by_layer(kvs):
                places = SequenceBuffers(keys, values, ()).places
                places_by_layer.append([row + [0] * num_unused for row in places])
            fill(self._places, places_by_layer)
            dropped_of = [kv.num_dropped for kv in kvs] + [[0] * len(self._places)] * num_unused
            fill(self._dropped, list(zip(*dropped_of, strict=True)))
            self._places_of = places_of

    def compute(self) -> Tensor:
        """Run the model on these inputs, and return logits ``[R, V]``.

        The new KV is written into the buffers.
        """
        lengths = self._lengths - self._dropped
        tables = [
            BufferTable(places, lengths_in_layer, self._most_rows, self._starts, self._most_new)
            for places, lengths_in_layer in zip(self._places, lengths, strict=True)
        ]
        attention = BatchAttention(self._parts.backend, tables)
        return forward(
            self._parts,
            self._ids,
            self._positions,
            None,
            attention,
            last_only=False,
            linear=self._linear,
            steps=self._steps,
            embed=self._embed,
        )


def _prepared_states(
    kvs: Sequence[OwnKV], counts: Sequence[int] | None, follows_drafted: bool
) -> RunStates | None:
    """Return the linear attention of a pass, with states prepared; None: the model has none."""
    answers = []
    for kv in kvs:
        states = kv.states
        if states is None:
            return None
        states.num_run = kv.num_run
        if not follows_drafted:
            states.num_certain = kv.num_run
        states.prepare()
        answers.append(states)
    return RunStates(answers, _counts_or_ones(kvs, counts))


def _buffers_by_layer(kvs: Sequence[OwnKV]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return for every layer the keys of all answers, and the values of all answers."""
    buffers_of = [kv.buffers for kv in kvs]
    by_layer = []
    for layer in range(len(buffers_of[0])):
        keys = [buffers[layer][0] for buffers in buffers_of]
        values = [buffers[layer][1] for buffers in buffers_of]
        by_layer.append((keys, values))
    return by_layer


def _counts_or_ones(kvs: Sequence[OwnKV], counts: Sequence[int] | None) -> Sequence[int]:
    """Return how many tokens each answer has in a pass."""
    return [1] * len(kvs) if counts is None else counts


def _positions(kvs: Sequence[OwnKV], counts: Sequence[int] | None) -> list[int]:
    """Return the rotary positions of answers' next tokens."""
    positions: list[int] = []
    for kv, count in zip(kvs, _counts_or_ones(kvs, counts), strict=True):
        positions += range(kv.position, kv.position + count)
    return positions


def _next_power_of_2(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _rounded_up(count: int, steps: Sequence[int]) -> int:
    """Return the batch size, or the number of tokens or rows, of the smallest graph that fits."""
    return next(step for step in steps if step >= count)
