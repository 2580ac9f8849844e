"""Settings for speculative decoding."""

from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from .checks import Checked, instance_of, integer, number, one_of, setting, switch
from .drafts import HippoConfig, LayerSkipConfig, TabedConfig, UVPruneConfig
from .facts import KEEP_FACTS, STRATEGY_FACTS
from .names import (
    DEFAULT_KEEP_RATIO,
    KEEP_POLICIES,
    MOST_AUTO_DRAFT_TOKENS,
    PRUNINGS,
    STRATEGY_NAMES,
)
from .refusals import refuse
from .regrouped import Moved, moved_under_its_name, regrouped

OwnSettings = TypeVar("OwnSettings", HippoConfig, UVPruneConfig, LayerSkipConfig, TabedConfig)


def longest_window(num_draft_tokens: int | str) -> int:
    """Return the maximum number of tokens per draft: γ, or the limit of ``"auto"``."""
    return MOST_AUTO_DRAFT_TOKENS if isinstance(num_draft_tokens, str) else num_draft_tokens


@dataclass(frozen=True, kw_only=True)
class SpeculativeAblationConfig(Checked):
    """Parts of speculative decoding that benchmarks and tests switch off.

    Attributes:
        keep_losing_draft: keep using a draft that costs more time than it saves. Without it, the
            rest of an answer is decoded without a draft that has cost eight forward passes of the
            target more than it has saved, where one round counts as four at most. To measure that,
            and for ``num_draft_tokens="auto"``, the target now and then runs a forward pass without
            drafted tokens.
        concurrent_prefill: with a draft host: whether it prefills while the target does (HIPPO,
            Section 5.2), or only when the target's prefill has ended, as PEARL does (PEARL-video in
            HIPPO's Table 3). Without a draft host the draft always prefills after the target.

    Raises:
        InvalidConfigError: a switch is not true or false.
    """

    keep_losing_draft: bool = switch(False)
    concurrent_prefill: bool = switch(True)


@regrouped(
    *moved_under_its_name("ablation", SpeculativeAblationConfig),
    Moved("hippo_terms", "hippo", HippoConfig, "terms"),
    Moved("uv_layer", "uv_prune", UVPruneConfig, "layer"),
    Moved("layer_ratio", "layerskip", LayerSkipConfig, "layer_ratio"),
    Moved("ensemble", "tabed", TabedConfig, "ensemble"),
)
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(Checked):
    """Settings for speculative decoding; the verified output is always the target's own.

    Attributes:
        strategy: a name in :data:`apbv.speculate.STRATEGIES`. A second model drafts in
            ``"vanilla"`` (on all visual tokens), ``"sd_tree"`` (the same, a tree), ``"specvlm"``,
            ``"hippo"`` and ``"parallelvlm"`` (on some, by ``keep``), ``"text_only"`` and
            ``"tabed"`` (reading the prompt in several ways, see ``tabed``); the target drafts
            itself in ``"std"`` (on the most attended visual KV), ``"streaming"`` (on the first
            tokens and the latest visual KV), ``"layerskip"`` (by its first layers) and ``"mtp"``
            (by the multi-token prediction layer of its checkpoint); ``"ngram"`` looks up what
            followed the last tokens before.
        draft_model: a directory or hub id of the draft model; ``"demo"`` is the bundled one. It is
            of the target's family and tokenizer; for ``"text_only"``, but not on a draft host, it
            may be a text-only model with the target's tokens.
        num_draft_tokens: tokens drafted per round, γ, or ``"auto"``. ``"auto"``: at most 16, chosen
            to maximise the expected speedup from the costs and the acceptance rate so far (see
            :func:`apbv.speculate.loops.pace.best_windows`). With ``"auto"`` a draft host drafts
            until the target's forward pass ends, where ParallelVLM's Theorem 6 is largest.
        keep: how the visual tokens are selected that a pruned draft sees. By the question's
            attention to them ``"specvlm"`` (SpecVLM's: the fewest that hold 40 % of it, and others
            evenly spaced) and ``"attention"`` (the highest); ``"uv_prune"`` (ParallelVLM's: what
            comes closer to the text in the target's first layers), ``"hippo"`` (see ``hippo``); by
            the frames alone, with which HIPPO's Figure 7 compares, ``"frames"``, ``"transitions"``
            and ``"dycoke"`` (see :mod:`apbv.speculate.strategies.frame_selection`); ``"even"``
            (evenly spaced), ``"random"``, ``"full"``. None: as the strategy's paper does.
        keep_ratio: share of visual tokens that a pruned draft sees. None: 0.1, where
            ``keep_tokens`` is not given.
        keep_tokens: number of prompt tokens that a pruned draft sees, instead of ``keep_ratio``.
            All text tokens, and visual ones for the rest, at least one. With ``"std"`` that is the
            paper's K + m_t, of each layer and KV head; 1024 there.
        prune: what is pruned for a draft: its prompt, or its KV once it has read all of it.
            ``"prompt"``: the draft reads the kept tokens only. ``"kv"``: it reads everything, and
            the KV of what is not kept is dropped; its prefill costs more. Then a draft host
            does not wait for the scores of the target's prefill: it drafts its first window on the
            whole prompt.
        num_tree_nodes: tokens of a draft tree, at most γ deep, drafted per round instead of a chain
            of γ. None: 25 for ``"sd_tree"``, and a chain for the other strategies.
        draft_host: draft on the last of at least two hosts while the others, which run the target,
            verify.
        draft_timeout: seconds after which the target's hosts go on without a draft host that does
            not answer, even if it is still computing; at most a quarter of the hosts' own timeout.
        hippo, uv_prune: settings of the policy of this name. None: its defaults.
        layerskip, tabed: settings of the strategy of this name. None: its defaults.
        ablation: parts of speculative decoding, for benchmarks and tests.

    Raises:
        InvalidConfigError: a number is out of range, a name is unknown, or settings are those of
            another strategy or policy.
    """

    strategy: str = one_of(STRATEGY_NAMES, "specvlm")
    draft_model: str | None = None
    num_draft_tokens: int | str = setting(
        5,
        "be an integer in 1 .. 256, or 'auto'",
        lambda n: n == "auto" or (type(n) is int and 1 <= n <= 256),
        int,
    )
    keep: str | None = one_of(KEEP_POLICIES, None)
    keep_ratio: float | None = number("lie in (0, 1]", lambda share: 0 < share <= 1, None)
    keep_tokens: int | None = integer(1, 2**31 - 1, None)
    prune: str = one_of(PRUNINGS, "prompt")
    num_tree_nodes: int | None = integer(1, 256, None)
    draft_host: bool = switch(False)
    draft_timeout: float = number(
        "be a positive number of seconds", lambda seconds: seconds > 0, 60.0
    )
    hippo: HippoConfig | None = instance_of(HippoConfig)
    uv_prune: UVPruneConfig | None = instance_of(UVPruneConfig)
    layerskip: LayerSkipConfig | None = instance_of(LayerSkipConfig)
    tabed: TabedConfig | None = instance_of(TabedConfig)
    ablation: SpeculativeAblationConfig = instance_of(
        SpeculativeAblationConfig, default=SpeculativeAblationConfig()
    )

    def __post_init__(self):
        super().__post_init__()
        own = self._own_settings
        drafting = self.strategy if self.keep is None else f"keep={self.keep!r}"
        refuse(
            keep_ratio=self.keep_ratio is not None,
            keep_tokens=self.keep_tokens is not None,
            hippo=self.hippo is not None,
            not_by_hippo=None if "hippo" in own else drafting,
            uv_prune=self.uv_prune is not None,
            not_by_uv_prune=None if "uv_prune" in own else drafting,
            layerskip=self.layerskip is not None,
            all_layers=None if "layerskip" in own else self.strategy,
            tabed=self.tabed is not None,
            one_context=None if "tabed" in own else self.strategy,
            prefills_in_turn=not self.ablation.concurrent_prefill,
            no_draft_host=not self.draft_host,
        )
        if self.keep_tokens is None and self.keep_ratio is None:
            object.__setattr__(self, "keep_ratio", DEFAULT_KEEP_RATIO)

    @property
    def most_draft_tokens(self) -> int:
        """Maximum number of tokens per draft."""
        return longest_window(self.num_draft_tokens)

    @property
    def keep_policy(self) -> str | None:
        """The policy that chooses the draft's visual tokens; None if the strategy has no choice."""
        return self.keep or STRATEGY_FACTS[self.strategy].keep

    @property
    def _own_settings(self) -> dict[str, type]:
        """The classes of settings that the strategy and the keep policy have alone, by field."""
        classes: dict[str, type] = {}
        if STRATEGY_FACTS[self.strategy].skips_layers:
            classes["layerskip"] = LayerSkipConfig
        if STRATEGY_FACTS[self.strategy].reads_contexts:
            classes["tabed"] = TabedConfig
        if self.keep_policy is not None:
            if KEEP_FACTS[self.keep_policy].ranks_by_terms:
                classes["hippo"] = HippoConfig
            if KEEP_FACTS[self.keep_policy].ranks_by_change:
                classes["uv_prune"] = UVPruneConfig
        return classes

    def settings_of(self, kind: type[OwnSettings]) -> OwnSettings:
        """Return the settings of one strategy or policy: those given, or its defaults.

        Args:
            kind: their class.
        """
        for given in (self.hippo, self.uv_prune, self.layerskip, self.tabed):
            if isinstance(given, kind):
                return given
        return kind()

    @property
    def shared(self) -> dict[str, Any]:
        """The settings that must be the same on every host, JSON-ready.

        The strategy's and the keep policy's own are those in force, also where none are given.
        """
        settings = asdict(self)
        for name, kind in self._own_settings.items():
            settings[name] = asdict(self.settings_of(kind))
        return settings

    @property
    def needs_caption(self) -> bool:
        """Whether the draft reads a caption instead of visual tokens."""
        reads_contexts = STRATEGY_FACTS[self.strategy].reads_contexts
        return reads_contexts and "C" in self.settings_of(TabedConfig).contexts
