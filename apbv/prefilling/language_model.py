"""Runs the unmodified language model on a host's tokens of a prompt, and keeps their KV."""

from collections.abc import Sequence
from threading import get_ident

import torch
from torch import Tensor

from ..device_copy import to_device
from ..input.model_inputs import ModelInputs
from ..kv.cache import ShardedCache
from ..model.attention import NewTokenAttention
from ..model.linear_attention import LinearStates
from ..model.modules import decoder_layers
from ..model.parts import ModelParts
from ..versions import CACHE_ARGUMENT
from .cancelling import Stop, asking_before_each, require_going_on
from .placeholder_exchange import PlaceholderRows
from .prefill_observer import PrefillObserver, SplitPrompt, observed_by
from .split_linear_attention import SplitLinearAttention


def run_language_model(
    prompt: SplitPrompt,
    parts: ModelParts,
    inputs: ModelInputs,
    visual: PlaceholderRows,
    cache: ShardedCache,
    stop: Stop | None,
    observer: PrefillObserver | None = None,
    states: LinearStates | None = None,
) -> Tensor | None:
    """Run all layers on this host's tokens; collective.

    A question that is split off follows in a pass of its own.

    Args:
        visual: the embeddings that replace the placeholders of this host's tokens; dropped.
        cache: gets their KV.
        stop: asked on host 0 before each layer; true ends the prefill.
        observer: the observer; its :meth:`PrefillObserver.begin` was called.
        states: gets the states of a hybrid's linear attention.

    Returns:
        The output ``[1, S, d]`` of the last norm, in the pass with the question; None on a host
        without tokens.
    """
    method = prompt.method
    hosts = prompt.hosts
    layout = prompt.layout
    decoder = parts.language_model
    local = prompt.local
    if len(local) == 0:  # host 0 computes the prompt alone
        for _ in cache.layers:
            require_going_on(hosts, stop)
        if observer is not None:
            observer.on_nothing()
        empty = torch.empty(
            1, parts.num_kv_heads, 0, parts.head_dim, dtype=parts.dtype, device=parts.device
        )
        for layer in cache.shards:
            layer.hold(empty, empty)
        return None
    merged, extra = visual.merge_into(parts, inputs.input_ids[:, local])
    embeds = [merged]
    del merged  # the list has the only reference, see _run
    if states is not None:
        extra["linear"] = SplitLinearAttention(layout, hosts, states, not method.separate_query)
    positions = inputs.position_ids[..., local]
    if layout.anchor_copy:
        _move_copy(positions, inputs.position_ids, layout.anchor_copy)
    attention = asking_before_each(method, hosts, stop) if stop is not None else method
    if method.gathers_by_layer(method.config) and hosts.size > 1 and layout.is_split:
        attention = cache.gather_behind_each(attention, hosts)
    prompt_length = int(inputs.position_ids.max()) + 1
    with (
        parts.rotary_of_prompt(prompt_length),
        observed_by(
            observer, prompt, decoder, attention, has_question=not method.separate_query
        ) as attention,
    ):
        hidden = _run(parts, embeds, positions, cache, apbv=attention, **extra)
    if not method.separate_query:
        return hidden

    # The question can see the whole context only now.
    question_ids = to_device(inputs.input_ids[:, inputs.query_start :], parts.device)
    positions = inputs.position_ids[..., inputs.query_start :]
    extra = {} if states is None else {"linear": states}
    attention = NewTokenAttention(parts.backend, hosts=hosts)
    with (
        parts.rotary_of_prompt(prompt_length),
        observed_by(observer, prompt, decoder, attention, has_context=False) as attention,
    ):
        embeds = [parts.embed_tokens(question_ids)]
        return _run(parts, embeds, positions, cache, apbv=attention, **extra)


def _run(
    parts: ModelParts, embeds: list[Tensor], positions: Tensor, cache: ShardedCache, **options
) -> Tensor:
    """Run the decoder, and return its output.

    The first layer takes the input out of its list, so that it is freed after that layer. The
    decoder itself, which would hold its input until its last layer has run, gets a tensor of the
    same shape that takes no memory. Another thread, which may decode with the same model, is not
    affected.

    Args:
        embeds: the input ``[1, S, d]``, as the only item of a list.
    """
    decoder = parts.language_model
    thread = get_ident()
    stand_in = embeds[0].new_empty(()).expand(embeds[0].shape)

    def hand_over(layer, args: tuple) -> tuple:
        if get_ident() != thread:
            return args
        return (embeds.pop(), *args[1:])

    hook = decoder_layers(decoder)[0].register_forward_pre_hook(hand_over, prepend=True)
    options |= {
        "position_ids": to_device(positions, parts.device),
        "use_cache": True,
        CACHE_ARGUMENT: cache,
    }
    try:
        return decoder(inputs_embeds=stand_in, **options).last_hidden_state
    finally:
        hook.remove()


def _move_copy(positions: Tensor, prompt: Tensor, copied: Sequence[range]) -> None:
    """Give an anchor's copy its own rotary positions.

    The question begins in it where the context would. It shifts the context by its own length. All
    other tokens keep their positions in the prompt.

    Args:
        positions: of this host's tokens, first of all those of the copy, ``[3, 1, S]`` or
            ``[1, S]``; changed.
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
