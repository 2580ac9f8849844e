"""The papers' settings of prefill for exams, whose prompts are much shorter than the papers'."""

from apbv import PrefillConfig, SparseConfig
from apbv.config import SPARSE_NAMES

# Queries; the papers' 128 are a large part of such short prompts.
_SPARSE_BLOCK = 32


def paper_lengths(num_tokens: int) -> tuple[int, int]:
    """Return the APB-V paper's l_a and l_p, which are fractions of the context's length."""
    return -(-num_tokens // 64), -(-num_tokens // 128)


def passing_methods(num_tokens: int) -> dict[str, PrefillConfig]:
    """Configure the methods that pass KV pairs on, with the papers' lengths; APB passes twice as many on."""
    anchor, passing = paper_lengths(num_tokens)
    return {
        "apb": PrefillConfig(method="apb", anchor_len=anchor, passing_len=2 * passing),
        "apbv": PrefillConfig(anchor_len=anchor, passing_len=passing),
    }


def sparse_choices() -> dict[str, SparseConfig]:
    """Configure the ways to choose blocks of attention."""
    return {name: SparseConfig(method=name, block_size=_SPARSE_BLOCK) for name in SPARSE_NAMES}
