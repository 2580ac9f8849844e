"""Lists the ways to read a long video that are compared."""

import json
from dataclasses import asdict, dataclass, replace

from apbv import PrefillConfig, ReduceConfig, SpeculativeConfig
from apbv.config import REDUCER_NAMES

from ..exams.settings import passing_methods, sparse_choices

RATIOS = (0.5, 0.25)


@dataclass(frozen=True)
class System:
    """One way to answer.

    Attributes:
        label: its name in tables and plots.
        kind: what it saves by, for the plot's colours.
        config: how prompts are prefilled.
        hosts: on how many hosts.
        speculate: how a draft proposes tokens; None: there is none.
    """

    label: str
    kind: str
    config: PrefillConfig
    hosts: int = 1
    speculate: SpeculativeConfig | None = None

    @property
    def settings(self) -> dict:
        """All settings, for a record."""
        speculate = None if self.speculate is None else asdict(self.speculate)
        return json.loads(json.dumps({"prefill": asdict(self.config), "speculate": speculate}))


def systems(num_visual: int, hosts: int) -> list[System]:
    """List what is compared, with the APB-V paper's l_a and l_p as fractions of the visual tokens.

    Args:
        num_visual: the visual tokens of a prompt.
        hosts: on how many hosts a way runs that shares a prompt out.
    """
    full, sparse = PrefillConfig(method="full"), sparse_choices()
    shared = {"star": PrefillConfig(method="star"), **passing_methods(num_visual)}
    draft = SpeculativeConfig(strategy="hippo", keep_losing_draft=True)
    return [
        System("full", "exact", full),
        *(
            System(name, "sparse", PrefillConfig(method=name, sparse=blocks, on_single_host=True))
            for name, blocks in sparse.items()
        ),
        *(System(name, "hosts", config, hosts) for name, config in shared.items()),
        *(
            System(f"apbv, {name}", "hosts", replace(shared["apbv"], sparse=blocks), hosts)
            for name, blocks in sparse.items()
        ),
        *(
            System(
                f"{name}, {ratio:g}",
                "fewer tokens",
                PrefillConfig(method="full", reduce=ReduceConfig(method=name, ratio=ratio)),
            )
            for name in REDUCER_NAMES
            for ratio in RATIOS
        ),
        System(f"full, draft by hippo, {draft.keep_ratio:g}", "exact", full, speculate=draft),
    ]
