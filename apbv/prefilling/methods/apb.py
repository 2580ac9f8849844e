"""APB: one block on every host, the query in a second forward pass, no overlap."""

from typing import ClassVar

from ...config import METHOD_FACTS
from .apbv import ApbvMethod


class ApbMethod(ApbvMethod):
    """APB, APB-V's predecessor, with one context block on every host and l_p = n/64.

    Its authors train retaining heads that select the passing KV pairs. Here the selection is
    training-free, by ``config.importance``, scored with a copy of the query in the context's pass.
    """

    name = "apb"
    facts = METHOD_FACTS["apb"]
    # O, F and Z of the APB-V paper's Table 4.
    ablation: ClassVar[dict[str, bool]] = {"overlap": False, "fused_query": False, "zigzag": False}
