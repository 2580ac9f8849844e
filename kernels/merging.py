"""This module merges partial attention results over disjoint keys."""

from collections.abc import Sequence

from torch import Tensor

from .backends import choose, implementation


def merge_states(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    *,
    out: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Merge partial attention results of the same queries over disjoint sets of keys.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i): the online softmax by which APB-V
    merges the hosts' query attention (Eq. 5).

    Args:
        outs: N partial results ``[B, H, S_i, D]``, in one tensor ``[N, B, H, S, D]`` or in several. One of fewer
            than S queries is of the last S_i ones: the others saw none of its keys.
        lses: ``[B, H, S_i]`` of each; +inf, which some libraries report for no visible key, counts as -inf.
        out: ``[B, H, S, D]``, of any strides with neighbouring numbers along D and any dtype: filled and returned
            in place of a new tensor. It may be the first of ``outs``.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        out ``[B, H, S, D]`` in the dtype of ``out``, by default fp32 (fp64 for fp64 input), and lse ``[B, H, S]``
        in fp32 (fp64 for fp64 input). A query that saw nothing has zeros and an lse of -inf.

    Raises:
        ValueError: outs and lses do not have the same shapes, the head dimension aside, or out is too short.
        BackendError: the back end cannot be used here.
    """
    if isinstance(outs, Tensor):
        shapes = [(outs.shape, lses.shape)]
    else:
        shapes = [(partial.shape, lse.shape) for partial, lse in zip(outs, lses, strict=True)]
    for partial, lse in shapes:
        if partial[:-1] != lse:
            raise ValueError(f"partial results of shape {list(partial)} do not have lses of shape {list(lse)}")
        if out is not None and partial[-2] > out.shape[2]:
            raise ValueError(f"partial results of {partial[-2]} queries do not fit into {out.shape[2]} rows")
    return implementation("merge_states", choose(backend, lses[0]))(outs, lses, out=out)
