"""Lists the operators at the sizes that a prefill and a decoding step give them."""

from dataclasses import dataclass, replace

from .attention import block, block_with_anchor, causal, query, verify
from .case import Case, Sizes
from .selection import importance, merge, merge_into_place, topk, visual_scores
from .sparse import antidiagonals, listed_blocks, means


@dataclass(frozen=True)
class Preset:
    """The sizes of the cases, and of the copy and the square matrix product that show the ceilings."""

    sizes: Sizes
    tokens: list[int]
    copy_bytes: int
    matrix_side: int


PRESETS = {
    "quick": Preset(Sizes(600, 2, 4, 2, 32, 9, 3, 7, 11, 48), [600], 2**24, 256),
    "cpu": Preset(Sizes(8192, 2, 8, 2, 64, 32, 16, 12, 21, 512), [8192], 2**28, 2048),
    # The heads and the width of Qwen2.5-VL-7B, and 64 frames of 720p.
    "h200": Preset(Sizes(131072, 8, 28, 4, 128, 64, 64, 26, 46, 3584), [8192, 32768, 131072], 2**30, 8192),
}


def cases(sizes: Sizes, tokens: list[int]) -> list[Case]:
    """Build all cases: attention and the choice of keys for every context length, the others once."""
    found: list[Case] = []
    for length in tokens:
        s = replace(sizes, tokens=length)
        found += [block(s), block_with_anchor(s), causal(s), query(s)]
        found += [*(verify(s, queries) for queries in (1, 4, 16)), verify(s, 16, tree=True)]
        found += [importance(s, reduce) for reduce in ("peak", "softmax", "dot")]
        found += [topk(s), merge_into_place(s)]
        found += [listed_blocks(s, share) for share in (0.05, 0.1, 0.2, 0.5)]
        found += [*(antidiagonals(s, stride) for stride in (8, 16)), means(s)]
    return [*found, merge(sizes), *visual_scores(sizes)]
