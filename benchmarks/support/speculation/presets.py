"""Which ways to decode the papers' tables compare, at a share of visual tokens kept.

Where a paper's method is a combination of ours, the label is the paper's name for it.
"""

from collections.abc import Callable

from apbv import SpeculativeConfig

Ways = list[tuple[str, SpeculativeConfig]]


def _vanilla(**settings) -> SpeculativeConfig:
    return SpeculativeConfig(strategy="vanilla", **settings)


def _beside(strategy: str, keep_ratio: float, **settings) -> SpeculativeConfig:
    """Configure drafting on a host of its own for as long as the target runs."""
    return SpeculativeConfig(
        strategy=strategy, keep_ratio=keep_ratio, num_draft_tokens="auto", draft_host=True, **settings
    )


def _hippo1(keep_ratio: float) -> Ways:
    return [
        ("Vanilla SD", _vanilla()),
        ("SD-tree", SpeculativeConfig(strategy="sd_tree")),
        ("SpecVLM", SpeculativeConfig(strategy="specvlm", keep_ratio=keep_ratio)),
        ("HIPPO", _beside("hippo", keep_ratio)),
        ("HIPPO, pruned KV", _beside("hippo", keep_ratio, prune="kv")),
    ]


def _hippo2(keep_ratio: float) -> Ways:
    return _hippo1(keep_ratio)[-2:]


def _hippo3(keep_ratio: float) -> Ways:
    """Return HIPPO's Table 3 without PEARL-video, which reads the two prompts one after the other."""
    return [
        ("PEARL w/ Syn-Prefill", _beside("vanilla", 1.0)),
        ("PEARL-SpecVLM", _beside("specvlm", keep_ratio)),
        *_hippo2(keep_ratio),
    ]


def _hippo6(keep_ratio: float) -> Ways:
    """Return the ablations of HIPPO's Figures 6 and 15 to 17. Without attention there is nothing to wait for."""
    return [
        ("HIPPO", _beside("hippo", keep_ratio)),
        ("w/o attn", _beside("hippo", keep_ratio, hippo_terms=("time", "space"))),
        ("w/o temp", _beside("hippo", keep_ratio, hippo_terms=("attention", "space"))),
        ("w/o spa", _beside("hippo", keep_ratio, hippo_terms=("attention", "time"))),
        ("w/o vpsd", SpeculativeConfig(strategy="hippo", keep_ratio=keep_ratio)),
    ]


def _parallelvlm1(keep_ratio: float) -> Ways:
    return [
        ("Vanilla SD", _vanilla()),
        ("OnSD", SpeculativeConfig(strategy="text_only")),
        ("SD-Tree", SpeculativeConfig(strategy="sd_tree")),
        ("SpecVLM", SpeculativeConfig(strategy="specvlm", keep_ratio=keep_ratio)),
        ("STD", SpeculativeConfig(strategy="std", keep_ratio=keep_ratio, num_draft_tokens=9)),
        ("ParallelVLM", _beside("parallelvlm", keep_ratio)),
    ]


def _parallelvlm3(keep_ratio: float) -> Ways:
    """Return the ways of T_p / T_q by the share of tokens pruned."""
    pruned = (0.0, 0.5, 0.9)
    return [(f"α = {a}", SpeculativeConfig(strategy="parallelvlm", keep_ratio=1 - a)) for a in pruned]


def _parallelvlm7(keep_ratio: float) -> Ways:
    pruned = (0.9, 0.95, 0.99)
    ways = [(f"α = {a:.2f}", _beside("parallelvlm", 1 - a)) for a in pruned]
    return [*ways, ("α = 1.00", _beside("text_only", 1.0))]


def _std1(keep_ratio: float) -> Ways:
    """Return STD's Table 1, always with its γ = 9 and K + m_t = 1024, so that a prompt must be longer."""
    amounts = {"layerskip": None, "streaming": 1024, "std": 1024, "std_apbv": None}
    labels = ("LayerSkip", "Streaming", "STD", "STD by APB-V")
    return [
        (label, SpeculativeConfig(strategy=strategy, keep_tokens=amount, num_draft_tokens=9))
        for label, (strategy, amount) in zip(labels, amounts.items(), strict=True)
    ]


def _tabed1(keep_ratio: float) -> Ways:
    kinds = ("T", "MT", "MT*")
    return [("M", _vanilla()), *((kind, SpeculativeConfig(strategy="tabed", ensemble=kind)) for kind in kinds)]


def _tabed2(keep_ratio: float) -> Ways:
    kinds = ("P", "C", "MTCP", "MTCP*")
    return _tabed1(keep_ratio)[:2] + [(k, SpeculativeConfig(strategy="tabed", ensemble=k)) for k in kinds]


PRESETS: dict[str, Callable[[float], Ways]] = {
    "hippo1": _hippo1,
    "hippo2": _hippo2,
    "hippo3": _hippo3,
    "hippo6": _hippo6,
    "parallelvlm1": _parallelvlm1,
    "parallelvlm3": _parallelvlm3,
    "parallelvlm7": _parallelvlm7,
    "std1": _std1,
    "tabed1": _tabed1,
    "tabed2": _tabed2,
}
