"""Which ways to draft the papers' tables compare, by the papers' names; a method may be a combination of ours."""

from apbv import SpeculativeConfig
from apbv.speculate import prunes

# On a host of its own, for as long as the target runs.
_BESIDE = {"num_draft_tokens": "auto", "draft_host": True}
_VANILLA, _TREE, _SPECVLM = ({"strategy": name} for name in ("vanilla", "sd_tree", "specvlm"))
_HIPPO, _PARALLELVLM = ({"strategy": name, **_BESIDE} for name in ("hippo", "parallelvlm"))
_STD = {"strategy": "std", "num_draft_tokens": 9}


def _tabed(*kinds: str) -> dict[str, dict]:
    return {kind: {"strategy": "tabed", "ensemble": kind} for kind in kinds}


PRESETS: dict[str, dict[str, dict]] = {
    "hippo1": {
        "Vanilla SD": _VANILLA,
        "SD-tree": _TREE,
        "SpecVLM": _SPECVLM,
        "HIPPO": _HIPPO,
        "HIPPO, pruned KV": {**_HIPPO, "prune": "kv"},
    },
    # Without PEARL-video, which reads the two prompts one after the other.
    "hippo3": {
        "PEARL w/ Syn-Prefill": {**_VANILLA, **_BESIDE},
        "PEARL-SpecVLM": {**_SPECVLM, **_BESIDE},
        "HIPPO": _HIPPO,
        "HIPPO, pruned KV": {**_HIPPO, "prune": "kv"},
    },
    # The ablations of HIPPO's Figures 6 and 15 to 17. Without attention there is nothing to wait for.
    "hippo6": {
        "HIPPO": _HIPPO,
        "w/o attn": {**_HIPPO, "hippo_terms": ("time", "space")},
        "w/o temp": {**_HIPPO, "hippo_terms": ("attention", "space")},
        "w/o spa": {**_HIPPO, "hippo_terms": ("attention", "time")},
        "w/o vpsd": {"strategy": "hippo"},
    },
    "parallelvlm1": {
        "Vanilla SD": _VANILLA,
        "OnSD": {"strategy": "text_only"},
        "SD-Tree": _TREE,
        "SpecVLM": _SPECVLM,
        "STD": _STD,
        "ParallelVLM": _PARALLELVLM,
    },
    # Always with STD's γ = 9 and K + m_t = 1024, so that a prompt must be longer.
    "std1": {
        "Vanilla SD": _VANILLA,
        "STD": {**_STD, "keep_tokens": 1024},
    },
    "tabed1": {"M": _VANILLA, **_tabed("T", "MT", "MT*")},
    "tabed2": {"M": _VANILLA, **_tabed("T", "P", "C", "MTCP", "MTCP*")},
}


def configs_of(preset: str, keep_ratio: float) -> dict[str, SpeculativeConfig]:
    """Return a preset's ways by label, at a share of visual tokens kept where they do not have their own."""
    found = {}
    for label, settings in PRESETS[preset].items():
        amount = {"keep_ratio": keep_ratio} if prunes(SpeculativeConfig(strategy=settings["strategy"])) else {}
        amount = {} if "keep_tokens" in settings else amount
        found[label] = SpeculativeConfig(**{**amount, **settings})
    return found
