"""This module offers causal attention of one sequence that computes listed blocks of keys only.

Shapes: B batch, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), S tokens, D head dimension, nq and nk
blocks of queries and of keys.
"""

from torch import Tensor

from .backends import choose, implementation
from .runs import ListedBlocks
from .torch_attention import empty_output, result_without_keys


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: ListedBlocks,
    scale: float,
    *,
    skip_margin: float | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend causally from every token of a sequence to its own block, and to the blocks listed for that.

    With a ``skip_margin`` λ, values of a listed block whose weights are negligible are not multiplied: the sparse
    online softmax of SpargeAttn (Zhang et al., 2025, Section 3.4). A block of queries visits the blocks that it
    lists in ascending order, and its own keys last. With m(r) the highest score that row r has met up to and with
    a listed block, and s(r) its highest in this block, the block's values are skipped where s(r) - m(r) < -λ for
    all rows. Their weights, each below exp(-λ) of its row's largest, still count in the softmax's denominator: the
    lse does not depend on λ, and results of other keys can be merged.

    The back end ``triton`` decides so for every tile of a program. A tile is a whole block for SpargeAttn's blocks
    of up to 128 queries in half precision with D up to 128. Elsewhere it is a part of one: then all that is
    skipped by the rule above is skipped, and parts of other blocks are where the rule holds for them.

    Args:
        q: ``[B, Hq, S, D]``.
        k, v: ``[B, Hkv, S, D]``, of the same tokens.
        blocks: which blocks each query head computes.
        scale: factor of the scores, usually ``D ** -0.5``.
        skip_margin: λ above 0, in units of scaled scores; None: no values are skipped.
        out: ``[B, Hq, S, D]`` in q's dtype, of any strides with neighbouring numbers along D: filled and returned
            in place of a new tensor.
        backend: see :mod:`apbv.kernels.backends`. ``torch`` waits for the lists on a GPU.

    Returns:
        out ``[B, Hq, S, D]`` in q's dtype and lse ``[B, Hq, S]`` in fp32 (fp64 for fp64 input), the natural-log
        sum of exponentials of the scaled scores that were computed; :func:`apbv.kernels.merge_states` merges them
        with those over other keys.

    Raises:
        ValueError: shapes do not fit together, the lists are of another number of blocks, or λ is not above 0.
        BackendError: the back end cannot be used here.
    """
    if k.shape != v.shape or q.shape[::2] != k.shape[::2] or q.shape[3] != k.shape[3]:
        shapes = ", ".join(str(list(states.shape)) for states in (q, k, v))
        raise ValueError(f"q, k and v must be of the same tokens, not {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype):
        what = "of shape {} in {}".format
        wanted, given = (what(list(states.shape), states.dtype) for states in (q, out))
        raise ValueError(f"the result is {wanted}, and out is {given}")
    numbers = [-(-q.shape[2] // rows) for rows in (blocks.query_block, blocks.key_block)]
    if blocks.indices.shape != (*q.shape[:2], *numbers) or blocks.counts.shape != (*q.shape[:2], numbers[0]):
        wanted, given = [*q.shape[:2], *numbers], list(blocks.indices.shape)
        raise ValueError(f"{q.shape[2]} tokens need lists of shape {wanted}, not {given}")
    if skip_margin is not None and not skip_margin > 0:
        raise ValueError(f"the skip margin must be above 0, not {skip_margin!r}")
    if q.shape[2] == 0:
        return result_without_keys(q, out)
    compute = implementation("block_sparse_attention", choose(backend, q))
    out = empty_output(q) if out is None else out
    return compute(q, k, v, blocks, scale, skip_margin=skip_margin, out=out)
