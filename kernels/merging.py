"""This module merges partial attention results over disjoint keys."""

from torch import Tensor

from .backends import choose, implementation


def merge_states(outs: Tensor, lses: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Merge partial attention results of the same queries over disjoint sets of keys.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i): the online softmax by which APB-V
    merges the hosts' query attention (Eq. 5).

    Args:
        outs: ``[N, B, H, S, D]`` partial results.
        lses: ``[N, B, H, S]``; +inf, which some libraries report for no visible key, counts as -inf.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        out ``[B, H, S, D]`` and lse ``[B, H, S]`` in fp32 (fp64 for fp64 input).

    Raises:
        ValueError: outs and lses do not have one shape, the head dimension aside.
        BackendError: the back end cannot be used here.
    """
    if outs.shape[:-1] != lses.shape:
        raise ValueError(
            f"partial results of shape {list(outs.shape)} do not have lses of shape {list(lses.shape)}"
        )
    out, lse = implementation("merge_states", choose(backend, lses))(outs, lses)
    return out.to(lses.dtype), lse.to(lses.dtype)
