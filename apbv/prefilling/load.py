"""Loads a saved prefill from disk on any number of hosts."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..config import KV_PLACEMENTS
from ..errors import InvalidConfigError
from ..hosts import HostGroup
from ..kv.export.loading import read_saved
from ..kv.facts import ModelIdentity
from ..model.parts import inspect_model
from ..stats import StageTimer
from .reduction.choosing import Reduction
from .result import PrefillResult


def load(
    path: str | Path,
    model: PreTrainedModel | None = None,
    *,
    hosts: HostGroup | None = None,
    kv: str = "gathered",
) -> PrefillResult:
    """Read a prefill that :meth:`PrefillResult.save` wrote, on any number of hosts; collective.

    Args:
        path: the directory; must be visible to every host that holds KV.
        model: the model that will read the KV; checked to be the one that wrote it. None skips the
            check.
        hosts: the hosts that take part; ``HostGroup.from_env()`` by default.
        kv: where the KV goes: all of it to host 0, or its shares to every host, as in
            :class:`apbv.PrefillConfig`.

    Raises:
        StorageError: there is no saved KV, or it is incomplete, changed, or of another model; on
            every host.
        HostError: another host failed.
    """
    hosts = hosts or HostGroup.from_env()
    timer = StageTimer(hosts)
    with hosts.local_stage("loading the KV"), timer.stage("handoff"):
        if kv not in KV_PLACEMENTS:
            raise InvalidConfigError(f"kv must be one of {', '.join(KV_PLACEMENTS)}, not {kv!r}")
        parts = None if model is None else inspect_model(model)
        saved = read_saved(Path(path), parts, hosts, kv)
    manifest = saved.manifest
    hosts.require_same("the saved KV", repr(manifest).encode())
    timer.mark_prefilled()
    reduction = None
    stored = manifest.reduction
    if stored is not None:
        kept = torch.tensor(stored.kept, dtype=torch.int64)
        reduction = Reduction(stored.method, stored.ratio, stored.num_before, len(kept), kept)
    return PrefillResult(
        method=manifest.method,
        exact=manifest.exact,
        density=manifest.density,
        timer=timer,
        num_kv_heads=manifest.num_kv_heads,
        model=lambda: ModelIdentity.of(manifest),
        reduction=reduction,
        logits=saved.logits,
        layout=saved.layout,
        inputs=saved.inputs,
        kv=saved.kv,
    )
