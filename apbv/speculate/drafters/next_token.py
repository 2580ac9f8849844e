"""Drafts with the multi-token prediction layer of the target's checkpoint."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from ...config import SamplingParams
from ...kv.cache import appending_in_place
from ...model.next_token import NextTokenModel
from ...runner.batch_steps import BatchRunner, OwnKV, Tokens
from ...runner.decoder import ModelRunner
from ...runner.outputs import TokenOutputs
from .drafters import ModelDrafter, ReadPrompt


def hidden_before(
    first: int, num_tokens: int, last_hidden: Tensor, target: TokenOutputs | None
) -> Tensor:
    """Return the target's hidden states before an answer's tokens from number ``first`` on.

    Args:
        num_tokens: of the answer, the last of which the target has not run.
        last_hidden: ``[1, d]``, behind the prompt's last token.
        target: its output for the answer's tokens.

    Returns:
        ``[num_tokens - first, d]``.
    """
    before = [last_hidden] if first == 0 else []
    num_known = num_tokens - 1
    if num_known:
        assert target is not None, "it is kept"
        before.append(target.between(max(0, first - 1), num_known))
    return torch.cat(before)


class NextTokenRunner(ModelRunner):
    """Runs the layer on new tokens, each with the hidden state behind the token before it.

    Args:
        model: the layer.
        cache: its KV, to which that of the new tokens is appended.

    Attributes:
        hidden: ``[S, d]``, the hidden states for the next run of S tokens. After a run it is the
            layer's own output for the last one, which the token that was drafted goes with.
    """

    hidden: Tensor

    def __init__(self, model: NextTokenModel, cache: DynamicCache):
        super().__init__(model.parts, cache, keeps_outputs=True)
        self._model = model

    def run(
        self,
        ids: Sequence[int] | Tensor,
        positions: Sequence[int],
        visible: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        logits = super().run(ids, positions, visible, last_only)
        assert self.output is not None and self.output.rows is not None, "it is kept"
        self.hidden = self.output.rows[-1:]
        return logits

    def _embedded(self, ids: Tensor) -> Tensor:
        return self._model.join(super()._embedded(ids), self.hidden[None])


class NextTokenBatchRunner(BatchRunner):
    """Runs the layer on new tokens of several answers, each with the hidden state before it.

    Of every KV, :attr:`NextTokenKV.hidden` has those for the tokens of the next run.

    Args:
        model: the layer.
    """

    _hidden: Tensor  # of all tokens of the run

    def __init__(self, model: NextTokenModel):
        super().__init__(model.parts, keeps_outputs=True)
        self._model = model

    def run(
        self,
        ids: Tokens,
        kvs: Sequence[OwnKV],
        counts: Sequence[int] | None = None,
        follows_drafted: bool = False,
    ) -> Tensor:
        own = [kv for kv in kvs if isinstance(kv, NextTokenKV)]
        assert len(own) == len(kvs), "they are of drafts with this layer"
        self._hidden = torch.cat([kv.hidden for kv in own])
        logits = super().run(ids, kvs, counts, follows_drafted)
        # The layer's own output goes with the token that is drafted.
        assert self.output is not None and self.output.rows is not None, "it is kept"
        lengths = [1] * len(own) if counts is None else list(counts)
        for kv, rows in zip(own, self.output.rows.split(lengths), strict=True):
            kv.hidden = rows[-1:]
            if not follows_drafted:
                kv.num_verified = kv.num_run
        return logits

    def _embedded(self, ids: Tensor) -> Tensor:
        return self._model.join(super()._embedded(ids), self._hidden[None])


class NextTokenKV(OwnKV):
    """The layer's KV of one answer in a batch.

    Attributes:
        hidden: ``[S, d]``, the hidden states for the next run of S tokens.
        num_verified: how many tokens were run with the target's hidden states.
    """

    hidden: Tensor
    num_verified: int = 0

    def prepare(self, num_tokens: int, last_hidden: Tensor, target: OwnKV) -> None:
        """Go back to what the target has verified, and take the hidden states of what is missing.

        Args:
            num_tokens: of the answer, the last of which the target has not run.
            last_hidden: ``[1, d]``, behind the prompt's last token.
            target: the target's KV of the answer, with its outputs.
        """
        # At least the last token is run: after a round that failed once more.
        first = min(self.num_verified, num_tokens - 1)
        self.hidden = hidden_before(first, num_tokens, last_hidden, target.outputs)
        self.num_run = first


class NextTokenDrafter(ModelDrafter):
    """Drafts chains with the layer: the target's hidden state gives the first token, the layer's
    own output the ones after it.

    What the layer computed from its own output is dropped when the target has verified it: the
    accepted tokens are run again, with the target's hidden states.

    Args:
        model: the layer.
        cache: its KV of the prompt but its last token.
        last_hidden: ``[1, d]``, the target's hidden state behind that.
        next_position: the rotary position of the first new token.
        prompt_len: n, the tokens of the prompt.
        config, vocab_size, prompt_ids: see :class:`ModelDrafter`.

    Attributes:
        model, last_hidden: as above.
        target: the target's decoder, which has the hidden states of the verified tokens.
    """

    last_hidden: Tensor
    _runner: NextTokenRunner

    def __init__(
        self,
        model: NextTokenModel,
        cache: DynamicCache,
        last_hidden: Tensor,
        next_position: int,
        prompt_len: int,
        config: SamplingParams,
        vocab_size: int,
        prompt_ids: Tensor,
    ):
        self.model = model
        # A token has the position of the one before it, whose hidden state it goes with.
        super().__init__(
            model.parts,
            ReadPrompt(cache),
            next_position - 1,
            prompt_len,
            config,
            vocab_size,
            prompt_ids=prompt_ids,
        )
        self.last_hidden = last_hidden
        # How many tokens were run with the target's hidden states.
        self._num_verified = 0

    def _continue(self, cache: DynamicCache) -> None:
        self.cache = appending_in_place(cache)
        self._runner = NextTokenRunner(self.model, self.cache)

    def _roll_back(self, tokens: Sequence[int], num_verified: int | None = None) -> list[int]:
        assert num_verified is None, "all tokens are verified"
        num_drafted = len(self._cached) - self._num_verified
        if num_drafted:
            self.cache.crop(-num_drafted)
        self._cached = list(tokens[: self._num_verified])
        self._num_cached = self._num_verified
        missing = list(tokens[self._num_verified :])

        outputs = None if self.target is None else self.target.outputs
        self._runner.hidden = hidden_before(
            self._num_verified, len(tokens), self.last_hidden, outputs
        )
        self._num_verified = len(tokens)
        return missing
