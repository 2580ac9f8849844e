"""Attention within packed sequences: every way to compute it, against the definition."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from apbv.kernels import PackedSequences, reference, varlen_attention
from apbv.kernels import torch_attention as varlen

from apbv_tests.pairs import each_choice

pytestmark = pytest.mark.cpu  # on which torch's FlashAttention is played

CPU = torch.device("cpu")
RAGGED = [64, 5, 64, 1, 63, 5]
LENGTHS = [[37], [16, 16, 16], RAGGED, [3, 0, 8, 3]]


def pack(lengths) -> PackedSequences:
    return PackedSequences(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), max(lengths))


def draw(rows: int, *, heads: int = 2, groups: int = 1, dim: int = 24, dtype=torch.float32):
    """q, k and v as a fused projection leaves them: v is a slice of rows that hold more."""
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(rows, heads * groups, dim, generator=generator).to(dtype)
    k, v = torch.randn(rows, 2, heads, dim, generator=generator).to(dtype).unbind(1)
    return q, k, v


@each_choice(lengths=LENGTHS, dtype=[torch.float32, torch.bfloat16], groups=[1, 1, 3])
def test_every_sequence_attends_to_itself(lengths, groups, dtype):
    q, k, v = draw(sum(lengths), groups=groups, dtype=dtype)
    out = varlen_attention(q, k, v, pack(lengths), 0.2)
    exact = reference.varlen_attention(q.double(), k.double(), v.double(), pack(lengths), 0.2)
    assert out.dtype == dtype and out.is_contiguous()
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)


def test_equal_lengths_are_one_batch_that_is_not_copied():
    assert [*pack([16, 16, 16]).by_length] == [(16, None)]
    lengths, rows = zip(*pack(RAGGED).by_length, strict=True)
    assert lengths == (1, 5, 63, 64)
    assert sorted(torch.cat(rows).tolist()) == list(range(sum(RAGGED)))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (reference.varlen_attention, None),
        (lambda q, k, v, *packed: v, "off by"),
        (lambda q, k, v, *packed: q[:, :1], r"returned \[\(262, 1, 80\)\]"),
    ],
)
def test_flash_attention_is_tried_before_it_is_used(monkeypatch, function, reason):
    monkeypatch.setattr(varlen, "varlen_flash", function)
    found = varlen.probe_varlen(CPU, torch.bfloat16, 80)
    assert found is None if reason is None else re.search(reason, found)


@pytest.mark.parametrize("obstacle", [None, "absent"])
def test_flash_attention_is_used_where_it_works(monkeypatch, obstacle):
    used = []
    monkeypatch.setattr(varlen, "varlen_obstacle", lambda *args: obstacle)
    monkeypatch.setattr(
        varlen, "varlen_flash", lambda *args: used.append(1) or reference.varlen_attention(*args)
    )
    q, k, v = draw(8, dtype=torch.bfloat16)
    varlen_attention(q, k, v, pack([8]), 0.2)
    assert bool(used) == (obstacle is None)
    with pytest.raises(ValueError, match="3 query heads"):
        varlen_attention(torch.cat([q, q[:, :1]], dim=1), k, v, pack([8]), 0.2)


def test_torch_has_the_operator_that_takes_boundaries():
    """By its registered schema and shapes: nothing is computed without a GPU."""
    with FakeTensorMode():
        q = torch.empty(40, 4, 80, dtype=torch.bfloat16, device="cuda")
        boundaries = torch.empty(3, dtype=torch.int32, device="cuda")
        out = varlen.varlen_flash(q, q, q, PackedSequences(boundaries, 30), 0.1)
        assert out.shape == q.shape and out.is_cuda
