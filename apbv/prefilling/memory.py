"""Estimates a prefill's memory on every host.

It also rejects prompts that cannot fit, and explains out-of-memory errors.

The estimate needs a model's config and a layout of the prompt; nothing runs. First the vision tower
encodes, chunk by chunk, into the embeddings of the host's tokens. Then the layers run. The KV of
each stays where it is computed, or goes to the host that decodes: while the next layer runs, or
after the last one.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil

import torch

from ..errors import HostError, NotEnoughMemoryError, is_out_of_memory
from ..hosts import HostGroup
from ..kv.cache import GROWTH_ROWS
from ..layout import ContextLayout, intersect
from ..model.families import RULE_CHUNK, DecoderSizes, LinearSizes
from ..model.row_chunks import chunk_rows, mlp_row_bytes
from ..stats import free_memory_bytes
from .split_linear_attention import MOST_TOKENS, query_parts, runs_of_host

_ADVICE = {
    "encoding": "use smaller chunks: VideoConfig(chunk_bytes=…), or infer.py's --video-chunk-mib",
    "reduction": "use fewer frames, or more hosts",
    "prefill": "use fewer frames or tokens, or more hosts",
    "handoff": "use kv='sharded', which gathers no KV, or fewer frames or tokens",
}
# The minimum memory of a prompt per stage.
_NEEDED_FOR = {
    "reduction": "the embeddings of its frames, which are all encoded before pruning",
    "prefill": "its KV and one layer's states",
    "handoff": "the gathered KV of all hosts",
}
_STAGES = tuple(_NEEDED_FOR)


@dataclass(frozen=True)
class HostMemory:
    """Estimated peak memory of a prefill on one process of a host, without the weights, in bytes.

    Attributes:
        kv: the KV that this host keeps when the last layer has run.
        stages: memory in use at once, by stage and by purpose.
        certain: by stage, the memory that is certainly needed.
    """

    kv: int
    stages: dict[str, dict[str, int]]
    certain: dict[str, int]

    @property
    def peak(self) -> int:
        """The maximum over all stages."""
        return max(sum(parts.values()) for parts in self.stages.values())


def host_memory(
    sizes: DecoderSizes,
    layout: ContextLayout,
    host: int,
    kv: str,
    *,
    itemsize: int,
    device: torch.device,
    decode_host: int = 0,
    by_layer: bool = True,
    asks_apart: bool = False,
    question_start: int = 0,
    tensor_parallel: int = 1,
    expert_parallel: bool = False,
    visual: range = range(0),
    num_encoded: int = 0,
    encodes_all: bool = False,
    chunk: int = 0,
) -> HostMemory:
    """Estimate a prefill's memory on one host.

    Args:
        sizes: the model's.
        layout: the tokens that each host computes and keeps.
        kv: where the KV is placed, as in :class:`apbv.PrefillConfig`.
        itemsize: bytes per number.
        device: its device, which decides the sizes of row chunks.
        decode_host: the host that gets gathered KV.
        by_layer: whether gathered KV leaves layer by layer; see
            :meth:`.PrefillMethod.gathers_by_layer`.
        asks_apart: whether the question runs in a pass of its own; see
            :meth:`.PrefillMethod.asks_apart`.
        question_start: the number of tokens before the question.
        tensor_parallel: T, the processes that shard a host's model.
        expert_parallel: whether each of them has whole experts.
        visual: from the first visual token to the last.
        num_encoded: of how many visual tokens the host has embeddings before pruning.
        encodes_all: whether it has the embeddings of the whole prompt, without frame parallelism,
            while it copies those of its own tokens.
        chunk: memory to encode a chunk of the video.
    """
    # The bytes of a token's hidden state, of its queries, and of its K and V in a layer.
    hidden = sizes.hidden * itemsize
    query = ceil(sizes.heads / tensor_parallel) * sizes.head_dim * itemsize
    num_kv_heads = ceil(sizes.kv_heads / tensor_parallel)
    kv_row = 2 * num_kv_heads * sizes.head_dim * itemsize

    # The tokens that this host computes, and those whose KV it keeps.
    spans = layout.local_spans(host)
    num_rows = sum(map(len, spans))
    num_visual = sum(len(intersect(span, visual)) for span in spans)
    num_kept = sum(map(len, layout.cache_spans(host)))

    # A layer's KV: what is kept here, with room for an answer on the host that decodes, and what
    # the decode host gathers.
    sends_kv = kv == "gathered" and layout.num_hosts > 1
    sends_by_layer = sends_kv and by_layer and layout.is_split
    is_decode_host = host == decode_host
    kept_layer = num_kept * kv_row
    num_spare = GROWTH_ROWS if host == 0 and num_kept else 0
    staying_layer = (num_kept + num_spare) * kv_row
    gathered_layer = layout.num_tokens * kv_row if sends_kv and is_decode_host else 0

    # Encoding.
    num_embeddings = num_visual
    if encodes_all and num_visual < len(visual):
        num_embeddings += len(visual)
    encoding = {
        "embeddings": max(num_embeddings, num_encoded) * hidden * (1 + sizes.deepstack),
        "a video chunk": chunk,
    }

    # Handing over: a layer that has come and the next, which is coming; on other hosts copies of
    # what they send.
    if not sends_kv:
        on_their_way = 0
    elif is_decode_host:
        on_their_way = 2 * gathered_layer
    else:
        on_their_way = 2 * kept_layer
    gathered = {
        "KV": sizes.kv_layers * max(gathered_layer, kept_layer),
        "layers on their way": on_their_way,
    }

    # The prefill of a layer. Of every token its number and its position, in int64; and of the whole
    # prompt which tokens are visual.
    residual = num_rows * (hidden + 2 * sizes.head_dim * itemsize + 2 * 8) + layout.num_tokens
    # Beside these: normed rows, K and V, and the queries, turned by their positions in four steps,
    # which are as large as what comes after. Where queries have a norm, there are these and two
    # copies in fp32 before any K and V.
    queries = max(kv_row + 4 * query, query + 2 * 4 * query // itemsize)
    attention = num_rows * (hidden + queries)
    # Or the layer's input, an MLP's, its output, and a chunk.
    mlp_row = mlp_row_bytes(sizes, itemsize, tensor_parallel, expert_parallel)
    mlp_chunk = min(num_rows, chunk_rows(device, mlp_row)) * (mlp_row + hidden)
    mlp = 3 * num_rows * hidden + mlp_chunk
    logits = sizes.vocab * (itemsize + 4)
    kv_in_prefill = gathered
    if not sends_by_layer:
        kv_in_prefill = {"KV": sizes.kv_layers * staying_layer, "layers on their way": 0}
    prefill = {
        **kv_in_prefill,
        "activations": residual + max(attention, mlp) + logits,
        "passing KV": _passing(layout, host, query, kv_row),
        "states": 0,
    }

    # Linear attention, whose layers may take more.
    if sizes.linear is not None:
        layer_states = sizes.linear.layer_bytes(itemsize)
        states = sizes.state_bytes(itemsize)
        # Of a question that is not split, those before it and before its last token are kept, too.
        has_question = len(layout.query) > 0 or not layout.is_split
        num_kept = 3 if has_question else 1
        # A question that is asked apart is run after the context, in a pass with few tokens.
        num_copies = 1 if asks_apart and layout.is_split else num_kept
        prefill["states"] = num_copies * states
        gathered["states"] = num_kept * states
        if not num_rows:  # it receives a layer's states, and copies them; then the logits
            prefill["activations"] = layout.num_tokens + max(layer_states, sizes.vocab * itemsize)
        num_before, kv_before = _kv_before_last_linear(
            sizes, sends_by_layer, kept_layer, staying_layer, gathered_layer, kv_row
        )
        is_sending = sends_by_layer and num_before > 0
        in_linear = {
            "KV": kv_before,
            "layers on their way": kept_layer + gathered_layer if is_sending else 0,
            "activations": residual
            + _linear_attention(sizes.linear, layout, host, hidden, itemsize, question_start),
            "passing KV": 0,
            # A layer's states are stored when it has run.
            "states": num_copies * (states - layer_states),
        }
        prefill = max(prefill, in_linear, key=lambda parts: sum(parts.values()))

    # What a host certainly needs: its tokens' states in a layer, and the KV of the layers before.
    keeps_kv = not sends_kv or is_decode_host
    certain_kv = (sizes.kv_layers - 1) * kept_layer if keeps_kv else 0
    certain = {
        "prefill": certain_kv + num_rows * (hidden + query + kv_row),
        "handoff": sizes.kv_layers * gathered_layer,
    }
    stages = {"encoding": encoding, "prefill": prefill, "handoff": gathered}
    return HostMemory(sizes.kv_layers * kept_layer, stages, certain)


def _kv_before_last_linear(
    sizes: DecoderSizes,
    sends_by_layer: bool,
    kept_layer: int,
    staying_layer: int,
    gathered_layer: int,
    kv_row: int,
) -> tuple[int, int]:
    """Count the layers with KV before the last layer of linear attention.

    Also return the bytes of their KV.

    Where KV is sent layer by layer, the newest of these layers is on its way: its rows, and of the
    others what the decode host has gathered, with room for an answer.
    """
    assert sizes.linear is not None  # the model is a hybrid
    linear_layers = sizes.linear.layers
    num_before = len([n for n in range(linear_layers[-1]) if n not in linear_layers])
    if not sends_by_layer or num_before == 0:
        return num_before, num_before * staying_layer
    gathered_with_room = 0
    if gathered_layer:
        gathered_with_room = gathered_layer + GROWTH_ROWS * kv_row
    return num_before, (num_before - 1) * gathered_with_room + staying_layer


def _passing(layout: ContextLayout, host: int, query: int, kv: int) -> int:
    """Return the bytes of a layer's communication buffers on one host."""
    if layout.num_hosts == 1 or not layout.is_split:
        return 0
    if len(layout.query) or len(layout.anchor):
        buffers = layout.num_hosts + 1  # all hosts', and its own
        rows = len(layout.virtual_hosts(host)) * buffers * layout.most_passing.max_passed
        if layout.splits_anchor:  # its parts, and all of it
            rows += buffers * layout.longest_anchor_part + layout.anchor_len
        return rows * kv
    num_rows = sum(map(len, layout.local_spans(host)))
    if layout.zigzag:  # a ring: what is attended to, what comes, and a partial result
        return num_rows * (2 * kv + query)
    return 3 * num_rows * (query + kv)  # all-to-all: sent, received, joined


def _linear_attention(
    sizes: LinearSizes,
    layout: ContextLayout,
    host: int,
    hidden: int,
    itemsize: int,
    question_start: int,
) -> int:
    """Return the bytes that a layer of linear attention holds at once on one host.

    Residual and positions do not count.

    As :class:`.split_linear_attention.SplitLinearAttention` computes it:
    the maps of this host's blocks, then the blocks themselves, then the norm of all rows.
    """
    num_rows = sum(map(len, layout.local_spans(host)))
    if not num_rows:
        return 0
    values = sizes.value_heads * sizes.value_dim
    # A state without tokens is there all the time.
    state = nothing = 4 * sizes.state
    block_map = 4 * sizes.block_map

    # All the time: the layer's input, the convolution's output, the gate, the layer's output; and
    # of every head two projections, beta, and the decay in fp32.
    row = hidden + (sizes.channels + 2 * values) * itemsize + sizes.value_heads * (3 * itemsize + 4)
    # The convolution's last inputs before this layer's last rows, and after each of their parts.
    always = num_rows * row + nothing + 4 * sizes.last_inputs * itemsize

    # The maps of this host's own runs, and those of all hosts'.
    runs = runs_of_host(layout, host)
    own_maps = len(runs.own) * block_map
    maps = sum(map(len, runs.chains)) * block_map

    # While maps are computed: the maps before, the state that this one begins with, and all values
    # with zeros.
    most = 0
    if runs.own:
        width = sizes.value_dim + sizes.key_dim
        joined = num_rows * sizes.value_heads * width * itemsize + 4 * sizes.key_dim**2
        for number, rows in enumerate(runs.own):
            most = max(most, joined + (number + 1) * block_map + _rule(sizes, len(rows), width))
        # Then they are joined, to be sent to all, and there is room for all hosts'.
        most = max(most, joined + 2 * own_maps + maps)

    # The copy and the anchor are computed while maps are on their way.
    for rows in (runs.copy, runs.anchor):
        most = max(most, own_maps + maps + _rule(sizes, len(rows), sizes.value_dim))
    # Then the host's own runs, and the query, begin with a state, unless nothing comes before them.
    for number, rows in enumerate(runs.own):
        first_state = 0 if runs.begins_without_state(host, number) else state
        most = max(most, maps + first_state + _rule(sizes, len(rows), sizes.value_dim))
    # The query is computed in parts, because states between them are kept.
    first_state = state if runs.own or len(runs.anchor) > 0 else 0
    for rows in query_parts(runs.query, layout, question_start):
        most = max(most, maps + first_state + _rule(sizes, len(rows), sizes.value_dim))
        if rows:
            first_state = state

    # The norm: its input, and copies in fp32.
    norm = num_rows * values * (itemsize + 2 * 4) - nothing
    return always + max(most, norm)


def _rule(sizes: LinearSizes, num_rows: int, width: int) -> int:
    """Return the bytes that the rule holds at once for a run of rows.

    Its inputs and the state before them do not count.

    Args:
        width: of the values.
    """
    if not num_rows:
        return 0
    first_part = _rule_of_part(sizes, min(num_rows, MOST_TOKENS), width)
    if num_rows <= MOST_TOKENS:
        return first_part
    # Later parts begin with the state behind the part before.
    state = 4 * sizes.value_heads * sizes.key_dim * width
    later_part = state + _rule_of_part(sizes, min(num_rows - MOST_TOKENS, MOST_TOKENS), width)
    return max(first_part, later_part)


def _rule_of_part(sizes: LinearSizes, num_rows: int, width: int) -> int:
    """Return the bytes that the rule holds for rows that are computed at once, all in fp32."""
    num_chunks = ceil(num_rows / RULE_CHUNK)
    padded = num_chunks * RULE_CHUNK
    state = sizes.value_heads * sizes.key_dim * width

    # Of every row: q, k, k with beta, with its decay, and what the old state already predicts;
    # values, values with beta, new values, and the output; three matrices of a chunk; the decay,
    # its sums, and beta.
    row = 5 * sizes.key_dim + 4 * width + 3 * RULE_CHUNK + 3
    rows_of_all = padded * sizes.value_heads * row
    # Of every chunk its decay, and of all the mask.
    of_chunks = num_chunks * sizes.value_heads + RULE_CHUNK**2 // 4
    # Of the newest chunk: its output and its new values.
    newest = 2 * RULE_CHUNK * sizes.value_heads * width
    # In the last chunk: the state before, if a chunk has made it, decayed, what is added to it, and
    # the sum.
    in_last_chunk = (3 if num_chunks == 1 else 4) * state
    # Behind it: the last state, and the output once more, in order.
    behind = padded * sizes.value_heads * width + state
    return 4 * (rows_of_all + of_chunks + newest + max(in_last_chunk, behind))


@dataclass(frozen=True)
class Room:
    """Check whether a prompt fits on all hosts.

    Attributes:
        memory: its memory on this host.
        num_tokens: the prompt's tokens.
        hosts: the hosts that prefill.
    """

    memory: HostMemory
    num_tokens: int
    hosts: HostGroup

    def require(self) -> None:
        """Reject the prompt if a host has less free memory than its minimum; collective.

        Raises:
            NotEnoughMemoryError: a host has too little; raised on every host.
        """
        device = self.hosts.device
        certain = self.memory.certain
        stage = max(certain, key=lambda name: certain[name])
        for _ in range(2):
            free = free_memory_bytes(device, swaps=True)
            rows = self.hosts.gather_floats([certain[stage], _STAGES.index(stage), free])
            short = [process for process, (needed, _, there) in enumerate(rows) if needed > there]
            if not short:
                return
            # Uncollected garbage counts as free.
            gc.collect()
        needed, stage_number, there = rows[short[0]]
        stage = _STAGES[int(stage_number)]
        raise NotEnoughMemoryError(
            f"a prompt of {self.num_tokens:,} tokens does not fit in memory: "
            f"{self.hosts.name_of(short[0])} needs at least {needed / 1e9:.2f} GB, for "
            f"{_NEEDED_FOR[stage]}, but only {there / 1e9:.2f} GB are free; {_ADVICE[stage]}"
        )

    @contextmanager
    def explained(self, stage: str) -> Iterator[None]:
        """Replace an allocator's error by one that says what the memory is needed for.

        Args:
            stage: ``"encoding"``, ``"reduction"``, ``"prefill"`` or ``"handoff"``.

        Raises:
            NotEnoughMemoryError: this host ran out of memory inside.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, HostError) or not is_out_of_memory(error):
                raise
            parts = self.memory.stages[stage].items()
            estimate = ", ".join(f"{size / 1e9:.2f} GB of {name}" for name, size in parts if size)
            raise NotEnoughMemoryError(
                f"{self.hosts.name} ran out of memory on {self.hosts.device} in the {stage} of a "
                f"prompt of {self.num_tokens:,} tokens, which takes about {estimate}; "
                f"{_ADVICE[stage]}"
            ) from error
