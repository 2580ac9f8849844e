"""Incompatible features and the reasons: one table for the library, the command line and the server.

Configs, options and requests pass their features to :func:`refuse`. A feature without conflicts needs no entry.
"""

# The reason why two features are incompatible; braces stand for the given value.
REFUSALS = {
    ("anchor_query", "no_anchor"): (
        "anchor_query puts the question into the anchor of apbv or apb: not {no_anchor}"
    ),
    ("anchor_query", "late_reduction"): (
        "anchor_query copies the prompt's start into every anchor: not together with {late_reduction}, which "
        "leaves tokens out between layers"
    ),
    ("sparse", "dense_method"): "sparse attention is for full, apbv, apb and star: {dense_method} has none",
    ("sparse", "other_sparse_method"): "{other_sparse_method} cannot choose blocks as {sparse}",
    ("skip_margin", "sparse_without_margin"): (
        "values are skipped by spargeattn: {sparse_without_margin} has no skip margin"
    ),
    ("reduce_layer", "early_reduction"): (
        "{early_reduction} leaves tokens out before the language model: it has no layer"
    ),
    ("reduce_asked_by", "otherwise_ranked"): (
        "fastv and pdrop rank tokens by the attention of one token or of the question: {otherwise_ranked} does not"
    ),
    ("kv_reuse", "reduction"): (
        "{reduction} chooses visual tokens anew for every prompt: it works with reuse='exact' only"
    ),
    ("kv_reuse", "watching_draft"): (
        "{watching_draft} watches the prefill of the whole prompt: it works with reuse='exact' only"
    ),
    ("handing_over", "reduction"): "{handing_over} hands whole prompts over, and {reduction} shortens them",
    ("context", "source"): (
        "a prompt is about a text, or about videos, images and audio, but {source} and {context} were given"
    ),
    ("draft_host", "one_model"): (
        "{one_model} drafts without a second model: there is nothing for a draft host to do"
    ),
    ("draft_host", "tensor_parallel"): (
        "a draft host is not supported with tensor parallelism: the first member of host 0 drafts"
    ),
    ("self_drafting", "tensor_parallel"): (
        "{self_drafting}, with which the target drafts itself, is not supported with tensor parallelism: the "
        "first member of host 0 drafts"
    ),
    ("draft_host", "learning_draft"): (
        "{learning_draft} learns from every verification before it drafts on: not on a draft host"
    ),
    ("draft_host", "tree"): "a draft host drafts a chain of tokens: it cannot draft a tree",
    ("tree", "chain_only"): "{chain_only} drafts a chain of tokens: it cannot draft a tree",
    ("keep", "no_choice"): "{no_choice} does not choose among visual tokens: keep does not apply",
    ("keep_ratio", "keep_tokens"): (
        "keep_ratio and keep_tokens both say how many visual tokens a draft sees: give one of them"
    ),
    ("keep_tokens", "fixed_share"): (
        "a draft by {fixed_share} always sees the same share of the prompt: keep_tokens does not apply"
    ),
    ("prune_kv", "drops_nothing"): (
        "{drops_nothing} drops no KV of what its draft has read: prune='kv' does not apply"
    ),
    ("passed_kv", "nothing_passed"): (
        "{passed_kv} drafts on KV that a prefill passes on between hosts; this one passes nothing on: it needs "
        "method apbv or apb, 2 hosts at least, and a passing_len"
    ),
    ("self_drafting", "late_reduction"): (
        "{self_drafting} drafts on the target's KV, which has other tokens in every layer where {late_reduction} "
        "leaves some out between layers"
    ),
    ("ranking", "late_reduction"): (
        "{ranking} goes by what the target's prefill sees in all layers, and {late_reduction} leaves tokens out "
        "between layers: choose another, such as keep='even'"
    ),
    ("ranking_on_draft_host", "reduction"): (
        "{ranking_on_draft_host} goes by what the target's prefill sees, and {reduction} leaves some of that out: "
        "on a draft host choose another, such as keep='even'"
    ),
    ("draft_host", "one_host"): "a draft host drafts for others: it needs at least two hosts",
    ("caption", "no_captioner"): "the ensemble {caption} drafts from a caption: it needs a captioner",
}


def refuse(**asked: str | bool | None) -> None:
    """Reject incompatible features.

    Args:
        asked: the requested features by name: the value to show in the reason, or true; False or None if a feature
            is not requested.

    Raises:
        ValueError: two features are incompatible; the message says why.
    """
    for (feature, other), reason in REFUSALS.items():
        if asked.get(feature) and asked.get(other):
            raise ValueError(reason.format(**asked))
