"""Runs the language model in stages, each a run of its layers over tokens of its own.

Where no tokens are dropped inside the model there is one stage, of all layers and the whole prompt. Between two
stages every host is brought the hidden states of the tokens that it computes next.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs
from ..kv.cache import ShardedCache
from ..layout import ContextLayout
from ..model.attention import LayerAttention, NewTokenAttention
from ..model.parts import ModelParts, some_layers
from .cancelling import Cancelling
from .exchange import LocalVisual, ReadOnce
from .methods import PrefillMethod
from .moving import move_rows


@dataclass(frozen=True)
class Stage:
    """A run of decoder layers, and the tokens of the prompt that they compute.

    Tokens of a stage are numbered from 0 to n_s - 1, in token order; its layout counts them so.

    Attributes:
        layers: the decoder layers.
        method: computes their attention.
        query_start: the first token of the question.
        is_visual: which tokens are visual, bool ``[n_s]``.
        tokens: int64 ``[n_s]``, ascending: which tokens of the prompt they are; None: all of them.
    """

    layers: range
    method: PrefillMethod
    query_start: int
    is_visual: Tensor
    tokens: Tensor | None = None

    @property
    def layout(self) -> ContextLayout:
        """The layout of this stage's tokens."""
        return self.method.layout

    @property
    def hosts(self) -> HostGroup:
        """The hosts that compute it."""
        return self.method.hosts

    @property
    def num_tokens(self) -> int:
        """n_s, the tokens of this stage."""
        return self.layout.num_tokens

    @property
    def question(self) -> range:
        """The tokens of the question."""
        return range(self.query_start, self.num_tokens)

    @property
    def splits_question(self) -> bool:
        """Whether the hosts share the question out, too."""
        return self.layout.is_split and not len(self.layout.query)

    @cached_property
    def local(self) -> list[Tensor]:
        """The tokens that each host computes, in the order of its rows."""
        return [_numbers(self.layout.local_spans(host)) for host in range(self.hosts.size)]

    @cached_property
    def owned(self) -> list[Tensor]:
        """The tokens whose KV each host keeps, in cache order."""
        return [_numbers(self.layout.cache_spans(host)) for host in range(self.hosts.size)]

    @cached_property
    def owner(self) -> Tensor:
        """The host that keeps each token, int64 ``[n_s]``."""
        owner = torch.empty(self.num_tokens, dtype=torch.long)
        for host, tokens in enumerate(self.owned):
            owner[tokens] = host
        return owner

    def rows_of(self, tokens: Tensor) -> Tensor:
        """Return the places of some tokens among this host's local ones."""
        local = self.local[self.hosts.rank]
        place = torch.zeros(self.num_tokens, dtype=torch.long)
        place[local] = torch.arange(len(local))
        return place[tokens]

    @cached_property
    def owned_visual(self) -> list[Tensor]:
        """The visual tokens that each host keeps, in cache order."""
        return [tokens[self.is_visual[tokens]] for tokens in self.owned]

    @cached_property
    def visual_numbers(self) -> list[Tensor]:
        """The same tokens by their numbers among the stage's visual tokens."""
        numbers = self.is_visual.long().cumsum(0) - 1
        return [numbers[tokens] for tokens in self.owned_visual]

    @cached_property
    def visual_rows(self) -> Tensor:
        """The places of visual tokens among those that this host keeps, on its device."""
        return self.is_visual[self.owned[self.hosts.rank]].nonzero().flatten().to(self.hosts.device)

    def states_of(self, tokens: Tensor, rows: "HiddenRows", parts: ModelParts) -> Tensor:
        """Return the hidden states ``[T, d]`` of tokens that this host keeps, all of the question or none."""
        if rows.query is not None and len(tokens) and tokens[0] >= self.query_start:
            return rows.query[0, (tokens - self.query_start).to(rows.query.device)]
        if rows.local is None:
            return torch.empty(0, parts.hidden_size, dtype=parts.dtype, device=parts.device)
        return rows.local[0, self.rows_of(tokens).to(rows.local.device)]

    def next(self, method: PrefillMethod, layers: range, left: Tensor) -> "Stage":
        """Return the stage behind this one, of the tokens ``left``, ascending."""
        num_before = int((left < self.query_start).sum())
        tokens = left if self.tokens is None else self.tokens[left]
        return Stage(layers, method, num_before, self.is_visual[left], tokens)


@dataclass
class HiddenRows:
    """The hidden states of a host's tokens between two layers.

    Attributes:
        local: ``[1, S, d]`` of its local tokens; None on a host without any.
        query: those of the question, ``[1, n_q, d]``, where the method runs it in a pass of its own; else, and
            before the first layer, None.
        deepstack: for every next layer behind which visual features are added, those of the host's visual tokens.
    """

    local: Tensor | None = None
    query: Tensor | None = None
    deepstack: list[Tensor] = field(default_factory=list)

    def take(self, name: str) -> Tensor | None:
        """Return :attr:`local` or :attr:`query`, and forget it."""
        taken = getattr(self, name)
        setattr(self, name, None)
        return taken


class Watcher:
    """Looks on as a stage is computed, on all hosts. As it is, it sees nothing.

    Attributes:
        stage: the stage.
        layers: the decoder layers whose queries and keys it is shown.
        hidden_layers: those whose inputs it is shown (0: the embeddings).
        wants_passed: whether it is told which KV pairs are passed on.
    """

    layers: Collection[int] = ()
    hidden_layers: Collection[int] = ()
    wants_passed = False

    def begin(self, stage: Stage) -> None:
        """Get ready for a stage."""
        self.stage = stage

    def on_layer(self, q: Tensor, keys: Tensor, scale: float, rows: Tensor) -> None:
        """Take the queries and keys of one of :attr:`layers`; collective among the hosts that compute.

        Args:
            q: the question's query states ``[1, Hq, n_q, D]``, post-RoPE.
            keys: ``[1, Hkv, S, D]``, among them those of the tokens that this host keeps.
            rows: the places of these, ``[T]`` in cache order.
        """

    def on_hidden(self, layer: int, hidden: Tensor, question: Tensor | None, owned: Tensor | None) -> None:
        """Take the input ``[S, d]`` of one of :attr:`hidden_layers`, in the pass that computes it for good.

        Args:
            question: the question's rows; None in a pass without it.
            owned: those of the tokens that this host keeps, in cache order; None in a pass without them.
        """

    def on_passed(self, block: int, chosen: Tensor) -> None:
        """Take one layer's choice of a block's KV pairs to pass on; see ``PrefillMethod.on_passed``."""

    def on_nothing(self) -> None:
        """Take part in the other hosts' exchanges, on a host that computes nothing of the stage."""

    def result(self) -> Any:
        """Return what was seen, the same on every host; collective, after the stage."""


def embed(stage: Stage, parts: ModelParts, inputs: ModelInputs, visual: LocalVisual) -> HiddenRows:
    """Return what goes into the first layer on this host; ``visual`` forgets its rows."""
    rows, rank = HiddenRows(), stage.hosts.rank
    if not len(stage.local[rank]):
        return rows
    rows.local, extra = visual.merge_into(parts, inputs.input_ids[:, stage.local[rank]])
    deepstack = extra.get("deepstack_visual_embeds", ())
    rows.deepstack = [deepstack[index] for index in range(len(deepstack))]
    return rows


def run_stage(
    stage: Stage,
    parts: ModelParts,
    inputs: ModelInputs,
    rows: HiddenRows,
    cache: ShardedCache,
    cancelling: Cancelling,
    watcher: Watcher | None = None,
) -> HiddenRows:
    """Run a stage's layers on this host's tokens, and keep their KV; return what comes out, and forget ``rows``.

    Behind the model's last layer that is what its last norm makes of it.

    Args:
        cancelling: may end the prefill before a layer.
        watcher: looks on; it has begun the stage.
    """
    method, layout, rank, layers = stage.method, stage.layout, stage.hosts.rank, stage.layers
    cache.add_layers(len(layers), layout, keep_query=not method.separate_query)
    spans = layout.local_spans(rank)
    if not spans:  # host 0 computes the stage alone
        for _ in layers:
            cancelling.together()
        if watcher is not None:
            watcher.on_nothing()
        cache.initialize_empty(parts.num_kv_heads, parts.head_dim, parts.dtype, parts.device)
        return HiddenRows()
    part = parts
    if len(layers) < parts.num_layers:
        with_norm = layers.stop == parts.num_layers  # which follows only the last layer
        part = replace(parts, language_model=some_layers(parts.language_model, layers, with_norm))
    result = HiddenRows(deepstack=rows.deepstack[len(layers) :])
    extra = {}
    if rows.deepstack:
        extra["visual_pos_masks"] = stage.is_visual[stage.local[rank]][None].to(parts.device)
        extra["deepstack_visual_embeds"] = ReadOnce(rows.deepstack[: len(layers)])
        rows.deepstack = []
    if stage.tokens is None:
        positions = _local_positions(inputs, spans, layout.anchor_copy)
    else:
        positions = inputs.position_ids[..., stage.tokens[stage.local[rank]]]
    with _shown_to(watcher, stage, part, method, has_question=not method.separate_query) as attention:
        options = {"cache": cache, "attention": cancelling.before_each(attention), **extra}
        del extra
        result.local = _run(part, [rows.take("local")], positions, options)
    if method.separate_query:  # only now can the question see all of the context
        attention = NewTokenAttention(parts.backend, hosts=stage.hosts)
        with _shown_to(watcher, stage, part, attention, has_context=False) as attention:
            question = [rows.take("query")]
            if stage.tokens is None:
                question = [parts.embed_tokens(inputs.input_ids[:, inputs.query_start :].to(parts.device))]
            positions = inputs.position_ids[..., inputs.query_start :]
            result.query = _run(part, question, positions, {"cache": cache, "attention": attention})
    return result


def next_rows(stage: Stage, following: Stage, left: Tensor, rows: HiddenRows, parts: ModelParts) -> HiddenRows:
    """Bring every host the hidden states of its tokens in the next stage; collective. ``rows`` is forgotten.

    Args:
        left: the tokens of ``stage`` that ``following`` has, ascending.
    """
    hosts, wanted = stage.hosts, [left[tokens] for tokens in following.local]
    nothing = torch.empty(0, parts.hidden_size, dtype=parts.dtype, device=parts.device)
    result = HiddenRows(query=rows.take("query"))
    local = nothing if rows.local is None else rows.take("local")[0]
    if result.query is not None and not following.method.separate_query:
        # What rode along with the context only ranked keys; the question's own states go on.
        local[stage.local[hosts.rank] >= stage.query_start] = result.take("query")[0]
    result.local = move_rows(local, stage.local, stage.owner, wanted, hosts)[None]
    del local
    num_to_add = max(0, parts.num_deepstack_layers - following.layers.start)
    if num_to_add:
        is_visual = stage.is_visual
        held, wanted = ([tokens[is_visual[tokens]] for tokens in of_hosts] for of_hosts in (stage.local, wanted))
        for index in range(num_to_add):
            features = rows.deepstack[index] if rows.deepstack else nothing
            result.deepstack.append(move_rows(features, held, stage.owner, wanted, hosts))
    return result


@contextmanager
def _shown_to(
    watcher: Watcher | None,
    stage: Stage,
    part: ModelParts,
    attention: LayerAttention,
    has_context: bool = True,
    has_question: bool = True,
) -> Iterator[LayerAttention]:
    """Show a watcher what a pass of some layers computes; yield the attention to compute it with.

    Without context a pass is of the question alone, and its attention gets the keys that this host keeps.
    """
    if watcher is None:
        yield attention
        return
    device = stage.hosts.device
    question = owned = None
    if has_context:
        owned = stage.rows_of(stage.owned[stage.hosts.rank]).to(device)
    if has_question:
        question = torch.arange(stage.query_start, stage.num_tokens)
        question = (stage.rows_of(question) if has_context else question - stage.query_start).to(device)

    def watched(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        if layer in watcher.layers:
            rows = torch.arange(k.shape[2], device=device) if owned is None else owned
            watcher.on_layer(question_states(stage, q, question), k, scale, rows)
        return attention(q, k, v, scale, layer)

    with ExitStack() as hooks:
        for layer in watcher.hidden_layers:

            def show(module, args, kwargs, layer=layer):
                hidden = args[0] if args else kwargs["hidden_states"]
                watcher.on_hidden(layer, hidden[0], question, owned)

            hook = part.language_model.layers[layer].register_forward_pre_hook(show, with_kwargs=True)
            hooks.callback(hook.remove)
        yield watched if has_question and watcher.layers else attention


def question_states(stage: Stage, q: Tensor, rows: Tensor) -> Tensor:
    """Return the question's queries ``[1, Hq, n_q, D]`` on every host that computes; collective among these.

    Where the method splits the question over the hosts, too, each sends the others its share.

    Args:
        q: of this host's rows in this pass, ``[1, Hq, S, D]``.
        rows: the question's, where they are all here.
    """
    hosts = stage.hosts
    if not stage.splits_question:
        return q[:, :, rows]
    everything = torch.arange(stage.query_start, stage.num_tokens)
    held = [tokens[tokens >= stage.query_start] for tokens in stage.local]
    wanted = [everything if len(tokens) else everything[:0] for tokens in stage.local]
    mine = q[0, :, stage.rows_of(held[hosts.rank]).to(q.device)].transpose(0, 1)
    return move_rows(mine, held, stage.owner, wanted, hosts).transpose(0, 1)[None]


def _run(parts: ModelParts, hidden: list[Tensor], positions: Tensor, options: dict) -> Tensor:
    """Run the language model's layers on ``[1, S, d]``, taken out of a list; return what comes out."""
    with _handed_to_first_layer(parts, hidden) as stand_in:
        return parts.language_model(
            inputs_embeds=stand_in,
            position_ids=positions.to(parts.device),
            past_key_values=options.pop("cache"),
            use_cache=True,
            apbv=options.pop("attention"),
            **options,
        ).last_hidden_state


@contextmanager
def _handed_to_first_layer(parts: ModelParts, held: list[Tensor]) -> Iterator[Tensor]:
    """Let the first layer take the only item of a list, so that it is freed behind it.

    The language model itself would hold what it was given until its last layer has run. It gets, and this yields,
    a tensor of the same shape that takes no memory. Another thread, which may decode with the same model then,
    is handed nothing.
    """
    stand_in, thread = held[0].new_empty(()).expand(held[0].shape), get_ident()

    def hand_over(layer, args: tuple) -> tuple:
        return (held.pop(), *args[1:]) if get_ident() == thread else args

    hook = parts.language_model.layers[0].register_forward_pre_hook(hand_over, prepend=True)
    try:
        yield stand_in
    finally:
        hook.remove()


def _numbers(spans: Sequence[range]) -> Tensor:
    """Return the tokens of some spans, one behind the other."""
    return torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(s.start, s.stop) for s in spans)])


def _local_positions(inputs: ModelInputs, spans: Sequence[range], copied: Sequence[range]) -> Tensor:
    """Return the rotary positions of spans of the prompt, ``[3, 1, S]`` or ``[1, S]``.

    An anchor's copy is a prompt with the question in front of the context: the question begins where the context
    would, and moves it on by its own length. All other tokens have their places in the prompt.

    Args:
        spans: tokens of the prompt, first of all those of ``copied``.
        copied: prefix, question and start of the context, as in :class:`~apbv.layout.ContextLayout`; empty where
            nothing is copied.
    """
    positions = [inputs.position_ids[..., span.start : span.stop] for span in spans]
    if copied:
        question, context = positions[1], inputs.position_ids[..., copied[0].stop]
        positions[1] = question - question[..., :1] + context[..., None]
        positions[2] = positions[2] + question[..., -1:] - question[..., :1] + 1
    return torch.cat(positions, dim=-1)
