"""Which back end runs: what is asked for is obeyed or refused with a reason, and no library is
trusted untried."""

import math
import sys
from functools import cache
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from apbv.kernels import BackendError, segmented_attention, triton_merging, verify_attention
from apbv.kernels import library_attention as libraries
from apbv.kernels.backends import (
    ENVIRONMENT_VARIABLE,
    LIBRARIES,
    choose,
    failed_launch,
    implementation,
    requested,
)
from apbv.kernels.library_attention import attend_natively

from apbv_tests.wrong_attention import WRONG, base_2, by_definition, raising

pytestmark = pytest.mark.cpu  # which plays GPUs and libraries

CPU = torch.device("cpu")


def make_inputs(queries=5, keys=9, *, group=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 2 * group, queries, 16), (2, 2, keys, 16), (2, 2, keys, 16)]
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def test_the_argument_goes_before_the_environment(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    assert requested() == "auto" and requested("flash_attn") == "flash_attn"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "triton")
    assert requested() == "triton" and requested("torch") == "torch"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fast")
    q, k, v = make_inputs()
    with pytest.raises(BackendError, match=r"backend must be one of auto, torch, .*, not 'cuda'"):
        verify_attention(q, k, v, 0.25, backend="cuda")
    with pytest.raises(BackendError, match=r"APBV_BACKEND must be one of .*, not 'fast'"):
        segmented_attention(q, [(k, v)], 0.25, False)


def test_libraries_are_refused_without_a_gpu():
    q, k, v = make_inputs(dtype=torch.bfloat16)
    for library in LIBRARIES:
        with pytest.raises(
            BackendError, match=rf"the {library} backend cannot be used: .* CUDA .* on cpu"
        ):
            segmented_attention(q, [(k, v)], 0.25, False, backend=library)
        # The other operators, which no library has, run as with "auto".
        assert choose(library, q) == "torch"
        verify_attention(q, k, v, 0.25, backend=library)


def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k, v = make_inputs(dtype=torch.bfloat16)
    with pytest.raises(
        BackendError, match=r"triton .* cannot be used: .*computes bfloat16 products wrongly"
    ):
        segmented_attention(q, [(k, v)], 0.25, False, backend="triton")
    q, k, v = make_inputs(dtype=torch.float16)
    assert libraries.choose_attention("triton", q, [(k, v)]) == "triton"
    assert libraries.choose_attention("auto", q, [(k, v)]) == "torch"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(BackendError, match=r"it compiles for GPUs, and the tensors are on cpu"):
        segmented_attention(q, [(k, v)], 0.25, False, backend="triton")


def test_what_the_documentation_rules_out():
    why_not = libraries.why_not_library
    assert "float64" in why_not("torch", (9, 0), torch.float64, 64)
    assert "8.0, and this one has 7.5" in why_not("flash_attn", (7, 5), torch.float16, 64)
    assert "multiples of 8" in why_not("flash_attn", (9, 0), torch.float16, 100)
    assert "up to 128" in why_not("flash_attn", (10, 0), torch.bfloat16, 192)
    assert not why_not("flash_attn", (9, 0), torch.bfloat16, 256)
    assert not why_not("torch", (8, 0), torch.bfloat16, 80)


# --- what the probe sees ---


def test_wrong_functions_fail_the_probe():
    for attend in (by_definition, attend_natively):
        for dtype, groups in ((torch.float16, 7), (torch.bfloat16, 1)):
            assert libraries.probe(attend, CPU, dtype, 80, groups) is None
    for attend, mistake in WRONG.items():
        reason = libraries.probe(attend, CPU, torch.bfloat16, 64, 2)
        assert mistake in reason and "\n" not in reason, attend


# --- the choice on a GPU, which needs none ---


def test_the_order_of_preference():
    for dtype in (torch.bfloat16, torch.float16):
        assert libraries.preferred(dtype, 0.6) == ("flash_attn", "torch", "triton")
        assert libraries.preferred(dtype, 0.59)[0] == "triton"  # whose programs split the keys
    assert libraries.preferred(torch.float32, 9.0) == ("triton",) and not libraries.preferred(
        torch.float64, 9.0
    )


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of compute capability 9.0 that computes on the CPU: ``hopper.kernels`` are what it
    has."""
    kernels = dict.fromkeys(libraries.ATTEND, raising)
    triton_fails = [None]
    monkeypatch.setattr(libraries, "capability", lambda device: (9, 0))
    monkeypatch.setattr("apbv.kernels.backends.capability", lambda device: (9, 0))
    monkeypatch.setattr("apbv.kernels.backends.failed_launch", lambda device: triton_fails[0])
    monkeypatch.setattr(libraries, "flash_version", lambda major: 3)
    monkeypatch.setattr(libraries, "num_processors", lambda device: 8)
    monkeypatch.setattr(libraries, "ATTEND", kernels)
    probe = libraries.probe
    monkeypatch.setattr(
        libraries, "probe", lambda attend, device, *problem: probe(attend, CPU, *problem)
    )
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    libraries.usable.cache_clear()

    def choose(backend="auto", queries=16384, dtype=torch.bfloat16):
        libraries.usable.cache_clear()
        with FakeTensorMode():
            q, k = (
                torch.empty(1, heads, queries, 64, dtype=dtype, device="cuda") for heads in (4, 2)
            )
        return libraries.choose_attention(backend, q, [(k, k)]), libraries.attend_with(
            "torch", q, k
        )

    yield SimpleNamespace(kernels=kernels, choose=choose, triton_fails=triton_fails)
    libraries.usable.cache_clear()


def test_the_first_that_works_is_chosen(hopper):
    hopper.kernels.update(flash_attn=base_2, torch=by_definition)
    assert hopper.choose()[0] == "torch"
    with pytest.raises(BackendError, match=r"the flash_attn backend cannot be used: .* off by"):
        hopper.choose("flash_attn")
    hopper.kernels["flash_attn"] = by_definition
    assert (
        hopper.choose("flash_attn")[0] == hopper.choose()[0] == "flash_attn"
        and hopper.choose(queries=1)[0] == "triton"
    )
    assert (
        hopper.choose(dtype=torch.float32)[0] == "triton"
        and hopper.choose(dtype=torch.float64)[0] == "torch"
    )
    hopper.triton_fails[0] = "there is no C compiler"
    assert (
        hopper.choose(queries=1)[0] == "flash_attn"
        and hopper.choose(dtype=torch.float32)[0] == "torch"
    )
    with pytest.raises(BackendError, match="triton backend cannot be used: there is no C compiler"):
        hopper.choose("triton")


def test_torch_computes_by_definition_what_its_flash_kernel_cannot(hopper):
    hopper.kernels["torch"] = by_definition
    assert hopper.choose()[1] is by_definition
    hopper.kernels["torch"] = raising
    assert hopper.choose()[1] is attend_natively


# --- the libraries' own conventions, as documented ---


def rows_first(q, k, v, scale, causal):
    """``[B, S, H, D]`` in and out, as FlashAttention has it."""
    out, lse = by_definition(*(x.transpose(1, 2) for x in (q, k, v)), scale, causal)
    return out.transpose(1, 2).contiguous(), lse


def flash_attention_2(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, *, return_attn_probs=False
):
    return *rows_first(q, k, v, softmax_scale, causal), None


def flash_attention_4(q, k, v, *, softmax_scale=None, causal=False, return_lse=False):
    out, lse = rows_first(q, k, v, softmax_scale, causal)
    return out, lse if return_lse else None


@pytest.mark.parametrize(
    ("major", "function", "name", "version"),
    [
        (8, flash_attention_2, "flash_attn", 2),
        (9, flash_attention_2, "flash_attn_interface", 3),
        (9, flash_attention_2, "fa3_fwd_interface", 3),
        (10, flash_attention_4, "flash_attn.cute", 4),
        (9, None, "flash_attn", None),
    ],
)
def test_the_flash_attention_of_a_gpu(monkeypatch, major, function, name, version):
    for each in chain.from_iterable(libraries.FLASH_MODULES.values()):
        module = (
            SimpleNamespace(flash_attn_func=function)
            if function and each in ("flash_attn", name)
            else None
        )
        monkeypatch.setitem(sys.modules, each, module)
    monkeypatch.setattr(libraries, "capability", lambda device: (major, 0))
    for cached in (libraries.flash_attention, libraries.flash_version):
        monkeypatch.setattr(libraries, cached.__name__, cache(cached.__wrapped__))
    assert libraries.flash_version(major) == version
    reason = libraries.probe(libraries.ATTEND["flash_attn"], CPU, torch.bfloat16, 64, 4)
    assert reason is None if version else "ImportError: flash_attn" in reason


def test_triton_is_tried_before_it_is_trusted(monkeypatch):
    """Interpreted here; what keeps it from running on a GPU is found in the same way."""
    assert failed_launch(CPU) is None

    def no_compiler(outs, lses):
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    for broken, reason in {
        no_compiler: "its first kernel failed: RuntimeError: Failed to find C compiler.",
        lambda outs, lses: (
            outs[0] * math.nan,
            lses[0],
        ): "its first kernel failed: it is off by nan and 0.69",
    }.items():
        monkeypatch.setattr(triton_merging, "merge_states", broken)
        monkeypatch.setattr("apbv.kernels.backends.implementation", implementation.__wrapped__)
        assert failed_launch.__wrapped__(CPU) == reason
