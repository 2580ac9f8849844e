"""Drafts with the multi-token prediction layer of the target's checkpoint."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from ...config import SamplingParams
from ...device.copies import to_device
from ...kv.cache import appending_in_place
from ...model.attention import NewTokenAttention, apbv_attention
from ...model.forward import LayerRows, run_layers
from ...model.next_token import NextTokenModel
from .drafters import ModelDrafter, ReadPrompt


class NextTokenRunner:
    """Runs the layer on new tokens, each with the hidden state behind the token before it.

    Args:
        model: the layer.
        cache: its KV, to which that of the new tokens is appended.

    Attributes:
        hidden: ``[S, d]``, the hidden states for the next run of S tokens. After a run it is the
            layer's own output for the last one, which the token that was drafted goes with.
    """

    def __init__(self, model: NextTokenModel, cache: DynamicCache):
        self._model = model
        self._cache = cache
        self.hidden: Tensor | None = None

    @torch.no_grad()
    def run(
        self,
        ids: Sequence[int] | Tensor,
        positions: Sequence[int],
        visible: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Run the layer on S tokens; see :meth:`apbv.runner.decoder.ModelRunner.run`.

        Args:
            positions: the rotary positions of the tokens before them.
        """
        assert visible is None, "the layer drafts chains"
        assert last_only, "only the last token's logits are needed"
        assert self.hidden is not None, "every token has a hidden state before it"
        parts = self._model.parts
        embeddings = parts.embed_tokens(to_device(ids, parts.device))
        joined = self._model.join(embeddings[None], self.hidden[None])
        rows = LayerRows(joined, to_device(positions, parts.device)[None])
        with apbv_attention(parts.language_model):
            out = run_layers(parts, rows, self._cache, NewTokenAttention(parts.backend))
        self.hidden = out[0, -1:]
        return parts.lm_head(out[:, -1:])[0]


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
        target: the target's decoder, which has the hidden states of the verified tokens.
    """

    _runner: NextTokenRunner  # type: ignore[assignment]  # it takes the same arguments

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
        self._model = model
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
        self._last_hidden: Tensor | None = last_hidden
        # How many tokens were run with the target's hidden states.
        self._num_verified = 0

    def _continue(self, cache: DynamicCache) -> None:
        self.cache = appending_in_place(cache)
        self._runner = NextTokenRunner(self._model, self.cache)

    def _roll_back(self, tokens: Sequence[int], num_verified: int | None = None) -> list[int]:
        assert num_verified is None, "all tokens are verified"
        num_drafted = len(self._cached) - self._num_verified
        if num_drafted:
            self.cache.crop(-num_drafted)
        self._cached = list(tokens[: self._num_verified])
        self._num_cached = self._num_verified
        missing = list(tokens[self._num_verified :])

        # The hidden states before the missing tokens.
        before = []
        if self._last_hidden is not None:
            before.append(self._last_hidden)
            self._last_hidden = None
        num_known = len(missing) - len(before)
        if num_known:
            assert self.target is not None and self.target.outputs is not None, "they are kept"
            before.append(self.target.outputs.take())
        self._runner.hidden = torch.cat(before)
        self._num_verified = len(tokens)
        return missing
