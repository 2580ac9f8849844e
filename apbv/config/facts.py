"""What is known of methods, reductions, drafting strategies and keep policies by their names.

The classes that implement them carry these facts; nothing else compares the names.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MethodFacts:
    """What is known of a prefill method.

    Attributes:
        is_exact: whether it computes full attention, if no blocks are skipped.
        splits: whether the hosts share a prompt; if not, host 0 computes it alone.
        has_anchor: whether its anchor can have the question in it.
        has_passing: whether context blocks pass KV pairs on to other hosts.
        shares_anchor: whether hosts compute parts of the anchor where that is faster; else all of
            it, as its authors do.
        is_sparse: whether it is the selection of blocks of the same name, over the whole prompt.
        takes_sparse: whether it can attend sparsely, to selected blocks.
    """

    is_exact: bool = False
    splits: bool = True
    has_anchor: bool = False
    has_passing: bool = False
    shares_anchor: bool = False
    is_sparse: bool = False
    takes_sparse: bool = True


_SPARSE = MethodFacts(is_exact=True, splits=False, is_sparse=True)
_EXACT_ON_ALL_HOSTS = MethodFacts(is_exact=True, takes_sparse=False)

METHOD_FACTS = {
    "full": MethodFacts(is_exact=True, splits=False),
    "xattention": _SPARSE,
    "spargeattn": _SPARSE,
    "flexprefill": _SPARSE,
    "zigzag_ring": _EXACT_ON_ALL_HOSTS,
    "ulysses": _EXACT_ON_ALL_HOSTS,
    "star": MethodFacts(),
    "apb": MethodFacts(has_anchor=True, has_passing=True),
    "apbv": MethodFacts(has_anchor=True, has_passing=True, shares_anchor=True),
}


@dataclass(frozen=True, kw_only=True)
class ReducerFacts:
    """What is known of a reduction of visual tokens.

    Attributes:
        between_layers: whether it prunes between the language model's layers; else before it.
        ranks_by_asking: whether the attention of tokens that ask ranks, so that these can be
            chosen.
        prunes_decoding: whether it can leave tokens out of decoding steps, too.
    """

    between_layers: bool = False
    ranks_by_asking: bool = False
    prunes_decoding: bool = False


REDUCER_FACTS = {
    "slowfast": ReducerFacts(),
    "fastvid": ReducerFacts(),
    "dycoke": ReducerFacts(prunes_decoding=True),
    "fastv": ReducerFacts(between_layers=True, ranks_by_asking=True),
    "pdrop": ReducerFacts(between_layers=True, ranks_by_asking=True),
    "sparsevlm": ReducerFacts(between_layers=True),
}


@dataclass(frozen=True, kw_only=True)
class KeepFacts:
    """What is known of a policy that chooses the visual tokens which a draft sees.

    Attributes:
        prunes: whether it can leave tokens out.
        ranks_by_prefill: whether it ranks them by scores of the target's prefill.
        ranks_by_change: whether these are changes of hidden states between layers, up to that of
            ``uv_prune``.
        ranks_by_terms: whether it ranks them by the terms of ``hippo``, one of which is of the
            prefill.
        selects_frames: whether it looks at the frames of a video alone, and chooses among these.
    """

    prunes: bool = True
    ranks_by_prefill: bool = False
    ranks_by_change: bool = False
    ranks_by_terms: bool = False
    selects_frames: bool = False

    @property
    def needs_frames(self) -> bool:
        """Whether the prompt must have whole frames of videos."""
        return self.selects_frames or self.ranks_by_terms


# Those that choose from a video's frames alone are those with which HIPPO's Figure 7 compares.
KEEP_FACTS = {
    "specvlm": KeepFacts(ranks_by_prefill=True),
    "attention": KeepFacts(ranks_by_prefill=True),
    "uv_prune": KeepFacts(ranks_by_prefill=True, ranks_by_change=True),
    "hippo": KeepFacts(ranks_by_terms=True),
    "frames": KeepFacts(selects_frames=True),
    "transitions": KeepFacts(selects_frames=True),
    "dycoke": KeepFacts(selects_frames=True),
    "even": KeepFacts(),
    "random": KeepFacts(),
    "full": KeepFacts(prunes=False),
}


@dataclass(frozen=True, kw_only=True)
class StrategyFacts:
    """What is known of a drafting strategy.

    Attributes:
        needs_draft_model: whether a second model drafts.
        runs_target: whether the target drafts itself. Tensor parallelism excludes that: TP ranks of
            a host would not be forced to draft the same tokens.
        prunes_kv: whether ``keep_ratio`` or ``keep_tokens`` limits the visual KV of a target that
            drafts itself.
        needs_verdicts: whether the draft learns from every verification before it drafts on, so
            that it has to take turns with the target.
        reads_contexts: whether the draft reads the prompt in the contexts of ``tabed``.
        reads_outputs: whether the draft reads the target's hidden states behind its last norm, of
            the prompt and of every verified token.
        skips_layers: whether the target drafts with the first layers, by ``layerskip``.
        keep: the default policy that chooses the visual tokens which the draft sees; None if none
            can be chosen.
        drafts_trees: whether its drafter, from :meth:`DraftTask.drafter`, can draft trees.
        num_tree_nodes: the default size of the draft tree; None for a chain.
        reads_text_only: whether the draft model sees only the prompt's text, so that any model with
            the target's tokens will do.
    """

    needs_draft_model: bool = False
    runs_target: bool = False
    prunes_kv: bool = False
    needs_verdicts: bool = False
    reads_contexts: bool = False
    reads_outputs: bool = False
    skips_layers: bool = False
    keep: str | None = None
    drafts_trees: bool = True
    num_tree_nodes: int | None = None
    reads_text_only: bool = False


STRATEGY_FACTS = {
    "vanilla": StrategyFacts(needs_draft_model=True, keep="full"),
    "sd_tree": StrategyFacts(needs_draft_model=True, keep="full", num_tree_nodes=25),
    "specvlm": StrategyFacts(needs_draft_model=True, keep="specvlm"),
    "hippo": StrategyFacts(needs_draft_model=True, keep="hippo"),
    "parallelvlm": StrategyFacts(needs_draft_model=True, keep="uv_prune"),
    "text_only": StrategyFacts(needs_draft_model=True, reads_text_only=True),
    "tabed": StrategyFacts(
        needs_draft_model=True,
        needs_verdicts=True,
        reads_contexts=True,
        keep="full",
        drafts_trees=False,
    ),
    "std": StrategyFacts(runs_target=True, prunes_kv=True),
    "streaming": StrategyFacts(runs_target=True, prunes_kv=True),
    "layerskip": StrategyFacts(runs_target=True, skips_layers=True),
    "mtp": StrategyFacts(runs_target=True, reads_outputs=True, drafts_trees=False),
    "ngram": StrategyFacts(drafts_trees=False),
}
