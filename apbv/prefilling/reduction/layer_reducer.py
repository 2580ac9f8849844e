"""Pruning of visual tokens between the language model's layers: what reducers have in common.

The first layers read the whole prompt; by their attention some visual tokens are chosen, and the
layers that follow read these alone. It is computed as the papers run it, on one host with full
attention. Tokens stay at their rotary positions.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...config import ReduceConfig
from ...device.copies import to_device
from ...errors import InvalidConfigError
from ...input.prompts.model_inputs import ModelInputs
from ...model.forward import LayerRows, LayerStep
from ...model.modules import decoder_layers
from ...model.parts import ModelParts
from .choosing import Reduction

# Attention probabilities in memory at a time, in fp32.
MOST_PROBABILITIES = 2**26


class Selection(NamedTuple):
    """The visual tokens that the following layers read.

    Attributes:
        kept: their numbers among the visual tokens that the layers before have read, int64,
            ascending; at least one.
        merged: some of ``kept``, int64, which stand for several tokens from here on; None: none.
        values: the hidden states of ``merged``, ``[merged tokens, d]``.
    """

    kept: Tensor
    merged: Tensor | None = None
    values: Tensor | None = None


class LayerReducer(LayerStep, ABC):
    """Drops visual tokens between layers, in the prefill of one prompt on one host.

    Args:
        settings: a reduction of this name.
        parts: the model.
        inputs: the prompt, with visual tokens.

    Attributes:
        name: its name in the config and on the command line.
        layers: after how many decoder layers it chooses, ascending.
        num_visual: the visual tokens of the prompt.
        num_question: the tokens of the question, at the prompt's end.

    Raises:
        InvalidConfigError: the model has too few layers.
    """

    name: ClassVar[str]

    def __init__(self, settings: ReduceConfig, parts: ModelParts, inputs: ModelInputs):
        num_layers = parts.sizes.layers
        first = settings.layer or 1
        if first >= num_layers:
            raise InvalidConfigError(
                f"{self.name} cannot prune after {first} layers: the model has {num_layers}, and "
                "at least one must follow"
            )
        is_visual = parts.is_visual(inputs.input_ids[0])
        self.settings = settings
        self.parts = parts
        self.layers = self.choose_layers(settings, num_layers)
        self.num_visual = int(is_visual.sum())
        self._visual_rows = is_visual.nonzero().flatten()
        self._numbers = torch.arange(self.num_visual)  # of the visual tokens that are left
        self._num_after_layer: list[int] = []
        self.num_question = inputs.num_tokens - inputs.query_start
        self._step = 0

    @staticmethod
    @abstractmethod
    def choose_layers(settings: ReduceConfig, num_layers: int) -> tuple[int, ...]:
        """Return after how many layers tokens are pruned: ascending, in 1 .. num_layers - 1."""

    @abstractmethod
    def choose(self, rows: LayerRows) -> Selection:
        """Choose among the visual tokens that are left.

        Args:
            rows: the output of the layer before.
        """

    @property
    def step(self) -> int:
        """How often tokens were pruned before."""
        return self._step

    @property
    def next_layer(self) -> int:
        """The number of the layer before which tokens are pruned next."""
        return self.layers[self._step]

    @property
    def num_left(self) -> int:
        """How many visual tokens the layers read at this point."""
        return len(self._visual_rows)

    def after(self, layer: int, rows: LayerRows) -> None:
        if layer + 1 in self.layers:
            self._prune(rows)
            self._step += 1
        self._num_after_layer.append(self.num_left)

    def _prune(self, rows: LayerRows) -> None:
        """Drop the rows that are not chosen."""
        selection = self.choose(rows)
        device = rows.hidden.device
        if selection.merged is not None:
            assert selection.values is not None, "merged tokens have hidden states"
            merged_rows = to_device(self._visual_rows[selection.merged], device)
            rows.hidden[0].index_copy_(0, merged_rows, selection.values.to(rows.hidden))
        stays = torch.ones(rows.hidden.shape[1], dtype=torch.bool)
        stays[self._visual_rows] = False
        stays[self._visual_rows[selection.kept]] = True
        rows.keep(to_device(stays.nonzero().flatten(), device))
        # Each row's place among those that stay.
        place_of_row = stays.long().cumsum(0) - 1
        self._visual_rows = place_of_row[self._visual_rows[selection.kept]]
        self._numbers = self._numbers[selection.kept]

    def visual_states(self, rows: LayerRows) -> Tensor:
        """Return the hidden states of the visual tokens that are left, ``[tokens, d]``."""
        return rows.hidden[0, to_device(self._visual_rows, rows.hidden.device)]

    def question_states(self, rows: LayerRows) -> Tensor:
        """Return the hidden states of the question's tokens, ``[n_q, d]``."""
        return rows.hidden[0, -self.num_question :]

    def attention_of(self, raters: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return the attention of some tokens of the question to the visual tokens that are left.

        It is the mean over heads of the softmax over all tokens up to the one that asks.

        Args:
            raters: int64 ``[R]``, the tokens' numbers in the question.
            q, k, scale: as in :meth:`on_attention`.

        Returns:
            ``[R, visual tokens]`` in fp32 or wider, in CPU memory.
        """
        num_rows = k.shape[2]
        num_kv_heads = k.shape[1]
        dtype = torch.promote_types(q.dtype, torch.float32)
        rater_rows = raters + num_rows - self.num_question
        is_later = to_device(torch.arange(num_rows) > rater_rows[:, None], q.device)
        visual_rows = to_device(self._visual_rows, q.device)
        group = q.shape[1] // num_kv_heads
        chunk = max(1, MOST_PROBABILITIES // (group * num_rows))
        found = []
        # Of some tokens at a time, and of one KV head.
        for some_rows, are_later in zip(
            to_device(rater_rows, q.device).split(chunk), is_later.split(chunk), strict=True
        ):
            total = torch.zeros(len(some_rows), len(visual_rows), dtype=dtype, device=q.device)
            for head in range(num_kv_heads):
                queries = q[0, head * group : (head + 1) * group, some_rows].to(dtype)
                scores = queries @ k[0, head].to(dtype).T * scale
                attention = scores.masked_fill(are_later, float("-inf")).softmax(dim=-1)
                total += attention[..., visual_rows].sum(dim=0)
            found.append(total / q.shape[1])
        return torch.cat(found).cpu()

    def next_attention_inputs(self, rows: LayerRows) -> tuple[Tensor, Tensor, float]:
        """Compute queries, keys and scale of the next layer, on rows that it would read.

        Nothing else of that layer is computed, but what follows its attention.
        """
        layer = decoder_layers(self.parts.language_model)[self.next_layer]
        seen: list[tuple[Tensor, Tensor, float]] = []

        def look(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
            seen.append((q, k, scale))
            return q

        layer.get_submodule("self_attn")(
            hidden_states=layer.get_submodule("input_layernorm")(rows.hidden),
            position_embeddings=rows.rotary,
            attention_mask=None,
            apbv=look,
        )
        return seen[0]

    def reduction(self) -> Reduction:
        """Return a record of the pruning, after the last layer."""
        return Reduction(
            method=self.name,
            ratio=self.settings.ratio,
            num_before=self.num_visual,
            num_after=self.num_left,
            kept=self._numbers,
            by_layer=(self.num_visual, *self._num_after_layer[:-1]),
        )


def asking_tokens(settings: ReduceConfig, num_question: int) -> Tensor:
    """Return the numbers of the question's tokens that rank: the last one, or all."""
    if settings.asked_by == "question":
        return torch.arange(num_question)
    return torch.tensor([num_question - 1])
