"""Runs the language model in stages, each a run of layers with its own tokens.

Without pruning between layers there is one stage, of all layers and the whole prompt. Between two stages every
host receives the hidden states of the tokens that it computes next.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from ..input.model_inputs import ModelInputs
from ..kv.cache import ShardedCache
from ..model.attention import LayerAttention, NewTokenAttention
from ..model.linear_attention import LinearStates
from ..model.parts import ModelParts, some_layers
from ..transfer import to_device
from ..versions import cache_argument
from .cancelling import Stop, asking_before_each, require_going_on
from .exchange import ReadOnce
from .linear_attention import SplitLinearAttention
from .methods import PrefillMethod
from .moving import move_rows


@dataclass
class Stage:
    """Run of decoder layers, and the prompt tokens that they compute.

    Tokens of a stage are numbered from 0 to n_s - 1, in token order; its layout counts them so.

    Attributes:
        layers: the decoder layers.
        method: computes their attention.
        query_start: the first token of the question.
        is_visual: which tokens are visual, bool ``[n_s]``.
        tokens: int64 ``[n_s]``, ascending: which tokens of the prompt they are; None: all of them.
        layout: the layout of its tokens.
        hosts: the hosts that compute it.
        num_tokens: n_s.
        local: the tokens that each host computes, in the order of its rows.
    """

    layers: range
    method: PrefillMethod
    query_start: int
    is_visual: Tensor
    tokens: Tensor | None = None

    def __post_init__(self):
        self.layout, self.hosts = self.method.layout, self.method.hosts
        self.num_tokens = self.layout.num_tokens
        self.local = [_numbers(self.layout.local_spans(host)) for host in range(self.hosts.size)]

    @property
    def question(self) -> range:
        """The tokens of the question."""
        return range(self.query_start, self.num_tokens)

    @cached_property
    def owned(self) -> list[Tensor]:
        """The tokens whose KV each host keeps, in cache order."""
        return [_numbers(self.layout.cache_spans(host)) for host in range(self.hosts.size)]

    def rows_of(self, tokens: Tensor) -> Tensor:
        """Return the indices of tokens among this host's local ones."""
        local = self.local[self.hosts.rank]
        place = torch.zeros(self.num_tokens, dtype=torch.long)
        place[local] = torch.arange(len(local))
        return place[tokens]

    @cached_property
    def owned_visual(self) -> list[Tensor]:
        """The visual tokens that each host keeps, in cache order."""
        return [tokens[self.is_visual[tokens]] for tokens in self.owned]

    @cached_property
    def visual_rows(self) -> Tensor:
        """The indices of visual tokens among those that this host keeps, on its device."""
        return to_device(self.is_visual[self.owned[self.hosts.rank]].nonzero().flatten(), self.hosts.device)

    def states_of(self, tokens: Tensor, rows: "HiddenRows", parts: ModelParts) -> Tensor:
        """Return the hidden states ``[T, d]`` of tokens that this host keeps, all of the question or none."""
        if rows.query is not None and len(tokens) and tokens[0] >= self.query_start:
            return rows.query[0, to_device(tokens - self.query_start, rows.query.device)]
        if rows.local is None:
            return torch.empty(0, parts.hidden_size, dtype=parts.dtype, device=parts.device)
        return rows.local[0, to_device(self.rows_of(tokens), rows.local.device)]

    def question_rows(self, rows: "HiddenRows", parts: ModelParts) -> Tensor:
        """Return the hidden states ``[n_q, d]`` of the question on every host; collective."""
        held = [tokens[tokens >= self.query_start] for tokens in self.owned]
        wanted = [torch.arange(self.query_start, self.num_tokens)] * self.hosts.size
        return move_rows(self.states_of(held[self.hosts.rank], rows, parts), held, wanted, self.hosts)


@dataclass
class HiddenRows:
    """Hidden states of a host's tokens between two layers.

    Attributes:
        local: ``[1, S, d]`` of its local tokens; None on a host without any.
        query: those of the question, ``[1, n_q, d]``, if the method runs it in a separate pass; else, and before
            the first layer, None.
        deepstack: for every next layer after which visual features are added, those of the host's visual tokens.
    """

    local: Tensor | None = None
    query: Tensor | None = None
    deepstack: list[Tensor] = field(default_factory=list)


class Watcher:
    """Observer of a stage's computation, on all hosts. The base class observes nothing.

    Attributes:
        stage: the stage.
        layers: the decoder layers whose queries and keys it gets.
        hidden_layers: those whose inputs it gets (0: the embeddings).
        wants_passed: whether it gets the choice of KV pairs that are passed on.
    """

    layers: Collection[int] = ()
    hidden_layers: Collection[int] = ()
    wants_passed = False

    def begin(self, stage: Stage) -> None:
        """Prepare for a stage."""
        self.stage = stage

    def on_layer(self, q: Tensor, keys: Tensor, scale: float, rows: Tensor) -> None:
        """Observe the queries and keys of one of :attr:`layers`; collective among the hosts that compute.

        Args:
            q: the question's query states ``[1, Hq, n_q, D]``, post-RoPE.
            keys: ``[1, Hkv, S, D]``, among them those of the tokens that this host keeps.
            rows: the indices of these, ``[T]`` in cache order.
        """

    def on_hidden(self, layer: int, hidden: Tensor, question: Tensor | None, owned: Tensor | None) -> None:
        """Observe the input ``[S, d]`` of one of :attr:`hidden_layers`, in the pass whose result is final.

        Args:
            question: the question's rows; None in a pass without it.
            owned: those of the tokens that this host keeps, in cache order; None in a pass without them.
        """

    def on_passed(self, block: int, chosen: Tensor) -> None:
        """Observe one layer's choice of a block's KV pairs to pass on; see ``PrefillMethod.on_passed``."""

    def on_nothing(self) -> None:
        """Take part in the other hosts' collectives, on a host that computes nothing in the stage."""

    def result(self) -> Any:
        """Return the observation, the same on every host; collective, after the stage."""


def run_stage(
    stage: Stage,
    parts: ModelParts,
    inputs: ModelInputs,
    rows: HiddenRows,
    cache: ShardedCache,
    stop: Stop | None,
    watcher: Watcher | None = None,
    states: LinearStates | None = None,
) -> HiddenRows:
    """Run a stage's layers on this host's tokens, and keep their KV; return the output, and drop ``rows``.

    After the model's last layer this is the output of its last norm.

    Args:
        stop: asked on host 0 before each layer; true ends the prefill.
        watcher: the observer; its :meth:`Watcher.begin` was called.
        states: gets the states of a hybrid's linear attention.
    """
    method, hosts, layers, local = stage.method, stage.hosts, stage.layers, stage.local[stage.hosts.rank]
    num_kv_layers = len(layers) - (0 if states is None else len(states.places))
    cache.add_layers(num_kv_layers, stage.layout, keep_query=not method.separate_query)
    if not len(local):  # host 0 computes the stage alone
        for _ in range(num_kv_layers):
            require_going_on(hosts, stop)
        if watcher is not None:
            watcher.on_nothing()
        empty = torch.empty(1, parts.num_kv_heads, 0, parts.head_dim, dtype=parts.dtype, device=parts.device)
        for layer in cache.layers[-num_kv_layers:]:
            layer.hold(empty, empty)
        return HiddenRows()
    decoder = parts.language_model
    if len(layers) < parts.num_layers:
        decoder = some_layers(decoder, layers, with_norm=layers.stop == parts.num_layers)
    result, extra = HiddenRows(deepstack=rows.deepstack[len(layers) :]), {}
    if rows.deepstack:
        extra["visual_pos_masks"] = to_device(stage.is_visual[local][None], parts.device)
        extra["deepstack_visual_embeds"] = ReadOnce(rows.deepstack[: len(layers)])
        rows.deepstack = []
    if states is not None:
        extra["linear"] = SplitLinearAttention(stage.layout, hosts, states, not method.separate_query)
    positions = inputs.position_ids[..., local if stage.tokens is None else stage.tokens[local]]
    if stage.tokens is None and stage.layout.anchor_copy:
        _move_copy(positions, inputs.position_ids, stage.layout.anchor_copy)
    attention = asking_before_each(method, hosts, stop) if stop is not None else method
    is_only_pass = len(layers) == parts.num_layers and stage.layout.is_split and not method.separate_query
    if is_only_pass and hosts.size > 1 and method.config.kv == "gathered" and method.config.overlap:
        attention = cache.gather_behind_each(attention, hosts)
    with _shown_to(watcher, stage, decoder, attention, has_question=not method.separate_query) as attention:
        held, rows.local = [rows.local], None
        result.local = _run(parts, decoder, held, positions, cache, apbv=attention, **extra)
    if method.separate_query:  # the question can see the whole context only now
        attention = NewTokenAttention(parts.backend, hosts=hosts)
        with _shown_to(watcher, stage, decoder, attention, has_context=False) as attention:
            held, rows.query = [rows.query], None
            if stage.tokens is None:
                held = [parts.embed_tokens(to_device(inputs.input_ids[:, inputs.query_start :], parts.device))]
            positions = inputs.position_ids[..., inputs.query_start :]
            extra = {} if states is None else {"linear": states}
            result.query = _run(parts, decoder, held, positions, cache, apbv=attention, **extra)
    return result


def next_rows(stage: Stage, following: Stage, left: Tensor, rows: HiddenRows, parts: ModelParts) -> HiddenRows:
    """Send every host the hidden states of its tokens in the next stage; collective. Drops ``rows``.

    Args:
        left: the tokens of ``stage`` that ``following`` has, ascending.
    """
    hosts, wanted = stage.hosts, [left[tokens] for tokens in following.local]
    nothing = torch.empty(0, parts.hidden_size, dtype=parts.dtype, device=parts.device)
    local, query = nothing if rows.local is None else rows.local[0], rows.query
    rows.local = rows.query = None
    if query is not None and not following.method.separate_query:
        # The query that ran with the context only ranked keys; the question's own states continue.
        local[stage.local[hosts.rank] >= stage.query_start] = query[0]
        query = None
    result = HiddenRows(query=query)
    result.local = move_rows(local, stage.local, wanted, hosts)[None]
    del local
    num_to_add = max(0, parts.num_deepstack_layers - following.layers.start)
    if num_to_add:
        is_visual = stage.is_visual
        held, wanted = ([tokens[is_visual[tokens]] for tokens in of_hosts] for of_hosts in (stage.local, wanted))
        for index in range(num_to_add):
            features = rows.deepstack[index] if rows.deepstack else nothing
            result.deepstack.append(move_rows(features, held, wanted, hosts))
    return result


@contextmanager
def _shown_to(
    watcher: Watcher | None,
    stage: Stage,
    decoder: nn.Module,
    attention: LayerAttention,
    has_context: bool = True,
    has_question: bool = True,
) -> Iterator[LayerAttention]:
    """Let a watcher observe a pass of some layers; yield the attention to run it with.

    A pass without context has only the question, and its attention gets the keys that this host keeps.
    """
    if watcher is None:
        yield attention
        return
    device = stage.hosts.device
    question = owned = None
    if has_context:
        owned = to_device(stage.rows_of(stage.owned[stage.hosts.rank]), device)
    if has_question:
        question = torch.arange(stage.query_start, stage.num_tokens)
        question = to_device(stage.rows_of(question) if has_context else question - stage.query_start, device)

    def watched(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        if layer in watcher.layers:
            rows = torch.arange(k.shape[2], device=device) if owned is None else owned
            watcher.on_layer(question_states(stage, q, question), k, scale, rows)
        return attention(q, k, v, scale, layer)

    thread = get_ident()
    with ExitStack() as hooks:
        for layer in watcher.hidden_layers:

            def show(module, args, kwargs, layer=layer):
                if get_ident() == thread:  # another may decode with the same model
                    hidden = args[0] if args else kwargs["hidden_states"]
                    watcher.on_hidden(layer, hidden[0], question, owned)

            hook = decoder.layers[layer].register_forward_pre_hook(show, with_kwargs=True)
            hooks.callback(hook.remove)
        yield watched if has_question and watcher.layers else attention


def question_states(stage: Stage, q: Tensor, rows: Tensor) -> Tensor:
    """Return the question's queries ``[1, Hq, n_q, D]`` on every host that computes; collective among these.

    If the method splits the question over the hosts, too, each sends its share to the others.

    Args:
        q: of this host's rows in this pass, ``[1, Hq, S, D]``.
        rows: the question's, where they are all here.
    """
    hosts = stage.hosts
    if not stage.layout.is_split or len(stage.layout.query):
        return q[:, :, rows]
    everything = torch.arange(stage.query_start, stage.num_tokens)
    held = [tokens[tokens >= stage.query_start] for tokens in stage.local]
    wanted = [everything if len(tokens) else everything[:0] for tokens in stage.local]
    mine = q[0, :, to_device(stage.rows_of(held[hosts.rank]), q.device)].transpose(0, 1)
    return move_rows(mine, held, wanted, hosts).transpose(0, 1)[None]


def _run(parts: ModelParts, decoder: nn.Module, held: list[Tensor], positions: Tensor, cache, **options) -> Tensor:
    """Run a decoder on ``[1, S, d]``, the only item of a list; return its output.

    The first layer takes it out of the list, so that it is freed after that layer. The decoder itself, which would
    hold its input until its last layer has run, gets a tensor of the same shape that takes no memory. Another
    thread, which may decode with the same model, is not affected.
    """
    stand_in, thread = held[0].new_empty(()).expand(held[0].shape), get_ident()

    def hand_over(layer, args: tuple) -> tuple:
        return (held.pop(), *args[1:]) if get_ident() == thread else args

    hook = decoder.layers[0].register_forward_pre_hook(hand_over, prepend=True)
    options |= {"position_ids": to_device(positions, parts.device), "use_cache": True, cache_argument(): cache}
    try:
        return decoder(inputs_embeds=stand_in, **options).last_hidden_state
    finally:
        hook.remove()


def _numbers(spans: Sequence[range]) -> Tensor:
    """Return the tokens of some spans, concatenated."""
    return torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(s.start, s.stop) for s in spans)])


def _move_copy(positions: Tensor, prompt: Tensor, copied: Sequence[range]) -> None:
    """Give an anchor's copy its own rotary positions: the question begins in it where the context would.

    It shifts the context by its own length. All other tokens keep their positions in the prompt.

    Args:
        positions: of this host's tokens, first of all those of the copy, ``[3, 1, S]`` or ``[1, S]``; changed.
        prompt: of all tokens.
        copied: prefix, question and start of the context, as in :class:`~apbv.layout.ContextLayout`.
    """
    question, context = positions.split([*map(len, copied), positions.shape[-1] - sum(map(len, copied))], dim=-1)[
        1:3
    ]
    context += question[..., -1:] - question[..., :1] + 1
    question += prompt[..., copied[0].stop, None] - question[..., :1]
