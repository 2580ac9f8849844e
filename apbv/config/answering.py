"""This module defines how new tokens are computed and chosen, and what is kept for further questions."""

from dataclasses import dataclass

from .checks import is_int, is_number, require_known
from .names import CUDA_GRAPH_MODES, REUSE_MODES


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """A DecodeConfig says how models are run over new tokens, in decoding, verification and drafting.

    Attributes:
        cuda_graphs: ``"auto"``: on a GPU, steps over as many tokens as an earlier step of the answer are recorded
            as CUDA graphs, which launch all kernels at once; where that is not possible, a warning says why. It is
            not for a KV in shares (``kv="sharded"``), tensor parallelism, or attention by other kernels than
            Triton's; an ensemble and a draft in a thread go without, too. ``"off"``: kernels are launched one by
            one.

    Raises:
        ValueError: the mode is unknown.
    """

    cuda_graphs: str = "auto"

    def __post_init__(self):
        require_known("cuda_graphs", self.cuda_graphs, CUDA_GRAPH_MODES)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """A SamplingConfig says how next tokens are chosen.

    Attributes:
        max_new_tokens: the largest number of generated tokens; at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probabilities sum to at least this (nucleus sampling).
        seed: with the same seed, prompt and model, the same tokens are drawn.
        ignore_eos: end tokens are tokens like others, and do not end the answer.
        min_tokens: before so many tokens no end token is chosen; at most ``max_new_tokens``.

    Raises:
        ValueError: a number is out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self):
        if not is_int(self.max_new_tokens) or not 1 <= self.max_new_tokens <= 2**20:
            raise ValueError(f"max_new_tokens must lie in 1 .. 2^20, not {self.max_new_tokens!r}")
        # Below the lower bound, which is of no practical use, logits over temperature overflow.
        if not is_number(self.temperature) or not (
            self.temperature == 0 or 1e-6 <= self.temperature < float("inf")
        ):
            raise ValueError(f"temperature must be 0 (greedy) or at least 1e-6, not {self.temperature!r}")
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p!r}")
        if not is_int(self.seed) or not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must lie in 0 .. 2^64-1, not {self.seed!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        if not is_int(self.min_tokens) or not 0 <= self.min_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_tokens must lie in 0 .. max_new_tokens ({self.max_new_tokens}), not {self.min_tokens!r}"
            )


@dataclass(frozen=True, kw_only=True)
class ReuseConfig:
    """A ReuseConfig says what is kept of a video, or a long text, for further questions about it.

    Attributes:
        mode: ``"exact"`` keeps the vision tower's embeddings of a video: answers are as without. ``"kv"`` keeps
            the KV of all that comes before the question, so that only the question is run; with a method that is
            exact so are its answers, else the KV is what the first question selected.
        max_bytes: the limit of what one host keeps; the least recently used is dropped first.

    Raises:
        ValueError: the mode is unknown, or the bound is not a positive number of bytes.
    """

    mode: str = "exact"
    max_bytes: int = 4 * 2**30

    def __post_init__(self):
        require_known("reuse", self.mode, REUSE_MODES)
        if not is_int(self.max_bytes) or self.max_bytes < 1:
            raise ValueError(f"max_bytes must be a positive number of bytes, not {self.max_bytes!r}")
