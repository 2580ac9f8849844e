"""This module defines how a draft proposes tokens."""

from dataclasses import dataclass

from .checks import is_int, is_number, require_known
from .names import (
    CONTEXTS,
    DEFAULT_KEEP_RATIO,
    HIPPO_TERMS,
    KEEP_POLICIES,
    MOST_AUTO_DRAFT_TOKENS,
    PRUNINGS,
    STRATEGY_NAMES,
)


def longest_window(num_draft_tokens: int | str) -> int:
    """Return the largest number of tokens of a draft window: γ, unless that is ``"auto"``."""
    return MOST_AUTO_DRAFT_TOKENS if num_draft_tokens == "auto" else num_draft_tokens


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """A SpeculativeConfig says how a draft proposes tokens; the verified output is always the target's own.

    Attributes:
        strategy: a name in :data:`apbv.speculate.STRATEGIES`. A second model drafts in ``"vanilla"`` (on all
            visual tokens), ``"specvlm"``, ``"hippo"``, ``"parallelvlm"`` (on some, by ``keep``), ``"text_only"``
            and ``"tabed"`` (reading the prompt in several ways, see ``ensemble``); the target drafts itself in
            ``"std"`` (on the most attended visual KV), ``"std_apbv"`` (on what the prefill passed on between
            hosts), ``"streaming"`` (the latest) and ``"layerskip"`` (its first layers); ``"ngram"`` looks up what
            followed the last tokens before.
        draft_model: a directory or hub id, of the target's family and tokenizer (for ``"text_only"``, but not on a
            draft host, also a text-only model with the target's tokens); ``"demo"`` is the packaged one.
        num_draft_tokens: γ, tokens drafted per round; ``"auto"``: at most 16, as many as promise the highest
            speed-up by the costs and the acceptance so far (see :func:`apbv.speculate.pace.best_window`). With
            ``"auto"`` a draft host drafts until the target's forward pass ends, where ParallelVLM's Theorem 6 is
            largest.
        keep_losing_draft: go on with a draft that costs more time than it saves. Off, the rest of an answer is
            decoded without a draft that has cost eight forward passes of the target more than it has saved; to
            measure that, the target now and then runs a forward pass without drafted tokens.
        keep: which visual tokens a pruned draft sees: by the question's attention to them
            ``"specvlm"`` (SpecVLM's: the fewest that hold 40 % of it, and others evenly spaced),
            ``"attention"`` (the highest), ``"attention_per_frame"`` (the highest of each frame),
            ``"attention_variation"`` (by how much it grows up to ``uv_layer``) and ``"draft_guided"`` (the highest
            in the draft instead of the target, for which the draft reads the whole prompt first);
            ``"uv_prune"`` (ParallelVLM's: what comes closer to the question in the target's first layers),
            ``"similarity"`` (what is close to it behind these layers), ``"hippo"`` (see ``hippo_terms``),
            ``"dycoke"`` and ``"fastvid"`` (as in :class:`apbv.ReduceConfig`, but nothing is merged); ``"even"``
            (evenly spaced), ``"uniform_frames"`` (whole frames, evenly spaced), ``"random"``, ``"full"``; None: as
            the strategy's paper does.
        keep_ratio: the share of visual tokens that a pruned draft sees; 0.1 where ``keep_tokens`` is not given.
        keep_tokens: how many of the prompt's tokens a pruned draft sees, in place of a ratio: all text tokens, and
            visual ones for the rest, at least one. With ``"std"`` that is the paper's K + m_t, of each layer and
            KV head; 1024 there.
        hippo_terms: the terms of HIPPO's scores: attention, change over time, variety in space.
        prune: ``"prompt"``: the draft reads the kept tokens only. ``"kv"``: it reads everything, and the KV of
            what is not kept is dropped; its prefill costs more. Then a draft host does not wait for the scores
            of the target's prefill: it drafts its first window on the whole prompt.
        vision_first: with ``prune="prompt"``, a draft host drafts its first window on the tokens that are best by
            HIPPO's visual terms alone, and reads the prompt again when the attention is known.
        uv_layer: the last layer of the target that ``"uv_prune"``, ``"similarity"`` and ``"attention_variation"``
            observe, at most its last but one; 20 in the paper.
        layer_ratio: the share of layers that ``"layerskip"`` runs.
        ensemble: what ``"tabed"`` drafts from: the prompt with the visual tokens that ``keep`` preserves (M), with
            line breaks instead (T), a caption (C), and pooled ones (P); ``*``: weighted by how well each has
            predicted the answer so far, instead of equally. The paper's are MT, MT*, MTCP, MTCP* and each letter
            alone; C needs a captioner.
        num_tree_nodes: the tokens of a draft tree, at most γ deep, that is drafted per round instead of a chain of
            γ. None: the strategy's default, which is 25 for ``"sd_tree"`` and a chain for the others.
        draft_host: the last host of the group drafts while the others, which run the target, verify; on a single
            host a thread drafts, on a CUDA stream of its own.
        draft_timeout: seconds after which the target's hosts go on without a draft host that does not answer, even
            if it is still computing; at most a quarter of the hosts' own timeout.

    Raises:
        ValueError: a number is out of range, or a name is unknown.
    """

    strategy: str = "specvlm"
    draft_model: str | None = None
    num_draft_tokens: int | str = 5
    keep: str | None = None
    keep_ratio: float | None = None
    keep_tokens: int | None = None
    hippo_terms: tuple[str, ...] = HIPPO_TERMS
    prune: str = "prompt"
    vision_first: bool = False
    uv_layer: int = 20
    layer_ratio: float = 0.5
    ensemble: str = "MT*"
    num_tree_nodes: int | None = None
    draft_host: bool = False
    draft_timeout: float = 60.0
    keep_losing_draft: bool = False

    def __post_init__(self):
        require_known("strategy", self.strategy, STRATEGY_NAMES)
        gamma = self.num_draft_tokens
        if gamma != "auto" and (not is_int(gamma) or not 1 <= gamma <= 256):
            raise ValueError(f"num_draft_tokens must lie in 1 .. 256 or be 'auto', not {gamma!r}")
        nodes = self.num_tree_nodes
        if nodes is not None and (not is_int(nodes) or not 1 <= nodes <= 256):
            raise ValueError(f"num_tree_nodes must lie in 1 .. 256, not {nodes!r}")
        if self.keep is not None and self.keep not in KEEP_POLICIES:
            raise ValueError(f"keep must be one of {', '.join(KEEP_POLICIES)}, not {self.keep!r}")
        if not self.hippo_terms or not set(self.hippo_terms) <= set(HIPPO_TERMS):
            raise ValueError(f"hippo_terms must be some of {', '.join(HIPPO_TERMS)}, not {self.hippo_terms!r}")
        if self.prune not in PRUNINGS:
            raise ValueError(f"prune must be one of {', '.join(PRUNINGS)}, not {self.prune!r}")
        letters = self.ensemble.removesuffix("*")
        if not set(letters) <= set(CONTEXTS) or len(set(letters)) < max(len(letters), 1 + ("*" in self.ensemble)):
            raise ValueError(
                f"ensemble must be different letters of {CONTEXTS}, with a * behind two at least to adapt their "
                f"weights, not {self.ensemble!r}"
            )
        if not is_int(self.uv_layer) or self.uv_layer < 1:
            raise ValueError(f"uv_layer must be at least 1, not {self.uv_layer!r}")
        if not is_number(self.draft_timeout) or not self.draft_timeout > 0:
            raise ValueError(f"draft_timeout must be a positive number of seconds, not {self.draft_timeout!r}")
        if self.keep_tokens is not None:
            if self.keep_ratio is not None:
                raise ValueError(
                    "keep_ratio and keep_tokens both say how many visual tokens a draft sees: give one of them"
                )
            if not is_int(self.keep_tokens) or not 1 <= self.keep_tokens < 2**31:
                raise ValueError(f"keep_tokens must lie in 1 .. 2^31-1, not {self.keep_tokens!r}")
        elif self.keep_ratio is None:
            object.__setattr__(self, "keep_ratio", DEFAULT_KEEP_RATIO)
        for name in ("layer_ratio",) if self.keep_ratio is None else ("keep_ratio", "layer_ratio"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value <= 1:
                raise ValueError(f"{name} must lie in (0, 1], not {value!r}")

    @property
    def most_draft_tokens(self) -> int:
        """The largest number of tokens of a draft window."""
        return longest_window(self.num_draft_tokens)

    @property
    def needs_caption(self) -> bool:
        """Whether the draft reads a caption in place of visual tokens."""
        return self.strategy == "tabed" and "C" in self.ensemble
