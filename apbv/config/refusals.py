"""Incompatible features, and the reasons.

It is one table for the library, the command line and the server.

Configs, options and requests pass their features to :func:`refuse`. A feature without conflicts
needs no entry.
"""

from typing import NamedTuple

from ..errors import InvalidConfigError


class Conflict(NamedTuple):
    """Two features that exclude each other.

    Attributes:
        first, second: their names.
        reason: why; braces stand for the value of a feature.
    """

    first: str
    second: str
    reason: str


CONFLICTS = [
    Conflict(
        "anchor_query",
        "no_anchor",
        "anchor_query needs the anchor of apbv or apb: not {no_anchor}",
    ),
    Conflict(
        "passing_len",
        "passing_budget",
        "passing_len and passing_budget both set how many KV pairs a block passes on: give one of "
        "them",
    ),
    Conflict(
        "early_passing",
        "passing_weights",
        "early_passing_len and passing_weights both set the passing lengths of the first layers: "
        "give one of them",
    ),
    Conflict(
        "sparse",
        "dense_method",
        "sparse attention needs full, apbv, apb or star: {dense_method} does not have it",
    ),
    Conflict(
        "sparse",
        "other_sparse_method",
        "{other_sparse_method} cannot select blocks as {sparse}",
    ),
    Conflict(
        "kv_reuse",
        "reduction",
        "{reduction} selects visual tokens anew for every prompt: use reuse='exact'",
    ),
    Conflict(
        "layer_reduction",
        "sparse",
        "{layer_reduction} prunes between layers by their whole attention: {sparse} skips some",
    ),
    Conflict(
        "layer_reduction",
        "several_hosts",
        "{layer_reduction} prunes between layers, on one host with full attention, as its paper "
        "does: on several choose one before the language model, such as dycoke",
    ),
    Conflict(
        "layer_reduction",
        "drafting",
        "{drafting} drafts for layers that hold all tokens, and {layer_reduction} prunes between "
        "layers: choose a reduction before the language model",
    ),
    Conflict(
        "layer_reduction",
        "hybrid",
        "{hybrid} has linear attention, whose states {layer_reduction} cannot prune: choose a "
        "reduction before the language model",
    ),
    Conflict(
        "reduce_layer",
        "early_reduction",
        "{early_reduction} prunes before the language model: it has no layer",
    ),
    Conflict(
        "reduce_asked_by",
        "other_ranking",
        "only fastv and pdrop rank by the attention of one token or of the question: "
        "{other_ranking} does not",
    ),
    Conflict(
        "decode_pruning",
        "whole_decoding",
        "only dycoke leaves tokens out of decoding steps (decode_ratio): {whole_decoding} does not",
    ),
    Conflict(
        "decode_pruning",
        "sharded_kv",
        "decode_ratio chooses among the KV of one host: it needs kv='gathered'",
    ),
    Conflict(
        "decode_pruning",
        "drafting",
        "{drafting} verifies several tokens in a step, and decode_ratio chooses KV for one: choose "
        "one of them",
    ),
    Conflict(
        "decode_pruning",
        "tensor_parallel",
        "decode_ratio ranks by the attention of all heads, of which each process has a share",
    ),
    Conflict(
        "decode_pruning",
        "hybrid",
        "{hybrid} has linear attention, whose states hold what decode_ratio would leave out",
    ),
    Conflict(
        "kv_reuse",
        "watching_draft",
        "{watching_draft} watches the prefill of the whole prompt: use reuse='exact'",
    ),
    Conflict(
        "rope_by_length",
        "kv_reuse",
        "the rotary frequencies of keys depend on the length of the prompt ({rope_by_length}): "
        "use reuse='exact'",
    ),
    Conflict(
        "rope_by_length",
        "offering",
        "{offering} transfers keys to vLLM, whose rotary frequencies ({rope_by_length}) do not "
        "depend on the length of the prompt",
    ),
    Conflict(
        "hybrid",
        "tree",
        "the linear attention of {hybrid} models reads one token after the other, and no branches "
        "of a tree: draft a chain, as vanilla does",
    ),
    Conflict(
        "hybrid",
        "learning_draft",
        "{learning_draft} pads the contexts of its draft to one length, and the states of {hybrid} "
        "models would read the padding",
    ),
    Conflict(
        "continuing",
        "last_token_lost",
        "{continuing} runs the prompt's last token again, and this prefill, which split the "
        "question over the hosts, has kept no state of linear attention from before it: use "
        "to_dynamic_cache(), and append a token chosen from the logits",
    ),
    Conflict(
        "hybrid",
        "offering",
        "{offering} transfers keys and values, but no states of linear attention, which {hybrid} "
        "models continue from",
    ),
    Conflict(
        "handing_over",
        "reduction",
        "{handing_over} transfers whole prompts, but {reduction} prunes them",
    ),
    Conflict(
        "context",
        "source",
        "a prompt has either a text, or videos, images and audio, but {source} and {context} "
        "were given",
    ),
    Conflict(
        "draft_host",
        "one_model",
        "{one_model} drafts without a second model, so a draft host would have no work",
    ),
    Conflict(
        "draft_host",
        "tensor_parallel",
        "a draft host is not supported with tensor parallelism: TP rank 0 of host 0 drafts",
    ),
    Conflict(
        "quantized",
        "tensor_parallel",
        "quantized weights are not split across the processes of a host: use more hosts",
    ),
    Conflict(
        "quantized",
        "adapter",
        "merging {adapter} would round quantized weights again: merge it into the model that was "
        "quantized",
    ),
    Conflict(
        "self_drafting",
        "tensor_parallel",
        "{self_drafting}, with which the target drafts itself, is not supported with tensor "
        "parallelism: TP rank 0 of host 0 drafts",
    ),
    Conflict(
        "draft_host",
        "learning_draft",
        "{learning_draft} learns from every verification before it continues drafting: not on a "
        "draft host",
    ),
    Conflict(
        "draft_host",
        "tree",
        "a draft host drafts a chain of tokens: it cannot draft a tree",
    ),
    Conflict(
        "tree",
        "chain_only",
        "{chain_only} drafts a chain of tokens: it cannot draft a tree",
    ),
    Conflict(
        "keep",
        "no_choice",
        "{no_choice} does not select visual tokens: keep does not apply",
    ),
    Conflict(
        "keep_ratio",
        "keep_tokens",
        "keep_ratio and keep_tokens both set the number of visual tokens of a draft: give one of "
        "them",
    ),
    Conflict(
        "keep_tokens",
        "fixed_share",
        "a draft with {fixed_share} always sees the same share of the prompt: keep_tokens does "
        "not apply",
    ),
    Conflict(
        "hippo",
        "not_by_hippo",
        "{not_by_hippo} does not rank visual tokens by HIPPO's scores: their terms do not apply",
    ),
    Conflict(
        "uv_prune",
        "not_by_uv_prune",
        "{not_by_uv_prune} does not select visual tokens as UV-Prune: its layer does not apply",
    ),
    Conflict(
        "layerskip",
        "all_layers",
        "{all_layers} runs all layers of its draft: layer_ratio does not apply",
    ),
    Conflict(
        "tabed",
        "one_context",
        "{one_context} drafts from one prompt: the ensemble does not apply",
    ),
    Conflict(
        "prune_kv",
        "drops_nothing",
        "{drops_nothing} prunes no KV after draft prefill: prune='kv' does not apply",
    ),
    Conflict(
        "ranking_on_draft_host",
        "reduction",
        "{ranking_on_draft_host} ranks by the target's prefill, which {reduction} prunes: on a "
        "draft host choose another, such as keep='even'",
    ),
    Conflict(
        "prefills_in_turn",
        "no_draft_host",
        "without a draft host the draft always prefills after the target: "
        "concurrent_prefill=False does not apply",
    ),
    Conflict(
        "draft_host",
        "one_host",
        "a draft host needs at least two hosts",
    ),
    Conflict(
        "caption",
        "no_captioner",
        "the ensemble {caption} drafts from a caption: it needs a captioner",
    ),
]
_FEATURES = frozenset(name for conflict in CONFLICTS for name in conflict[:2])


def refuse(**features: str | bool | None) -> None:
    """Reject incompatible features.

    Args:
        features: the requested features by name: the value to show in the reason, or true; False or
            None if a feature is not requested.

    Raises:
        InvalidConfigError: two features are incompatible; the message says why.
        TypeError: a name is not in the table: a mistake of the caller.
    """
    unknown = features.keys() - _FEATURES
    if unknown:
        raise TypeError(f"unknown features: {', '.join(sorted(unknown))}")
    for conflict in CONFLICTS:
        if features.get(conflict.first) and features.get(conflict.second):
            raise InvalidConfigError(conflict.reason.format(**features))
