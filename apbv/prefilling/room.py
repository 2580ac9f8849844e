"""This module refuses prompts that certainly do not fit in memory, and says what took it where it ran out."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..hosts import HostError, HostGroup
from ..stats import free_memory_bytes, unused_swap_bytes
from .memory import HostMemory, ReductionMemory, Share, host_memory
from .reduction.forecast import Forecast

_ADVICE = {
    "encoding": "VideoConfig(chunk_bytes=…), infer.py's --video-chunk-mib, lets it encode less at a time",
    "reduction": "fewer frames, or more hosts, take less",
    "prefill": "fewer frames or tokens, or more hosts, take less",
    "handoff": "kv='sharded' leaves the KV where it is computed; fewer frames or tokens take less",
}
# What a prompt takes at the very least in a stage.
_NEEDED_FOR = {
    "reduction": "the embeddings of its frames, all of which it encodes before any are left out",
    "prefill": "its KV and one layer's states",
    "handoff": "the KV of all hosts, which it gathers",
}
_STAGES = tuple(_NEEDED_FOR)


class NotEnoughMemoryError(ValueError):
    """A prompt does not fit in a host's memory; the message says what takes it, and what would take less."""


@dataclass(frozen=True)
class Room:
    """A Room knows what a prompt takes on this host, and asks whether it is there.

    Attributes:
        memory: what this host's part of the prefill takes, at most, without the vision tower's chunks.
        certain: likewise, where as few tokens are left as there may be.
        num_tokens: the prompt's tokens.
        hosts: who prefills.
    """

    memory: HostMemory
    certain: HostMemory
    num_tokens: int
    hosts: HostGroup

    @classmethod
    def of(
        cls,
        share: Share,
        forecast: Forecast,
        hosts: HostGroup,
        kv: str,
        reduction: ReductionMemory | None = None,
    ) -> "Room":
        """Compute what this host's part of a prompt takes.

        Args:
            forecast: what its layers will compute.
            kv: where the KV is placed, as in :class:`apbv.PrefillConfig`.
            reduction: what a reduction before the language model takes here, which is still to come; else None.
        """
        most, fewest = (
            host_memory(share, runs, hosts.rank, kv, reduction=reduction)
            for runs in (forecast.most, forecast.fewest)
        )
        return cls(most, fewest, forecast.most[0].layout.num_tokens, hosts)

    def require(self) -> None:
        """Refuse the prompt if a host has less free memory than it takes at the very least; collective.

        Raises:
            NotEnoughMemoryError: there is such a host; on every host.
        """
        if self._shortage() is None:
            return
        gc.collect()  # what is only waiting to be collected is free
        if (shortage := self._shortage()) is None:
            return
        process, least, stage, free = shortage
        what = _NEEDED_FOR[stage]
        raise NotEnoughMemoryError(
            f"a prompt of {self.num_tokens:,} tokens does not fit in memory: {self.hosts.name_of(process)} needs "
            f"at least {least / 1e9:.2f} GB, for {what}, and {free / 1e9:.2f} GB are free; {_ADVICE[stage]}"
        )

    @contextmanager
    def explained(self, stage: str) -> Iterator[None]:
        """Raise an error that says what memory is needed for, in place of an allocator's.

        Args:
            stage: ``"encoding"``, ``"reduction"``, ``"prefill"`` or ``"handoff"``.

        Raises:
            NotEnoughMemoryError: this host ran out of memory inside.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, HostError) or not _is_out_of_memory(error):
                raise
            memory = self.memory
            reduction, prefills = memory.reduction, stage == "prefill"
            embeddings = memory.rows if reduction is None else reduction.encoded
            parts = {
                "embeddings": embeddings if stage in ("encoding", "reduction") else 0,
                "scores and what is kept": reduction.choosing if stage == "reduction" else 0,
                "KV": memory.gathered_kv if stage == "handoff" else memory.kv if prefills else 0,
                "activations": memory.activations if prefills else 0,
                "passing KV": memory.passing if prefills else 0,
            }
            estimate = ", ".join(f"{size / 1e9:.2f} GB of {name}" for name, size in parts.items() if size)
            raise NotEnoughMemoryError(
                f"{self.hosts.name} ran out of memory on {self.hosts.device} in the {stage} of a prompt of "
                f"{self.num_tokens:,} tokens{estimate and f', which takes about {estimate}'}; {_ADVICE[stage]}"
            ) from error

    def _shortage(self) -> tuple[int, float, str, float] | None:
        """Return of the first process that is short of memory its number, what it needs, in which stage, and has.

        None where every process has enough.
        """
        device = self.hosts.device
        free = free_memory_bytes(device) + (0 if device.type == "cuda" else unused_swap_bytes())
        mine = [self.certain.least, _STAGES.index(self._hungriest_stage), free]
        for process, (least, stage, there) in enumerate(self.hosts.gather_floats(mine)):
            if least > there:
                return process, least, _STAGES[int(stage)], there
        return None

    @property
    def _hungriest_stage(self) -> str:
        """The stage that takes at least as much as the prompt does."""
        memory, reduction = self.certain, self.certain.reduction
        if memory.gathered_kv == memory.least and self.hosts.size > 1:
            return "handoff"
        return "reduction" if reduction is not None and reduction.encoded == memory.least else "prefill"


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocator failed: CUDA's, which has its own error, or the CPU's, which has only words."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
