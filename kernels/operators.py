"""The operators: segmented attention, merging, sparse attention, and key selection.

Each checks its operands, and calls the implementation that :mod:`apbv.kernels.backends` chooses.
Shapes: B batch, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), S queries, T keys, D
head dimension, R sequences, nq and nk blocks of queries and of keys, the last of which may be
shorter. lse is the natural-log sum of exponentials of the scaled scores, -inf where nothing was
visible.

The APB-V paper (Section 3.3) says only that query-to-context attention scores choose the l_p KV
pairs that are passed on.
"""

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .backends import choose, implementation
from .library_attention import choose_attention
from .listed_blocks import ListedBlocks
from .segments import Segment
from .sequences import BufferTable, PackedSequences, SequenceBuffers
from .strides import cdiv
from .torch_attention import empty_output, result_without_keys

REDUCTIONS = ("peak", "softmax", "dot")


def segmented_attention(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    causal_last: bool,
    *,
    num_anchor_queries: int = 0,
    out: Tensor | None = None,
    backend: str = "auto",
    rows_alone: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend over the concatenation of several key/value segments without concatenating them.

    Every segment is fully visible to every query, except the last one where ``causal_last`` is set:
    there query i of S sees the first T - S + i + 1 of its T keys (bottom-right causality, as in
    decoding).

    Args:
        q: ``[B, Hq, S, D]``.
        segments: (k, v) pairs, each ``[B, Hkv, T_i, D]``; a T_i may be 0.
        scale: factor of the scores, usually ``D ** -0.5``.
        causal_last: whether the last segment is causal.
        num_anchor_queries: number of leading queries that see the last segment only: APB-V's
            anchor, which precedes its block and sees no passing blocks.
        out: ``[B, Hq, S, D]`` in q's dtype, of any strides with neighbouring numbers along D:
            filled and returned in place of a new tensor.
        backend: ``"auto"`` or a name of :data:`apbv.kernels.backends.BACKENDS`.
        rows_alone: the former name of ``num_anchor_queries``; deprecated.

    Returns:
        out ``[B, Hq, S, D]`` in q's dtype (zeros where nothing was visible) and
        lse ``[B, Hq, S]`` in fp32 (fp64 for fp64 input).

    Raises:
        ValueError: no segment was given, Hq is not a multiple of Hkv, or out does not fit q.
        BackendError: the backend cannot be used here.
    """
    if rows_alone is not None:
        warnings.warn(
            "segmented_attention: rows_alone is now called num_anchor_queries",
            DeprecationWarning,
            stacklevel=2,
        )
        num_anchor_queries = rows_alone
    if not segments:
        raise ValueError("segmented_attention needs at least one (k, v) segment")
    require_shapes(q=(q, "B Hq S D"), k=(segments[0][0], "B Hkv T D"), out=(out, "B Hq S D"))
    require_dtype(out, q)
    if q.shape[2] == 0 or not any(k.shape[2] for k, _ in segments):
        return result_without_keys(q, out)
    if len(segments) == 1:
        num_anchor_queries = 0  # the other rows can see nothing else
    chosen = choose_attention(backend, q, segments)
    compute = implementation("attention.segmented_attention", chosen)
    if chosen == "triton":
        return compute(
            q,
            segments,
            scale,
            causal_last,
            num_anchor_queries=num_anchor_queries,
            out=out,
        )
    return compute(
        q,
        segments,
        scale,
        causal_last,
        num_anchor_queries=num_anchor_queries,
        out=out,
        merging=choose(backend, q),
    )


def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    visible: Tensor | None = None,
    num_keys: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend from a few new tokens to a long shared past and to N masked keys after it.

    Args:
        q: ``[B, Hq, S, D]``; fast for S of 1 to 16, correct for any.
        k, v: ``[B, Hkv, T, D]``.
        scale: factor of the scores.
        visible: bool ``[S, N]``, 0 <= N <= T: which of the last N keys a query sees; in a tree
            itself and its ancestors. None: the last S keys are the queries' own, and each sees
            those before it and itself.
        num_keys: int32 ``[1]`` on q's device: the number of leading rows of k and v that count, at
            least N; later rows are not read. "The last" keys above are the last of those. So a CUDA
            graph, in which shapes are fixed, serves all lengths up to T. None: all T rows. Only
            Triton reads it on the GPU; ``torch`` waits for it.
        backend: ``"auto"`` or a name of :data:`apbv.kernels.backends.BACKENDS`.

    Returns:
        out ``[B, Hq, S, D]`` in q's dtype (zeros where nothing was visible) and
        lse ``[B, Hq, S]`` in fp32 (fp64 for fp64 input).

    Raises:
        ValueError: Hq is not a multiple of Hkv, the mask covers more keys than there are, or
            num_keys is not one int32.
        BackendError: the backend cannot be used here.
    """
    require_shapes(q=(q, "B Hq S D"), k=(k, "B Hkv T D"), v=(v, "B Hkv T D"))
    masked = q.shape[2] if visible is None else visible.shape[1]
    if masked > k.shape[2]:
        raise ValueError(f"the mask covers the last {masked} keys, but there are only {k.shape[2]}")
    if num_keys is not None and (num_keys.dtype != torch.int32 or num_keys.shape != (1,)):
        raise ValueError(
            f"num_keys must be one int32, not {num_keys.dtype} of shape {list(num_keys.shape)}"
        )
    if q.shape[2] == 0 or k.shape[2] == 0:
        return result_without_keys(q)
    compute = implementation("attention.verify_attention", choose(backend, q))
    return compute(q, k, v, scale, visible=visible, num_keys=num_keys)


def batch_decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: SequenceBuffers | BufferTable,
    scale: float,
    *,
    backend: str = "auto",
) -> Tensor:
    """Append the newest KV of each of R sequences to its own buffers, and attend to all rows there.

    No other row is moved: sequences of any length share a call, wherever their buffers are. A
    sequence's keys are read once for all of its new tokens, each of which sees the rows up to its
    own.

    Args:
        q: ``[1, Hq, S, D]``: the newest tokens of every sequence, one after the other: one of each
            (S = R), or as many as ``buffers`` says.
        k, v: ``[1, Hkv, S, D]``, Hq a multiple of Hkv: written from row ``lengths[r]`` of sequence
            r's buffers on.
        buffers: storage of the sequences' rows. A table is for ``triton`` only, which then need not
            be told of other buffers or lengths from call to call; of a sequence that is not there
            the result is 0, and undefined in rows after the last sequence's.
        scale: factor of the scores.
        backend: ``"auto"`` or a name of :data:`apbv.kernels.backends.BACKENDS`.

    Returns:
        ``[1, Hq, S, D]`` in q's dtype.

    Raises:
        ValueError: Hq is not a multiple of Hkv, a buffer is full, or another backend is given a
            table.
        BackendError: the backend cannot be used here.
    """
    require_shapes(q=(q, "B Hq R D"), k=(k, "B Hkv R D"), v=(v, "B Hkv R D"))
    chosen = choose(backend, q)
    if isinstance(buffers, SequenceBuffers):
        buffers.require_room()
    elif chosen != "triton":
        raise ValueError(f"the {chosen} backend does not support a table of buffers")
    return implementation("batch_attention.batch_decode_attention", chosen)(q, k, v, buffers, scale)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float
) -> Tensor:
    """Attend within each sequence: every query sees all keys of its own sequence, and no others.

    Args:
        q: ``[T, Hq, D]``, neighbouring numbers along D.
        k, v: ``[T, Hkv, D]``, Hq a multiple of Hkv.
        sequences: where each begins and ends, the same for q, k and v; together they have T rows.
        scale: factor of the scores, usually ``D ** -0.5``.

    Returns:
        ``[T, Hq, D]`` in q's dtype, contiguous.

    Raises:
        ValueError: Hq is not a multiple of Hkv.
    """
    require_shapes(q=(q, "T Hq D"), k=(k, "T Hkv D"), v=(v, "T Hkv D"))
    if not q.shape[0]:
        return q.new_empty(q.shape)
    return implementation("attention.varlen_attention", "torch")(q, k, v, sequences, scale)


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: ListedBlocks,
    scale: float,
    *,
    skip_below: float | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend causally from every token to its own block and to the blocks listed for it.

    With ``skip_below``, λ, the values of a listed block are left out for 16 rows at a time where
    they weigh little, as in SpargeAttn's second stage (Zhang et al., 2025, Section 3.4): where no
    row's highest score in the block is higher than λ above that row's highest score so far, the
    block included, in the order of the listed blocks. Their weights count in the sum all the same.

    Args:
        q: ``[B, Hq, S, D]``.
        k, v: ``[B, Hkv, S, D]``, of the same tokens.
        blocks: which blocks each query head computes.
        scale: factor of the scores, usually ``D ** -0.5``.
        skip_below: λ, below 0, of scaled scores; None: no values are left out.
        out: ``[B, Hq, S, D]`` in q's dtype, of any strides with neighbouring numbers along D:
            filled and returned in place of a new tensor.
        backend: ``"auto"`` or a name of :data:`apbv.kernels.backends.BACKENDS`. ``torch`` waits for
            the lists on a GPU.

    Returns:
        out ``[B, Hq, S, D]`` in q's dtype and lse ``[B, Hq, S]`` in fp32 (fp64 for fp64 input), the
        natural-log sum of exponentials of the scaled scores that were computed;
        :func:`apbv.kernels.merge_states` merges them with those over other keys.

    Raises:
        ValueError: shapes do not fit together, or the lists are of another number of blocks.
        BackendError: the backend cannot be used here.
    """
    num_query_blocks = cdiv(q.shape[2], blocks.query_block)
    num_key_blocks = cdiv(q.shape[2], blocks.key_block)
    require_shapes(
        q=(q, "B Hq S D"),
        k=(k, "B Hkv S D"),
        v=(v, "B Hkv S D"),
        out=(out, "B Hq S D"),
        counts=(blocks.counts, "B Hq nq"),
        indices=(blocks.indices, "B Hq nq nk"),
        sizes={"nq": num_query_blocks, "nk": num_key_blocks},
    )
    require_dtype(out, q)
    if q.shape[2] == 0:
        return result_without_keys(q, out)
    if out is None:
        out = empty_output(q)
    compute = implementation("block_sparse.block_sparse_attention", choose(backend, q))
    return compute(q, k, v, blocks, scale, skip_below=skip_below, out=out)


def antidiagonal_scores(
    q: Tensor, k: Tensor, scale: float, stride: int, block: int, *, backend: str = "auto"
) -> Tensor:
    """Estimate each query block's attention mass on each key block, by antidiagonals.

    This is the score of XAttention (Xu et al., 2025, Algorithm 1). ``stride`` neighbouring tokens
    are a group. A group of queries scores a group of keys by the sum of q·k along the antidiagonal
    of their square of scores (the last query with the first key, and so on), times scale / stride.
    A softmax over the groups up to its own makes shares of a query group's scores, and the shares
    of a block's groups are summed. As in the released code, tokens that the last group lacks count
    as zeros, and the group on the diagonal counts with all of its square.

    Args:
        q: ``[B, Hq, S, D]``.
        k: ``[B, Hkv, S, D]``, of the same tokens.
        scale: factor of the scores, usually ``D ** -0.5``.
        stride: tokens of a group; a product with every key would be a stride of 1.
        block: tokens of a block, a multiple of the stride.
        backend: ``"auto"`` or a name of :data:`apbv.kernels.backends.BACKENDS`.

    Returns:
        ``[B, Hq, n, n]`` in fp32 (fp64 for fp64 input): for every block of queries the
        mean of its groups' shares, which add up to 1 over the blocks of keys; 0 after the diagonal.

    Raises:
        ValueError: the stride does not divide the block, or shapes do not fit together.
        BackendError: the backend cannot be used here.
    """
    require_shapes(q=(q, "B Hq S D"), k=(k, "B Hkv S D"))
    if stride < 1 or block < 1 or block % stride:
        raise ValueError(f"a stride of {stride} does not divide a block of {block}")
    chosen = "torch"  # for an empty tensor, for which Triton cannot launch a kernel
    if q.numel() > 0:
        chosen = choose(backend, q)
    return implementation("block_scores.antidiagonal_scores", chosen)(q, k, scale, stride, block)


def block_means(
    states: Tensor, block: int, *, center: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute the mean of each block's rows, and how similar they are to each other.

    SpargeAttn (Zhang et al., 2025) lets a mean stand for its block where the block is similar to
    itself. The similarity is the mean cosine of all pairs of rows, a row with itself included: the
    squared length of the mean unit vector. A row of zeros is similar to nothing.

    Args:
        states: ``[B, H, S, D]``, queries or keys.
        block: rows of a block.
        center: ``[B, H, D]``, what is subtracted from every row first; None: nothing.
        backend: ``"auto"`` or a name of :data:`apbv.kernels.backends.BACKENDS`.

    Returns:
        means ``[B, H, n, D]``, of the rows without ``center``, and similarities ``[B, H, n]``, both
        in fp32 (fp64 for fp64 input).

    Raises:
        ValueError: the block is not positive, or ``center`` is of another shape.
        BackendError: the backend cannot be used here.
    """
    if block < 1:
        raise ValueError(f"a block must have at least one row, not {block}")
    require_shapes(states=(states, "B H S D"), center=(center, "B H D"))
    chosen = "torch"  # for an empty tensor, for which Triton cannot launch a kernel
    if states.numel() > 0:
        chosen = choose(backend, states)
    return implementation("block_scores.block_means", chosen)(states, block, center=center)


def merge_states(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    *,
    out: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Merge partial attention results of the same queries over disjoint sets of keys.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i): the online softmax by which
    APB-V merges the hosts' query attention (Eq. 5).

    Args:
        outs: N partial results ``[B, H, S_i, D]``, in one tensor ``[N, B, H, S, D]`` or in several.
            One of fewer than S queries is of the last S_i ones: the others saw none of its keys.
        lses: ``[B, H, S_i]`` of each; +inf, which some libraries report for no visible key, counts
            as -inf.
        out: ``[B, H, S, D]``, of any strides with neighbouring numbers along D and any dtype:
            filled and returned in place of a new tensor. It may be the first of ``outs``.
        backend: ``"auto"`` or a name of :data:`apbv.kernels.backends.BACKENDS`.

    Returns:
        out ``[B, H, S, D]`` in the dtype of ``out``, by default fp32 (fp64 for fp64 input), and lse
        ``[B, H, S]`` in fp32 (fp64 for fp64 input). A query that saw nothing has zeros and an lse
        of -inf.

    Raises:
        ValueError: outs and lses do not have the same shapes, the head dimension aside, or out is
            too short.
        BackendError: the backend cannot be used here.
    """
    if isinstance(outs, Tensor) and isinstance(lses, Tensor):
        partials = [(outs, lses)]
    else:
        partials = list(zip(outs, lses, strict=True))
    for partial, lse in partials:
        shape = list(partial.shape)
        lse_shape = list(lse.shape)
        if shape[:-1] != lse_shape:
            raise ValueError(
                f"partial results of shape {shape} do not have lses of shape {lse_shape}"
            )
        if out is not None and shape[-2] > out.shape[2]:
            raise ValueError(
                f"partial results of {shape[-2]} queries do not fit into {out.shape[2]} rows"
            )
    return implementation("merging.merge_states", choose(backend, lses[0]))(outs, lses, out=out)


def kv_importance(
    q_query: Tensor,
    k: Tensor,
    scale: float,
    reduce: str = "peak",
    *,
    pool: int = 1,
    lse: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Score each key, per KV head, by how much the question's tokens attend to it.

    Args:
        q_query: ``[B, Hq, n_q, D]``, the query block; n_q > 0.
        k: ``[B, Hkv, T, D]``, the keys of one context block.
        scale: factor of the scores, usually ``D ** -0.5``.
        reduce: ``"peak"``: attention probability over these T keys, highest over query tokens and
            the heads of a group. ``"softmax"``: its mean. ``"dot"``: the mean of the scaled scores
            themselves, which is the score of the mean query.
        pool: width, odd, of a max-pooling over neighbouring keys; 1: none.
        lse: ``[B, Hq, n_q]``, natural-log sum of exponentials of the scaled scores over exactly
            these T keys, as attention over them returns it; saves a pass over the keys. None:
            computed here. Unused by ``"dot"``.
        backend: ``"auto"`` or a name of :data:`apbv.kernels.backends.BACKENDS`.

    Returns:
        ``[B, Hkv, T]`` in fp32; in fp64 for fp64 input; higher is more important. Scores of equal
        keys may differ by a rounding, as matrix products do from column to column.

    Raises:
        ValueError: ``reduce`` is unknown, ``pool`` is even, the question is empty, or shapes do not
            fit together.
        BackendError: the backend cannot be used here.
    """
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce must be one of {', '.join(REDUCTIONS)}, not {reduce!r}")
    if pool < 1 or pool % 2 == 0:
        raise ValueError(f"pool must be odd, so that the window is centred on a key, not {pool}")
    require_shapes(q_query=(q_query, "B Hq n_q D"), k=(k, "B Hkv T D"), lse=(lse, "B Hq n_q"))
    if q_query.shape[2] == 0:
        raise ValueError("the question has no tokens")
    if k.shape[2] == 0:
        wide = torch.promote_types(k.dtype, torch.float32)
        return torch.empty(k.shape[:3], dtype=wide, device=k.device)
    compute = implementation("importance.kv_importance", choose(backend, k))
    importance = compute(q_query, k, scale, reduce, lse=lse)
    if pool == 1:
        return importance
    return functional.max_pool1d(importance, pool, stride=1, padding=pool // 2)


def select_topk(
    scores: Tensor,
    k: Tensor,
    v: Tensor,
    count: int,
    out: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Copy the rows of each KV head with the highest scores, in their original order.

    Ties go to the earlier row. The result is deterministic, without synchronization.

    Args:
        scores: ``[B, Hkv, T]``; NaN counts as -inf.
        k, v: ``[B, Hkv, T, D]``.
        count: rows per KV head, 0 <= count <= T.
        out: ``[2, B, Hkv, N, D]`` with N >= count, K's dtype and device, and neighbouring numbers
            along D: the rows of K and V are written straight to the first ``count`` places of each
            head, and the rest is left alone. None: allocated, N = count.
        backend: ``"auto"`` or a name of :data:`apbv.kernels.backends.BACKENDS`.

    Returns:
        indices ``[B, Hkv, count]`` int64, ascending, and ``out``.

    Raises:
        ValueError: ``count`` lies outside 0 .. T, or shapes, dtypes or devices do not fit together.
        BackendError: the backend cannot be used here.
    """
    require_shapes(k=(k, "B Hkv T D"), v=(v, "B Hkv T D"), scores=(scores, "B Hkv T"))
    if not 0 <= count <= k.shape[2]:
        raise ValueError(f"count must lie in 0 .. {k.shape[2]}, the number of keys, not be {count}")
    if out is None:
        out = k.new_empty(2, *k.shape[:2], count, k.shape[3])
    require_shapes(k=(k, "B Hkv T D"), out=(out, "2 B Hkv N D"), sizes={"2": 2})
    if out.shape[3] < count:
        raise ValueError(f"out has room for {out.shape[3]} rows, not for {count}")
    require_dtype(out, k)
    if count == 0:
        return torch.empty(*k.shape[:2], 0, dtype=torch.int64, device=k.device), out
    return implementation("importance.select_topk", choose(backend, k))(scores, k, v, count, out)


def require_shapes(
    *,
    sizes: Mapping[str, int] | None = None,
    **operands: tuple[Tensor | None, str],
) -> None:
    """Raise ValueError unless operands have their shapes, in which a letter stands for one size.

    Args:
        sizes: of letters that are known.
        operands: of each the tensor, or None, and its letters, all different, as in ``"B Hq S D"``.
    """
    known = dict(sizes or {})
    for name, (tensor, shape) in operands.items():
        if tensor is None:
            continue
        letters = shape.split()
        found = dict(zip(letters, tensor.shape, strict=False))  # there may be more or fewer sizes
        has_known_sizes = all(known.get(letter, size) == size for letter, size in found.items())
        if tensor.dim() != len(letters) or not has_known_sizes:
            wanted = ", ".join([f"{x} = {known[x]}" if x in known else x for x in letters])
            raise ValueError(f"{name} must have the shape [{wanted}], not {list(tensor.shape)}")
        known |= found
    if "Hkv" in known and "Hq" in known and known["Hq"] % known["Hkv"]:
        raise ValueError(
            f"{known['Hq']} query heads are not a multiple of {known['Hkv']} key/value heads"
        )


def require_dtype(tensor: Tensor | None, like: Tensor) -> None:
    """Raise ValueError unless a tensor, if there is one, has another's dtype and device."""
    if tensor is None:
        return
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"a tensor in {tensor.dtype} on {tensor.device} does not match {like.dtype} on "
            f"{like.device}"
        )
