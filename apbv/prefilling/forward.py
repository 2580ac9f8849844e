"""Sequence-parallel prefill: one forward pass of an unmodified language model."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import PrefillConfig, ReduceConfig
from ..config.refusals import refuse
from ..errors import InvalidConfigError
from ..hosts import HostGroup
from ..input.prompts.model_inputs import ModelInputs
from ..kv.cache import ShardedCache
from ..kv.export.prefilled import identify
from ..kv.placement import PlacedKV, ShardedKV
from ..model.attention import apbv_attention
from ..model.linear_attention import LinearStates
from ..model.parts import ModelParts, inspect_model
from ..model.row_chunks import rows_in_chunks
from ..model.vision_attention import packed_attention
from ..reporting import warn_caller
from ..stats import StageTimer, reset_peak_memory
from .cancelling import Stop
from .encoding.placeholder_exchange import PlaceholderRows, encode_and_exchange
from .encoding.vision import VisualRows, tower_rows
from .language_model import run_language_model
from .memory import Room, host_memory
from .methods import PrefillMethod, method_alone, resolve_method
from .methods.anchor import share_anchor
from .prefill_observer import PrefillObserver, SplitPrompt
from .reduction import LAYER_REDUCERS, LayerReducer
from .reduction.pruning import decode_pruning, reduce_prompt, require_reducible
from .result import PrefillResult
from .split_linear_attention import share_states

_WEIGHTS = "a sample of the model's weights"


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
    stop: Stop | None = None,
    decode_host: int = 0,
) -> PrefillResult:
    """Prefill one prompt over all hosts.

    Called on every host with the same prompt, model and config.

    Args:
        model: an unmodified transformers model (see :func:`apbv.model.parts.inspect_model`), the
            same full replica on every host, on ``hosts.device``; with tensor parallelism as
            :class:`apbv.Engine` loads it. Afterwards it is as it was before. For many prompts pass
            the result of ``inspect_model(model, config.backend)``, so that it is computed once.
        model_inputs: prepared inputs, or what the model's transformers processor or tokenizer
            returned for one unpadded prompt.
        hosts: the hosts that take part; ``HostGroup.from_env()`` by default.
        config: method and lengths.
        timer: the request's stage times; a new one by default.
        observer: observes the question's attention, or hidden states (see
            :mod:`apbv.speculate.strategies.score_observers`).
        encoded: the source of this host's visual embeddings; None: the model's vision tower.
        stop: called on host 0 between chunks of the tower and between layers; if it returns true,
            the prefill is cancelled. None on all hosts, or on none.
        decode_host: the host on which the KV is gathered with ``kv="gathered"``.

    Returns:
        The logits of the last token on every host, and the KV as ``config.kv`` says.

    Raises:
        ApbvError: the prompt, the model or a length cannot be handled; raised on every host.
        NotEnoughMemoryError: a host has certainly too little memory for the prompt, which every
            host raises before anything is computed; or this host ran out of memory.
        RequestCancelled: ``stop`` was true; the hosts can go on.
        HostError: another host failed.
    """
    hosts = hosts or HostGroup.from_env()
    config = config or PrefillConfig()
    timer = timer or StageTimer(hosts)
    reduce = config.reduce
    reset_peak_memory(hosts.device)

    # Check.
    with hosts.local_stage("prefill planning") as agreement, timer.stage("preprocess"):
        if not 0 <= decode_host < hosts.size:
            raise InvalidConfigError(
                f"decode host must be one of the {hosts.size} hosts, not {decode_host}"
            )
        parts = model if isinstance(model, ModelParts) else inspect_model(model, config.backend)
        _require_place(parts, hosts)
        inputs = model_inputs
        if not isinstance(inputs, ModelInputs):
            inputs = ModelInputs.from_processor(
                parts,
                inputs,
                hosts,
                query_len=config.query_len,
                frame_parallel=config.ablation.frame_parallel,
            )
        _require_shared_out(inputs, hosts, config)
        inputs.require_room(parts.max_position_embeddings)
        if reduce is not None:
            require_reducible(reduce, inputs)
        agreement.content("the prompt", inputs.input_ids.numpy().tobytes())
        agreement.settings("the prefill configuration", config.shared)
        agreement.settings("the model's configuration", parts.config_values)
        if hosts.num_processes > 1 and hosts.tensor_parallel_size == 1:
            agreement.content(_WEIGHTS, parts.weights_sample)
    if hosts.tensor_parallel_size > 1:  # each process has weights of its own
        hosts.require_same_on_ranks(_WEIGHTS, parts.weights_sample)

    # Reduce.
    encoded = encoded or _tower(parts, inputs, timer)
    reduction = None
    if reduce is not None and not reduce.keeps_all and not reduce.prunes_between_layers:
        inputs, encoded, reduction = reduce_prompt(parts, inputs, encoded, hosts, config, timer)

    # Plan.
    with hosts.local_stage("prefill planning") as agreement, timer.stage("preprocess"):
        method = _plan(parts, inputs, hosts, config, observer)
        # Decided by each host, from what the hosts have compared.
        agreement.settings("the anchor", {"in parts": method.layout.splits_anchor})
        reducer = _layer_reducer(reduce, parts, inputs, method)
        pruning = decode_pruning(reduce, parts.sizes.layers)
        visual_tokens = range(0)
        if inputs.num_visual_tokens:
            visual_tokens = range(inputs.context_start, inputs.query_start)
        memory = host_memory(
            parts.sizes,
            method.layout,
            hosts.rank,
            config.kv,
            itemsize=parts.dtype.itemsize,
            device=parts.device,
            decode_host=decode_host,
            asks_apart=method.asks_apart(config),
            by_layer=method.gathers_by_layer(config),
            question_start=inputs.query_start,
            tensor_parallel=parts.tensor_parallel[1],
            expert_parallel=parts.is_expert_parallel,
            visual=visual_tokens,
            encodes_all=not config.ablation.frame_parallel,
        )
    room = Room(memory, inputs.num_tokens, hosts)
    room.require()

    # Encode.
    with room.explained("encoding"):
        visual = encode_and_exchange(
            parts,
            inputs,
            encoded,
            method.layout,
            hosts,
            timer,
            config.video.chunk_bytes,
            stop,
            explained=partial(room.explained, "encoding"),
        )
    del encoded  # frees the rows of a reduced prompt

    # Forward.
    with hosts.collective_stage("prefill"), room.explained("prefill"), timer.stage("prefill"):
        logits, shards, states = run_prompt(
            parts, inputs, visual, method, observer, reducer, stop, decode_host
        )
    if reducer is not None:
        reduction = reducer.reduction()

    # Gather the KV on the decode host, or leave it sharded.
    sharded = ShardedKV(shards, hosts, states)
    kv: PlacedKV = sharded
    if config.kv == "gathered":
        with hosts.collective_stage("handoff"), room.explained("handoff"), timer.stage("handoff"):
            kv = sharded.gathered()
    timer.mark_prefilled()

    # Only once the time is taken: it is collective, and waits for the device.
    density = None
    if method.blocks is not None:
        density = method.blocks.density(hosts)
    return PrefillResult(
        logits=logits,
        layout=method.layout,
        method=method.name,
        exact=method.gives_exact_kv and reduction is None,
        density=density,
        inputs=inputs.without_pixels(),
        timer=timer,
        kv=kv,
        model=partial(identify, parts),
        num_kv_heads=parts.sizes.kv_heads,
        reduction=reduction,
        warning=method.warning(method.layout),
        decode_pruning=pruning,
    )


def _tower(parts: ModelParts, inputs: ModelInputs, timer: StageTimer) -> VisualRows:
    """Return the vision tower as the source of a prompt's visual rows."""
    if inputs.visual is None:
        return _no_rows
    return partial(tower_rows, parts, inputs.visual, timer)


def _no_rows(chunks: Sequence[range]) -> Generator[Tensor, None, None]:
    """Yield no rows, of a prompt that shows nothing."""
    yield from ()


def _require_place(parts: ModelParts, hosts: HostGroup) -> None:
    """Raise InvalidConfigError if the model is another process's shard, or on another kind of
    device."""
    shard, num_shards = parts.tensor_parallel
    tp_rank = hosts.tensor_parallel_rank
    tp_size = hosts.tensor_parallel_size
    if (shard, num_shards) != (tp_rank, tp_size):
        raise InvalidConfigError(
            f"the model is shard {shard} of {num_shards}, but this process is TP rank {tp_rank} of "
            f"{tp_size}: load the model with Engine.from_pretrained and these hosts"
        )
    if parts.device.type != hosts.device.type:
        raise InvalidConfigError(
            f"the model is on {parts.device}, but this host computes on {hosts.device}"
        )


@contextmanager
def ready_for_prefills(parts: ModelParts) -> Iterator[None]:
    """Make the changes that prefills need in a model once, for several threads that prefill."""
    with (
        apbv_attention(parts.language_model),
        rows_in_chunks(parts, parts.max_position_embeddings),
        packed_attention(parts.packed_vision_tower),
        packed_attention(parts.audio_tower),
    ):
        yield


def _require_shared_out(inputs: ModelInputs, hosts: HostGroup, config: PrefillConfig) -> None:
    """Reject inputs whose video, images or audio are not shared out as the config says.

    Raises:
        InvalidConfigError: they are shared out over the hosts and should not be, or the other way
            round.
    """
    should_be_shared_out = config.ablation.frame_parallel and hosts.size > 1
    for media in (inputs.visual, inputs.audio):
        if media is not None and media.is_shared_out != should_be_shared_out:
            raise InvalidConfigError(
                f"the prefill has frame_parallel={config.ablation.frame_parallel}, but its inputs "
                "were made for another number of hosts, or with another frame_parallel"
            )


def _plan(
    parts: ModelParts,
    inputs: ModelInputs,
    hosts: HostGroup,
    config: PrefillConfig,
    observer: PrefillObserver | None,
) -> PrefillMethod:
    """Choose the method and its layout for a prompt.

    Raises:
        InvalidConfigError: a length does not fit the prompt, or an observer does not see the
            question with this method.
    """
    method_type = resolve_method(config, hosts.size)
    layout = method_type.plan(
        hosts.size, inputs.num_tokens, inputs.context_start, inputs.query_start, config
    )
    if not layout.is_split and method_type.facts.splits:
        if hosts.is_leader:
            how = "alone, exactly" if config.sparse is None else "alone"
            warn_caller(
                f"a prompt of {inputs.num_tokens} tokens, {inputs.query_start} of them before the "
                f"question, is too short to be split over {hosts.size} hosts: "
                f"host 0 computes it {how}"
            )
        method_type = method_alone(config)
    sizes = parts.sizes
    layout = share_anchor(
        layout, method_type.facts, config, sizes, parts.device, parts.dtype.itemsize
    )
    method = method_type(layout, hosts, config, sizes.kv_layers, parts.kv_copies)
    needs_question = observer is not None and observer.wants_question
    if needs_question and layout.is_split and not len(layout.query):
        raise InvalidConfigError(
            f"cannot observe the question's attention with {method.name}: the question is split "
            "across the hosts, too"
        )
    return method


def _layer_reducer(
    reduce: ReduceConfig | None, parts: ModelParts, inputs: ModelInputs, method: PrefillMethod
) -> LayerReducer | None:
    """Return the reducer that prunes visual tokens between layers; None: there is none.

    Raises:
        InvalidConfigError: the prompt is computed by several processes, or the model has too few
            layers.
    """
    if reduce is None or reduce.layer_reduction is None:
        return None
    is_alone = method.hosts.num_processes == 1 and not method.layout.is_split
    refuse(layer_reduction=reduce.layer_reduction, several_hosts=not is_alone)
    return LAYER_REDUCERS[reduce.layer_reduction](reduce, parts, inputs)


def run_prompt(
    parts: ModelParts,
    inputs: ModelInputs,
    visual: PlaceholderRows,
    method: PrefillMethod,
    observer: PrefillObserver | None,
    reducer: LayerReducer | None,
    stop: Stop | None,
    decode_host: int,
) -> tuple[Tensor, ShardedCache, LinearStates | None]:
    """Run the language model on this host's tokens.

    Returns:
        The last token's logits ``[1, V]`` on every host, this host's KV, and a hybrid's states.
    """
    # Compute the hidden states.
    hosts = method.hosts
    layout = method.layout
    cache = ShardedCache(
        parts.sizes.kv_layers, layout, hosts.rank, not method.separate_query, decode_host
    )
    prompt = SplitPrompt(method, inputs.query_start, parts.is_visual(inputs.input_ids[0]))
    if observer is not None:
        observer.begin(prompt)
    states = None if parts.sizes.linear is None else LinearStates(parts.sizes.linear.layers)
    with apbv_attention(parts.language_model), rows_in_chunks(parts, len(prompt.local)):
        hidden = run_language_model(
            prompt, parts, inputs, visual, cache, stop, observer, reducer, states
        )
    if states is not None and not layout.is_split:  # only host 0 has computed
        share_states(states, parts, hosts)

    # Compute the logits where the last token is; None: on every host.
    last_token_host = layout.last_token_host
    if last_token_host in (None, hosts.rank):
        assert hidden is not None  # it has tokens
        logits = parts.lm_head(hidden[:, -1:])[:, 0]
    else:
        logits = torch.empty(1, parts.vocab_size, dtype=parts.dtype, device=parts.device)
    if last_token_host is not None:
        logits = hosts.broadcast(logits, last_token_host)
    return logits, cache, states
