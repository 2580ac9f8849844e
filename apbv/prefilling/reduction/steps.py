"""This module takes a prefill from one stage to the next, with fewer visual tokens."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...kv.cache import ShardedCache
from ...model.attention import LayerAttention
from ..methods import PrefillMethod
from ..stages import HiddenRows, Stage, next_rows, run_stage
from .choosing import gather_scores
from .forecast import next_layout
from .late import Choice, LateReducer, OwnedRows
from .question_attention import WantedAttention, question_states
from .shape import PromptShape


def run_and_reduce(
    stage: Stage, layers: range, rows: HiddenRows, cache: ShardedCache, reducer: LateReducer
) -> tuple[Stage, HiddenRows]:
    """Run a stage, and return the next one, with fewer visual tokens, and what goes into it here; collective.

    Args:
        layers: those of the next stage.
    """
    hosts, parts, inputs = stage.hosts, reducer.parts, reducer.inputs
    is_visual = stage.is_visual(parts, inputs)
    reducer.enter(stage, OwnedRows(parts, stage, rows, is_visual))
    wanted = reducer.wanted_attention(stage, is_visual)
    watch = ReducerWatch(stage, wanted)
    rows = run_stage(stage, parts, inputs, rows, cache, watch)
    behind, attention = OwnedRows(parts, stage, rows, is_visual), None
    if wanted is not None:
        attention = gather_scores(watch.attention, behind.visual_numbers, hosts, [wanted.num_lists])
        attention = hosts.mean_over_members(attention)
    choice = reducer.choose(stage, behind, attention)
    stays = ~is_visual
    stays[is_visual.nonzero().flatten()[choice.left]] = True
    left = stays.nonzero().flatten()
    following = stage.next(_method_for(stage, left, reducer), layers, left)
    rows = next_rows(stage, following, left, rows, parts, inputs)
    if choice.merged is not None:
        _put_merged(choice, left, is_visual, following, rows)
    return following, rows


class ReducerWatch:
    """A ReducerWatch computes the attention that a reducer wants, while a stage runs.

    See :class:`~apbv.prefilling.stages.Watch`.

    Args:
        wanted: the attention; None: none is wanted.

    Attributes:
        attention: after the stage the attention to this host's visual tokens, ``[R, T]``, mean over the layers in
            which it is wanted; None where none is wanted, or this host computes nothing.
    """

    def __init__(self, stage: Stage, wanted: WantedAttention | None):
        self._stage, self._wanted = stage, wanted
        self.attention: Tensor | None = None

    @contextmanager
    def context_pass(self, attention: PrefillMethod) -> Iterator[LayerAttention]:
        """Watch the pass of the context, unless the question has a pass of its own."""
        is_wanted = self._wanted is not None and not attention.separate_query
        yield self._watching(attention, query_alone=False) if is_wanted else attention

    @contextmanager
    def query_pass(self, attention: LayerAttention) -> Iterator[LayerAttention]:
        """Watch the pass of the question, to which the keys are shown that this host owns."""
        yield attention if self._wanted is None else self._watching(attention, query_alone=True)

    def no_pass(self) -> None:
        """Do nothing: where a host computes nothing, the others exchange nothing."""

    def _watching(self, attention: LayerAttention, query_alone: bool) -> LayerAttention:
        """Return the attention, with a look at the queries and keys of the layers in which some is wanted."""
        stage, wanted = self._stage, self._wanted
        rows = None if query_alone else stage.rows_of(stage.owned[stage.hosts.rank]).to(stage.hosts.device)

        def watched(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
            if layer in wanted.layers:
                question, keys = (q, k) if rows is None else (question_states(stage, q), k[:, :, rows])
                share = wanted(question, keys, scale) / len(wanted.layers)
                self.attention = share if self.attention is None else self.attention + share
            return attention(q, k, v, scale, layer)

        return watched


def _method_for(stage: Stage, left: Tensor, reducer: LateReducer) -> PrefillMethod:
    """Return the method of the next stage, with a layout of the tokens that are left."""
    method, query_start = stage.method, int((left < stage.query_start).sum())
    context_start = min(reducer.inputs.context_start, query_start)
    shape = PromptShape(len(left), context_start, query_start)
    kind, layout, config = next_layout(type(method), stage.layout, shape, reducer.config)
    following = kind(layout, stage.hosts, config)
    following.blocks = method.blocks  # which counts what it computes
    return following


def _put_merged(choice: Choice, left: Tensor, is_visual: Tensor, following: Stage, rows: HiddenRows) -> None:
    """Put what was merged into this host's rows of the next stage."""
    merged = is_visual.nonzero().flatten()[choice.merged]
    local = left[following.local[following.hosts.rank]]
    place = torch.full((len(is_visual),), -1, dtype=torch.long)
    place[merged] = torch.arange(len(merged))
    here = (place[local] >= 0).nonzero().flatten()
    device = rows.local.device
    rows.local[0, here.to(device)] = choice.values[place[local[here]].to(device)]
