"""Star Attention, whose anchor is the whole first block."""

from ...config import METHOD_FACTS, PrefillConfig
from ...layout import ContextLayout, star_layout
from .apb import ApbMethod


class StarMethod(ApbMethod):
    """Star Attention: blocks see the first block and themselves, and the query sees everything.

    The query runs in a second pass.
    """

    name = "star"
    facts = METHOD_FACTS["star"]

    @staticmethod
    def plan(
        num_hosts: int, num_tokens: int, context_start: int, query_start: int, config: PrefillConfig
    ) -> ContextLayout:
        return star_layout(num_hosts, num_tokens, query_start)
