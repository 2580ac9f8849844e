"""What a prefill method provides."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...config import PrefillConfig
from ...hosts import HostGroup
from ...kernels import merge_states, segmented_attention
from ...kernels.runs import Segment
from ...layout import ContextLayout

State = tuple[Tensor, Tensor]  # a partial result: out [B, Hq, S, D], lse [B, Hq, S]


class PrefillMethod(ABC):
    """One method, for one prompt on one host; called in every layer in place of attention.

    Attributes:
        name: what callers write.
        is_exact: full attention, computed by several hosts.
        separate_query: the query runs in a forward pass of its own after the context's.
        passes_on: some of a context block's KV goes to other hosts.
        on_passed: told in every layer of each of this host's blocks, by its number, which of its rows are passed
            on, ``[1, Hkv, k_v]`` ascending; of the last block, which passes nothing on, which would be. Not
            called by methods that pass nothing on.
    """

    name: ClassVar[str]
    is_exact: ClassVar[bool] = False
    passes_on: ClassVar[bool] = False
    separate_query: bool = False
    on_passed: Callable[[int, Tensor], None] | None = None

    def __init__(self, layout: ContextLayout, hosts: HostGroup, config: PrefillConfig):
        self.layout = layout
        self.hosts = hosts
        self.config = config

    @property
    def gives_exact_kv(self) -> bool:
        """Whether the KV of this prompt is full attention's: nothing of it is left out."""
        blocks = max(map(len, self.layout.blocks), default=0)
        return self.is_exact or (self.passes_on and self.layout.passing_len >= blocks)

    def attend(
        self, q: Tensor, segments: list[Segment], scale: float, *, causal_last: bool, rows_alone: int = 0
    ) -> tuple[Tensor, Tensor]:
        """:func:`apbv.kernels.segmented_attention` by the back end that was configured."""
        return segmented_attention(
            q, segments, scale, causal_last, rows_alone=rows_alone, backend=self.config.backend
        )

    def merge(self, states: Sequence[State]) -> State:
        """Partial results over disjoint keys as one, in fp32 at least; a single one as it is."""
        if len(states) == 1:
            return states[0]
        outs, lses = zip(*states, strict=True)
        outs = torch.stack([out.to(lses[0].dtype) for out in outs])
        return merge_states(outs, torch.stack(lses), backend=self.config.backend)

    @staticmethod
    @abstractmethod
    def plan(
        num_hosts: int, num_tokens: int, context_start: int, query_start: int, config: PrefillConfig
    ) -> ContextLayout:
        """The layout of a prompt; see :func:`apbv.layout.plan_layout` for the arguments and errors."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of this host's tokens, in the order of ``layout.local_spans``.

        q ``[1, Hq, S, D]``, k and v ``[1, Hkv, S, D]``, post-RoPE; returns ``[1, Hq, S, D]``.
        """
