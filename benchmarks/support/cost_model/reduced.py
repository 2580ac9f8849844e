"""This module counts what prefills cost whose layers read fewer and fewer visual tokens; nothing runs."""

from collections.abc import Sequence
from dataclasses import replace

from apbv.prefilling.memory import LayerRun

from .costs import HostCost, Shape, Video, cost

_AT_THE_END = ("lm_head", "logits")


def reduced_cost(
    shape: Shape,
    method: str,
    runs: Sequence[LayerRun],
    *,
    fused_query: bool = True,
    video: Video | None = None,
    density: float = 1.0,
) -> list[HostCost]:
    """Compute the cost of one prefill, host by host, each run of whose layers has a layout of its own.

    Left out is what goes on between two runs: the attention by which tokens are chosen, and the hidden states that
    are sent to hosts which compute their tokens next, as these depend on the choice.

    Args:
        runs: the layers, as :class:`apbv.prefilling.reduction.forecast.Forecast` has them.
        shape, method, fused_query, video, density: as of :func:`~.costs.cost`.

    Raises:
        ValueError: as :func:`~.costs.cost`.
    """
    of_runs = []
    for number, run in enumerate(runs):
        part = replace(shape, layers=run.num_layers)
        shown, is_last = video if number == 0 else None, number == len(runs) - 1
        hosts = cost(part, method, run.layout, fused_query=fused_query, video=shown, density=density)
        of_runs.append([_without_end(host) if not is_last else host for host in hosts])
    weights = shape.weights * shape.bytes_per_number
    return [replace(_added(of_host), weight_bytes=weights) for of_host in zip(*of_runs, strict=True)]


def _without_end(host: HostCost) -> HostCost:
    """Return a cost without what follows the last layer."""
    counts = {name: getattr(host, name) for name in ("flops", "memory", "received", "exchanges")}
    zeros = {
        name: {part: 0 if part in _AT_THE_END else count for part, count in of_parts.items()}
        for name, of_parts in counts.items()
    }
    return replace(host, **zeros)


def _added(costs: Sequence[HostCost]) -> HostCost:
    """Add the costs of a host's runs."""
    first, *_ = costs
    sums = {
        name: {part: sum(getattr(host, name)[part] for host in costs) for part in getattr(first, name)}
        for name in ("flops", "memory", "received", "exchanges")
    }
    return replace(first, **sums, kv_bytes=sum(host.kv_bytes for host in costs))
