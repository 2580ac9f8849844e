"""This module computes how much memory a prefill takes on every host, from the layout; nothing runs.

What counts is what lies in memory at once. First the vision tower encodes, chunk by chunk, into the rows of the
host's tokens. Then the layers run, of which each leaves the KV that the host keeps. Then the KV goes to host 0,
where it is gathered.
"""

from dataclasses import dataclass
from math import ceil

import torch

from ..layout import ContextLayout, intersect
from ..model.parts import ModelParts, num_deepstack_layers
from ..model.row_chunks import chunk_rows, mlp_row_bytes, norm_row_bytes
from ..model.sizes import DecoderSizes


@dataclass(frozen=True)
class Share:
    """A Share is what one process has of a model.

    Attributes:
        sizes: of the whole decoder.
        itemsize: bytes of a number.
        device: where it computes, which decides how long rows are cut.
        tensor_parallel: T, the processes that share a host's model.
        num_deepstack_layers: L, the further rows that the vision tower makes for each visual token.
    """

    sizes: DecoderSizes
    itemsize: int
    device: torch.device
    tensor_parallel: int = 1
    num_deepstack_layers: int = 0

    @classmethod
    def of(cls, parts: ModelParts) -> "Share":
        """Return the share of a loaded model that is on this process."""
        config = parts.model.config
        _, size = parts.tensor_parallel
        sizes = DecoderSizes.from_config(config)
        return cls(sizes, parts.dtype.itemsize, parts.device, size, num_deepstack_layers(config))

    @property
    def hidden_row(self) -> int:
        """The bytes of a token's hidden state, which is replicated."""
        return self.sizes.hidden * self.itemsize

    @property
    def query_row(self) -> int:
        """The bytes of a token's query states in one layer; as many are of the attention's output."""
        return ceil(self.sizes.heads / self.tensor_parallel) * self.sizes.head_dim * self.itemsize

    @property
    def kv_row(self) -> int:
        """The bytes of a token's K and V in one layer."""
        return ceil(self.sizes.kv_row / self.tensor_parallel) * self.itemsize


@dataclass(frozen=True)
class HostMemory:
    """A HostMemory is what a prefill takes on one process of a host, beside the weights, in bytes.

    Attributes:
        rows: the visual embeddings of this host's tokens, until the layers begin.
        chunk: what encodes a chunk of a video: frames, pixels, activations.
        deepstack: visual features that the first layers add.
        kv: the KV that this host keeps when the last layer has run.
        activations: the most that a layer holds at once, of this host's tokens.
        passing: KV of other hosts in a layer.
        logits: of the prompt's last token.
        gathered_kv: the whole KV, where host 0 gathers it from others; else 0.
        handoff: two layers of it on their way.
        least: a bound from below of all this, of what certainly lies in memory at once.
    """

    rows: int = 0
    chunk: int = 0
    deepstack: int = 0
    kv: int = 0
    activations: int = 0
    passing: int = 0
    logits: int = 0
    gathered_kv: int = 0
    handoff: int = 0
    least: int = 0

    @property
    def encoding(self) -> int:
        """The most while the vision tower encodes."""
        return self.rows + self.chunk

    @property
    def prefill(self) -> int:
        """The most while the layers run: the first hold visual features, the last the KV of all."""
        return self.activations + self.passing + max(self.kv, self.deepstack) + self.logits

    @property
    def decoding(self) -> int:
        """The most while the KV is handed over, and an answer is decoded."""
        return max(self.gathered_kv, self.kv) + self.handoff + self.logits

    @property
    def peak(self) -> int:
        """The most at any time."""
        return max(self.encoding, self.prefill, self.decoding)


def host_memory(
    share: Share, layout: ContextLayout, host: int, kv: str, visual: range = range(0), chunk: int = 0
) -> HostMemory:
    """Compute what a prefill takes on one host.

    Args:
        layout: which host computes and keeps which tokens.
        kv: where the KV is placed, as in :class:`apbv.PrefillConfig`.
        visual: from the first visual token to the last.
        chunk: what encodes a chunk of the video.
    """
    num_rows = sum(map(len, layout.local_spans(host)))
    num_visual = sum(len(intersect(span, visual)) for span in layout.local_spans(host))
    kept = sum(map(len, layout.cache_spans(host)))
    layers, hidden, row = share.sizes.layers, share.hidden_row, share.kv_row
    gathers = kv == "gathered" and layout.num_hosts > 1 and host == 0
    gathered = layers * row * layout.num_tokens if gathers else 0
    states = num_rows * (hidden + share.query_row + row)  # the residual, and what attention gets
    return HostMemory(
        rows=num_visual * hidden * (1 + share.num_deepstack_layers),
        chunk=chunk,
        deepstack=num_visual * hidden * share.num_deepstack_layers,
        kv=layers * row * kept,
        activations=_activations(share, num_rows),
        passing=_passing(share, layout, host, num_rows),
        logits=share.sizes.vocab * (share.itemsize + 4),
        gathered_kv=gathered,
        # A layer that has come and the next, which is coming; on other hosts copies of what they send.
        handoff=2 * row * (layout.num_tokens if gathers else kept) * (kv == "gathered" and layout.num_hosts > 1),
        least=max((layers - 1) * row * kept + states, gathered),
    )


def _activations(share: Share, num_rows: int) -> int:
    """Return the most that a layer holds of so many tokens: the residual, and the hungriest of its steps."""
    sizes, itemsize, hidden = share.sizes, share.itemsize, share.hidden_row
    width = ceil(sizes.intermediate / share.tensor_parallel)

    def chunked(row_bytes: int) -> int:
        return min(num_rows, chunk_rows(share.device, row_bytes)) * row_bytes

    # Normed rows; K and V; the queries, turned by their positions in four steps, which are as large as what comes
    # after: output, its transposed copy, and what is merged to it.
    attention = num_rows * (hidden + share.kv_row + 4 * share.query_row)
    mlp = 2 * num_rows * hidden + chunked(mlp_row_bytes(width, itemsize))
    norm = num_rows * hidden + chunked(norm_row_bytes(sizes.hidden, itemsize))
    positions = 2 * num_rows * sizes.head_dim * itemsize  # cosines and sines
    return num_rows * hidden + positions + max(attention, mlp, norm)


def _passing(share: Share, layout: ContextLayout, host: int, num_rows: int) -> int:
    """Return the bytes that a layer exchanges, as they lie on one host."""
    if layout.num_hosts == 1 or not layout.is_split:
        return 0
    if len(layout.query) or len(layout.anchor):
        buffers = layout.num_hosts + 1  # everybody's, and its own
        return len(layout.virtual_hosts(host)) * buffers * layout.max_passed * share.kv_row
    if layout.zigzag:  # a ring: what is attended to, what comes, and a partial result
        return num_rows * (2 * share.kv_row + share.query_row)
    return 3 * num_rows * (share.query_row + share.kv_row)  # all-to-all: sent, received, joined
