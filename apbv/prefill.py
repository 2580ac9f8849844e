"""prefill(): one sequence-parallel forward pass of an unmodified language model, and what it leaves behind."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .attention import LayerAttention, ObservedAttention, PrefillObserver, ShardedAttention, apbv_attention
from .cache import ShardedCache
from .config import PrefillConfig
from .encode import encode_visual, exchange_visual
from .hosts import HostGroup
from .inputs import ModelInputs
from .layout import ContextLayout, offsets_within
from .methods import METHODS, PrefillMethod
from .methods.importance import IMPORTANCE
from .models import ModelParts, inspect_model
from .stats import StageTimer, reset_peak_memory
from .tensor_parallel import require_same_sharding


@dataclass
class PrefillResult:
    """A prompt whose KV is computed, ready to decode.

    Attributes:
        logits: ``[1, V]`` of the last prompt token, on every host.
        layout: which host computed and keeps what.
        method: the method that really ran (``"full"`` where the prompt or the group did not allow another).
        inputs: the prompt.
        timer: stage times so far; ``timer.summary()`` is collective.
    """

    logits: Tensor
    layout: ContextLayout
    method: str
    inputs: ModelInputs
    timer: StageTimer = field(repr=False)
    _parts: ModelParts = field(repr=False)
    _hosts: HostGroup = field(repr=False)
    _shards: ShardedCache | None = field(repr=False)
    _gathered: DynamicCache | None = field(repr=False, default=None)

    @property
    def num_tokens(self) -> int:
        """n, the tokens of the prompt."""
        return self.layout.num_tokens

    @property
    def next_position(self) -> int:
        """The rotary position of the first generated token: one past the last prompt token's."""
        return self.inputs.next_position

    @property
    def shards(self) -> ShardedCache | None:
        """This host's share of the KV; None once it was gathered on host 0."""
        return self._shards

    def to_dynamic_cache(self, host: int = 0) -> DynamicCache | None:
        """The whole KV as a plain transformers cache, in position order, on one host; collective.

        Args:
            host: who gets it. With ``kv="gathered"`` the KV is on host 0 already and no data travels.

        Returns:
            A DynamicCache of n tokens per layer, ``[1, Hkv, n, D]``, on ``host``; None on the others. It may
            share memory with this result; growing or cropping it leaves this result as it is. With tensor
            parallelism every member of the host gets that of its KV heads.

        Raises:
            ValueError: the KV was gathered on host 0 and another host is asked for.
        """
        if self._shards is not None:
            return self._shards.gather(self._hosts, host)
        if host != 0:
            raise ValueError(f"the KV was gathered on host 0; prefill with kv='sharded' to get it on host {host}")
        return None if self._gathered is None else _view(self._gathered, self.num_tokens)

    def generate_inputs(self) -> dict[str, Any]:
        """Keyword arguments with which plain ``model.generate`` continues from this prefill, on host 0.

        The whole prompt, an all-ones mask, explicit positions, and a cache of all tokens but the last, which
        ``generate`` then runs itself. Collective where the KV is sharded. Empty on the other hosts. With tensor
        parallelism all members of host 0 have to call ``generate``, with the same settings.
        """
        cache = self.to_dynamic_cache(host=0)
        if cache is None:
            return {}
        device = self._parts.device
        input_ids = self.inputs.input_ids.to(device)
        position_ids = self.inputs.position_ids.to(device)
        if self._parts.uses_mrope:
            # Row 0 holds plain text positions, from which transformers builds its masks.
            text_positions = torch.arange(self.num_tokens, device=device)[None, None]
            position_ids = torch.cat([text_positions, position_ids])
        return {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "position_ids": position_ids,
            "past_key_values": _view(cache, self.num_tokens - 1),
        }


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    model_inputs: ModelInputs | Mapping[str, Tensor],
    *,
    hosts: HostGroup | None = None,
    config: PrefillConfig | None = None,
    timer: StageTimer | None = None,
    observe: Callable[[ModelInputs, ContextLayout, HostGroup], PrefillObserver] | None = None,
) -> PrefillResult:
    """Prefill one prompt over all hosts; called on every host with the same prompt, model and config.

    Args:
        model: an unmodified transformers model (see :func:`apbv.models.inspect_model`), the same full replica
            on every host, on ``hosts.device``; with tensor parallelism as :class:`apbv.Engine` loads it. It is
            left as it was found.
        model_inputs: prepared inputs, or what the model's transformers processor or tokenizer returned for one
            unpadded prompt.
        hosts: who takes part; ``HostGroup.from_env()`` by default.
        config: method and lengths.
        timer: the request's stage times; a new one by default.
        observe: makes an observer of the question's attention (see :mod:`apbv.speculate`).

    Returns:
        The logits of the last token on every host, and the KV as ``config.kv`` says.

    Raises:
        ValueError: the prompt, the model or a length cannot be handled; raised on every host.
        HostError: another host failed.
    """
    hosts = hosts or HostGroup.from_env()
    config = config or PrefillConfig()
    timer = timer or StageTimer(hosts)
    reset_peak_memory(hosts.device)
    with hosts.local_stage("prefill planning"), timer.stage("preprocess"):
        parts = inspect_model(model, config.backend)
        require_same_sharding(parts, hosts)
        if parts.device.type != hosts.device.type:
            raise ValueError(f"the model is on {parts.device}, this host computes on {hosts.device}")
        if not isinstance(model_inputs, ModelInputs):
            model_inputs = ModelInputs.from_processor(parts, model_inputs, hosts, config.frame_parallel)
        method_type = resolve_method(config, hosts)
        layout = method_type.plan(
            hosts.size,
            model_inputs.num_tokens,
            model_inputs.context_start,
            model_inputs.query_start,
            config,
        )
        if not layout.is_split and method_type.name != "full":
            warnings.warn(
                f"a prompt of {model_inputs.num_tokens} tokens, {model_inputs.query_start} of them before the "
                f"question, is too short to be split over {hosts.size} hosts: host 0 computes it alone, exactly",
                stacklevel=2,
            )
            method_type = METHODS["full"]
        method = method_type(layout, hosts, config)
        observer = None
        if observe is not None:
            if layout.is_split and not len(layout.query):
                raise ValueError(
                    f"the attention of the question cannot be observed with {method.name}: "
                    "the hosts share out the question, too"
                )
            observer = observe(model_inputs, layout, hosts)
            if observer.wants_passed:
                method.on_passed = observer.observe_passed
    hosts.require_same("the prompt", model_inputs.input_ids.numpy().tobytes())
    hosts.require_same("the prefill configuration or the model", f"{config} {model.config}".encode())

    with hosts.collective_stage("encode"):
        with timer.stage("encode"):
            features = encode_visual(parts, model_inputs.visual)
        with timer.stage("exchange"):
            visual = exchange_visual(parts, model_inputs, features, layout, hosts)
    with hosts.collective_stage("prefill"), timer.stage("prefill"):
        logits, shards = _forward(parts, model_inputs, visual, method, observer)
        timer.mark_first_token()

    result = PrefillResult(
        logits=logits,
        layout=layout,
        method=method.name,
        inputs=model_inputs.without_pixels(),
        timer=timer,
        _parts=parts,
        _hosts=hosts,
        _shards=shards,
    )
    if config.kv == "sharded":
        return result
    with hosts.collective_stage("handoff"), timer.stage("handoff"):
        return replace(result, _gathered=shards.gather(hosts), _shards=None)


def resolve_method(config: PrefillConfig, hosts: HostGroup) -> type[PrefillMethod]:
    """The method that a config means on these hosts.

    Raises:
        ValueError: a name is unknown.
    """
    if config.method not in METHODS:
        raise ValueError(f"unknown method {config.method!r}; known are {', '.join(sorted(METHODS))}")
    if config.importance not in IMPORTANCE:
        raise ValueError(f"unknown importance {config.importance!r}; known are {', '.join(sorted(IMPORTANCE))}")
    if hosts.size == 1 and not config.on_single_host:
        return METHODS["full"]
    return METHODS[config.method]


def passes_blocks_on(config: PrefillConfig, hosts: HostGroup) -> bool:
    """Whether hosts tell each other some of their context's KV, where a prompt is long enough to be split."""
    return resolve_method(config, hosts).passes_on and config.passing_len != 0


def _forward(
    parts: ModelParts, inputs: ModelInputs, visual, method: PrefillMethod, observer: PrefillObserver | None
) -> tuple[Tensor, ShardedCache]:
    """Run this host's tokens through the language model; logits ``[1, V]`` and this host's KV."""
    layout, hosts = method.layout, method.hosts
    spans = layout.local_spans(hosts.rank)
    cache = ShardedCache(parts.num_layers, layout, hosts.rank, keep_query=not method.separate_query)
    if spans:
        attention: LayerAttention = method
        hooks = ExitStack()
        if observer is not None:
            query, *kept = offsets_within(
                spans, [range(inputs.query_start, inputs.num_tokens), *layout.cache_spans(hosts.rank)]
            )
            if not method.separate_query:
                attention = ObservedAttention(method, observer, query, kept)
            hooks = _hidden_hooks(parts, observer, None if method.separate_query else query, kept)
        with apbv_attention(parts.language_model):
            with hooks:
                hidden = _run(parts, inputs, visual, spans, cache, apbv=attention)
            if method.separate_query:
                attention = ShardedAttention(hosts, parts.backend)
                if observer is not None:  # only now does the query see all of the context
                    query = range(len(layout.query))
                    kept = offsets_within(layout.cache_spans(hosts.rank), layout.cache_spans(hosts.rank))
                    attention = ObservedAttention(attention, observer, query, kept)
                    hooks = _hidden_hooks(parts, observer, query, None)
                with hooks:
                    hidden = _run(parts, inputs, visual.text_only(), (layout.query,), cache, apbv=attention)
    else:  # host 0 computes the prompt alone
        cache.initialize_empty(parts.num_kv_heads, parts.head_dim, parts.dtype, parts.device)
    source = layout.last_token_host
    if source in (None, hosts.rank):
        logits = parts.logits(hidden[:, -1:])[:, 0]
    else:
        logits = torch.empty(1, parts.vocab_size, dtype=parts.dtype, device=parts.device)
    return (logits if source is None else hosts.broadcast(logits, source)), cache


def _hidden_hooks(
    parts: ModelParts, observer: PrefillObserver, query: range | None, kept: list[range] | None
) -> ExitStack:
    """Show the observer the inputs of the layers it asks for, for as long as the stack is open."""
    hooks = ExitStack()
    for layer in observer.hidden_layers:

        def show(module, args, kwargs, layer=layer):
            hidden = (args[0] if args else kwargs["hidden_states"])[0]
            observer.observe_hidden(
                layer,
                None if query is None else hidden[query.start : query.stop],
                None if kept is None else [hidden[rows.start : rows.stop] for rows in kept],
            )

        hook = parts.language_model.layers[layer].register_forward_pre_hook(show, with_kwargs=True)
        hooks.callback(hook.remove)
    return hooks


def _run(parts: ModelParts, inputs: ModelInputs, visual, spans, cache, **kwargs) -> Tensor:
    tokens = torch.cat([torch.arange(span.start, span.stop) for span in spans])
    embeds, extra = visual.merge_into(parts, inputs.input_ids[:, tokens].to(parts.device))
    return parts.language_model(
        inputs_embeds=embeds,
        position_ids=inputs.position_ids[..., tokens].to(parts.device),
        past_key_values=cache,
        use_cache=True,
        **extra,
        **kwargs,
    ).last_hidden_state


def _view(cache: DynamicCache, num_tokens: int) -> DynamicCache:
    """The first tokens of a cache as a cache of its own that shares its memory."""
    view = DynamicCache()
    for index, layer in enumerate(cache.layers):
        empty = layer.keys[:, :, :0]
        view.update(empty, empty, index)
        view.layers[index].keys = layer.keys[:, :, :num_tokens]
        view.layers[index].values = layer.values[:, :, :num_tokens]
    return view
