"""Defines sparse attention on one host: the whole prompt, of whose attention blocks are left out."""

from .full import FullMethod


class XAttentionMethod(FullMethod):
    """In XAttention host 0 computes those blocks of attention that antidiagonals of scores choose."""

    name = "xattention"


class SpargeAttnMethod(FullMethod):
    """In SpargeAttn host 0 computes those blocks of attention that the means of blocks choose."""

    name = "spargeattn"


class FlexPrefillMethod(FullMethod):
    """In FlexPrefill host 0 computes those blocks of attention that its last queries choose for a head."""

    name = "flexprefill"
