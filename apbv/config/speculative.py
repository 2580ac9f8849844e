"""Settings for speculative decoding."""

from dataclasses import dataclass

from .checks import Checked, described, integer, number, one_of, setting, switch
from .facts import STRATEGY_FACTS
from .names import (
    CONTEXTS,
    DEFAULT_KEEP_RATIO,
    HIPPO_TERMS,
    KEEP_POLICIES,
    MOST_AUTO_DRAFT_TOKENS,
    PRUNINGS,
    STRATEGY_NAMES,
)
from .refusals import refuse


def longest_window(num_draft_tokens: int | str) -> int:
    """Return the maximum number of tokens per draft: γ, or the limit of ``"auto"``."""
    return MOST_AUTO_DRAFT_TOKENS if isinstance(num_draft_tokens, str) else num_draft_tokens


def _are_terms(terms: tuple[str, ...]) -> bool:
    return isinstance(terms, tuple) and bool(terms) and set(terms) <= set(HIPPO_TERMS)


def _is_ensemble(letters: str) -> bool:
    is_adaptive = letters.endswith("*")
    contexts = letters.removesuffix("*")
    are_known = set(contexts) <= set(CONTEXTS)
    are_different = len(set(contexts)) == len(contexts)
    # Weights can be adapted to one another only.
    fewest = 2 if is_adaptive else 1
    return are_known and are_different and len(contexts) >= fewest


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(Checked):
    """Settings for speculative decoding; the verified output is always the target's own.

    Attributes:
        strategy: a name in :data:`apbv.speculate.STRATEGIES`. A second model drafts in
            ``"vanilla"`` (on all visual tokens), ``"sd_tree"`` (the same, a tree), ``"specvlm"``,
            ``"hippo"`` and ``"parallelvlm"`` (on some, by ``keep``), ``"text_only"`` and
            ``"tabed"`` (reading the prompt in several ways, see ``ensemble``); the target drafts
            itself in ``"std"`` (on the most attended visual KV), ``"streaming"`` (on the first
            tokens and the latest visual KV) and ``"layerskip"`` (by its first layers); ``"ngram"``
            looks up what followed the last tokens before.
        draft_model: a directory or hub id, of the target's family and tokenizer (for
            ``"text_only"``, but not on a draft host, also a text-only model with the target's
            tokens); ``"demo"`` is the bundled one.
        num_draft_tokens: γ, tokens drafted per round; ``"auto"``: at most 16, chosen to maximise
            the expected speedup from the costs and the acceptance rate so far (see
            :func:`apbv.speculate.loops.pace.best_windows`). With ``"auto"`` a draft host drafts
            until the target's forward pass ends, where ParallelVLM's Theorem 6 is largest.
        keep_losing_draft: keep using a draft that costs more time than it saves. Off, the rest of
            an answer is decoded without a draft that has cost eight forward passes of the target
            more than it has saved, where one round counts as four at most. To measure that, and for
            ``"auto"``, the target now and then runs a forward pass without drafted tokens.
        keep: selects the visual tokens that a pruned draft sees: by the question's attention to
            them ``"specvlm"`` (SpecVLM's: the fewest that hold 40 % of it, and others evenly
            spaced) and ``"attention"`` (the highest); ``"uv_prune"`` (ParallelVLM's: what comes
            closer to the text in the target's first layers), ``"hippo"`` (see ``hippo_terms``); by
            the frames alone, with which HIPPO's Figure 7 compares, ``"frames"``, ``"transitions"``
            and ``"dycoke"`` (see :mod:`apbv.speculate.strategies.frame_selection`); ``"even"``
            (evenly spaced), ``"random"``, ``"full"``; None: as the strategy's paper does.
        keep_ratio: share of visual tokens that a pruned draft sees; 0.1 if ``keep_tokens`` is not
            given.
        keep_tokens: number of prompt tokens that a pruned draft sees, instead of a ratio: all text
            tokens, and visual ones for the rest, at least one. With ``"std"`` that is the paper's K
            + m_t, of each layer and KV head; 1024 there.
        hippo_terms: the terms of HIPPO's scores (its Eq. 7): attention, change over time, variety
            in space. The paper's ablations leave one out.
        prune: ``"prompt"``: the draft reads the kept tokens only. ``"kv"``: it reads everything,
            and the KV of what is not kept is dropped; its prefill costs more. Then a draft host
            does not wait for the scores of the target's prefill: it drafts its first window on the
            whole prompt.
        uv_layer: the last layer of the target that ``"uv_prune"`` observes, at most its last but
            one; 20 in the paper.
        layer_ratio: the share of the target's layers that ``"layerskip"`` drafts with, the first
            ones; half of them by default, as nobody trained them to be left early.
        ensemble: the contexts that ``"tabed"`` drafts from: the prompt with the visual tokens that
            ``keep`` preserves (M), with line breaks instead (T), a caption (C), and pooled ones
            (P); ``*``: weighted by their divergence from the target in the answer so far, instead
            of equally. The paper's are MT, MT*, MTCP, MTCP* and each letter alone; C needs a
            captioner.
        num_tree_nodes: the tokens of a draft tree, at most γ deep, that is drafted per round
            instead of a chain of γ. None: the strategy's default, which is 25 for ``"sd_tree"`` and
            a chain for the others.
        draft_host: the last of at least two hosts drafts while the others, which run the target,
            verify.
        concurrent_prefill: with a draft host: whether it prefills while the target does (HIPPO,
            Section 5.2), or only when the target's prefill has ended, as PEARL does (PEARL-video in
            HIPPO's Table 3). Without a draft host the draft always prefills after the target.
        draft_timeout: seconds after which the target's hosts go on without a draft host that does
            not answer, even if it is still computing; at most a quarter of the hosts' own timeout.

    Raises:
        InvalidConfigError: a number is out of range, or a name is unknown.
    """

    strategy: str = one_of(STRATEGY_NAMES, "specvlm")
    draft_model: str | None = described(
        None, help="a directory or hub id (demo: the bundled draft)"
    )
    num_draft_tokens: int | str = setting(
        5,
        "be an integer in 1 .. 256, or 'auto'",
        lambda n: n == "auto" or (type(n) is int and 1 <= n <= 256),
        int,
        help="tokens drafted per round, or auto",
    )
    keep: str | None = one_of(
        KEEP_POLICIES,
        None,
        help="how to select the draft's visual tokens (default: the strategy's)",
    )
    keep_ratio: float | None = number(
        "lie in (0, 1]",
        lambda share: 0 < share <= 1,
        None,
        help="share of visual tokens that the draft sees (default 0.1)",
    )
    keep_tokens: int | None = integer(
        1,
        2**31 - 1,
        None,
        help="total prompt tokens for the draft, text included; replaces --keep-ratio",
    )
    hippo_terms: tuple[str, ...] = setting(
        HIPPO_TERMS,
        f"be some of {', '.join(HIPPO_TERMS)}",
        _are_terms,
        choices=HIPPO_TERMS,
        help="terms of HIPPO's score (default: all)",
    )
    prune: str = one_of(
        PRUNINGS, "prompt", help="prune the draft's prompt, or its KV after draft prefill"
    )
    uv_layer: int = integer(1, 2**31 - 1, 20)
    layer_ratio: float = number(
        "lie in (0, 1]",
        lambda share: 0 < share <= 1,
        0.5,
        help="share of the target's layers that layerskip drafts with (default 0.5)",
    )
    ensemble: str = setting(
        "MT*",
        f"be different letters of {CONTEXTS}, with a * after at least two to adapt their weights",
        _is_ensemble,
        help="contexts of tabed's ensemble: MT, MT*, MTCP, MTCP*, …",
    )
    num_tree_nodes: int | None = integer(
        1, 256, None, help="draft a tree of N tokens (default: a chain; sd_tree: 25)"
    )
    draft_host: bool = switch(False, help="draft on the last host, in parallel with verification")
    concurrent_prefill: bool = switch(True)
    draft_timeout: float = number(
        "be a positive number of seconds", lambda seconds: seconds > 0, 60.0
    )
    keep_losing_draft: bool = switch(False, help="keep drafting even if it slows the answer")

    def __post_init__(self):
        super().__post_init__()
        refuse(
            keep_ratio=self.keep_ratio is not None,
            keep_tokens=self.keep_tokens is not None,
            prefills_in_turn=not self.concurrent_prefill,
            no_draft_host=not self.draft_host,
        )
        if self.keep_tokens is None and self.keep_ratio is None:
            object.__setattr__(self, "keep_ratio", DEFAULT_KEEP_RATIO)

    @property
    def most_draft_tokens(self) -> int:
        """Maximum number of tokens per draft."""
        return longest_window(self.num_draft_tokens)

    @property
    def needs_caption(self) -> bool:
        """Whether the draft reads a caption instead of visual tokens."""
        return STRATEGY_FACTS[self.strategy].reads_contexts and "C" in self.ensemble
