"""A decoder's norms and MLPs in chunks of rows: the same numbers, and the module as it was."""

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from apbv import HostGroup, PrefillConfig, prefill
from apbv.model import row_chunks
from apbv.model.parts import inspect_model
from apbv.model.row_chunks import chunk_rows, rows_in_chunks

from apbv_tests.prompts import build, hugging_face, relative_error, text_batch

TOKENS = 1300  # three chunks of the fewest rows
FEWEST = 512
FULL = PrefillConfig(method="full")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class LongestIntermediates(TorchDispatchMode):
    """The most rows that an activation function, or a norm's mean, was given at once."""

    def __init__(self):
        super().__init__()
        self.rows = {"silu": 0, "mean": 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in self.rows and args[0].dim() == 3:
            self.rows[name] = max(self.rows[name], args[0].shape[1])
        return function(*args, **(kwargs or {}))


@pytest.fixture
def shortest_chunks(monkeypatch):
    monkeypatch.setitem(row_chunks.CHUNK_BYTES, "cpu", 1)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llama"])
def test_a_prefill_in_chunks_equals_hugging_face(shortest_chunks, family):
    model = build(family, torch.float32)
    expected, cache = hugging_face(family, torch.float32, text_batch(TOKENS))
    with LongestIntermediates() as seen:
        state = prefill(model, text_batch(TOKENS), hosts=HostGroup.single("cpu"), config=FULL)
    assert 0 < seen.rows["silu"] <= FEWEST and 0 < seen.rows["mean"] <= FEWEST
    assert relative_error(state.logits, expected) < 1e-4
    for here, layer in zip(state.to_dynamic_cache().layers, cache.layers, strict=True):
        assert (
            max(relative_error(here.keys, layer.keys), relative_error(here.values, layer.values))
            < 1e-4
        )


def test_the_model_is_left_as_it_was():
    parts = inspect_model(build("llama", torch.float32))
    mlp = parts.language_model.layers[0].mlp
    own = type(mlp).forward

    def theirs(states):
        return 2 * own(mlp, states)

    mlp.forward = theirs
    try:
        states = torch.randn(1, TOKENS, parts.language_model.config.hidden_size)
        tiny = mock.patch.dict(row_chunks.CHUNK_BYTES, {"cpu": 1})
        with pytest.raises(KeyError), torch.no_grad(), tiny, rows_in_chunks(parts, TOKENS):
            with rows_in_chunks(parts, TOKENS):
                pass
            assert mlp.forward is not theirs  # not undone by the inner block
            torch.testing.assert_close(mlp(states), theirs(states), **CLOSE)
            raise KeyError
        assert mlp.forward is theirs
        assert [module for module in parts.model.modules() if "forward" in vars(module)] == [mlp]
    finally:
        del mlp.forward


def test_chunks_follow_the_budget_and_are_never_tiny():
    cpu = torch.device("cpu")
    gpu = torch.device("cuda", 0)
    with mock.patch.dict(row_chunks.CHUNK_BYTES, {"cpu": 10**7}):
        assert chunk_rows(cpu, row_bytes=1000) == 9984  # a multiple of 256
    assert chunk_rows(cpu, row_bytes=10**9) == FEWEST
    assert chunk_rows(gpu, row_bytes=10**5) > chunk_rows(cpu, row_bytes=10**5)
