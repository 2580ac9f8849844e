"""This module defines the interface of reducers that drop visual tokens between layers of the language model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...config import PrefillConfig, ReduceConfig
from ...input.model_inputs import ModelInputs
from ...layout import ContextLayout
from ...model.parts import ModelParts
from ...model.sizes import DecoderSizes
from ..stages import HiddenRows, Stage
from .kept import Reduction
from .question_attention import MixedAttention, WantedAttention
from .shape import PromptShape, count_of


@dataclass(frozen=True)
class Choice:
    """A Choice says which of a stage's visual tokens the next stage has.

    Attributes:
        left: their numbers among the stage's visual tokens, int64, ascending; at least one.
        merged: some of ``left``, int64, whose hidden states become :attr:`values`.
        values: ``[merged tokens, d]``, on every host.
    """

    left: Tensor
    merged: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True)
class Remainder:
    """A Remainder bounds how many visual tokens are left behind some of the layers, before they are chosen.

    Attributes:
        behind: so many decoder layers have run.
        fewest, most: the bounds; the same number where it does not depend on what the layers compute.
    """

    behind: int
    fewest: int
    most: int


def require_layers(config: ReduceConfig | None, num_layers: int) -> None:
    """Refuse a reduction between layers of a model that has too few of them.

    Raises:
        ValueError: no layer follows the one behind which tokens are left out first.
    """
    if config is None or not config.is_late or config.leaves_all:
        return
    first = config.layer or 1
    if first >= num_layers:
        raise ValueError(
            f"{config.method} cannot leave tokens out behind {first} layers: the model has {num_layers}, "
            "and at least one must follow"
        )


class LateReducer(ABC):
    """A LateReducer chooses, between stages of one prompt's prefill, which visual tokens the next stage has.

    Every method is called on all hosts, and collective.

    Args:
        config: how the prompt is prefilled, with a reduction of this name.
        parts: the model.
        inputs: the prompt, with visual tokens.

    Attributes:
        name: its name in the config and on the command line.
        settings: the ratio and the layer.
        layers: behind how many decoder layers it chooses, ascending.
        num_visual: the visual tokens of the prompt.

    Raises:
        ValueError: the model has too few layers.
    """

    name: ClassVar[str]

    def __init__(self, config: PrefillConfig, parts: ModelParts, inputs: ModelInputs):
        self.config, self.settings, self.parts, self.inputs = config, config.reduce, parts, inputs
        require_layers(config.reduce, parts.num_layers)
        self.layers = self.choose_layers(config.reduce, parts.num_layers)
        self.num_visual = int(parts.is_visual(inputs.input_ids).sum())

    @staticmethod
    @abstractmethod
    def choose_layers(settings: ReduceConfig, num_layers: int) -> tuple[int, ...]:
        """Return behind how many layers tokens are dropped, ascending, each in 1 .. num_layers - 1."""

    @classmethod
    def remainders(cls, settings: ReduceConfig, num_layers: int, shape: PromptShape) -> tuple[Remainder, ...]:
        """Return what will be left behind each of the layers; by default every step leaves the same share.

        Args:
            shape: of the whole prompt.
        """
        layers = cls.choose_layers(settings, num_layers)
        shares = [settings.ratio ** (step / len(layers)) for step in range(1, len(layers) + 1)]
        counts = [count_of(share, shape.num_visual) for share in shares]
        return tuple(Remainder(layer, count, count) for layer, count in zip(layers, counts, strict=True))

    @staticmethod
    def num_asking(num_question: int, sizes: DecoderSizes) -> int:
        """Return of how many of the question's tokens times heads, at most, attention is computed at a time.

        By default it is not wanted.
        """
        return 0

    def enter(self, stage: Stage, rows: "OwnedRows") -> None:  # noqa: B027  (most need not see it)
        """See what goes into a stage behind which tokens are dropped; by default nothing is done."""

    def raters(self, stage: Stage) -> Tensor | None:
        """Return whose attention in the stage's last layer is wanted: ``[R, n_q]``, R mixtures of the question's.

        A row holds the weight of each of the question's tokens. None: no attention is wanted.
        """
        return None

    def wanted_attention(self, stage: Stage, is_visual: Tensor) -> WantedAttention | None:
        """Return which attention is wanted, by default that of :meth:`raters`; None: none is.

        Args:
            is_visual: which of the stage's tokens are visual, bool ``[n_s]``.
        """
        raters = self.raters(stage)
        return None if raters is None else MixedAttention(stage, is_visual, raters)

    @abstractmethod
    def choose(self, stage: Stage, rows: "OwnedRows", attention: Tensor | None) -> Choice:
        """Choose among the stage's visual tokens, from what came out of its last layer.

        Args:
            attention: ``[R, visual tokens]`` in fp32, on the CPU of every host: the attention to each visual token
                that :meth:`wanted_attention` asked for, mean over heads; None where none was wanted.
        """

    def reduction(self, left: Tensor, layouts: Sequence[ContextLayout]) -> Reduction | None:
        """Return what was left out; None where nothing was.

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

    def count(self, share: float) -> int:
        """Return how many tokens a share of the prompt's visual tokens is: rounded, and at least one."""
        return count_of(share, self.num_visual)


@dataclass(frozen=True)
class OwnedRows:
    """An OwnedRows shows the hidden states of the tokens that this host owns, before or behind a stage.

    Attributes:
        parts: the model.
        stage: the stage.
        rows: the hidden states of this host's local tokens.
        is_visual: which tokens of the stage are visual, bool ``[n_s]``.
    """

    parts: ModelParts
    stage: Stage
    rows: HiddenRows
    is_visual: Tensor

    @property
    def visual_tokens(self) -> list[Tensor]:
        """For every host the visual tokens that it owns, by their numbers in the stage."""
        return [tokens[self.is_visual[tokens]] for tokens in self.stage.owned]

    @property
    def visual_numbers(self) -> list[Tensor]:
        """For every host the visual tokens that it owns, by their numbers among the stage's visual tokens."""
        numbers = self.is_visual.long().cumsum(0) - 1
        return [numbers[tokens] for tokens in self.visual_tokens]

    def visual(self) -> Tensor:
        """Return the hidden states of the visual tokens that this host owns, ``[T, d]``."""
        return self._of(self.visual_tokens[self.stage.hosts.rank])

    @property
    def question_tokens(self) -> list[Tensor]:
        """For every host the tokens of the question that it owns, by their numbers in the stage."""
        return [tokens[tokens >= self.stage.query_start] for tokens in self.stage.owned]

    def question(self) -> Tensor:
        """Return the hidden states of the question's tokens that this host owns, ``[T, d]``."""
        tokens = self.question_tokens[self.stage.hosts.rank]
        if self.rows.query is not None:
            return self.rows.query[0, (tokens - self.stage.query_start).to(self.rows.query.device)]
        return self._of(tokens)

    def _of(self, tokens: Tensor) -> Tensor:
        if self.rows.local is None:
            parts = self.parts
            return torch.empty(0, parts.hidden_size, dtype=parts.dtype, device=parts.device)
        return self.rows.local[0, self.stage.rows_of(tokens).to(self.rows.local.device)]
