"""How new tokens are computed and chosen, and what is kept for further questions."""

from dataclasses import dataclass
from math import inf

from .checks import Checked, instance_of, integer, number, one_of, setting
from .names import CUDA_GRAPH_MODES, REUSE_MODES


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(Checked):
    """How models are run over new tokens, in decoding, verification and drafting.

    Attributes:
        cuda_graphs: ``"auto"``: on a GPU, steps over as many tokens as an earlier step of the answer are captured
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

    To the logits the bias is added, and then penalties are applied; what temperature makes of them is cut by
    ``min_p``, ``top_k`` and ``top_p``, in this order.

    Attributes:
        max_new_tokens: the largest number of generated tokens; at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probabilities sum to at least this (nucleus sampling).
        top_k: keep the so many most probable tokens, and such as are as probable as the last of them; 0: all.
        min_p: keep tokens at least this times as probable as the most probable one.
        repetition_penalty: logits of tokens that the prompt or the answer has are divided by it where they are
            positive, and else multiplied (Keskar et al., 2019).
        presence_penalty: what is subtracted from the logit of every token that the answer has (OpenAI's).
        frequency_penalty: the same, times how often the answer has it.
        logit_bias: (token, what is added to its logit) pairs.
        logprobs: how many of the most probable tokens are told of with every token of the answer, and their
            logarithmic probabilities in the model, before any of these settings; None: not even the token's own.
        json_schema: a JSON schema that the answer follows (needs the extra ``apbv[json]``).
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
    top_k: int = integer(0, 2**20, 0)
    min_p: float = number("lie in 0 .. 1", lambda share: 0 <= share <= 1, 0.0)
    repetition_penalty: float = number("lie in (0, 10]", lambda factor: 0 < factor <= 10, 1.0)
    presence_penalty: float = number("lie in -2 .. 2", lambda penalty: -2 <= penalty <= 2, 0.0)
    frequency_penalty: float = number("lie in -2 .. 2", lambda penalty: -2 <= penalty <= 2, 0.0)
    logit_bias: tuple[tuple[int, float], ...] = instance_of(
        tuple, says="be a tuple of (token, number)", default=()
    )
    logprobs: int | None = integer(0, 20, None)
    json_schema: str | None = instance_of(str, says="be a text")
    seed: int = integer(0, 2**64 - 1, 0)
    ignore_eos: bool = setting(False, "be True or False", lambda value: isinstance(value, bool))
    min_tokens: int = integer(0, 2**20, 0)

    def __post_init__(self):
        super().__post_init__()
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_tokens must lie in 0 .. max_new_tokens ({self.max_new_tokens}), not {self.min_tokens!r}"
            )
        if self.json_schema is not None and (self.min_tokens or self.ignore_eos):
            raise ValueError("json_schema ends the answer: it excludes min_tokens and ignore_eos")

    @property
    def cuts(self) -> tuple[float, float, int, float]:
        """How a distribution is made of logits: temperature, top_p, top_k and min_p; greedy, all are alike."""
        return (self.temperature, self.top_p, self.top_k, self.min_p) if self.temperature else (0.0, 1.0, 0, 0.0)

    @property
    def penalises(self) -> bool:
        """Whether a token's logit is penalised for the tokens before."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def looks_back(self) -> bool:
        """Whether no token can be chosen before all those before it are known on the host."""
        return self.penalises or self.json_schema is not None


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
