"""Settings of single drafting strategies, and of single policies that choose visual tokens."""

from dataclasses import dataclass
from typing import Any

from ..errors import InvalidConfigError
from .checks import Checked, integer, number, setting
from .names import CONTEXTS, HIPPO_TERMS


def _are_terms(terms: Any) -> bool:
    if not isinstance(terms, tuple):
        return False
    return bool(terms) and all(term in HIPPO_TERMS for term in terms)


def _is_ensemble(letters: Any) -> bool:
    if not isinstance(letters, str):
        return False
    is_adaptive = letters.endswith("*")
    contexts = letters.removesuffix("*")
    are_known = set(contexts) <= set(CONTEXTS)
    are_different = len(set(contexts)) == len(contexts)
    # Weights can be adapted to one another only.
    fewest = 2 if is_adaptive else 1
    return are_known and are_different and len(contexts) >= fewest


@dataclass(frozen=True, kw_only=True)
class HippoConfig(Checked, name="hippo "):
    """Settings of the policy ``"hippo"``, HIPPO's choice of the visual tokens that a draft sees.

    Attributes:
        terms: terms of HIPPO's scores (by default all): attention, change over time, variety in
            space. They are those of Eq. 7; the paper's ablations leave one out.

    Raises:
        InvalidConfigError: there is no term, or an unknown one.
    """

    terms: tuple[str, ...] = setting(
        HIPPO_TERMS, f"be some of {', '.join(HIPPO_TERMS)}", _are_terms, choices=HIPPO_TERMS
    )


@dataclass(frozen=True, kw_only=True)
class UVPruneConfig(Checked, name="uv_prune "):
    """Settings of the policy ``"uv_prune"``, ParallelVLM's choice of visual tokens for a draft.

    Attributes:
        layer: the last layer of the target that it observes, at most the target's last but one; 20
            in the paper.

    Raises:
        InvalidConfigError: the layer is not a positive integer.
    """

    layer: int = integer(1, 2**31 - 1, 20)


@dataclass(frozen=True, kw_only=True)
class LayerSkipConfig(Checked, name="layerskip "):
    """Settings of the strategy ``"layerskip"``.

    Attributes:
        layer_ratio: share of the target's layers with which ``"layerskip"`` drafts, the first ones.
            Half of them by default, as nobody trained them to be left early.

    Raises:
        InvalidConfigError: the share is out of range.
    """

    layer_ratio: float = number("lie in (0, 1]", lambda share: 0 < share <= 1, 0.5)


@dataclass(frozen=True, kw_only=True)
class TabedConfig(Checked, name="tabed "):
    """Settings of the strategy ``"tabed"``.

    Attributes:
        ensemble: contexts from which ``"tabed"`` drafts: MT, MT*, MTCP, MTCP*, or others of these
            letters. M is the prompt with the visual tokens that ``keep`` preserves, T with line
            breaks instead, C with a caption, which needs a captioner, and P with pooled ones. With
            an asterisk they are weighted by their divergence from the target in the answer so far,
            instead of equally. The paper's are MT, MT*, MTCP, MTCP* and each letter alone.
        window: h, the number of verified tokens, the latest, from which adapted weights are learnt.
            1, 4 and 16 in Table 3 (Appendix B.1). None: all of the answer, as in the paper's other
            tables.

    Raises:
        InvalidConfigError: a letter is unknown or occurs twice, weights of one context are to be
            adapted, or weights that are not adapted have a window.
    """

    ensemble: str = setting(
        "MT*",
        f"be different letters of {CONTEXTS}, with a * after at least two to adapt their weights",
        _is_ensemble,
    )
    window: int | None = integer(1, 2**31 - 1, None)

    def __post_init__(self):
        super().__post_init__()
        if self.window is not None and not self.adapts_weights:
            raise InvalidConfigError(
                f"tabed window is for adapted weights, which {self.ensemble} does not have: give "
                f"{self.ensemble}*"
            )

    @property
    def contexts(self) -> str:
        """The letters of the contexts."""
        return self.ensemble.removesuffix("*")

    @property
    def adapts_weights(self) -> bool:
        """Whether the contexts' weights follow their divergence from the target."""
        return self.ensemble.endswith("*")
