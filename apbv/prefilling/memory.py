"""This module computes how much memory a prefill takes on every host, from the layout; nothing runs.

What counts is what lies in memory at once. First the vision tower encodes, chunk by chunk, into the rows of the
host's tokens; where a reduction chooses among these, into the rows of the frames that the host encodes. Then the
layers run, of which each leaves the KV that the host keeps. Then the KV goes to host 0, where it is gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch

from ..config import SparseConfig
from ..layout import ContextLayout, intersect
from ..model.parts import ModelParts, num_deepstack_layers
from ..model.row_chunks import chunk_rows, mlp_row_bytes, norm_row_bytes
from ..model.sizes import DecoderSizes
from .methods.block_attention import block_bytes

# So many scores of the question's attention a reduction has in memory at a time, in fp32; and in so many
# copies: products, what is masked of them, and weights.
MOST_SCORES, _COPIES_OF_SCORES = 2**26, 3


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
class LayerRun:
    """A LayerRun is a run of decoder layers over the same tokens of a prompt.

    Attributes:
        num_layers: how many layers.
        layout: which host computes and keeps which of these tokens.
        visual: from the first visual token to the last.
        num_asking: of how many of the question's tokens times heads the attention is computed at a time, for a
            reduction that leaves tokens out behind these layers.
        sparse: how blocks of attention are chosen; None: attention is dense.
    """

    num_layers: int
    layout: ContextLayout
    visual: range = range(0)
    num_asking: int = 0
    sparse: SparseConfig | None = None


@dataclass(frozen=True)
class ReductionMemory:
    """A ReductionMemory is what a reduction before the language model takes on one host, in bytes.

    Attributes:
        encoded: the embeddings of the frames that the host encodes, all of which it holds before any is left out.
        choosing: what scores them, and what is left while it is collected.
        kept: the embeddings that are left on this host.
    """

    encoded: int
    choosing: int
    kept: int


@dataclass(frozen=True)
class HostMemory:
    """A HostMemory is what a prefill takes on one process of a host, beside the weights, in bytes.

    Attributes:
        reduction: what a reduction before the language model takes; None without one.
        rows: the visual embeddings of this host's tokens, until the layers begin.
        chunk: what encodes a chunk of a video: frames, pixels, activations.
        deepstack: visual features that the first layers add.
        kv: the KV that this host keeps when the last layer has run.
        kv_by_then: how much of it there is when a layer takes most; less than that where the first layers have
            more tokens than the last.
        activations: the most that a layer holds at once, of this host's tokens.
        passing: KV of other hosts in a layer.
        logits: of the prompt's last token.
        gathered_kv: the whole KV, where host 0 gathers it from others; else 0.
        handoff: two layers of it on their way.
        least: a bound from below of all this, of what certainly lies in memory at once.
    """

    reduction: ReductionMemory | None = None
    rows: int = 0
    chunk: int = 0
    deepstack: int = 0
    kv: int = 0
    kv_by_then: int = 0
    activations: int = 0
    passing: int = 0
    logits: int = 0
    gathered_kv: int = 0
    handoff: int = 0
    least: int = 0

    @property
    def encoding(self) -> int:
        """The most while the vision tower encodes, and until the layers begin."""
        if self.reduction is None:
            return self.rows + self.chunk
        reduction = self.reduction
        return max(reduction.encoded + max(self.chunk, reduction.choosing), reduction.kept + self.rows)

    @property
    def prefill(self) -> int:
        """The most while the layers run: the first hold visual features, the last the KV of all."""
        return self.activations + self.passing + max(self.kv_by_then, self.deepstack) + self.logits

    @property
    def decoding(self) -> int:
        """The most while the KV is handed over, and an answer is decoded."""
        return max(self.gathered_kv, self.kv) + self.handoff + self.logits

    @property
    def peak(self) -> int:
        """The most at any time."""
        return max(self.encoding, self.prefill, self.decoding)


def host_memory(
    share: Share,
    runs: Sequence[LayerRun],
    host: int,
    kv: str,
    chunk: int = 0,
    reduction: ReductionMemory | None = None,
) -> HostMemory:
    """Compute what a prefill takes on one host.

    Args:
        runs: the decoder's layers, in order; one run where no tokens are left out between them.
        kv: where the KV is placed, as in :class:`apbv.PrefillConfig`.
        chunk: what encodes a chunk of the video.
        reduction: what a reduction before the language model takes here; None without one.
    """
    first, num_hosts, row = runs[0], runs[0].layout.num_hosts, share.kv_row
    in_runs, kept_before, first_layer = [], 0, 0
    for run in runs:
        in_runs.append(_RunMemory.of(share, run, host, kept_before, first_layer))
        kept_before, first_layer = in_runs[-1].kv, first_layer + run.num_layers
    hungriest = max(in_runs, key=lambda run: run.peak)
    leaves, gathers = kv == "gathered" and num_hosts > 1, kv == "gathered" and num_hosts > 1 and host == 0
    gathered = row * sum(run.num_layers * run.layout.num_tokens for run in runs) if gathers else 0
    longest = first.layout.num_tokens if gathers else _num_kept(first, host)
    return HostMemory(
        reduction=reduction,
        rows=_num_visual(first, host) * share.hidden_row * (1 + share.num_deepstack_layers),
        chunk=chunk,
        deepstack=hungriest.deepstack,
        kv=kept_before,
        kv_by_then=hungriest.kv,
        activations=hungriest.activations,
        passing=hungriest.passing,
        logits=share.sizes.vocab * (share.itemsize + 4),
        gathered_kv=gathered,
        # A layer that has come and the next, which is coming; on other hosts copies of what they send.
        handoff=2 * row * longest * leaves,
        least=max(gathered, 0 if reduction is None else reduction.encoded, *(run.least for run in in_runs)),
    )


@dataclass(frozen=True)
class _RunMemory:
    """What a run of layers takes on one host, in bytes; see :class:`HostMemory`.

    Attributes:
        kv: the KV that the host has kept of this run and of those before.
        least: a bound from below of what is in memory in its last layer.
    """

    kv: int
    deepstack: int
    activations: int
    passing: int
    least: int

    @classmethod
    def of(cls, share: Share, run: LayerRun, host: int, kept_before: int, first_layer: int) -> "_RunMemory":
        num_rows, num_kept = sum(map(len, run.layout.local_spans(host))), _num_kept(run, host)
        layer, to_add = share.kv_row * num_kept, max(0, share.num_deepstack_layers - first_layer)
        kv = kept_before + run.num_layers * layer
        states = num_rows * (
            share.hidden_row + share.query_row + share.kv_row
        )  # the residual, what attention gets
        return cls(
            kv=kv,
            deepstack=_num_visual(run, host) * share.hidden_row * to_add,
            activations=_activations(share, num_rows, _attention(share, run, num_kept), _blocks(share, run, host)),
            passing=_passing(share, run.layout, host, num_rows),
            least=kv - layer + states,
        )

    @property
    def peak(self) -> int:
        """The most at once."""
        return self.activations + self.passing + max(self.kv, self.deepstack)


def _num_visual(run: LayerRun, host: int) -> int:
    """Return how many tokens between the first visual one and the last a host computes."""
    return sum(len(intersect(span, run.visual)) for span in run.layout.local_spans(host))


def _num_kept(run: LayerRun, host: int) -> int:
    """Return how many tokens' KV a host keeps of each layer."""
    return sum(map(len, run.layout.cache_spans(host)))


def _attention(share: Share, run: LayerRun, num_kept: int) -> int:
    """Return what the question's attention to the tokens that a host keeps takes."""
    if not run.num_asking:
        return 0
    keys = num_kept * (share.kv_row // 2 + 4 * share.sizes.head_dim)  # theirs, and a head's in fp32
    return keys + 4 * _COPIES_OF_SCORES * min(run.num_asking * num_kept, MOST_SCORES)


def _blocks(share: Share, run: LayerRun, host: int) -> tuple[int, int]:
    """Return what the chosen blocks of a run of tokens take while they are computed, and while they are chosen."""
    if run.sparse is None or run.sparse.computes_all:
        return 0, 0
    blocks, heads = run.layout.virtual_hosts(host), ceil(share.sizes.heads / share.tensor_parallel)
    alone = 0 if run.layout.is_split else sum(map(len, run.layout.local_spans(host)))
    longest = max((len(run.layout.blocks[block]) for block in blocks), default=alone)
    listed, choosing = block_bytes(run.sparse, heads, share.sizes.head_dim, longest)
    # Without a kernel the diagonal and what is listed are computed apart, and then merged.
    apart = 2 * longest * share.query_row if share.device.type == "cpu" else 0
    return listed + apart, listed + choosing


def _activations(share: Share, num_rows: int, asked: int, blocks: tuple[int, int]) -> int:
    """Return the most that a layer holds of so many tokens: the residual, and the hungriest of its steps.

    Args:
        asked: what a reduction takes to see the question's attention, before attention is computed.
        blocks: what chosen blocks take while they are computed, and while they are chosen.
    """
    sizes, itemsize, hidden = share.sizes, share.itemsize, share.hidden_row
    width = ceil(sizes.intermediate / share.tensor_parallel)

    def chunked(row_bytes: int) -> int:
        return min(num_rows, chunk_rows(share.device, row_bytes)) * row_bytes

    # Normed rows; K and V; the queries, turned by their positions in four steps, which are as large as what comes
    # after: output, its transposed copy, and what is merged to it.
    attention = num_rows * (hidden + share.kv_row + 4 * share.query_row) + blocks[0]
    asking = num_rows * (hidden + share.kv_row + share.query_row) + max(asked, blocks[1])
    mlp = 2 * num_rows * hidden + chunked(mlp_row_bytes(width, itemsize))
    norm = num_rows * hidden + chunked(norm_row_bytes(sizes.hidden, itemsize))
    positions = 2 * num_rows * sizes.head_dim * itemsize  # cosines and sines
    return num_rows * hidden + positions + max(attention, asking, mlp, norm)


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
