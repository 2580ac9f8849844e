"""How new tokens are computed and chosen, and what is kept for further questions."""

from dataclasses import dataclass
from math import inf

from .checks import Checked, integer, number, one_of, setting
from .names import CUDA_GRAPH_MODES, REUSE_MODES


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(Checked):
    """How models are run over new tokens, in decoding, verification and drafting.

    Attributes:
        cuda_graphs: ``"auto"``: on a GPU, steps over as many tokens as an earlier step of the answer are recorded
            as CUDA graphs, which launch all kernels at once; where that is not possible, a warning says why. It is
            not for a KV in shares (``kv="sharded"``), tensor parallelism, or attention by other kernels than
            Triton's; an ensemble and a draft in a thread go without, too. ``"off"``: kernels are launched one by
            one.

    Raises:
        ValueError: the mode is unknown.
    """

    cuda_graphs: str = one_of(CUDA_GRAPH_MODES, "auto")


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Checked):
    """How next tokens are chosen.

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

    max_new_tokens: int = integer(1, 2**20, 128)
    # Below the lower bound, which is of no practical use, logits over temperature overflow.
    temperature: float = number("be 0 (greedy) or at least 1e-6", lambda t: t == 0 or 1e-6 <= t < inf, 0.0)
    top_p: float = number("lie in (0, 1]", lambda share: 0 < share <= 1, 1.0)
    seed: int = integer(0, 2**64 - 1, 0)
    ignore_eos: bool = setting(False, "be True or False", lambda value: isinstance(value, bool))
    min_tokens: int = integer(0, 2**20, 0)

    def __post_init__(self):
        super().__post_init__()
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_tokens must lie in 0 .. max_new_tokens ({self.max_new_tokens}), not {self.min_tokens!r}"
            )


@dataclass(frozen=True, kw_only=True)
class ReuseConfig(Checked, name="reuse "):
    """What is kept of a video, or a long text, for further questions about it.

    Attributes:
        mode: ``"exact"`` keeps the vision tower's embeddings of a video: answers are as without. ``"kv"`` keeps
            the KV of all that comes before the question, so that only the question is run; with a method that is
            exact so are its answers, else the KV is what the first question selected.
        max_bytes: the limit of what one host keeps; the least recently used is dropped first.

    Raises:
        ValueError: the mode is unknown, or the bound is not a positive number of bytes.
    """

    mode: str = one_of(REUSE_MODES, "exact")
    max_bytes: int = integer(1, 2**63 - 1, 4 * 2**30)
