"""Ways to give a prefill's KV to others: on disk, over the network, and to transformers.

Each is a function of a prefill's result, of which :class:`PrefilledKV` says what it reads.
"""

from .prefilled import PrefilledKV

__all__ = ["PrefilledKV"]
