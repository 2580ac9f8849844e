"""Runs the unmodified language model on a host's tokens of a prompt, and keeps their KV."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device.copies import numbers_in, to_device
from ..input.prompts.model_inputs import ModelInputs
from ..kv.cache import LayerGather, ShardedCache
from ..model.attention import LayerAttention, NewTokenAttention
from ..model.forward import LayerRows, LayerStep, run_layers
from ..model.linear_attention import LinearStates
from ..model.parts import ModelParts
from .cancelling import CancelBetweenLayers, Stop, require_going_on
from .encoding.placeholder_exchange import PlaceholderRows
from .prefill_observer import ObservedPass, PrefillObserver, SplitPrompt
from .reduction import LayerReducer
from .split_linear_attention import QuestionAfterContext, SplitLinearAttention


def run_language_model(
    prompt: SplitPrompt,
    parts: ModelParts,
    inputs: ModelInputs,
    visual: PlaceholderRows,
    cache: ShardedCache,
    stop: Stop | None,
    observer: PrefillObserver | None = None,
    reducer: LayerReducer | None = None,
    states: LinearStates | None = None,
) -> Tensor | None:
    """Run all layers on this host's tokens; collective.

    A question that is split off follows in a pass of its own.

    Args:
        visual: the embeddings that replace the placeholders of this host's tokens; dropped.
        cache: gets their KV.
        stop: asked on host 0 before each layer; true ends the prefill.
        observer: the observer; its :meth:`PrefillObserver.begin` was called.
        reducer: prunes visual tokens between layers; None: none are.
        states: gets the states of a hybrid's linear attention.

    Returns:
        The output ``[1, S, d]`` of the last norm, in the pass with the question; None on a host
        without tokens.
    """
    method = prompt.method
    hosts = prompt.hosts
    layout = prompt.layout
    local = prompt.local
    if len(local) == 0:  # host 0 computes the prompt alone
        for _ in range(parts.sizes.layers):
            require_going_on(hosts, stop)
        if observer is not None:
            observer.on_nothing()
        empty = torch.empty(
            1, parts.num_kv_heads, 0, parts.head_dim, dtype=parts.dtype, device=parts.device
        )
        for layer in cache.shards:
            layer.hold(empty, empty)
        return None

    # The input of the first layer.
    positions = inputs.position_ids[..., local]
    if layout.anchor_copy:
        copy_positions = inputs.position_ids[..., numbers_in(*layout.anchor_copy)]
        _move_copy(copy_positions, inputs.position_ids, layout.anchor_copy)
        part = layout.anchor_part(hosts.rank)
        positions[..., : len(part)] = copy_positions[..., part.start : part.stop]
    rows = visual.merge_into(parts, inputs.input_ids[:, local], positions)

    # What happens around each layer.
    steps: list[LayerStep] = []
    if stop is not None:
        steps.append(CancelBetweenLayers(hosts, stop))
    if observer is not None:
        steps.append(ObservedPass(observer, prompt, has_question=not method.separate_query))
    if reducer is not None:
        steps.append(reducer)
    gather = None
    if method.gathers_by_layer(method.config) and hosts.size > 1 and layout.is_split:
        gather = cache.gather_by_layer(hosts)
    linear = None
    if states is not None:
        linear = SplitLinearAttention(
            layout, hosts, states, not method.separate_query, inputs.query_start
        )

    prompt_length = int(inputs.position_ids.max()) + 1
    with parts.rotary_of_prompt(prompt_length):
        attention = _PrefillAttention(method, steps, gather)
        hidden = run_layers(parts, rows, cache, attention, linear=linear, steps=steps)
    if not method.separate_query:
        return hidden

    # The question can see the whole context only now.
    question_ids = to_device(inputs.input_ids[:, inputs.query_start :], parts.device)
    positions = inputs.position_ids[..., inputs.query_start :]
    rows = LayerRows(parts.embed_tokens(question_ids), to_device(positions, parts.device))
    steps = []
    if observer is not None:
        steps.append(ObservedPass(observer, prompt, has_context=False))
    with parts.rotary_of_prompt(prompt_length):
        attention = _PrefillAttention(NewTokenAttention(parts.backend, hosts=hosts), steps)
        of_question = None if states is None else QuestionAfterContext(states)
        return run_layers(parts, rows, cache, attention, linear=of_question, steps=steps)


@dataclass(frozen=True)
class _PrefillAttention:
    """The attention of one forward pass.

    Attributes:
        attention: computes it.
        steps: look on.
        gather: sends each layer's KV to the decode host; None: it stays.
    """

    attention: LayerAttention
    steps: Sequence[LayerStep] = ()
    gather: LayerGather | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        for step in self.steps:
            step.on_attention(q, k, scale, layer)
        out = self.attention(q, k, v, scale, layer)
        if self.gather is not None:
            self.gather.send_next()
        return out


def _move_copy(positions: Tensor, prompt: Tensor, copied: Sequence[range]) -> None:
    """Give an anchor's copy its own rotary positions.

    The question begins in it where the context would. It shifts the context by its own length. All
    other tokens keep their positions in the prompt.

    Args:
        positions: of the copy's tokens in the prompt, ``[3, 1, l_a]`` or ``[1, l_a]``; changed.
        prompt: of all tokens.
        copied: prefix, question and start of the context, as in
            :class:`~apbv.layout.ContextLayout`.
    """
    prefix, question, context = copied
    first_question = len(prefix)
    first_context = first_question + len(question)
    # Views of the positions of the question and of the context's start.
    of_question = positions[..., first_question:first_context]
    of_context = positions[..., first_context : first_context + len(context)]
    of_context += of_question[..., -1:] - of_question[..., :1] + 1
    of_question += prompt[..., prefix.stop, None] - of_question[..., :1]
