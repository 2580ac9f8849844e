"""Defines APB: one block on every host, the query in a second forward pass, no overlap."""

from dataclasses import replace

from ...config import PrefillConfig
from ...hosts import HostGroup
from ...layout import ContextLayout
from .apbv import ApbvMethod


class ApbMethod(ApbvMethod):
    """APB is APB-V's predecessor, with one context block on every host and l_p = n/64.

    Its authors train retaining heads that select what is passed on. Here the selection is training-free, by
    ``config.importance``, and scored with a query that rides along in the context's pass.
    """

    name = "apb"

    def __init__(self, layout: ContextLayout, hosts: HostGroup, config: PrefillConfig):
        super().__init__(layout, hosts, without_optimisations(config))

    @staticmethod
    def plan(
        num_hosts: int, num_tokens: int, context_start: int, query_start: int, config: PrefillConfig
    ) -> ContextLayout:
        return ApbvMethod.plan(num_hosts, num_tokens, context_start, query_start, without_optimisations(config))


def without_optimisations(config: PrefillConfig) -> PrefillConfig:
    """Return the config without O, F and Z of the APB-V paper's Table 4."""
    return replace(config, overlap=False, fused_query=False, zigzag=False)
