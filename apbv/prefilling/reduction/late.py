"""Pruning of visual tokens between layers: the interface of a reducer, and the next stage of a prefill."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...config import PrefillConfig, ReduceConfig
from ...input.model_inputs import ModelInputs
from ...kv.cache import ShardedCache
from ...layout import ContextLayout, single_host_layout
from ...model.parts import ModelParts, hybrid_family
from ...refusals import refuse
from ...transfer import to_device
from ..cancelling import Stop
from ..methods import PrefillMethod, method_alone
from ..stages import HiddenRows, Stage, Watcher, next_rows, run_stage
from .choosing import Reduction


class Selection(NamedTuple):
    """The visual tokens of a stage that the next stage keeps.

    Attributes:
        left: their numbers among the stage's visual tokens, int64, ascending; at least one.
        merged: some of ``left``, int64, whose hidden states become :attr:`values`.
        values: ``[merged tokens, d]``, on every host.
    """

    left: Tensor
    merged: Tensor | None = None
    values: Tensor | None = None


def require_layers(config: ReduceConfig | None, num_layers: int) -> None:
    """Reject a reduction between layers of a model that has too few of them.

    Raises:
        ValueError: no layer follows the one after which tokens are pruned first.
    """
    if config is None or not config.is_late or config.leaves_all:
        return
    first = config.layer or 1
    if first >= num_layers:
        raise ValueError(
            f"{config.method} cannot prune after {first} layers: the model has {num_layers}, "
            "and at least one must follow"
        )


class LateReducer(ABC):
    """Selects, between stages of one prompt's prefill, the visual tokens of the next stage.

    Every method is called on all hosts, and collective.

    Args:
        config: how the prompt is prefilled, with a reduction of this name.
        parts: the model.
        inputs: the prompt, with visual tokens.

    Attributes:
        name: its name in the config and on the command line.
        settings: the ratio and the layer.
        layers: after how many decoder layers it chooses, ascending.
        num_visual: the visual tokens of the prompt.

    Raises:
        ValueError: the model has too few layers, or is a hybrid.
    """

    name: ClassVar[str]

    def __init__(self, config: PrefillConfig, parts: ModelParts, inputs: ModelInputs):
        self.config, self.settings, self.parts, self.inputs = config, config.reduce, parts, inputs
        refuse(hybrid=hybrid_family(parts.model.config), late_reduction=self.name)
        require_layers(config.reduce, parts.num_layers)
        self.layers = self.choose_layers(config.reduce, parts.num_layers)
        self.num_visual = int(parts.is_visual(inputs.input_ids).sum())

    @staticmethod
    @abstractmethod
    def choose_layers(settings: ReduceConfig, num_layers: int) -> tuple[int, ...]:
        """Return the numbers of layers after which tokens are pruned, ascending, in 1 .. num_layers - 1."""

    def enter(self, stage: Stage, rows: HiddenRows) -> None:  # noqa: B027  (most need not see it)
        """Observe the input of a stage after which tokens are pruned; by default does nothing."""

    def watcher(self, stage: Stage) -> Watcher:
        """Return the watcher of a stage; by default it observes nothing."""
        return Watcher()

    @abstractmethod
    def choose(self, stage: Stage, rows: HiddenRows, seen: Any) -> Selection:
        """Choose among the stage's visual tokens.

        Args:
            rows: what came out of its last layer.
            seen: the result of :meth:`watcher`'s.
        """

    def reduction(self, left: Tensor, layouts: Sequence[ContextLayout]) -> Reduction | None:
        """Return the pruning result; None if nothing was pruned.

        Args:
            left: the prompt's tokens that the last layers have, ascending.
            layouts: of every layer.
        """
        num_tokens = self.inputs.num_tokens
        if len(left) == num_tokens:
            return None
        is_visual = self.parts.is_visual(self.inputs.input_ids[0])
        numbers = is_visual.long().cumsum(0) - 1
        kept = numbers[left[is_visual[left]]]
        by_layer = tuple(self.num_visual - num_tokens + layout.num_tokens for layout in layouts)
        return Reduction(self.name, self.settings.ratio, self.num_visual, len(kept), kept, by_layer)


def run_and_reduce(
    stage: Stage,
    layers: range,
    rows: HiddenRows,
    cache: ShardedCache,
    reducer: LateReducer,
    stop: Stop | None,
) -> tuple[Stage, HiddenRows]:
    """Run a stage, and return the next one, with fewer visual tokens, and what goes into it here; collective.

    Args:
        layers: those of the next stage.
    """
    parts, inputs = reducer.parts, reducer.inputs
    reducer.enter(stage, rows)
    watcher = reducer.watcher(stage)
    watcher.begin(stage)
    rows = run_stage(stage, parts, inputs, rows, cache, stop, watcher)
    choice = reducer.choose(stage, rows, watcher.result())
    visual, stays = stage.is_visual.nonzero().flatten(), ~stage.is_visual
    stays[visual[choice.left]] = True
    left = stays.nonzero().flatten()
    query_start = int((left < stage.query_start).sum())
    method = _method_for(stage, len(left), query_start, reducer)
    tokens = left if stage.tokens is None else stage.tokens[left]
    following = Stage(layers, method, query_start, stage.is_visual[left], tokens)
    rows = next_rows(stage, following, left, rows, parts)
    if choice.merged is not None:
        local, merged = left[following.local[stage.hosts.rank]], visual[choice.merged]
        here = torch.isin(local, merged).nonzero().flatten()
        device, places = rows.local.device, torch.searchsorted(merged, local[here])
        rows.local[0, to_device(here, device)] = choice.values[to_device(places, device)]
    return following, rows


def _method_for(stage: Stage, num_tokens: int, query_start: int, reducer: LateReducer) -> PrefillMethod:
    """Return the method of the next stage, with a layout of the tokens that are kept."""
    method = stage.method
    context_start = min(reducer.inputs.context_start, query_start)
    kind, config, hosts = type(method), reducer.config, stage.hosts
    if config.anchor_len is not None and config.anchor_len >= query_start:
        config = replace(config, anchor_len=None)  # one for all of the prompt would leave no context
    layout = kind.plan(hosts.size, num_tokens, context_start, query_start, config)
    if not (stage.layout.is_split and layout.is_split):  # once host 0 has all of it, it goes on alone
        kind, layout = method_alone(config), single_host_layout(hosts.size, num_tokens)
    following = kind(layout, hosts, config)
    following.blocks = method.blocks  # which counts what it computes
    return following
