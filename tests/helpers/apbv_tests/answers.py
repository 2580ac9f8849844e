"""Answers behind a prefill, for what decodes them."""

from transformers import PreTrainedModel

from apbv import PrefillResult, SamplingParams
from apbv.decode.answer import Answer, generate_tokens
from apbv.model.parts import ModelParts, inspect_model
from apbv.runner.decoder import Decoder


def answer_by(
    decoder, state: PrefillResult, sampling: SamplingParams, end=(), on_token=None
) -> Answer:
    """An answer that this decoder continues; it ends with the tokens of ``end``."""
    prompt = state.inputs.input_ids[0]
    return Answer(
        decoder, state.logits[0], state.num_tokens, sampling, end, on_token, prompt_ids=prompt
    )


def decoder_behind(state: PrefillResult, model: PreTrainedModel | ModelParts) -> Decoder:
    parts = model if isinstance(model, ModelParts) else inspect_model(model)
    return Decoder(parts, state.kv, state.next_position)


def plain_tokens(
    state: PrefillResult, model, sampling: SamplingParams, end=(), on_token=None
) -> list[int]:
    """The tokens of decoding one by one."""
    return generate_tokens(answer_by(decoder_behind(state, model), state, sampling, end, on_token))
