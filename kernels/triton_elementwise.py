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
_NUM_WARPS = 8


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    p_x,
    p_w,
    p_out,
    num_rows,
    eps,
    D: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    """One program normalizes BR rows: in fp32 up to the product with the weights."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    m_x = (o_r < num_rows)[:, None] & m_d[None, :]
    o_x = (o_r * D)[:, None] + o_d[None, :]
    # [BR, BD]
    b_x = tl.load(p_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_x *= tl.rsqrt(tl.sum(b_x * b_x, axis=1) / D + eps)[:, None]
    # [BD]
    b_w = tl.load(p_w + o_d, mask=m_d, other=0.0)
    # [BR, BD]
    tl.store(p_out + o_x, b_x.to(p_x.dtype.element_ty) * b_w[None, :], mask=m_x)


@triton.jit
def silu_product_kernel(
    p_gate,
    p_up,
    p_out,
    count,
    BN: tl.constexpr,
):
    """One program computes BN numbers; the sigmoid in fp32."""
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    m_n = o_n < count
    # [BN]
    b_gate = tl.load(p_gate + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_up = tl.load(p_up + o_n, mask=m_n, other=0.0)
    tl.store(p_out + o_n, (b_gate * tl.sigmoid(b_gate)).to(b_up.dtype) * b_up, mask=m_n)


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
    """One program rotates BR rows of q, or of k, each one head of a token.

    The two numbers of a pair are half of the row apart.
    """
    # The tiles of q come first, then those of k.
    i_r = tl.program_id(0)
    p_x = p_q
    p_out = p_q_out
    num_q_tiles = tl.cdiv(num_tokens * heads, BR)
    if i_r >= num_q_tiles:
        i_r = i_r - num_q_tiles
        p_x = p_k
        p_out = p_k_out
        heads = kv_heads
    num_rows = num_tokens * heads
    o_r = i_r.to(tl.int64) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD // 2)
    m_x = (o_r < num_rows)[:, None] & (o_d < D // 2)[None, :]
    o_x = (o_r * D)[:, None] + o_d[None, :]
    o_t = (o_r // heads * D)[:, None] + o_d[None, :]
    # [BR, BD // 2]
    b_first = tl.load(p_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_second = tl.load(p_x + o_x + D // 2, mask=m_x, other=0.0).to(tl.float32)
    b_cos = tl.load(p_cos + o_t, mask=m_x, other=0.0)
    b_sin = tl.load(p_sin + o_t, mask=m_x, other=0.0)
    tl.store(p_out + o_x, b_first * b_cos - b_second * b_sin, mask=m_x)
    b_cos = tl.load(p_cos + o_t + D // 2, mask=m_x, other=0.0)
    b_sin = tl.load(p_sin + o_t + D // 2, mask=m_x, other=0.0)
    tl.store(p_out + o_x + D // 2, b_second * b_cos + b_first * b_sin, mask=m_x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide rows ``[..., D]`` by their root mean square, and multiply by weights ``[D]``."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
    dim = x.shape[-1]
    num_rows = x.numel() // dim
    padded_dim, rows_at_once = _tile(dim)
    rms_norm_kernel[(cdiv(num_rows, rows_at_once),)](
        p_x=x,
        p_w=weight,
        p_out=out,
        num_rows=num_rows,
        eps=eps,
        D=dim,
        BR=rows_at_once,
        BD=padded_dim,
        num_warps=_NUM_WARPS,
    )
    return out


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply silu(gate) = gate * sigmoid(gate) by ``up``, of the same shape."""
    gate = gate.contiguous()
    up = up.contiguous()
    out = torch.empty_like(gate)
    silu_product_kernel[(cdiv(out.numel(), _BLOCK),)](
        p_gate=gate,
        p_up=up,
        p_out=out,
        count=out.numel(),
        BN=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return out


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate heads ``[B, H, S, D]`` by angles ``[B, S, D]``.

    In memory the results are ``[B, S, H, D]``.
    """
    # [B, S, H, D]
    q = q.transpose(1, 2).contiguous()
    k = k.transpose(1, 2).contiguous()
    batch, tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    cos = cos.expand(batch, tokens, dim).contiguous()
    sin = sin.expand(batch, tokens, dim).contiguous()
    q_out = torch.empty_like(q)
    k_out = torch.empty_like(k)

    num_tokens = batch * tokens
    padded_dim, rows_at_once = _tile(dim)
    num_q_tiles = cdiv(num_tokens * heads, rows_at_once)
    num_k_tiles = cdiv(num_tokens * kv_heads, rows_at_once)
    rotary_kernel[(num_q_tiles + num_k_tiles,)](
        p_q=q,
        p_k=k,
        p_cos=cos,
        p_sin=sin,
        p_q_out=q_out,
        p_k_out=k_out,
        num_tokens=num_tokens,
        heads=heads,
        kv_heads=kv_heads,
        D=dim,
        BR=rows_at_once,
        BD=padded_dim,
        num_warps=_NUM_WARPS,
    )
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


def _tile(dim: int) -> tuple[int, int]:
    """Return rows' padded width, and how many whole rows a program takes."""
    padded_dim = next_power_of_2(dim)
    return padded_dim, max(1, _BLOCK // padded_dim)
