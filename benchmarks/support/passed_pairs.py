"""Lets blocks pass on other pairs than ``apbv`` would: random ones, or those of the answer.

What a ranking is worth shows beside these: they pass on as many pairs. One that knows the answer
shows about what this number of pairs allows.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

# isort: split
import torch
from torch import Tensor

from apbv import HostGroup, ModelInputs, PrefillConfig, prefill
from apbv.model.parts import ModelParts
from apbv.prefilling.methods import METHODS
from apbv.prefilling.methods.apbv import ApbvMethod, LayerQKV
from apbv.prefilling.methods.importance import importance_of

# How the labels of such rows end.
RANDOM = ", random pairs"
OF_THE_ANSWER = ", pairs of the answer"


class _Random(ApbvMethod):
    """Passes on pairs by random scores."""

    def rank(self, states: LayerQKV, block: int, rows: range, lse: Tensor | None) -> Tensor:
        keys, _ = states.pair(rows)
        generator = torch.Generator(keys.device).manual_seed(1000 * states.layer + block)
        return torch.rand(keys.shape[:3], generator=generator, device=keys.device)


def drawn() -> AbstractContextManager:
    """Let ``apbv`` pass on pairs that are drawn at random."""
    return patch.dict(METHODS, {"apbv": _Random})


class AnswersPairs:
    """The scores of all keys for a right answer: its tokens' attention, in every layer and block.

    They come from a prefill of the prompt with the answer behind it, which its tokens rank for.

    Attributes:
        scores: by layer and block, ``[1, KV heads, tokens of the block]``.
    """

    def __init__(self):
        self.scores: dict[tuple[int, int], Tensor] = {}

    def _ranked_by(self, num_answer: int | None) -> type[ApbvMethod]:
        """Return a method that passes on the pairs with the highest scores.

        Args:
            num_answer: tokens of the answer at the prompt's end, whose attention becomes the
                scores; None: the scores are known.
        """
        scores = self.scores

        class ByTheAnswer(ApbvMethod):
            def rank(self, states: LayerQKV, block: int, rows: range, lse: Tensor | None) -> Tensor:
                key = (states.layer, block)
                if num_answer is not None:
                    # The answer stands at the end of the query.
                    query = states.q[:, :, -num_answer:]
                    keys, _ = states.pair(rows)
                    if lse is not None:
                        lse = lse[:, :, -num_answer:]
                    scores[key] = importance_of("peak", query, keys, states.scale, lse=lse)
                return scores[key]

        return ByTheAnswer

    def find(
        self,
        parts: ModelParts,
        inputs: ModelInputs,
        answer: list[int],
        hosts: HostGroup,
        config: PrefillConfig,
    ) -> None:
        """Prefill the prompt and the answer; collective.

        Args:
            inputs: a text.
        """
        layout = ApbvMethod.plan(hosts.size, inputs.num_tokens, 0, inputs.query_start, config)
        ids = torch.cat([inputs.input_ids, torch.tensor([answer])], dim=1)
        longer = replace(inputs, input_ids=ids, position_ids=torch.arange(ids.shape[1])[None])
        config = replace(
            config,
            anchor_len=layout.anchor_len,
            passing_len=layout.passing_len,
            passing_budget=None,
        )
        prefill(parts, longer, hosts=hosts, config=config)

    def finding(self, num_answer: int) -> AbstractContextManager:
        """Let a prefill of a prompt and an answer behind it find the scores.

        Args:
            num_answer: tokens of the answer.
        """
        return patch.dict(METHODS, {"apbv": self._ranked_by(num_answer)})

    def passing(self) -> AbstractContextManager:
        """Let ``apbv`` pass on the pairs with the highest scores."""
        return patch.dict(METHODS, {"apbv": self._ranked_by(None)})
