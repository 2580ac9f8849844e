"""Decoders with fused kernels: the same numbers from the same weights, beside a model that stays as
it was."""

from unittest import mock

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from apbv.kernels import triton_elementwise
from apbv.kernels.backends import implementation
from apbv.model import row_chunks
from apbv.model.attention import CausalAttention, apbv_attention
from apbv.model.forward import LayerRows, run_layers
from apbv.model.linear_attention import LinearStates
from apbv.model.parts import inspect_model
from apbv.model.row_chunks import rows_in_chunks

from apbv_tests import families
from apbv_tests.pairs import each_choice
from apbv_tests.prompts import ALL_FAMILIES, relative_error

TOKENS = 600  # two chunks of the fewest rows
CLOSE = {torch.float32: 1e-5, torch.float16: 1e-2}
# GLM rotates neighbours, GLM-4.5V like the others.
ROTATE_NEIGHBOURS = ("glm4", "glm4v", "glm46v", "glm_ocr")


@torch.no_grad()
def hidden_states(decoder, parts) -> torch.Tensor:
    """What a decoder makes of random rows."""
    states = torch.randn(
        1, TOKENS, parts.hidden_size, generator=torch.Generator().manual_seed(0)
    ).to(parts.dtype)
    places = torch.arange(TOKENS)[None]
    if decoder is parts.language_model:
        linear = None
        if parts.sizes.linear is not None:
            linear = LinearStates(parts.sizes.linear.layers)
        with apbv_attention(decoder):
            rows = LayerRows(states, places)
            return run_layers(parts, rows, None, CausalAttention(), linear=linear)
    places = places.expand(3, -1, -1) if parts.uses_mrope else places
    return decoder(inputs_embeds=states, position_ids=places, use_cache=False).last_hidden_state


@each_choice(family=ALL_FAMILIES, dtype=list(CLOSE))
def test_the_decoder_computes_what_it_did_and_the_model_is_left_as_it_was(family, dtype):
    model = families.build_model(family, dtype=dtype, layers=2)
    is_hybrid = family in families.HYBRID_FAMILIES
    before = [(module, type(module), dict(vars(module))) for module in model.modules()]
    parts = inspect_model(model, "triton")
    decoder = model.get_decoder()
    fused = {
        name: module
        for name, module in parts.language_model.named_modules()
        if hasattr(module, "is_fused")
    }
    for name, module in parts.language_model.named_modules():
        # The norms of hybrids multiply by 1 + w.
        is_computed = (name.endswith("norm") and not is_hybrid) or hasattr(module, "up_proj")
        is_computed |= name.endswith("linear_attn")  # which is run in pieces
        is_computed |= name.endswith("self_attn") and family not in ROTATE_NEIGHBOURS
        assert (name in fused) == is_computed, name
        assert isinstance(module, type(decoder.get_submodule(name)))
    assert all(
        x is y for x, y in zip(parts.language_model.parameters(), decoder.parameters(), strict=True)
    )
    called = []
    decoder.layers[1].mlp.register_forward_hook(lambda *_: called.append(True))
    with mock.patch.dict(row_chunks.CHUNK_BYTES, {"cpu": 1}), rows_in_chunks(parts, TOKENS):
        found = hidden_states(parts.language_model, parts)
    assert called == [True]
    assert relative_error(found, hidden_states(decoder, parts)) < CLOSE[dtype]
    assert all(type(module) is kind and vars(module) == was for module, kind, was in before)
    assert is_hybrid or inspect_model(model, "torch").language_model is decoder


class Gemma(LlamaRMSNorm):
    """A norm that looks like Llama's, and multiplies by 1 + w."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) * (1 + self.weight) / self.weight


def twice(q, k, cos, sin):
    return 2 * q, 2 * k


@pytest.mark.parametrize("wrong", ["LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "Gemma"])
def test_what_is_wrong_is_left_out_with_a_warning(monkeypatch, wrong):
    kernel, function, mistake = {
        "LlamaRMSNorm": ("rms_norm", lambda x, weight, eps: x * torch.nan, "off by nan"),
        "LlamaMLP": ("silu_product", lambda gate, up: gate.view(7), "RuntimeError: shape"),
        "LlamaAttention": ("rotated", twice, "off by .* and"),
        "Gemma": ("rms_norm", triton_elementwise.rms_norm, "off by"),
    }[wrong]
    monkeypatch.setattr(triton_elementwise, kernel, function)
    monkeypatch.setattr("apbv.model.fused.implementation", implementation.__wrapped__)
    model = families.build_model("llama", layers=2)
    if wrong == "Gemma":
        for layer in model.get_decoder().layers:
            layer.input_layernorm.__class__ = Gemma
    with pytest.warns(UserWarning, match=f"a fused kernel is not used for {wrong}: .*{mistake}"):
        parts = inspect_model(model, "triton")
    kinds = {
        type(module).__name__
        for module in parts.language_model.modules()
        if hasattr(module, "is_fused")
    }
    assert kinds == {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"} - {wrong}
    found = hidden_states(parts.language_model, parts)
    expected = hidden_states(model.get_decoder(), parts)
    assert relative_error(found, expected) < CLOSE[torch.float32]


def test_a_module_with_a_forward_of_its_own_keeps_it():
    model = families.build_model("llama", layers=2)
    mlp = model.get_decoder().layers[1].mlp
    mlp.forward = lambda states: 0 * states
    parts = inspect_model(model, "triton")
    assert parts.language_model.layers[1].mlp is mlp
    assert hasattr(parts.language_model.layers[0].mlp, "is_fused")
