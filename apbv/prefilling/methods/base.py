"""Interface of a prefill method, and the methods by which host 0 computes a prompt alone."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from ...config import METHOD_FACTS, MethodFacts, PrefillConfig
from ...hosts import HostGroup
from ...kernels import merge_states, segmented_attention
from ...kernels.segments import Segment
from ...layout import (
    ACCURATE_PASSING,
    FEWEST_ANCHOR,
    FEWEST_PASSING,
    ContextLayout,
    shared_out_layout,
    single_host_layout,
)
from .block_attention import BlockAttention

# The result of attention to some of the keys: out [B, Hq, S, D], lse [B, Hq, S].
PartialAttention = tuple[Tensor, Tensor]


class PrefillMethod(ABC):
    """Computes one prompt's attention on one host, in every layer in place of the model's own.

    Attributes:
        name: its name in the config and on the command line.
        facts: what the config knows of it, by its name.
        zigzag: whether the default :meth:`plan` gives each host two blocks, an early and a late
            one.
        blocks: computes chosen blocks of attention, as the config says; None if attention is dense.
        num_layers: the decoder's layers with attention.
        kv_copies: how many of a host's processes have the same KV head, and a share of its query
            heads each.
        separate_query: whether the query runs in a second forward pass, after the context's.
        ablation: the fields of the config's ``ablation`` that the method fixes.
        attend: :func:`apbv.kernels.segmented_attention` with the configured backend.
    """

    name: ClassVar[str]
    facts: ClassVar[MethodFacts]
    zigzag: ClassVar[bool] = False
    separate_query: bool = False
    ablation: ClassVar[dict[str, bool]] = {}

    def __init__(
        self,
        layout: ContextLayout,
        hosts: HostGroup,
        config: PrefillConfig,
        num_layers: int,
        kv_copies: int = 1,
    ):
        self.layout = layout
        self.hosts = hosts
        self.config = self.in_force(config)
        self.num_layers = num_layers
        self.kv_copies = kv_copies
        self.attend = partial(segmented_attention, backend=config.backend)
        sparse = config.sparse_attention
        self.blocks: BlockAttention | None = None
        if sparse is not None and not sparse.computes_all:
            self.blocks = BlockAttention(sparse, config.backend)
        self.prepare()

    def prepare(self) -> None:  # noqa: B027  (most methods need none)
        """Precompute data that all layers share; by default nothing."""

    @classmethod
    def in_force(cls, config: PrefillConfig) -> PrefillConfig:
        """Return a config with what the method fixes in it."""
        return replace(config, ablation=replace(config.ablation, **cls.ablation))

    @property
    def gives_exact_kv(self) -> bool:
        """Whether this prompt's KV is what full attention gives.

        It is not where blocks have a copy of the anchor in front of them.
        """
        if self.blocks is not None:
            return False
        passes_all = self.facts.has_passing and self.layout.passing_is_complete
        return self.facts.is_exact or passes_all

    def layout_in(self, layer: int) -> ContextLayout:
        """Return the layout of a layer of attention.

        Some layers may pass on more KV pairs than others.

        Args:
            layer: its number among the layers of attention. A hybrid's decoder has others between
                them, which do not count.
        """
        return self.layout.in_layer(layer, self.num_layers)

    def attend_within(self, q: Tensor, own: Segment, scale: float) -> PartialAttention:
        """Attend causally within a run of tokens, to all of it or to the chosen blocks."""
        if self.blocks is None:
            return self.attend(q, [own], scale, causal_last=True)
        k, v = own
        return self.blocks(q, k, v, scale)

    def merge(self, partials: Sequence[PartialAttention], out: Tensor) -> PartialAttention:
        """Call :func:`apbv.kernels.merge_states` with the configured backend."""
        outs = [partial_out for partial_out, _ in partials]
        lses = [lse for _, lse in partials]
        return merge_states(outs, lses, out=out, backend=self.config.backend)

    @classmethod
    def plan(
        cls,
        num_hosts: int,
        num_tokens: int,
        context_start: int,
        query_start: int,
        config: PrefillConfig,
    ) -> ContextLayout:
        """Plan the layout of a prompt.

        See :func:`apbv.layout.plan_layout` for the arguments and errors.

        By default every token is given to one host, without an anchor.
        """
        if not cls.facts.splits:
            return single_host_layout(num_hosts, num_tokens)
        return shared_out_layout(num_hosts, num_tokens, cls.zigzag)

    @classmethod
    def gathers_by_layer(cls, config: PrefillConfig) -> bool:
        """Return whether each layer's KV is sent to the decode host while the next layers run.

        Else all KV is sent after the last layer.
        """
        return config.kv == "gathered" and config.ablation.overlap

    @classmethod
    def asks_apart(cls, config: PrefillConfig) -> bool:
        """Return whether the query runs in a second forward pass: :attr:`separate_query`."""
        return cls.separate_query

    @classmethod
    def warning(cls, layout: ContextLayout) -> str | None:
        """Return why a layout's anchor and passing lengths may cost accuracy; None: they may not.

        The limits were measured with pretrained models.
        """
        if not cls.facts.has_passing or layout.passing_is_complete:
            return None
        if layout.anchor_len < FEWEST_ANCHOR or layout.passing_len < FEWEST_PASSING:
            return (
                f"answers were less accurate with l_a below {FEWEST_ANCHOR} or l_p below "
                f"{FEWEST_PASSING}"
            )
        closer_len = math.ceil(layout.num_tokens / ACCURATE_PASSING)
        if layout.early.passing_len < closer_len:
            return (
                "answers were closer to full attention's, and took longer, with early_passing_len "
                f"= {closer_len:,}, and more so with passing_len = {closer_len:,}"
            )
        return None

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        """Compute the attention of this host's tokens, in the order of ``layout.local_spans``.

        Args:
            q: ``[1, Hq, S, D]``, post-RoPE.
            k, v: ``[1, Hkv, S, D]``, post-RoPE.
            scale: the factor of q·k.
            layer: the layer's number among those of attention, from 0.

        Returns:
            ``[1, Hq, S, D]``
        """


class FullMethod(PrefillMethod):
    """Full attention: host 0 computes the whole prompt."""

    name = "full"
    facts = METHOD_FACTS["full"]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        out, _ = self.attend_within(q, (k, v), scale)
        return out
