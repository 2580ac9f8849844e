"""This module refuses prompts that certainly do not fit in memory, and says what took it where it ran out."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..hosts import HostError, HostGroup
from ..layout import ContextLayout
from ..model.parts import ModelParts
from ..stats import free_memory_bytes, unused_swap_bytes
from .memory import HostMemory, Share, host_memory

_ADVICE = {
    "encoding": "VideoConfig(chunk_bytes=…), infer.py's --video-chunk-mib, lets it encode less at a time",
    "prefill": "fewer frames or tokens, or more hosts, take less",
    "handoff": "kv='sharded' leaves the KV where it is computed; fewer frames or tokens take less",
}


class NotEnoughMemoryError(ValueError):
    """A prompt does not fit in a host's memory; the message says what takes it, and what would take less."""


@dataclass(frozen=True)
class Room:
    """A Room knows what a prompt takes on this host, and asks whether it is there.

    Attributes:
        memory: what this host's part of the prefill takes, without the vision tower's chunks.
        num_tokens: the prompt's tokens.
        hosts: who prefills.
    """

    memory: HostMemory
    num_tokens: int
    hosts: HostGroup

    @classmethod
    def of(cls, parts: ModelParts, layout: ContextLayout, hosts: HostGroup, kv: str) -> "Room":
        """Compute what this host's part of a prompt takes.

        Args:
            kv: where the KV is placed, as in :class:`apbv.PrefillConfig`.
        """
        return cls(host_memory(Share.of(parts), layout, hosts.rank, kv), layout.num_tokens, hosts)

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
        process, least, gathered, free = shortage
        what = "the KV of all hosts, which it gathers" if gathered else "its KV and one layer's states"
        stage = "handoff" if gathered and self.hosts.size > 1 else "prefill"
        raise NotEnoughMemoryError(
            f"a prompt of {self.num_tokens:,} tokens does not fit in memory: {self.hosts.name_of(process)} needs "
            f"at least {least / 1e9:.2f} GB, for {what}, and {free / 1e9:.2f} GB are free; {_ADVICE[stage]}"
        )

    @contextmanager
    def explained(self, stage: str) -> Iterator[None]:
        """Raise an error that says what memory is needed for, in place of an allocator's.

        Args:
            stage: ``"encoding"``, ``"prefill"`` or ``"handoff"``.

        Raises:
            NotEnoughMemoryError: this host ran out of memory inside.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, HostError) or not _is_out_of_memory(error):
                raise
            memory = self.memory
            parts = {
                "embeddings": memory.rows if stage == "encoding" else 0,
                "KV": memory.gathered_kv if stage == "handoff" else memory.kv if stage == "prefill" else 0,
                "activations": memory.activations if stage == "prefill" else 0,
                "passing KV": memory.passing if stage == "prefill" else 0,
            }
            estimate = ", ".join(f"{size / 1e9:.2f} GB of {name}" for name, size in parts.items() if size)
            raise NotEnoughMemoryError(
                f"{self.hosts.name} ran out of memory on {self.hosts.device} in the {stage} of a prompt of "
                f"{self.num_tokens:,} tokens{estimate and f', which takes about {estimate}'}; {_ADVICE[stage]}"
            ) from error

    def _shortage(self) -> tuple[int, float, bool, float] | None:
        """Return of the first process that is short of memory its number, what it needs, for which, and has."""
        device, memory = self.hosts.device, self.memory
        free = free_memory_bytes(device) + (0 if device.type == "cuda" else unused_swap_bytes())
        mine = [memory.least, memory.gathered_kv == memory.least, free]
        for process, (least, gathered, there) in enumerate(self.hosts.gather_floats(mine)):
            if least > there:
                return process, least, bool(gathered), there
        return None


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocator failed: CUDA's, which has its own error, or the CPU's, which has only words."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
