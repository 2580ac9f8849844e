"""Defines full attention on one host, the exact baseline."""

from torch import Tensor

from ...config import PrefillConfig
from ...layout import ContextLayout, single_host_layout
from .base import PrefillMethod


class FullMethod(PrefillMethod):
    """In full attention host 0 computes the whole prompt."""

    name = "full"
    splits = False
    is_exact = True

    @staticmethod
    def plan(
        num_hosts: int, num_tokens: int, context_start: int, query_start: int, config: PrefillConfig
    ) -> ContextLayout:
        return single_host_layout(num_hosts, num_tokens)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        return self.attend_within(q, (k, v), scale)[0]
