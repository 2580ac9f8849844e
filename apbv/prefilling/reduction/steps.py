"""This module takes a prefill from one stage to the next, with fewer visual tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ...kv.cache import ShardedCache
from ...layout import single_host_layout
from ...model.attention import LayerAttention
from ..methods import PrefillMethod, method_alone
from ..stages import HiddenRows, Stage, next_rows, run_stage
from .choosing import gather_scores
from .late import Choice, LateReducer, OwnedRows
from .question_attention import question_states, visual_attention


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
    raters = reducer.raters(stage)
    watch = ReducerWatch(stage, raters, is_visual)
    rows = run_stage(stage, parts, inputs, rows, cache, watch)
    behind, attention = OwnedRows(parts, stage, rows, is_visual), None
    if raters is not None:
        attention = gather_scores(watch.attention, behind.visual_numbers, hosts, raters.shape[:1])
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
    """A ReducerWatch has the attention that a reducer wants, in a stage's last layer.

    See :class:`~apbv.prefilling.stages.Watch`.

    Args:
        raters: as of :meth:`LateReducer.raters`.
        is_visual: which of the stage's tokens are visual, bool ``[n_s]``.

    Attributes:
        attention: after the stage the attention to this host's visual tokens, ``[R, T]``; None where none is
            wanted, or this host computes nothing.
    """

    def __init__(self, stage: Stage, raters: Tensor | None, is_visual: Tensor):
        self._stage, self._raters, self._is_visual = stage, raters, is_visual
        self.attention: Tensor | None = None

    @contextmanager
    def context_pass(self, attention: PrefillMethod) -> Iterator[LayerAttention]:
        """Watch the pass of the context, unless the question has a pass of its own."""
        is_wanted = self._raters is not None and not attention.separate_query
        yield self._watching(attention, query_alone=False) if is_wanted else attention

    @contextmanager
    def query_pass(self, attention: LayerAttention) -> Iterator[LayerAttention]:
        """Watch the pass of the question, to which the keys are shown that this host owns."""
        yield attention if self._raters is None else self._watching(attention, query_alone=True)

    def no_pass(self) -> None:
        """Do nothing: where a host computes nothing, the others exchange nothing."""

    def _watching(self, attention: LayerAttention, query_alone: bool) -> LayerAttention:
        """Return the attention, with a look at the last layer's queries and keys."""
        stage, here = self._stage, self._stage.hosts.rank
        owned = stage.owned[here]

        def watched(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
            if layer == stage.layers.stop - 1:
                question, keys = q, k
                if not query_alone:
                    question, keys = question_states(stage, q), k[:, :, stage.rows_of(owned).to(k.device)]
                is_visual = self._is_visual[owned]
                self.attention = visual_attention(stage, question, keys, scale, self._raters, is_visual)
            return attention(q, k, v, scale, layer)

        return watched


def _method_for(stage: Stage, left: Tensor, reducer: LateReducer) -> PrefillMethod:
    """Return the method of the next stage, with a layout of the tokens that are left."""
    hosts, config, method = stage.hosts, reducer.config, stage.method
    query_start = int((left < stage.query_start).sum())
    context_start = min(reducer.inputs.context_start, query_start)
    if config.anchor_len is not None and config.anchor_len >= query_start:
        config = replace(config, anchor_len=None)  # one for all of the prompt would leave no context
    layout = type(method).plan(hosts.size, len(left), context_start, query_start, config)
    if stage.layout.is_split and layout.is_split:
        following = type(method)(layout, hosts, config)
    else:  # once host 0 has all of it, it goes on alone
        following = method_alone(config)(single_host_layout(hosts.size, len(left)), hosts, config)
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
