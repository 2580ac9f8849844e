"""This module holds the figures of a plan, and prints them as a table."""

from dataclasses import dataclass

from ..prefilling.memory import HostMemory


@dataclass(frozen=True)
class PlannedReduction:
    """A PlannedReduction says how many of a prompt's visual tokens will be left.

    Attributes:
        method, ratio: as in :class:`apbv.ReduceConfig`.
        num_tokens: the tokens that the language model's last layers read, at most.
        num_visual_tokens: those of them that stand for the video.
        by_layer: the visual tokens of every layer, at most.
        is_bound: whether there may be fewer, by what the video shows.
    """

    method: str
    ratio: float
    num_tokens: int
    num_visual_tokens: int
    by_layer: tuple[int, ...]
    is_bound: bool

    def __str__(self) -> str:
        steps, visual = [], None
        for layer, count in enumerate(self.by_layer):
            if count != visual:
                steps.append(f"{count:,}" + (f" behind layer {layer}" if layer else " visual tokens"))
                visual = count
        at_most = "at most " if self.is_bound else ""
        return f"{self.method} {self.ratio:g}: {at_most}{', '.join(steps)}; {self.num_tokens:,} tokens in the end"


@dataclass(frozen=True)
class Plan:
    """A Plan says what a prompt takes on every process, in bytes, and whether that is there.

    Attributes:
        model: its name.
        method, kv: the method that would run, and where it would place the KV.
        num_tokens: the prompt's tokens, before any are left out.
        num_visual_tokens: those of them that stand for the video.
        num_audio_tokens: those of them that stand for its sound.
        weights: of the model, on one process.
        draft: of the draft model and its KV; 0 without one.
        overhead: assumed for the device's own libraries.
        hosts: what the prefill takes beside them, for a process of every host.
        device_memory: what each process may take.
        reduction: what is left of the prompt; None where nothing is left out.
        most: how many frames, or of a text how many tokens, would fit; None: more than were tried.
    """

    model: str
    method: str
    kv: str
    num_tokens: int
    num_visual_tokens: int
    num_audio_tokens: int
    weights: int
    draft: int
    overhead: int
    hosts: tuple[HostMemory, ...]
    device_memory: int
    reduction: PlannedReduction | None = None
    most: int | None = None

    @property
    def needed(self) -> tuple[int, ...]:
        """The most that a process of every host has in memory at once."""
        return tuple(self.weights + self.draft + self.overhead + host.peak for host in self.hosts)

    @property
    def fits(self) -> bool:
        """Whether every process has room for what it needs."""
        return max(self.needed) <= self.device_memory

    def __str__(self) -> str:
        busiest = self.needed.index(max(self.needed))
        host = self.hosts[busiest]
        hosts = f"{len(self.hosts)} host{'s' * (len(self.hosts) > 1)}"
        lines = [("model", self.model), ("method", f"{self.method} on {hosts}, KV {self.kv}")]
        heard = f", {self.num_audio_tokens:,} sound" if self.num_audio_tokens else ""
        lines.append(("prompt", f"{self.num_tokens:,} tokens, {self.num_visual_tokens:,} of them visual{heard}"))
        if self.reduction is not None:
            lines.append(("reduced", str(self.reduction)))
        where = "" if len(self.hosts) == 1 else f" on host {busiest}"
        lines.append((f"memory{where}", ""))
        parts = {
            "weights": self.weights,
            "draft": self.draft,
            "device's libraries": self.overhead,
            "encoding": host.encoding,
            "  all embeddings": 0 if host.reduction is None else host.reduction.encoded,
            "  choosing of them": 0 if host.reduction is None else host.reduction.choosing,
            "  embeddings": host.rows,
            "  a video chunk": host.chunk,
            "prefill": host.prefill,
            "  KV by then": host.kv_by_then if host.kv_by_then != host.kv else 0,
            "  KV kept here": host.kv,
            "  activations": host.activations,
            "  passing KV": host.passing,
            "  deepstack": host.deepstack,
            "  logits": host.logits,
            "decoding": host.decoding,
            "  KV gathered": host.gathered_kv,
            "  handing over": host.handoff,
        }
        lines += [(f"  {name}", _readable(size)) for name, size in parts.items() if size]
        lines.append(("needed", f"  {_readable(max(self.needed))} of {_readable(self.device_memory).strip()}"))
        lines.append(("fits", "yes" if self.fits else "no"))
        unit = "frames" if self.num_visual_tokens else "tokens"
        lines.append((f"{unit} that fit", "all that were tried" if self.most is None else f"{self.most:,}"))
        return "\n".join(f"{name:<22}{value}".rstrip() for name, value in lines)


def _readable(size: int) -> str:
    return f"{size / 1e9:10.2f} GB" if size >= 1e8 else f"{size / 1e6:10.2f} MB"
