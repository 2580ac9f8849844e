"""Attention within packed sequences: every way to compute it, against the definition."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from apbv.kernels import PackedSequences, backends, library_attention, reference, varlen_attention
from apbv.kernels import torch_attention as varlen

from pairs import each_choice

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


def by_definition(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
    """What the varlen function of every FlashAttention computes, and what all of them require."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and not causal
    assert q.dtype in (torch.float16, torch.bfloat16) and q.stride(-1) == 1
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    return reference.varlen_attention(q, k, v, PackedSequences(cu_seqlens_q, max_seqlen_q), softmax_scale)


def flash_attention_2(*states, dropout_p=0.0, **options):
    return by_definition(*states, **{"causal": False} | options)


def flash_attention_4(*states, **options):
    return flash_attention_2(*states, **options), None


@pytest.fixture
def flash(monkeypatch):
    """Puts a function in place of an installed FlashAttention, on a GPU that this machine takes the CPU for."""

    def forget():
        for function in (
            library_attention._flash_attention,
            library_attention.flash_version,
            varlen.varlen_obstacle,
        ):
            function.cache_clear()

    def install(function, major=8, name="flash_attn"):
        for module in ("flash_attn", "flash_attn_interface", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, module, None)
        module = SimpleNamespace(flash_attn_func=None, flash_attn_varlen_func=function)
        monkeypatch.setitem(sys.modules, name, function and module)
        for module in (backends, library_attention, varlen):
            monkeypatch.setattr(module, "capability", lambda device: (major, 0), raising=False)
        forget()

    yield install
    forget()


@pytest.mark.parametrize(
    ("function", "major", "name", "reason"),
    [
        (flash_attention_2, 8, "flash_attn", None),
        (flash_attention_2, 9, "flash_attn_interface", None),
        (flash_attention_4, 10, "flash_attn.cute", None),
        (None, 8, "flash_attn", "ImportError"),
        (lambda q, k, v, **options: v, 8, "flash_attn", "off by"),
        (lambda q, k, v, **options: q[:, :1], 8, "flash_attn", r"returned \[\(262, 1, 80\)\]"),
    ],
)
def test_a_flash_attention_is_tried_before_it_is_used(flash, function, major, name, reason):
    flash(function, major, name)
    found = varlen.probe_varlen("flash_attn", CPU, torch.bfloat16, 80)
    assert found is None if reason is None else re.search(reason, found)


@pytest.mark.parametrize("usable", [["flash_attn", "torch"], ["torch"], []], ids=str)
def test_auto_takes_what_is_usable(monkeypatch, usable):
    used = []
    for place in ("torch_attention.varlen_obstacle", "operators.varlen_obstacle"):
        monkeypatch.setattr(f"apbv.kernels.{place}", lambda name, *args: None if name in usable else "absent")
    for name in ("flash_attn", "torch"):
        recording = lambda *args, name=name: used.append(name) or reference.varlen_attention(*args)  # noqa: E731
        monkeypatch.setitem(varlen.VARLEN, name, recording)
    q, k, v = draw(8, dtype=torch.bfloat16)
    varlen_attention(q, k, v, pack([8]), 0.2)
    assert used == usable[:1]
    with pytest.raises(ValueError, match="3 query heads"):
        varlen_attention(torch.cat([q, q[:, :1]], dim=1), k, v, pack([8]), 0.2)


def test_torch_has_the_operator_that_takes_boundaries():
    """By its registered schema and shapes: nothing is computed without a GPU."""
    with FakeTensorMode():
        q = torch.empty(40, 4, 80, dtype=torch.bfloat16, device="cuda")
        boundaries = torch.empty(3, dtype=torch.int32, device="cuda")
        out = varlen.VARLEN["torch"](q, q, q, PackedSequences(boundaries, 30), 0.1)
        assert out.shape == q.shape and out.is_cuda
