"""Settings for decoding, sampling, and the prefix and embedding caches."""

from dataclasses import dataclass, replace
from math import inf

from ..errors import InvalidRequestError
from .checks import Checked, instance_of, integer, number, one_of
from .names import CUDA_GRAPH_MODES, GENERATION_CONFIGS, REUSE_MODES

# Logits divided by less may overflow, and give the most probable token anyway.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(Checked):
    """Settings for running models on new tokens, in decoding, verification and drafting.

    Attributes:
        cuda_graphs: whether decode steps are captured as CUDA graphs; ``"auto"``: on GPUs. There
            the second step with a given token count is captured, and all its kernels are launched
            at once; if that fails, a warning gives the reason. Not supported with ``kv="sharded"``,
            tensor parallelism, or attention backends other than Triton; ensembles and drafts in a
            thread run eagerly, too. ``"off"``: kernels are launched one by one.
        generation_config: what sampling parameters are that a request leaves open: the
            checkpoint's (``"auto"``), or without effect (``"neutral"``).

    Raises:
        InvalidRequestError: a mode is unknown.
    """

    cuda_graphs: str = one_of(CUDA_GRAPH_MODES, "auto")
    generation_config: str = one_of(GENERATION_CONFIGS, "auto")


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Checked, error=InvalidRequestError):
    """Sampling parameters.

    Logits get the bias first, then the penalties, then the temperature; the distribution is then
    truncated by ``min_p``, ``top_k`` and ``top_p``, in this order. For what is None the engine
    takes the value of the checkpoint's generation config (:attr:`DecodeConfig.generation_config`),
    but is greedy without a temperature, so that figures can be compared: only the server takes that
    from the checkpoint, too.

    Attributes:
        max_new_tokens: maximum tokens to generate, at least 1. None: the model's, or 128. An answer
            may then end earlier for want of positions, which are otherwise required.
        temperature: sampling temperature, by which logits are divided; 0, or less than 1e-5, is
            greedy. None: 0, and in the server the model's.
        top_p: keep the smallest set of tokens whose probabilities sum to at least this (nucleus
            sampling). None: the model's.
        top_k: keep the k most probable tokens, and those that tie with the last of them; 0: all.
            None: the model's.
        min_p: keep tokens at least this times as probable as the most probable one. None: the
            model's.
        repetition_penalty: penalty on tokens that the prompt or the answer has; 1: none. Their
            logits are divided by it where they are positive, and else multiplied (Keskar et al.,
            2019). None: the model's.
        presence_penalty: subtracted from the logit of every token that the answer has (OpenAI's).
        frequency_penalty: subtracted from the logit of every token that the answer has, times how
            often it has it (OpenAI's).
        logit_bias: pairs of a token and the number added to its logit.
        logprobs: number of most probable tokens to return with every token of the answer, with the
            model's log probabilities before any of these settings; None: none, not even the token's
            own.
        json_schema: JSON schema that the answer must follow (needs the extra ``json``).
        grammar: a grammar that it must follow instead, in llguidance's variant of Lark (needs the
            extra ``json``).
        seed: random seed. The same seed, prompt and model give the same tokens.
        ignore_eos: treat end tokens like other tokens; they do not end the answer.
        min_tokens: minimum tokens before an end token may be chosen; at most ``max_new_tokens``.

    Raises:
        InvalidRequestError: a number is out of range.
    """

    max_new_tokens: int | None = integer(1, 2**20, None)
    temperature: float | None = number("be 0 (greedy) or more", lambda t: 0 <= t < inf, None)
    top_p: float | None = number("lie in (0, 1]", lambda share: 0 < share <= 1, None)
    top_k: int | None = integer(0, 2**20, None)
    min_p: float | None = number("lie in 0 .. 1", lambda share: 0 <= share <= 1, None)
    repetition_penalty: float | None = number(
        "lie in (0, 10]", lambda factor: 0 < factor <= 10, None
    )
    presence_penalty: float = number("lie in -2 .. 2", lambda penalty: -2 <= penalty <= 2, 0.0)
    frequency_penalty: float = number("lie in -2 .. 2", lambda penalty: -2 <= penalty <= 2, 0.0)
    logit_bias: tuple[tuple[int, float], ...] = instance_of(
        tuple, says="be a tuple of (token, number)", default=()
    )
    logprobs: int | None = integer(0, 20, None)
    json_schema: str | None = instance_of(str, says="be a text")
    grammar: str | None = instance_of(str, says="be a text")
    seed: int = integer(0, 2**64 - 1, 0)
    ignore_eos: bool = instance_of(bool, says="be True or False", default=False)
    min_tokens: int = integer(0, 2**20, 0)

    def __post_init__(self):
        super().__post_init__()
        if self.min_tokens > (self.max_new_tokens or self.min_tokens):
            raise InvalidRequestError(
                f"min_tokens must lie in 0 .. max_new_tokens ({self.max_new_tokens}), not "
                f"{self.min_tokens!r}"
            )
        if self.json_schema is not None and self.grammar is not None:
            raise InvalidRequestError("pass either json_schema or grammar, not both")
        if self.is_constrained and (self.min_tokens or self.ignore_eos):
            raise InvalidRequestError(
                "json_schema or grammar ends the answer: it excludes min_tokens and ignore_eos"
            )
        # Very low temperatures are greedy: 0.
        if self.is_greedy and self.temperature is not None:
            object.__setattr__(self, "temperature", 0.0)

    def filled(self, defaults: "SamplingParams") -> "SamplingParams":
        """Return these parameters with others for those that are left open.

        A missing temperature becomes 0: greedy.
        """
        names = ("max_new_tokens", "top_p", "top_k", "min_p", "repetition_penalty")
        filled = {name: getattr(defaults, name) for name in names if getattr(self, name) is None}
        if "max_new_tokens" in filled:
            filled["max_new_tokens"] = max(defaults.require_max_new_tokens(), self.min_tokens)
        return replace(self, temperature=self.temperature or 0.0, **filled)

    def require_max_new_tokens(self) -> int:
        """Return the maximum number of tokens, which an answer cannot begin without.

        Raises:
            InvalidRequestError: it was left open.
        """
        if self.max_new_tokens is None:
            raise InvalidRequestError("an answer needs max_new_tokens")
        return self.max_new_tokens

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always chosen."""
        return (self.temperature or 0.0) < _GREEDY_BELOW

    @property
    def cuts(self) -> tuple[float, float, int, float]:
        """Temperature, top_p, top_k and min_p, which turn logits into a distribution.

        The same for all greedy settings, so that they compare equal.
        """
        if self.temperature is None or self.is_greedy:
            return 0.0, 1.0, 0, 0.0
        return self.temperature, self.top_p or 1.0, self.top_k or 0, self.min_p or 0.0

    @property
    def penalises(self) -> bool:
        """Whether a token's logit is penalised for the tokens before."""
        return self.repetition_penalty not in (None, 1) or bool(
            self.presence_penalty or self.frequency_penalty
        )

    @property
    def is_constrained(self) -> bool:
        """Whether a JSON schema or a grammar says which tokens are allowed."""
        return self.json_schema is not None or self.grammar is not None


@dataclass(frozen=True, kw_only=True)
class ReuseConfig(Checked, name="reuse "):
    """Settings of the embedding or prefix cache.

    It is for further questions about the same video or long text.

    Attributes:
        mode: what is cached. ``"exact"`` caches the vision tower's embeddings of a video, which
            changes no answer. ``"kv"`` caches the KV of everything before the question, so that
            only the question is run; answers are exact with an exact method, otherwise they use the
            KV that the first question selected.
        max_bytes: cache limit per host; eviction is LRU.

    Raises:
        InvalidRequestError: the mode is unknown, or the bound is not a positive number of bytes.
    """

    mode: str = one_of(REUSE_MODES, "exact")
    max_bytes: int = integer(1, 2**63 - 1, 4 * 2**30)
