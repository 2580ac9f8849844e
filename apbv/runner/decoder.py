"""Runs a language model on new tokens with a KV cache, step by step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from ..device.copies import fill, to_device
from ..hosts import HostGroup
from ..kv.cache import ShardedCache, growing_layers, keep_of_last, kv_layers, writing_at
from ..kv.placement import PlacedKV
from ..model.attention import LayerAttention, NewTokenAttention, apbv_attention
from ..model.forward import LayerRows, LayerStep, run_layers
from ..model.linear_attention import LinearAttention, LinearStates
from ..model.parts import ModelParts
from .answer_states import AnswerStates, RunStates
from .dynamic_pruning import DynamicPruning
from .graphs import MOST_CAPTURED, RecordedSteps, Step, may_record
from .outputs import LatestOutput, TokenOutputs


def forward(
    parts: ModelParts,
    ids: Tensor,
    positions: Tensor,
    cache: Cache | None,
    attention: LayerAttention,
    last_only: bool,
    linear: LinearAttention | None = None,
    steps: Sequence[LayerStep] = (),
    embed: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Run a language model on S tokens, append their KV to the cache, and return logits ``[S, V]``.

    Args:
        ids, positions: int64 ``[S]`` on the device.
        cache: what the model appends to; None if ``attention`` appends by itself.
        attention: computes the new tokens' attention. The model's own would copy the KV heads of
            grouped queries, and need a mask for several tokens.
        last_only: compute only the last token's logits, ``[1, V]``.
        linear: computes a hybrid's linear attention of the new tokens.
        steps: what is done around the layers.
        embed: makes the first layer's input ``[1, S, d]`` of ids ``[1, S]``; None: it is the
            model's embeddings.
    """
    embed = embed or parts.embed_tokens
    rows = LayerRows(embed(ids[None]), positions[None])
    with apbv_attention(parts.language_model):
        hidden = run_layers(parts, rows, cache, attention, linear=linear, steps=steps)
    return parts.lm_head(hidden[:, -1:] if last_only else hidden)[0]


class ModelRunner:
    """Runs a language model on new tokens and appends their KV to a cache.

    On a GPU, steps of one size are captured as a CUDA graph if possible (:mod:`.graphs`): launching
    the hundreds of kernels of a 7B model's step takes longer than computing them.

    Args:
        parts: the model.
        cache: of the tokens before; it appends in place.
        hosts: the hosts over which the KV is sharded; None: it is all here.
        states: those of a hybrid's linear attention. :class:`LinearStates` are changed in place,
            and cannot go back; with :class:`AnswerStates` no steps are captured.
        pruning: the attention of an answer that leaves out visual tokens; None: none are.
        keeps_outputs: whether the output of the last norm is kept, in :attr:`output`. Then no steps
            are captured.

    Attributes:
        output: that of the latest pass; None: it is not kept.
    """

    def __init__(
        self,
        parts: ModelParts,
        cache: Cache,
        hosts: HostGroup | None = None,
        states: LinearStates | AnswerStates | None = None,
        pruning: DynamicPruning | None = None,
        keeps_outputs: bool = False,
    ):
        self._parts = parts
        self._cache = cache
        self._layers = growing_layers(cache)
        self._hosts = hosts
        self._states = states
        self._pruning = pruning
        self.output = LatestOutput() if keeps_outputs else None
        self._steps = () if self.output is None else (self.output,)
        is_plain = pruning is None and not keeps_outputs
        can_record = is_plain and not isinstance(states, AnswerStates)
        records = can_record and may_record(parts, hosts)
        self._recorded = RecordedSteps(parts) if records else None
        self._buffers: list[tuple[Tensor, Tensor] | None] = []  # of the recorded steps

    @torch.no_grad()
    def run(
        self,
        ids: Sequence[int] | Tensor,
        positions: Sequence[int],
        visible: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Run the model on S text tokens.

        Args:
            ids: the tokens. A tensor ``[S]`` is on the device, and its values need not be known on
                the CPU.
            positions: the rotary position of each; for M-RoPE time, height and width advance
                together.
            visible: bool ``[S, N]``: which of the last N tokens in the cache, these included, each
                one sees; None: those up to itself.

        Returns:
            The logits after each token, ``[S, V]``, or after the last, ``[1, V]``.
        """
        recorded = self._recorded
        if recorded is not None and len(ids) <= MOST_CAPTURED:
            return self._run_recorded(recorded, ids, positions, visible, last_only)
        parts = self._parts
        device = self._parts.device
        attention: LayerAttention
        if self._pruning is not None:
            assert visible is None and self._hosts is None, "one answer's tokens, on one host"
            attention = self._pruning
        else:
            there = None if visible is None else to_device(visible, device)
            attention = NewTokenAttention(parts.backend, there, self._hosts)
        new_ids = to_device(ids, device)
        places = to_device(positions, device)
        states = self._states
        linear: LinearAttention | None
        if isinstance(states, AnswerStates):
            states.prepare()
            linear = RunStates([states], [len(ids)])
        else:
            linear = states
        logits = forward(
            parts,
            new_ids,
            places,
            self._cache,
            attention,
            last_only,
            linear,
            self._steps,
            self._embedded,
        )
        if isinstance(states, AnswerStates):
            states.num_run += len(ids)
        return logits

    def _embedded(self, ids: Tensor) -> Tensor:
        """Return the first layer's input ``[1, S, d]`` of ids ``[1, S]``."""
        return self._parts.embed_tokens(ids)

    def _run_recorded(
        self,
        recorded: RecordedSteps,
        ids: Sequence[int] | Tensor,
        positions: Sequence[int],
        visible: Tensor | None,
        last_only: bool,
    ) -> Tensor:
        """Run a step, from the second of its size on as a CUDA graph."""
        layers = self._layers
        count = len(ids)
        num_rows = [layer.keys.shape[2] for layer in layers]

        # Graphs are of one set of buffers. They go before there are new buffers: with the old ones
        # a second copy of the KV would be in memory.
        has_room = all(layer.has_room(count) for layer in layers)
        if not has_room or not self._has_recorded_buffers():
            recorded.clear()
            self._buffers = []
        if not has_room:
            for layer in layers:
                layer.make_room(count)
        self._buffers = [layer.buffers for layer in layers]

        num_masked = None if visible is None else visible.shape[1]
        shape = (count, last_only, num_masked)
        states = self._states
        assert not isinstance(states, AnswerStates), "their addresses change"
        logits = recorded.run(
            shape,
            lambda: _Step(self._parts, self._cache, shape, states),
            ids,
            positions,
            visible,
            num_rows,
        )
        for layer in layers:
            layer.extend(count)
        return logits

    def _has_recorded_buffers(self) -> bool:
        """Return whether the cache is still in the buffers of the recorded steps."""
        layers = self._layers
        if len(layers) != len(self._buffers):
            return False
        return all(
            layer.buffers is buffers for layer, buffers in zip(layers, self._buffers, strict=True)
        )


class _Step(Step):
    """Step of one shape: its inputs at fixed addresses, and the forward pass over them."""

    def __init__(
        self,
        parts: ModelParts,
        cache: Cache,
        kind: tuple[int, bool, int | None],
        states: LinearStates | None,
    ):
        """Allocate the inputs of ``kind``: S, whether only the last logits count, the mask's N.

        A hybrid's states are at fixed addresses already, and change in place.
        """
        count, self._last_only, num_masked = kind
        num_layers = len(cache.layers)
        super().__init__(parts, count, count + num_layers)
        self._cache = cache
        self._states = states
        self._positions, self._num_rows = self._others.split([count, num_layers])
        self._new_rows = torch.arange(count, device=parts.device)
        self._visible = None
        if num_masked is not None:
            self._visible = torch.empty(count, num_masked, dtype=torch.bool, device=parts.device)

    def take(
        self,
        ids: Sequence[int] | Tensor,
        positions: Sequence[int],
        visible: Tensor | None,
        num_rows: Sequence[int],
    ) -> None:
        """Copy the inputs of the next step, without synchronization.

        The step comes after ``num_rows`` rows of each layer of the cache.
        """
        self.hold(ids, [*positions, *num_rows])
        if self._visible is not None:
            assert visible is not None  # as the shape says
            fill(self._visible, visible)

    def compute(self) -> Tensor:
        """Run the model on these inputs, and return the logits.

        The new KV is written into the cache's buffers.
        """
        # Where every layer's new rows are written, and how many rows count then.
        places = self._num_rows[:, None] + self._new_rows
        num_keys = (self._num_rows + len(self._new_rows)).int()[:, None]
        attention = NewTokenAttention(self._parts.backend, self._visible, num_keys=num_keys)
        with writing_at(self._cache, places):
            return forward(
                self._parts,
                self._ids,
                self._positions,
                self._cache,
                attention,
                last_only=self._last_only,
                linear=self._states,
            )


class Decoder:
    """Runs the model on tokens that are already chosen, and rolls back the last ones. Collective.

    Host 0 keeps the new tokens' KV. Where the prompt's KV is sharded, every host runs the new
    tokens against its own share; else host 0 runs them alone.

    Args:
        kv: the prompt's KV, to which the new tokens' is appended.
        next_position: rotary position of the first new token.
        pruning: leaves out visual tokens of the prompt in every step; None: none are.
        goes_back: whether tokens may be rolled back and others follow them, as with drafts.
        keeps_outputs: whether the output of the last norm is kept, for a draft that reads it.

    Attributes:
        outputs: the output of the last norm for the newest tokens; None: it is not kept.
        cache: the cache that tokens are appended to; None on hosts that run nothing.
        prompt_states: a hybrid's states of linear attention behind the prompt; None: the model has
            none.
        states: those behind the answer, where they can go back; else None.
        next_position: the rotary position of the next token.
        prunes: whether steps leave out visual tokens.
        runs_ahead: whether this process alone runs the model, on a GPU, where a step can then be
            queued before the CPU knows the previous step's token.
    """

    def __init__(
        self,
        parts: ModelParts,
        kv: PlacedKV,
        next_position: int,
        pruning: DynamicPruning | None = None,
        goes_back: bool = False,
        keeps_outputs: bool = False,
    ):
        self.next_position = next_position
        self._first_position = next_position
        self.cache = kv.continued()
        self.prompt_states = kv.states
        self.states: AnswerStates | None = None
        self.outputs = TokenOutputs() if keeps_outputs else None
        self._runner = None
        if self.cache is not None:
            in_place = None
            if kv.states is not None and (goes_back or parts.device.type != "cuda"):
                self.states = AnswerStates(kv.states)
            elif kv.states is not None:
                in_place = kv.states.copy()  # the prompt's stay
            self._runner = ModelRunner(
                parts, self.cache, kv.attending, self.states or in_place, pruning, keeps_outputs
            )
        self.hosts = kv.hosts
        self.prunes = pruning is not None
        is_alone = kv.attending is None and parts.tensor_parallel[1] == 1
        self.runs_ahead = self.cache is not None and is_alone and parts.device.type == "cuda"

    def require_cache(self) -> DynamicCache | ShardedCache:
        """Return the cache of a host that runs tokens."""
        if self.cache is None:
            raise RuntimeError("this host runs no tokens")
        return self.cache

    def advance(
        self,
        tokens: Sequence[int] | Tensor,
        depths: Sequence[int] | None = None,
        visible: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor | None:
        """Run the model on S tokens.

        Args:
            tokens: a tensor ``[S]`` on the device is not waited for.
            depths, visible: of tokens that form a tree; see :meth:`ModelRunner.run`. The root has
                depth 0 and follows the sequence.

        Returns:
            The logits after each token, ``[S, V]``, or after the last, ``[1, V]``; None on hosts
            that run nothing.
        """
        first = self.next_position
        self.next_position += len(tokens)
        positions: Sequence[int] = range(first, self.next_position)
        if depths is not None:
            positions = [first + depth for depth in depths]
        if self._runner is None:
            return None
        if self.states is not None:
            self.states.num_certain = self.states.num_run
        logits = self._runner.run(tokens, positions, visible, last_only)
        latest = self._runner.output
        if self.outputs is not None and latest is not None:
            assert latest.rows is not None, "a pass has run"
            self.outputs.write(first - self._first_position, latest.rows)
        return logits

    def take_back(self, count: int, kept: Sequence[int] = ()) -> None:
        """Roll back the last ``count`` tokens.

        Their KV is dropped except that of the kept ones, such as a tree's path.

        Args:
            kept: their numbers in 0 .. count - 1, ascending.
        """
        if self.cache is not None and len(kept) < count:
            keep_of_last(self.cache, count, kept)
        if self.states is not None:
            assert list(kept) == list(range(len(kept))), "hybrids verify no trees"
            self.states.num_run += len(kept) - count
        self.next_position += len(kept) - count

    def newest_kv(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return the last ``count`` tokens' KV, ``[1, Hkv, count, D]`` per layer.

        Call it on host 0 only; not collective.
        """
        newest = []
        for layer in kv_layers(self.require_cache()):
            start = layer.keys.shape[2] - count
            newest.append((layer.keys[:, :, start:], layer.values[:, :, start:]))
        return newest
