"""Lists the operators at the sizes that a prefill and a decoding step give them."""

from dataclasses import replace

from .attention import block, block_with_anchor, causal, query, verify
from .case import Case, Sizes
from .selection import importance, merge, merge_into_place, similarity, spatial, temporal, topk
from .sparse import antidiagonals, listed_blocks, means


def cases(sizes: Sizes, tokens: list[int]) -> list[Case]:
    """Build all cases: attention and the choice of keys for every context length, the others once."""
    found: list[Case] = []
    for length in tokens:
        s = replace(sizes, tokens=length)
        found += [block(s), block_with_anchor(s), causal(s), query(s)]
        found += [verify(s, queries) for queries in (1, 4, 16)]
        found += [verify(s, 4, kept=True), verify(s, 16, tree=True)]
        found += [importance(s, reduce) for reduce in ("peak", "softmax", "dot")]
        found += [topk(s), merge_into_place(s)]
        found += [listed_blocks(s, share) for share in (0.05, 0.1, 0.2, 0.5)]
        found += [*(antidiagonals(s, stride) for stride in (8, 16)), means(s)]
    return [*found, merge(sizes), temporal(sizes), spatial(sizes), similarity(sizes)]
