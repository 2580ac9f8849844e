"""What a decoder computes between its matrix products, by Triton's kernels: against the definitions
in fp64."""

import math

import pytest
import torch

from apbv.kernels import triton_elementwise

from apbv_tests.device import DEVICE, TRITON_DTYPES
from apbv_tests.pairs import each_choice


def rms_norm(x, weight, eps):
    return torch.stack(
        [row / math.sqrt(row.square().mean() + eps) * weight for row in x.view(-1, x.shape[-1])]
    )


def silu_product(gate, up):
    return gate / (1 + torch.exp(-gate)) * up


def rotated(q, k, cos, sin):
    return rotated_heads(q, cos, sin), rotated_heads(k, cos, sin)


def rotated_heads(x, cos, sin):
    """Every pair of numbers that are half of a head apart, as a complex number."""
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    for i in range(half):
        out[..., i] = x[..., i] * cos[:, None, :, i] - x[..., i + half] * sin[:, None, :, i]
        out[..., i + half] = (
            x[..., i + half] * cos[:, None, :, i + half] + x[..., i] * sin[:, None, :, i + half]
        )
    return out


def operands(name, shape, dtype):
    """Cut out of NaN, so that no operand is contiguous."""
    batch, heads, tokens, dim = shape
    shapes = {
        "rms_norm": [(batch, tokens, dim), (dim,)],
        "silu_product": [(batch, tokens, dim)] * 2,
        "rotated": [
            (batch, heads, tokens, dim),
            (batch, -(-heads // 2), tokens, dim),
            (batch, tokens, dim),
            (1, tokens, dim),
        ],
    }
    generator = torch.Generator().manual_seed(sum(shape))
    for each in shapes[name]:
        buffer = torch.full((*each[:-1], each[-1] + 3), math.nan)
        buffer[..., 1:-2] = 3 * torch.randn(each, generator=generator)
        tensor = buffer.to(DEVICE, dtype)[..., 1:-2]
        yield tensor if len(each) > 1 else tensor.contiguous()


@pytest.mark.parametrize("name", ["rms_norm", "silu_product", "rotated"])
@each_choice(
    dtype=TRITON_DTYPES,
    # B, H, S, D; the last: rows that fill more than one program.
    shape=[(1, 1, 1, 2), (2, 3, 63, 100), (1, 28, 5, 128), (1, 2, 9, 4100)],
)
def test_a_kernel_computes_its_definition(name, dtype, shape):
    given = list(operands(name, shape, dtype))
    settings = (0.5,) if name == "rms_norm" else ()
    found = getattr(triton_elementwise, name)(*given, *settings)
    exact = globals()[name](*(x.double() for x in given), *settings)
    results = (
        zip(found, exact, given[:2], strict=True)
        if name == "rotated"
        else [(found, exact, given[0])]
    )
    for each, expected, like in results:
        assert each.dtype == dtype and each.shape == like.shape
        # Each is rounded up to three times.
        torch.testing.assert_close(
            each.double(), expected.view(each.shape), rtol=3 * torch.finfo(dtype).eps, atol=1e-5
        )
