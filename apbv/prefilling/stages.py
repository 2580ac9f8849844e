"""This module runs the language model in stages, each a run of its layers over tokens of its own.

Where no tokens are dropped inside the model there is one stage, of all layers and the whole prompt. Between two
stages every host is brought the hidden states of the tokens that it computes next.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import get_ident
from typing import Protocol

import torch
from torch import Tensor

from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs
from ..kv.cache import ShardedCache
from ..layout import ContextLayout
from ..model.attention import LayerAttention, NewTokenAttention
from ..model.parts import ModelParts
from ..model.some_layers import some_layers
from .exchange import LocalVisual, ReadOnce
from .methods import PrefillMethod
from .moving import move_rows
from .positions import local_positions


@dataclass(frozen=True)
class Stage:
    """A Stage is a run of decoder layers, and the tokens of the prompt that they compute.

    Tokens of a stage are numbered from 0 to n_s - 1, in token order; its layout counts them so.

    Attributes:
        layers: the decoder layers.
        method: computes their attention.
        query_start: the first token of the question.
        tokens: int64 ``[n_s]``, ascending: which tokens of the prompt they are; None: all of them.
    """

    layers: range
    method: PrefillMethod
    query_start: int
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

    def in_prompt(self, tokens: Tensor) -> Tensor:
        """Return the numbers in the prompt of some tokens of this stage."""
        return tokens if self.tokens is None else self.tokens[tokens]

    def is_visual(self, parts: ModelParts, inputs: ModelInputs) -> Tensor:
        """Find the stage's visual tokens: bool ``[n_s]``."""
        ids = inputs.input_ids[0]
        return parts.is_visual(ids if self.tokens is None else ids[self.tokens])

    def next(self, method: PrefillMethod, layers: range, left: Tensor) -> "Stage":
        """Return the stage behind this one, of the tokens ``left``, ascending."""
        num_before = int((left < self.query_start).sum())
        return Stage(layers, method, num_before, self.in_prompt(left))


@dataclass
class HiddenRows:
    """HiddenRows are the hidden states of a host's tokens between two layers.

    Attributes:
        local: ``[1, S, d]`` of its local tokens; None on a host without any.
        query: those of the question, ``[1, n_q, d]``, where the method runs it in a pass of its own; else, and
            before the first layer, None.
        deepstack: for every next layer behind which visual features are added, those of the host's visual tokens.
    """

    local: Tensor | None = None
    query: Tensor | None = None
    deepstack: list[Tensor] = field(default_factory=list)

    def take_local(self) -> Tensor:
        """Return :attr:`local`, and forget it."""
        local, self.local = self.local, None
        return local

    def take_query(self) -> Tensor:
        """Return :attr:`query`, and forget it."""
        query, self.query = self.query, None
        return query


class Watch(Protocol):
    """A Watch looks on as a stage is computed; what it yields computes the attention in the method's place."""

    def context_pass(self, attention: PrefillMethod) -> AbstractContextManager[LayerAttention]:
        """Watch the pass of the context, with which the question may be computed, too."""

    def query_pass(self, attention: LayerAttention) -> AbstractContextManager[LayerAttention]:
        """Watch the pass of the question alone, where the method has one."""

    def no_pass(self) -> None:
        """Take part in the exchanges of those who watch, on a host that computes nothing."""


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
    stage: Stage, parts: ModelParts, inputs: ModelInputs, rows: HiddenRows, cache: ShardedCache, watch: Watch
) -> HiddenRows:
    """Run a stage's layers on this host's tokens, and keep their KV; return what comes out, and forget ``rows``.

    Behind the model's last layer that is what its last norm makes of it.
    """
    method, layout, rank, layers = stage.method, stage.layout, stage.hosts.rank, stage.layers
    cache.add_layers(len(layers), layout, keep_query=not method.separate_query)
    spans = layout.local_spans(rank)
    if not spans:  # host 0 computes the stage alone
        watch.no_pass()
        cache.initialize_empty(parts.num_kv_heads, parts.head_dim, parts.dtype, parts.device)
        return HiddenRows()
    part = _part_of(parts, layers)
    result = HiddenRows(deepstack=rows.deepstack[len(layers) :])
    extra = {}
    if rows.deepstack:
        ids = inputs.input_ids[:, stage.in_prompt(stage.local[rank])]
        extra["visual_pos_masks"] = parts.is_visual(ids).to(parts.device)
        extra["deepstack_visual_embeds"] = ReadOnce(rows.deepstack[: len(layers)])
        rows.deepstack = []
    if stage.tokens is None:
        positions = local_positions(inputs, spans, layout.anchor_copy)
    else:
        positions = inputs.position_ids[..., stage.tokens[stage.local[rank]]]
    with watch.context_pass(method) as attention:
        options = {"cache": cache, "attention": attention, **extra}
        del extra
        result.local = _run(part, [rows.take_local()], positions, options)
    if method.separate_query:  # only now can the question see all of the context
        with watch.query_pass(NewTokenAttention(parts.backend, hosts=stage.hosts)) as attention:
            question = [rows.take_query()]
            if stage.tokens is None:
                question = [parts.embed_tokens(inputs.input_ids[:, inputs.query_start :].to(parts.device))]
            positions = inputs.position_ids[..., inputs.query_start :]
            result.query = _run(part, question, positions, {"cache": cache, "attention": attention})
    return result


def next_rows(
    stage: Stage, following: Stage, left: Tensor, rows: HiddenRows, parts: ModelParts, inputs: ModelInputs
) -> HiddenRows:
    """Bring every host the hidden states of its tokens in the next stage; collective. ``rows`` is forgotten.

    Args:
        left: the tokens of ``stage`` that ``following`` has, ascending.
    """
    hosts, wanted = stage.hosts, [left[tokens] for tokens in following.local]
    nothing = torch.empty(0, parts.hidden_size, dtype=parts.dtype, device=parts.device)
    result = HiddenRows(query=rows.take_query())
    local = nothing if rows.local is None else rows.take_local()[0]
    if result.query is not None and not following.method.separate_query:
        # What rode along with the context only ranked keys; the question's own states go on.
        local[stage.local[hosts.rank] >= stage.query_start] = result.take_query()[0]
    result.local = move_rows(local, stage.local, stage.owner, wanted, hosts)[None]
    del local
    num_to_add = max(0, parts.num_deepstack_layers - following.layers.start)
    if num_to_add:
        is_visual = stage.is_visual(parts, inputs)
        held, wanted = ([tokens[is_visual[tokens]] for tokens in of_hosts] for of_hosts in (stage.local, wanted))
        for index in range(num_to_add):
            features = rows.deepstack[index] if rows.deepstack else nothing
            result.deepstack.append(move_rows(features, held, stage.owner, wanted, hosts))
    return result


def _part_of(parts: ModelParts, layers: range) -> ModelParts:
    """Return parts whose language model is these layers; the last norm follows only the last layer."""
    if len(layers) == parts.num_layers:
        return parts
    with_norm = layers.stop == parts.num_layers
    return replace(parts, language_model=some_layers(parts.language_model, layers, with_norm))


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
