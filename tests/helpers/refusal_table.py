"""Table of incompatible options in docs/choosing.md.

``python tests/helpers/refusal_table.py`` writes it there.
"""

from pathlib import Path

from apbv.refusals import REFUSALS

PAGE = Path(__file__).parents[2] / "docs" / "choosing.md"
HEADER = "| option | incompatible with |"
# Names of features on the page.
FEATURES = {
    "anchor_query": "`--anchor-query`",
    "no_anchor": "a method without an anchor",
    "sparse": "`--sparse`",
    "dense_method": "`zigzag_ring` or `ulysses`",
    "other_sparse_method": "a different sparse `--method`",
    "skip_margin": "`--sparse-skip-margin`",
    "sparse_without_margin": "`xattention` or `flexprefill`",
    "reduction": "`--reduce`",
    "kv_reuse": "`--reuse kv`",
    "watching_draft": "a draft that uses the target's prefill scores",
    "handing_over": "`--kv-transfer`",
    "hybrid": "a hybrid model",
    "drafting": "`--speculate`",
    "context": "`--context`",
    "source": "`--video`, `--image` or `--audio`",
    "draft_host": "`--draft-host`",
    "one_host": "one host",
    "one_model": "`std` or `ngram`",
    "self_drafting": "`std`",
    "quantized": "quantized weights",
    "adapter": "`--adapter`",
    "tensor_parallel": "`--tensor-parallel`",
    "learning_draft": "`tabed`",
    "tree": "a draft tree",
    "chain_only": "`tabed` or `ngram`",
    "keep": "`--keep`",
    "no_choice": "`text_only`, `std` or `ngram`",
    "keep_ratio": "`--keep-ratio`",
    "keep_tokens": "`--keep-tokens`",
    "fixed_share": "a strategy that keeps all visual tokens, or none",
    "prune_kv": "`--prune kv`",
    "drops_nothing": "a strategy that keeps all visual tokens or none, or `tabed`",
    "ranking_on_draft_host": "`--draft-host` and `--keep` by the target's scores",
    "caption": "`--ensemble` with a C",
    "no_captioner": "no `--captioner`",
}


def table() -> str:
    """Format the refusals; what is incompatible with the same shares a row."""
    of_feature: dict[str, list[str]] = {}
    for feature, other in REFUSALS:
        of_feature.setdefault(FEATURES[feature], []).append(FEATURES[other])
    rows = [f"| {feature} | {'; '.join(others)} |" for feature, others in of_feature.items()]
    return "\n".join([HEADER, "|---|---|", *rows])


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text[: text.index(HEADER)] + table() + "\n", encoding="utf-8")
