"""A decoder's element-wise operators in Triton kernels that read and write once.

transformers' own modules, which call torch for each step, are the definition and the other
implementation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .strides import cdiv, next_power_of_2

_BLOCK = 4096  # numbers of a program, at most where a row has no more


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    p_x, p_w, p_out, num_rows, eps, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):
    """One program normalizes BR rows: in fp32 up to the product with the weights."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    mask = (o_r < num_rows)[:, None] & m_d[None, :]
    o_x = (o_r * D)[:, None] + o_d[None, :]
    # [BR, BD]
    b_x = tl.load(p_x + o_x, mask=mask, other=0.0).to(tl.float32)
    b_x *= tl.rsqrt(tl.sum(b_x * b_x, axis=1) / D + eps)[:, None]
    # [BD]
    b_w = tl.load(p_w + o_d, mask=m_d, other=0.0)
    tl.store(p_out + o_x, b_x.to(p_x.dtype.element_ty) * b_w[None, :], mask=mask)


@triton.jit
def silu_product_kernel(p_gate, p_up, p_out, count, BN: tl.constexpr):
    """One program computes BN numbers; the sigmoid in fp32."""
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    mask = o_n < count
    # [BN]
    b_gate = tl.load(p_gate + o_n, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_up + o_n, mask=mask, other=0.0)
    tl.store(p_out + o_n, (b_gate * tl.sigmoid(b_gate)).to(b_up.dtype) * b_up, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "heads", "kv_heads"])
def rotary_kernel(
    p_q,
    p_k,
    p_cos,
    p_sin,
    p_q_out,
    p_k_out,
    num_tokens,
    heads,
    kv_heads,
    D: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    """One program rotates BR rows of q, or of k, each one head of a token: a pair is half of the
    row apart."""
    i_r = tl.program_id(0)
    p_x = p_q
    p_out = p_q_out
    num_tiles = tl.cdiv(num_tokens * heads, BR)
    if i_r >= num_tiles:
        i_r = i_r - num_tiles
        p_x = p_k
        p_out = p_k_out
        heads = kv_heads
    num_rows = num_tokens * heads
    o_r = i_r.to(tl.int64) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD // 2)
    mask = (o_r < num_rows)[:, None] & (o_d < D // 2)[None, :]
    o_x = (o_r * D)[:, None] + o_d[None, :]
    o_t = (o_r // heads * D)[:, None] + o_d[None, :]
    # [BR, BD / 2]
    b_first = tl.load(p_x + o_x, mask=mask, other=0.0).to(tl.float32)
    b_second = tl.load(p_x + o_x + D // 2, mask=mask, other=0.0).to(tl.float32)
    b_cos = tl.load(p_cos + o_t, mask=mask, other=0.0)
    b_sin = tl.load(p_sin + o_t, mask=mask, other=0.0)
    tl.store(p_out + o_x, b_first * b_cos - b_second * b_sin, mask=mask)
    b_cos = tl.load(p_cos + o_t + D // 2, mask=mask, other=0.0)
    b_sin = tl.load(p_sin + o_t + D // 2, mask=mask, other=0.0)
    tl.store(p_out + o_x + D // 2, b_second * b_cos + b_first * b_sin, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide rows ``[..., D]`` by the root of their mean square, and multiply them by weights
    ``[D]``."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
    rows, grid, sizes = _in_rows(x)
    rms_norm_kernel[grid](x, weight, out, rows, eps, **sizes)
    return out


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply silu(gate) = gate * sigmoid(gate) by ``up``, of the same shape."""
    gate = gate.contiguous()
    up = up.contiguous()
    out = torch.empty_like(gate)
    silu_product_kernel[(cdiv(out.numel(), _BLOCK),)](
        gate, up, out, out.numel(), BN=_BLOCK, num_warps=8
    )
    return out


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate heads ``[B, H, S, D]`` by angles ``[B, S, D]``; in memory the results are
    ``[B, S, H, D]``."""
    q, k = (x.transpose(1, 2).contiguous() for x in (q, k))
    cos, sin = (angles.expand(*q.shape[:2], q.shape[3]).contiguous() for angles in (cos, sin))
    outs = [torch.empty_like(x) for x in (q, k)]
    ((rows, (tiles,), sizes), (_, (kv_tiles,), _)) = map(_in_rows, (q, k))
    rotary_kernel[(tiles + kv_tiles,)](
        q, k, cos, sin, *outs, rows // q.shape[2], q.shape[2], k.shape[2], **sizes
    )
    return tuple(out.transpose(1, 2) for out in outs)


def _in_rows(x: Tensor) -> tuple[int, tuple[int], dict[str, int]]:
    """Return the number of rows ``[..., D]``, the grid of programs that take whole ones, and their
    sizes."""
    rows = x.numel() // x.shape[-1]
    padded = next_power_of_2(x.shape[-1])
    at_once = max(1, _BLOCK // padded)
    return (
        rows,
        (cdiv(rows, at_once),),
        {"D": x.shape[-1], "BR": at_once, "BD": padded, "num_warps": 8},
    )
