"""The vision towers with one attention call for all windows, against transformers' own."""

from functools import cache

import pytest
import torch

from apbv.kernels import reference
from apbv.kernels import torch_attention as varlen
from apbv.model.parts import ModelParts, inspect_model
from apbv.model.vision_attention import packed_attention

from apbv_tests import families
from apbv_tests.pairs import each_choice

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# (temporal patches, patches down, patches across): Qwen2.5-VL's windows here are 4 x 4 patches.
GRIDS = {
    "one frame": [(1, 6, 10)],
    "whole windows": [(5, 8, 8)],
    "ragged windows": [(4, 10, 14)],
    "images": [(1, 4, 4), (1, 10, 6), (1, 2, 18)],
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.1}  # relative to the largest value


@cache
def build(family: str, dtype: torch.dtype = torch.float32) -> ModelParts:
    return inspect_model(families.build_model(family, dtype=dtype))


def encode(parts: ModelParts, grid, seed: int = 0) -> torch.Tensor:
    """The rows of random pixels, with those of deepstack behind one another."""
    tower = parts.model.model.visual
    sizes = torch.tensor(grid)
    width = 3 * tower.config.temporal_patch_size * tower.config.patch_size**2
    pixels = torch.randn(
        int(sizes.prod(1).sum()), width, generator=torch.Generator().manual_seed(seed)
    )
    with torch.no_grad():
        features = parts.model.model.get_image_features(
            pixels.to(parts.dtype), sizes, return_dict=True
        )
    layers = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
    return torch.cat(
        [torch.cat(list(rows)) if isinstance(rows, (tuple, list)) else rows for rows in layers]
    )


def close(rows: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((rows - expected).abs().max() / expected.abs().max()) <= TOLERANCE[rows.dtype]


@each_choice(family=QWEN, grid=[*GRIDS, "ragged windows"], dtype=TOLERANCE)
def test_the_rows_are_those_of_transformers(family, grid, dtype):
    parts = build(family, dtype)
    expected = encode(parts, GRIDS[grid])
    with packed_attention(parts.packed_vision_tower):
        assert close(encode(parts, GRIDS[grid]), expected)


def state_of(parts: ModelParts) -> tuple:
    tower = parts.model.model.visual
    text = parts.language_model
    hooks = [len(module._forward_pre_hooks) for module in tower.modules()]
    return [module.config._attn_implementation for module in (parts.model, tower, text)], hooks


@pytest.mark.parametrize("family", QWEN)
def test_afterwards_the_model_is_as_it_was(family):
    parts = build(family)
    before = state_of(parts)
    with packed_attention(parts.packed_vision_tower):
        assert state_of(parts) != before
        assert parts.language_model.config._attn_implementation == "sdpa"
        with packed_attention(parts.packed_vision_tower):
            encode(parts, GRIDS["one frame"])
        encode(parts, GRIDS["one frame"])
    assert state_of(parts) == before
    with pytest.raises(RuntimeError, match="shape"), packed_attention(parts.packed_vision_tower):
        encode(parts, [(1, 3, 5)])  # no whole tokens
    assert state_of(parts) == before


@pytest.mark.parametrize("family", QWEN)
def test_a_tower_calls_flash_attention_once_a_layer(family, monkeypatch):
    """With a function in its place, as no CPU has it."""
    calls = []

    def flash(q, k, v, sequences, scale):
        calls.append(sequences)
        return reference.varlen_attention(q, k, v, sequences, scale)

    parts = build(family, torch.bfloat16)
    grid = GRIDS["ragged windows"]
    expected = encode(parts, grid)
    monkeypatch.setattr(varlen, "varlen_obstacle", lambda *args: None)
    monkeypatch.setattr(varlen, "varlen_flash", flash)
    with packed_attention(parts.packed_vision_tower):
        assert close(encode(parts, grid), expected)
    assert len(calls) == len(parts.model.model.visual.blocks)
