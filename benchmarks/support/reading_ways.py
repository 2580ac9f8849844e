"""The ways to read a video whose answers are compared, by the tables that show them."""

from dataclasses import replace
from itertools import product

from apbv import PrefillConfig, ReduceConfig, SparseConfig, SpeculativeConfig
from apbv.config import IMPORTANCE_NAMES, METHOD_NAMES, REDUCER_NAMES, SPARSE_NAMES

from .exams import Way

PRESETS = ("methods", "systems", "captions", "importance", "table3", "table9", "anchor_query", "demo")
_SPARSE_BLOCK = 32  # queries; the papers' 128 are a large part of such short prompts


def ways_of(preset: str, num_visual: int) -> dict[str, Way]:
    """Return a preset's ways by label; ``num_visual`` is a prompt's number of visual tokens.

    ``table3`` and ``table9`` are ablations of the APB-V paper: without parts, and by the anchor's length.
    ``captions`` is ``systems`` for a pretrained decoder, which needs longer anchors and passing blocks.
    """
    parts = (16, 16) if preset == "captions" else (64, 128)  # 1/64 and 1/128 are the paper's l_a and l_p
    anchor, passing = (-(-num_visual // part) for part in parts)
    apbv = PrefillConfig(anchor_len=anchor, passing_len=passing)
    sparse = {name: SparseConfig(method=name, block_size=_SPARSE_BLOCK) for name in SPARSE_NAMES}
    methods = {name: PrefillConfig(method=name) for name in METHOD_NAMES}
    for name, blocks in sparse.items():
        methods[name] = replace(methods[name], sparse=blocks, on_single_host=True)
    methods |= {"apb": PrefillConfig(method="apb", anchor_len=anchor, passing_len=2 * passing), "apbv": apbv}
    methods["apbv, dot"] = replace(apbv, importance="dot")
    methods["apbv, as its authors"] = replace(apbv, importance="dot", anchor_query=True)
    full = methods["full"]
    without = {"A": {"anchor_len": 0}, "P": {"passing_len": 0}, "A and P": {"anchor_len": 0, "passing_len": 0}}
    without = {f"w/o {parts}": replace(apbv, **lengths) for parts, lengths in without.items()}
    if preset == "methods":
        ways = methods | {"apbv, default lengths": PrefillConfig()}
    elif preset in ("systems", "captions"):
        ways = {name: config for name, config in methods.items() if name not in ("zigzag_ring", "ulysses")}
        ways |= {f"apbv, {name}": replace(apbv, sparse=blocks) for name, blocks in sparse.items()}
        for name, ratio in product(REDUCER_NAMES, (0.5, 0.25)):
            ways[f"{name}, {ratio:g}"] = replace(full, reduce=ReduceConfig(method=name, ratio=ratio))
        ways |= without if preset == "captions" else {}
    elif preset == "importance":
        asked = product(IMPORTANCE_NAMES, (1, 2, 4, 8, 16, 32))
        ways = {f"{name}, l_p = {n}": replace(apbv, importance=name, passing_len=n) for name, n in asked}
    elif preset == "table3":
        ways = {"full": full, "apbv": apbv, **without}
    elif preset == "table9":
        ways = {f"l_a = {length}": replace(apbv, anchor_len=length) for length in (0, 4, 8, 16, 32, 64, 128)}
    elif preset == "anchor_query":
        plain = {name: methods[name] for name in ("apb", "apbv")}
        plain |= {f"{name}, l_p = 0": replace(config, passing_len=0) for name, config in plain.items()}
        asked = {f"{name}, question in A": replace(config, anchor_query=True) for name, config in plain.items()}
        ways = {"full": full, **plain, **asked}
    else:  # demo: the tables of the demo model's README
        base = PrefillConfig(importance="softmax")
        ways = {f"l_p = {length}": replace(base, passing_len=length) for length in (0, 8, 16, 32, 64, 128)}
        ways = {"full": full, **ways}
    found = {label: Way(config) for label, config in ways.items()}
    if preset == "systems":  # the demo has a draft
        draft = SpeculativeConfig(strategy="hippo", keep_losing_draft=True)
        found[f"full, draft by hippo, {draft.keep_ratio:g}"] = Way(full, draft)
    if preset in ("systems", "captions"):
        for ratio, keeps in product(("0.5", "0.25"), ("random", "needles kept")):
            found[f"dycoke, {keeps}, {ratio}"] = replace(found[f"dycoke, {ratio}"], keeps=keeps)
    return found
