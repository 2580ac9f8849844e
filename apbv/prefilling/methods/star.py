"""Star Attention: the anchor is the whole first block, nothing is passed on, the query has a pass of its own."""

from ...config import PrefillConfig
from ...layout import ContextLayout, star_layout
from .apb import ApbMethod


class StarMethod(ApbMethod):
    """Blocks see the first block and themselves; the query sees all."""

    name = "star"
    passes_on = False

    @staticmethod
    def plan(
        num_hosts: int, num_tokens: int, context_start: int, query_start: int, config: PrefillConfig
    ) -> ContextLayout:
        return star_layout(num_hosts, num_tokens, query_start)
