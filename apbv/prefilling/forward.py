"""This module prefills: one sequence-parallel forward pass of an unmodified language model."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import PrefillConfig
from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs
from ..kv.cache import ShardedCache
from ..kv.placement import ShardedKV
from ..layout import offsets_within
from ..model.attention import LayerAttention, NewTokenAttention, apbv_attention
from ..model.parts import ModelParts, inspect_model
from ..model.row_chunks import rows_in_chunks
from ..model.tensor_parallel import require_same_sharding
from ..stats import StageTimer, reset_peak_memory
from ..warn import warn_caller
from .encode import TowerRows, VisualRows
from .exchange import LocalVisual, encode_and_exchange
from .identity import identify
from .methods import METHODS, PrefillMethod
from .observer import ObservedAttention, PrefillObserver, hidden_hooks
from .result import PrefillResult
from .room import Room


@torch.no_grad()
def prefill(
    model: PreTrainedModel | ModelParts,
    model_inputs: ModelInputs | Mapping[str, Tensor],
    *,
    hosts: HostGroup | None = None,
    config: PrefillConfig | None = None,
    timer: StageTimer | None = None,
    observer: PrefillObserver | None = None,
    encoded: VisualRows | None = None,
) -> PrefillResult:
    """Prefill one prompt over all hosts; called on every host with the same prompt, model and config.

    Args:
        model: an unmodified transformers model (see :func:`apbv.model.parts.inspect_model`), the same full replica
            on every host, on ``hosts.device``; with tensor parallelism as :class:`apbv.Engine` loads it.
            Afterwards it is as it was before. For many prompts pass what ``inspect_model`` returns of it and
            ``config.backend``, which then is not done anew.
        model_inputs: prepared inputs, or what the model's transformers processor or tokenizer returned for one
            unpadded prompt.
        hosts: the hosts that take part; ``HostGroup.from_env()`` by default.
        config: method and lengths.
        timer: the request's stage times; a new one by default.
        observer: watches the question's attention, or hidden states (see :mod:`apbv.speculate.observers`).
        encoded: the source of this host's visual embeddings, where it is not the model's vision tower.

    Returns:
        The logits of the last token on every host, and the KV as ``config.kv`` says.

    Raises:
        ValueError: the prompt, the model or a length cannot be handled; raised on every host.
        NotEnoughMemoryError: a host has certainly too little memory for the prompt, which every host raises before
            anything is computed; or this host ran out of it.
        HostError: another host failed.
    """
    hosts = hosts or HostGroup.from_env()
    config = config or PrefillConfig()
    timer = timer or StageTimer(hosts)
    reset_peak_memory(hosts.device)
    with hosts.local_stage("prefill planning"), timer.stage("preprocess"):
        parts = model if isinstance(model, ModelParts) else inspect_model(model, config.backend)
        require_same_sharding(parts, hosts)
        if parts.device.type != hosts.device.type:
            raise ValueError(f"the model is on {parts.device}, this host computes on {hosts.device}")
        if not isinstance(model_inputs, ModelInputs):
            model_inputs = ModelInputs.from_processor(
                parts, model_inputs, hosts, config.frame_parallel, query_len=config.query_len
            )
        model_inputs.require_room(parts.max_position_embeddings)
        method_type = resolve_method(config, hosts.size)
        layout = method_type.plan(
            hosts.size,
            model_inputs.num_tokens,
            model_inputs.context_start,
            model_inputs.query_start,
            config,
        )
        if not layout.is_split and method_type.name != "full":
            if hosts.is_leader:
                warn_caller(
                    f"a prompt of {model_inputs.num_tokens} tokens, {model_inputs.query_start} of them before "
                    f"the question, is too short to be split over {hosts.size} hosts: host 0 computes it alone, "
                    "exactly"
                )
            method_type = METHODS["full"]
        method = method_type(layout, hosts, config)
        if observer is not None:
            if layout.is_split and not len(layout.query):
                raise ValueError(
                    f"the attention of the question cannot be observed with {method.name}: "
                    "the question is split over the hosts, too"
                )
            observer.begin(model_inputs, layout, hosts)
            if observer.wants_passed:
                method.on_passed = observer.observe_passed
    hosts.require_same("the prompt", model_inputs.input_ids.numpy().tobytes())
    hosts.require_same("the prefill configuration or the model", f"{config} {parts.config_text}".encode())
    room = Room.of(parts, layout, hosts, config.kv)
    room.require()

    if encoded is None:
        encoded = TowerRows(parts, model_inputs.visual, timer)
    chunk_bytes = config.video.chunk_bytes
    with room.explained("encoding"):
        visual = encode_and_exchange(parts, model_inputs, encoded, layout, hosts, timer, chunk_bytes)
    with hosts.collective_stage("prefill"), room.explained("prefill"), timer.stage("prefill"):
        logits, shards = _forward(parts, model_inputs, visual, method, observer)

    kv = ShardedKV(shards, hosts)
    if config.kv == "gathered":
        with hosts.collective_stage("handoff"), room.explained("handoff"), timer.stage("handoff"):
            kv = kv.gathered()
    timer.mark_prefilled()
    return PrefillResult(
        logits=logits,
        layout=layout,
        method=method.name,
        exact=method.gives_exact_kv,
        inputs=model_inputs.without_pixels(),
        timer=timer,
        kv=kv,
        model=partial(identify, parts),
    )


def resolve_method(config: PrefillConfig, num_hosts: int) -> type[PrefillMethod]:
    """Return the method that a config means on so many hosts: on a single one ``full``, unless asked otherwise."""
    if num_hosts == 1 and not config.on_single_host:
        return METHODS["full"]
    return METHODS[config.method]


def passes_blocks_on(config: PrefillConfig, hosts: HostGroup) -> bool:
    """Return whether hosts pass KV pairs of their context blocks on, for prompts long enough to be split."""
    return resolve_method(config, hosts.size).passes_on and config.passing_len != 0


def _forward(
    parts: ModelParts,
    inputs: ModelInputs,
    visual: LocalVisual,
    method: PrefillMethod,
    observer: PrefillObserver | None,
) -> tuple[Tensor, ShardedCache]:
    """Run the language model on this host's tokens; return logits ``[1, V]`` and this host's KV."""
    layout, hosts = method.layout, method.hosts
    spans = layout.local_spans(hosts.rank)
    cache = ShardedCache(parts.num_layers, layout, hosts.rank, keep_query=not method.separate_query)
    if spans:
        attention: LayerAttention = method
        hooks = ExitStack()
        if observer is not None:
            query, *owned = offsets_within(
                spans, [range(inputs.query_start, inputs.num_tokens), *layout.cache_spans(hosts.rank)]
            )
            if not method.separate_query:
                attention = ObservedAttention(method, observer, query, owned)
            hooks = hidden_hooks(parts, observer, None if method.separate_query else query, owned)
        with apbv_attention(parts.language_model), rows_in_chunks(parts):
            with hooks:
                hidden = _run(parts, inputs, visual, spans, cache, apbv=attention)
            if method.separate_query:
                attention = NewTokenAttention(parts.backend, hosts=hosts)
                if observer is not None:  # only now does the query see all of the context
                    query = range(len(layout.query))
                    owned = offsets_within(layout.cache_spans(hosts.rank), layout.cache_spans(hosts.rank))
                    attention = ObservedAttention(attention, observer, query, owned)
                    hooks = hidden_hooks(parts, observer, query, None)
                with hooks:
                    hidden = _run(parts, inputs, LocalVisual(), (layout.query,), cache, apbv=attention)
    else:  # host 0 computes the prompt alone
        if observer is not None:
            observer.observe_nothing()
        cache.initialize_empty(parts.num_kv_heads, parts.head_dim, parts.dtype, parts.device)
    source = layout.last_token_host
    if source in (None, hosts.rank):
        logits = parts.logits(hidden[:, -1:])[:, 0]
    else:
        logits = torch.empty(1, parts.vocab_size, dtype=parts.dtype, device=parts.device)
    return (logits if source is None else hosts.broadcast(logits, source)), cache


def _run(parts: ModelParts, inputs: ModelInputs, visual: LocalVisual, spans, cache, **kwargs) -> Tensor:
    """Run the language model on some tokens; return the last layer's hidden states ``[1, S, d]``."""
    tokens = torch.cat([torch.arange(span.start, span.stop) for span in spans])
    embeds, extra = visual.merge_into(parts, inputs.input_ids[:, tokens])
    with _handed_to_first_layer(parts, embeds) as stand_in:
        del embeds
        return parts.language_model(
            inputs_embeds=stand_in,
            position_ids=inputs.position_ids[..., tokens].to(parts.device),
            past_key_values=cache,
            use_cache=True,
            **extra,
            **kwargs,
        ).last_hidden_state


@contextmanager
def _handed_to_first_layer(parts: ModelParts, embeds: Tensor) -> Iterator[Tensor]:
    """Let the first layer take the embeddings, so that they are freed behind it.

    The language model itself would hold what it was given until its last layer has run. It gets, and this yields,
    a tensor of the same shape that takes no memory. Another thread, which may decode with the same model then,
    is handed nothing.
    """
    held, stand_in, thread = [embeds], embeds.new_empty(()).expand(embeds.shape), get_ident()
    del embeds

    def hand_over(layer, args: tuple) -> tuple:
        return (held.pop(), *args[1:]) if get_ident() == thread else args

    hook = parts.language_model.layers[0].register_forward_pre_hook(hand_over, prepend=True)
    try:
        yield stand_in
    finally:
        hook.remove()
