"""A GPU is given the next step before the host has read a token; the answer stays the same."""

import pytest
import torch

from apbv import DecodeConfig, HostGroup, PrefillConfig, SamplingParams, prefill
from apbv.decode.answer import generate_tokens
from apbv.errors import ModelOutputError
from apbv.model.parts import inspect_model
from apbv.runner.decoder import Decoder

from apbv_tests.answers import answer_by, decoder_behind
from apbv_tests.prompts import UNCOMPRESSED, as_inputs, build, text_batch

MOST = 10
GREEDY = SamplingParams(max_new_tokens=MOST)
SAMPLED = SamplingParams(max_new_tokens=MOST, temperature=1.5, top_p=0.9, seed=5)
# A token gives way once it came too often, so that the one before it has to be known.
BIAS = ((3, 91.0), (5, 90.0), (7, 89.0))
PENALISED = SamplingParams(max_new_tokens=MOST, logit_bias=BIAS, frequency_penalty=2.0)


def prefilled(kv: str = "gathered"):
    hosts = HostGroup.single()
    inputs = as_inputs("llama", text_batch(60), 50, hosts)
    config = PrefillConfig(kv=kv, passing_len=UNCOMPRESSED)
    return prefill(build("llama", torch.float32), inputs, hosts=hosts, config=config)


def decoded(
    state, ahead: bool, sampling: SamplingParams, end=()
) -> tuple[list[int], list[str], int]:
    """The tokens, what happened one after the other, and how many tokens' KV is left behind the
    prompt's."""
    decoder = decoder_behind(state, build("llama", torch.float32))
    happened = []
    advance = decoder.advance
    decoder.runs_ahead = ahead

    def noted(tokens) -> torch.Tensor:
        happened.append("step")
        return advance(tokens)

    decoder.advance = noted
    tokens = generate_tokens(
        answer_by(decoder, state, sampling, end, lambda token: happened.append("token"))
    )
    return tokens, happened, decoder.cache.get_seq_length() - state.num_tokens


@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"]
)
def test_an_answer_of_any_length_is_the_same(sampling):
    state = prefilled()
    full, happened, _ = decoded(state, False, sampling)
    assert len(full) == MOST and happened[:4] == ["token", "step", "token", "step"]
    tokens, happened, _ = decoded(state, True, sampling)
    assert tokens == full and happened[:6] == ["token", "step", "step", "token", "step", "token"]
    for index, token in enumerate(full):
        expected = decoded(state, False, sampling, (token,))
        tokens, happened, left = decoded(state, True, sampling, (token,))
        assert (tokens, left) == (expected[0], expected[2])
        assert left == len(tokens) - 1
        # Behind an end token a step was for nothing; where the answer may not be longer there is
        # none.
        wasted = 1 < len(tokens) < MOST
        assert happened.count("step") == len(tokens) - 1 + wasted, index


@pytest.mark.parametrize(("sampling", "broken_at"), [(GREEDY, 4), (SAMPLED, 1)])
def test_logits_that_are_not_finite_end_it(sampling, broken_at):
    """What was chosen from them in the meantime must be a token: a GPU does not look before it
    reads its row."""
    state = prefilled()
    steps = []
    decoder = decoder_behind(state, build("llama", torch.float32))
    advance = decoder.advance

    def breaking(tokens) -> torch.Tensor:
        assert all(0 <= int(token) < state.logits.shape[1] for token in tokens)
        steps.append(tokens)
        return advance(tokens) * (torch.nan if len(steps) == broken_at else 1.0)

    decoder.advance = breaking
    decoder.runs_ahead = True
    with pytest.raises(ModelOutputError, match=f"after {broken_at} tokens"):
        generate_tokens(answer_by(decoder, state, sampling))


def test_only_a_process_that_runs_the_model_alone_runs_ahead(monkeypatch):
    state = prefilled()
    shared = prefilled("sharded")
    parts = inspect_model(build("llama", torch.float32))
    assert not Decoder(parts, state.kv, 0).runs_ahead  # on a CPU nothing would be gained
    monkeypatch.setitem(vars(parts), "device", torch.device("cuda"))
    monkeypatch.setitem(vars(parts), "decode", DecodeConfig(cuda_graphs="off"))
    assert Decoder(parts, state.kv, 0).runs_ahead
    assert not Decoder(parts, shared.kv, 0).runs_ahead
    monkeypatch.setitem(vars(parts), "tensor_parallel", (0, 2))
    assert not Decoder(parts, state.kv, 0).runs_ahead
