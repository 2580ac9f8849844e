"""This module offers attention of one new token of each of several sequences, as decoding in a batch needs it."""

from torch import Tensor

from .backends import choose, implementation
from .runs import BufferTable, SequenceBuffers


def batch_decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: SequenceBuffers | BufferTable,
    scale: float,
    *,
    backend: str = "auto",
) -> Tensor:
    """Append the newest key and value of each of R sequences to its own buffers, and attend to all rows there.

    No other row is moved: sequences of any lengths share a call, wherever their buffers lie.

    Args:
        q: ``[1, Hq, R, D]``: the newest token of every sequence.
        k, v: ``[1, Hkv, R, D]``, Hq a multiple of Hkv: written to row ``lengths[r]`` of sequence r's buffers.
        buffers: where the sequences' rows lie. A table is for ``triton`` only, which then need not be told of
            other buffers or lengths from call to call; of a sequence that is not there the result is 0.
        scale: factor of the scores.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        ``[1, Hq, R, D]`` in q's dtype.

    Raises:
        ValueError: Hq is not a multiple of Hkv, a buffer is full, or another back end is given a table.
        BackendError: the back end cannot be used here.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads")
    chosen = choose(backend, q)
    if isinstance(buffers, SequenceBuffers):
        buffers.require_room()
    elif chosen != "triton":
        raise ValueError(f"the {chosen} back end does not look up buffers in a table")
    return implementation("batch_decode_attention", chosen)(q, k, v, buffers, scale)
