"""Operators that only a GPU has, by their definitions in fp64."""

import torch
from torch import Tensor


def _attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention ``[B, H, S, D]`` and its log-sum-exp; in memory ``[B, S, H, D]``, as torch's
    kernels have it.

    NaN, as on a GPU, where the scale is not above 0.
    """
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if q.device.type == "meta":
        return out, lse
    if q.shape[1] != k.shape[1]:
        group = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
    scores = (q.double() @ k.double().transpose(-1, -2)) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    if causal:  # from the top left
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf")
        )
    exact = scores.logsumexp(dim=-1)
    if scale is not None and scale <= 0:
        exact = exact * torch.nan
    out.copy_((scores - exact[..., None]).exp() @ v.double())
    return out, lse.copy_(exact)


def _flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    return *_attend(q, k, v, is_causal, scale), None, None, q.shape[2], k.shape[2], None, None, None


def _efficient(q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, *, scale=None):
    return *_attend(q, k, v, is_causal, scale), None, None


def _varlen_flash(
    q, k, v, ends_q, ends_k, longest_q, longest_k, dropout_p, is_causal, debug, *, scale=None
):
    """Attention within packed sequences ``[T, H, D]``; the kernel reads their ends where they
    are."""
    out = torch.empty_like(q)
    if q.device.type != "meta":
        ends_q = ends_q.tolist()
        ends_k = ends_k.tolist()
        for i in range(len(ends_q) - 1):
            rows = slice(ends_q[i], ends_q[i + 1])
            keys = slice(ends_k[i], ends_k[i + 1])
            parts = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
            out[rows] = _attend(*parts, is_causal, scale)[0][0].transpose(0, 1)
    return (
        out,
        torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device),
        None,
        None,
        None,
    )


def _fused_choice(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """Choose as torch does on a GPU with compute capability 9.0: 1 is flash, 2 memory-efficient, 0
    none."""
    if attn_mask is not None or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] > 256:
        return (
            2 if attn_mask is None and q.shape[1] == k.shape[1] and q.dtype != torch.float64 else 0
        )
    return 1


def _histogram(x, *args, **kwargs):
    """A histogram of integers, which a CPU makes of floats only."""
    return torch.histc(x.float(), *args, **kwargs).to(x.dtype)


KERNELS = {
    "histc": _histogram,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_flash_attention_forward": _varlen_flash,
    "_fused_sdp_choice": _fused_choice,
}
