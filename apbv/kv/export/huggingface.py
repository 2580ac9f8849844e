"""Gives a prefill's KV to transformers: as a plain cache, or as arguments of ``generate``."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...compat.versions import CACHE_ARGUMENT
from ...config.refusals import refuse
from ...device.copies import to_device
from ...errors import InvalidRequestError
from ..cache import first_tokens, kv_layers
from .prefilled import PrefilledKV


class HandoffCache(DynamicCache):
    """A prompt's KV for transformers' ``generate``, which rejects unsupported options.

    Assisted decoding would run the whole prompt again on top of this KV, and return wrong tokens.

    Args:
        num_tokens: the number of tokens whose KV will be put into the cache.
    """

    def __init__(self, num_tokens: int):
        super().__init__()
        self._num_tokens = num_tokens

    def activate_past_recording(self):
        # Assisted decoding calls this first, plain decoding after it has run the rest of the
        # prompt.
        if self.get_seq_length() <= self._num_tokens:
            raise InvalidRequestError(
                "assistant_model and prompt_lookup_num_tokens run the prompt again on top of its "
                "KV, which gives wrong tokens; for speculative decoding use Engine(speculate=…), "
                "or launch/infer.py --speculate"
            )
        super().activate_past_recording()

    def update(self, key_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if key_states.shape[0] != 1:
            raise InvalidRequestError(
                "the KV is of one sequence: num_beams and num_return_sequences must be 1; for "
                "another answer call generate() again, with new generate_inputs()"
            )
        return super().update(key_states, *args, **kwargs)


def to_dynamic_cache(prefilled: PrefilledKV, host: int = 0) -> DynamicCache | None:
    """Return the whole KV as a plain cache on one host; collective.

    See :meth:`apbv.PrefillResult.to_dynamic_cache`.
    """
    cache = prefilled.kv.to_dynamic_cache(host)
    states = prefilled.kv.states
    if cache is None or states is None:
        return cache
    return states.among(cache)


def generate_inputs(prefilled: PrefilledKV) -> dict[str, Any]:
    """Return arguments with which ``model.generate`` continues from a prefill, on host 0.

    See :meth:`apbv.PrefillResult.generate_inputs`.
    """
    states = prefilled.kv.states
    refuse(
        continuing="generate_inputs()",
        last_token_lost=states is not None and states.before_last is None,
    )
    cache = prefilled.kv.to_dynamic_cache(0)
    if cache is None:
        return {}
    device = kv_layers(cache)[0].keys.device
    num_tokens = prefilled.layout.num_tokens
    input_ids = to_device(prefilled.inputs.input_ids, device)
    position_ids = to_device(prefilled.inputs.position_ids, device)
    if position_ids.dim() == 3:
        # Row 0 holds plain text positions, from which transformers builds its masks.
        text_positions = torch.arange(num_tokens, device=device)[None, None]
        position_ids = torch.cat([text_positions, position_ids])
    # generate() runs the last token itself.
    num_handed = num_tokens - 1
    handed = first_tokens(cache, num_handed, HandoffCache(num_handed))
    if states is not None:
        assert states.before_last is not None  # checked above
        handed = states.before_last.among(handed, HandoffCache(num_handed))
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "position_ids": position_ids,
        CACHE_ARGUMENT: handed,
    }
