"""This module counts what one prefill costs every host: arithmetic, memory traffic and exchanges. Nothing runs.

A multiply-add is 2 FLOPs; causal attention of l rows has exactly l (l + 1) / 2 (query, key) pairs. Left out are
element-wise operations (norms, rotary positions, activations), copies and launches, so that the times that
times.py derives from these counts are floors.
"""

from dataclasses import dataclass
from math import prod

from apbv.layout import ContextLayout, intersect, split_evenly
from apbv.model.parts import num_deepstack_layers
from apbv.model.sizes import DecoderSizes

# "block_to_earlier": an exact method's blocks attend to everything before them. Full attention is one block that
# attends to itself.
ATTENTION = ("anchor", "block_to_anchor", "block_to_passing", "block_to_earlier", "block_to_self", "query")
# "query_pass": the projections and the MLP of a separate pass of the query.
PARTS = ("vision", "projections", "mlp", *ATTENTION, "scoring", "query_pass", "lm_head")
KINDS = ("embeddings", "passing", "query_merge", "ring", "all_to_all", "logits")
METHODS = ("full", "zigzag_ring", "ulysses", "star", "apb", "apbv")
_GATED = ("qwen2_5_vl", "qwen2_5_omni_thinker")  # vision towers whose MLPs have a gate
_SHARED_OUT = ("zigzag_ring", "ulysses")  # exact, and no token is replicated
# On a CPU the importance materialises its scores in fp32 three times: their product, the difference from the lse,
# and the maximum, each of which reads what the one before wrote. (On a GPU they never leave the chip.)
_BYTES_PER_SCORE = 16


@dataclass(frozen=True)
class VisionShape:
    """The sizes of a vision tower.

    The tower attends within one temporal patch ("frame") at a time, in every layer; for Qwen2.5-VL, where most
    layers attend within smaller windows, this is an upper bound.

    Attributes:
        layers, hidden: depth and width.
        weights: weights of all layers, which are a row's multiply-adds without attention.
        patches_per_token: patches that become one token (the square of the spatial merge).
        class_tokens: number of rows of a frame that are not patches.
        outer_macs: a token's multiply-adds outside the layers (patch embedding, mergers or projector).
        num_deepstack: number of further rows of the decoder's width that the decoder reads per token.
    """

    layers: int
    hidden: int
    weights: int
    patches_per_token: float
    class_tokens: int
    outer_macs: float
    num_deepstack: int

    def frame_flops(self, tokens: int) -> float:
        """Count the FLOPs of a frame that becomes so many tokens."""
        rows = tokens * self.patches_per_token + self.class_tokens
        attention_macs = 2 * self.layers * rows**2 * self.hidden
        return 2 * (rows * self.weights + attention_macs + tokens * self.outer_macs)

    @classmethod
    def from_config(cls, config) -> "VisionShape":
        """Read the sizes from a vision-language config; families differ in names and in what follows the tower.

        Raises:
            ValueError: the family is unknown.
        """
        vision, family, width = config.vision_config, config.model_type, config.get_text_config().hidden_size
        layers, deepstack = vision.num_hidden_layers, num_deepstack_layers(config)
        hidden = vision.embed_dim if family == "qwen2_vl" else vision.hidden_size
        mlp = hidden * vision.mlp_ratio if family == "qwen2_vl" else vision.intermediate_size
        if family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_thinker"):
            patches = vision.spatial_merge_size**2
            outer = (1 + deepstack) * patches * hidden * (patches * hidden + width)
        elif family == "internvl":
            patches = int(1 / config.downsample_ratio) ** 2
            outer = width * (patches * hidden + width)
        elif family == "llava_onevision":  # all patches are projected, then a frame's side is halved
            side = vision.image_size // vision.patch_size
            patches = (side / -(-side // 2)) ** 2
            outer = patches * width * (hidden + width)
        else:
            raise ValueError(f"the cost model does not know the vision tower of {family}")
        sides = [vision.patch_size] * 2 if isinstance(vision.patch_size, int) else vision.patch_size
        outer += patches * 3 * getattr(vision, "temporal_patch_size", 1) * prod(sides) * hidden
        weights = layers * hidden * (4 * hidden + (3 if family in _GATED else 2) * mlp)
        return cls(layers, hidden, weights, patches, int(family == "internvl"), outer, deepstack)


@dataclass(frozen=True)
class Shape(DecoderSizes):
    """The sizes of a model's decoder and vision tower.

    Attributes:
        bytes_per_number: bytes of one weight, and of one number of the KV.
        vision: its vision tower; None for a text model.
    """

    bytes_per_number: int = 2
    tied_embeddings: bool = False
    vision: VisionShape | None = None

    @classmethod
    def from_config(cls, config, bytes_per_number: int = 2) -> "Shape":
        """Read the sizes from a transformers config of Llama, Qwen2, Qwen3 or a vision-language model around one.

        Raises:
            ValueError: the decoder has experts, or the vision tower is of an unknown family.
        """
        text = config.get_text_config()
        if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
            raise ValueError(f"{text.model_type} has experts; the cost model knows dense decoders only")
        return super().from_config(
            config,
            bytes_per_number=bytes_per_number,
            tied_embeddings=config.tie_word_embeddings,
            vision=VisionShape.from_config(config) if hasattr(config, "vision_config") else None,
        )

    @property
    def weights(self) -> int:
        """Count the weights of all matrices except those that a vision tower has outside its layers."""
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab * self.hidden
        vision = self.vision.weights if self.vision else 0
        return self.layers * sum(self.layer_weights.values()) + embeddings + vision

    @property
    def kv_bytes(self) -> int:
        """Count the bytes of one token's K and V in all layers."""
        return self.layers * self.kv_row * self.bytes_per_number


@dataclass(frozen=True)
class Video:
    """The video of a prompt.

    Attributes:
        tokens: the run of its placeholders; timestamps between them, as in Qwen3-VL, count as placeholders.
        frames: number of temporal patches.
        frame_parallel: whether every host encodes its share of them instead of all.
        frame_tokens: tokens of a frame before a reduction leaves some out, of every frame equally many, as is
            assumed; None: nothing is left out before the language model.
    """

    tokens: range
    frames: int
    frame_parallel: bool = True
    frame_tokens: int | None = None

    @property
    def encoded_tokens(self) -> int:
        """The tokens that the tower makes of a frame."""
        return len(self.tokens) // self.frames if self.frame_tokens is None else self.frame_tokens

    def pieces(self, num_hosts: int) -> list[tuple[int, range]]:
        """Return for every host how many frames it encodes, and the tokens that these become."""
        frames = range(self.frames)
        shares = split_evenly(frames, num_hosts) if self.frame_parallel else [frames] * num_hosts
        # Tokens beyond an equal number per frame (LLaVA-OneVision's newline) belong to the last frame.
        count, per_frame = len(self.tokens), len(self.tokens) // self.frames
        ends = [frame * (per_frame if self.frame_tokens is None else count / self.frames) for frame in frames]
        edges = [self.tokens.start + int(end) for end in ends] + [self.tokens.stop]
        return [(len(share), range(edges[share.start], edges[share.stop])) for share in shares]


@dataclass(frozen=True)
class HostCost:
    """The cost of a prefill on one host, over all layers.

    Attributes:
        flops: FLOPs by part (:data:`PARTS`).
        memory: the fewest bytes that each part moves: weights once a pass, scores, the KV that the query reads.
        received: bytes from other hosts, by kind (:data:`KINDS`).
        exchanges: number of exchanges that follow one another, by kind.
        kv_bytes: bytes of the KV that this host keeps.
        weight_bytes: bytes of the whole model, of which every host holds a replica.
    """

    flops: dict[str, int]
    memory: dict[str, int]
    received: dict[str, int]
    exchanges: dict[str, int]
    kv_bytes: int
    weight_bytes: int

    @property
    def total_flops(self) -> int:
        """Count the FLOPs of all parts."""
        return sum(self.flops.values())

    @property
    def attention_flops(self) -> int:
        """Count the FLOPs of attention and of the scoring for it."""
        return sum(self.flops[part] for part in (*ATTENTION, "scoring"))


def cost(
    shape: Shape,
    method: str,
    layout: ContextLayout,
    *,
    fused_query: bool = True,
    video: Video | None = None,
    density: float = 1.0,
) -> list[HostCost]:
    """Compute the cost of one prefill, host by host. Importance is ``peak``.

    Args:
        shape: the model's sizes.
        method: a name in :data:`METHODS`; all are full attention on host 0 where the layout has no blocks.
        layout: what the method's ``plan`` returned.
        fused_query: False: the query runs in the context's pass, where it sees the anchor and itself, and then
            alone over everything, as it always does with ``star`` and ``apb``.
        video: the prompt's video, if it has one.
        density: the share of blocks' causal attention to themselves that is computed, as the figures of a prefill
            with sparse attention give it; how these blocks are chosen is left out.

    Raises:
        ValueError: the method is unknown or has no sparse attention, the layout is another method's, or the shape
            has no vision tower.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; known are {', '.join(METHODS)}")
    if not 0 < density <= 1 or (density < 1 and method in _SHARED_OUT):
        raise ValueError(f"{method} does not compute {density:g} of its attention")
    if layout.is_split:
        replicates = len(layout.anchor) + len(layout.query) > 0
        zigzag = {"zigzag_ring": True, "apbv": layout.zigzag}.get(method, False)
        if method == "full" or replicates == (method in _SHARED_OUT) or layout.zigzag != zigzag:
            raise ValueError(f"{layout} is not a layout of method {method!r}")
    else:
        method = "full"
    if video is not None and shape.vision is None:
        raise ValueError("a video was given, but the shape has no vision tower")
    separate = method in ("star", "apb") or (method == "apbv" and not fused_query)
    costs = [_host_cost(shape, method, layout, host, separate, video) for host in range(layout.num_hosts)]
    for host in costs if density < 1 else ():
        host.flops["block_to_self"] = round(density * host.flops["block_to_self"])
    return costs


def _host_cost(shape, method, layout, host, separate, video) -> HostCost:
    flops, memory = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    layers, size = shape.layers, shape.bytes_per_number
    rows = sum(map(len, layout.local_spans(host)))
    for part, weights in shape.layer_weights.items():
        flops[part] = 2 * layers * rows * weights
        memory[part] = layers * weights * size if rows else 0
        if separate:
            flops["query_pass"] += 2 * layers * len(layout.query) * weights
            memory["query_pass"] += layers * weights * size
    for part, scores in _scores(shape, method, layout, host, separate).items():
        # Attention multiplies by K and by V, the scoring by K only.
        flops[part] = (2 if part == "scoring" else 4) * layers * shape.head_dim * scores
        memory[part] = layers * scores * _BYTES_PER_SCORE if part == "scoring" else 0
    kv_bytes = shape.kv_bytes * sum(map(len, layout.cache_spans(host)))
    memory["query"] = kv_bytes if flops["query"] else 0
    if layout.last_token_host in (None, host):
        flops["lm_head"] = 2 * shape.hidden * shape.vocab
        memory["lm_head"] = shape.hidden * shape.vocab * size
    if video is not None:
        frames, _ = video.pieces(layout.num_hosts)[host]
        flops["vision"] = round(frames * shape.vision.frame_flops(video.encoded_tokens))
        memory["vision"] = shape.vision.weights * size if frames else 0
    received, exchanges = _traffic(shape, method, layout, host, video) if layout.num_hosts > 1 else ({}, {})
    zeros = dict.fromkeys(KINDS, 0)
    return HostCost(flops, memory, zeros | received, zeros | exchanges, kv_bytes, shape.weights * size)


def _scores(shape, method, layout, host, separate) -> dict[str, int]:
    """Count the (query head, query row, key) triples of one layer on one host, by part."""
    if method == "full":
        return {"block_to_self": shape.heads * sum(_causal(len(span)) for span in layout.local_spans(host))}
    heads, blocks = shape.heads, layout.virtual_hosts(host)
    if method == "ulysses":  # a share of the heads, over all tokens
        heads, blocks = len(_query_heads(shape, layout)[host]), range(layout.num_hosts)
    rows = {v: len(layout.blocks[v]) for v in blocks}
    pairs = {"block_to_self": sum(map(_causal, rows.values()))}
    if method in _SHARED_OUT:
        pairs["block_to_earlier"] = sum(rows[v] * layout.blocks[v].start for v in blocks)
    else:
        anchor, query, last = layout.anchor_len, len(layout.query), len(layout.blocks) - 1
        pairs["anchor"] = _causal(anchor)
        # A copy in front of the prompt's first block would repeat what the block begins with.
        pairs["block_to_anchor"] = anchor * sum(rows[v] for v in blocks if v or not layout.anchor_copy)
        pairs["block_to_passing"] = sum(rows[v] * sum(map(layout.num_passed, range(v))) for v in blocks)
        pairs["query"] = query * (len(layout.anchor_slice(host)) + sum(rows.values()))
        pairs["query"] += _causal(query) if host == 0 else 0  # host 0 keeps the query's own KV
        pairs["query"] += query * anchor + _causal(query) if separate else 0
        # The last block passes nothing on, and one that passes on all of itself need not choose.
        chosen = [rows[v] for v in blocks if v != last and 0 < layout.num_passed(v) < rows[v]]
        pairs["scoring"] = query * sum(chosen)
    return {part: heads * count for part, count in pairs.items()}


def _traffic(shape, method, layout, host, video) -> tuple[dict[str, int], dict[str, int]]:
    """Count the bytes that one of several hosts receives, and its successive exchanges, both by kind."""
    received, exchanges = {}, {}
    layers, size, others = shape.layers, shape.bytes_per_number, layout.num_hosts - 1
    here = sum(len(layout.blocks[v]) for v in layout.virtual_hosts(host))
    if method == "zigzag_ring":
        received["ring"], exchanges["ring"] = shape.kv_bytes * (layout.num_tokens - here), layers * others
    elif method == "ulysses":
        heads, group = _query_heads(shape, layout)[host], shape.heads // shape.kv_heads
        kv_heads = -(-heads.stop // group) - heads.start // group if len(heads) else 0
        states = (len(heads) + 2 * kv_heads) * (layout.num_tokens - here)
        outputs = (shape.heads - len(heads)) * here
        received["all_to_all"] = layers * (states + outputs) * shape.head_dim * size
        exchanges["all_to_all"] = 2 * layers
    elif method != "full":
        if layout.max_passed:
            # All buffers are as long as the longest, and the last block sends an empty one.
            buffers = others * len(layout.virtual_hosts(host))
            received["passing"] = shape.kv_bytes * buffers * layout.max_passed
            exchanges["passing"] = layers * len(layout.virtual_hosts(host))
        row = shape.heads * (shape.head_dim * size + max(4, size))  # the output and its log-sum-exp
        received["query_merge"], exchanges["query_merge"] = layers * others * len(layout.query) * row, layers
    if layout.last_token_host is not None:
        received["logits"] = 0 if host == layout.last_token_host else shape.vocab * size
        exchanges["logits"] = 1
    if video is not None and video.frame_parallel:
        _, encoded = video.pieces(layout.num_hosts)[host]
        needed = [intersect(span, video.tokens) for span in layout.local_spans(host)]
        missing = sum(len(run) - len(intersect(run, encoded)) for run in needed)
        received["embeddings"] = missing * (1 + shape.vision.num_deepstack) * shape.hidden * size
        exchanges["embeddings"] = 1
    return received, exchanges


def _causal(rows: int) -> int:
    return rows * (rows + 1) // 2


def _query_heads(shape: Shape, layout: ContextLayout) -> list[range]:
    return split_evenly(range(shape.heads), layout.num_hosts)


def paper_attention_flops(layout: ContextLayout, hidden: int) -> int:
    """Compute Eq. 7 of the APB-V paper as printed, for one layer on any host.

    It is 2 l_a^2 d + 4 l_b^2 d + 4 (2H - 1) l_p l_b d, with l_b the longest block and l_p at most that.

    Raises:
        ValueError: the layout has no zigzag, which the equation assumes.
    """
    if not layout.zigzag:
        raise ValueError(f"Eq. 7 is about two blocks on every host, unlike {layout}")
    l_a, l_b, l_p = len(layout.anchor), max(map(len, layout.blocks)), layout.max_passed
    return 2 * l_a**2 * hidden + 4 * l_b**2 * hidden + 4 * (2 * layout.num_hosts - 1) * l_p * l_b * hidden


def share_beyond_paper(host_cost: HostCost) -> float:
    """Compute the share of a host's attention FLOPs that Eq. 7 omits: blocks to anchor, query, scoring."""
    left_out = sum(host_cost.flops[part] for part in ("block_to_anchor", "query", "scoring"))
    return left_out / host_cost.attention_flops


def flop_ratio(costs_full: list[HostCost], costs_other: list[HostCost]) -> float:
    """Divide the busiest hosts' FLOPs: the speed-up where every host brings its own cores."""
    return max(c.total_flops for c in costs_full) / max(c.total_flops for c in costs_other)


def work_ratio(costs_full: list[HostCost], costs_other: list[HostCost]) -> float:
    """Divide all hosts' FLOPs: the speed-up where all hosts share the same cores."""
    return sum(c.total_flops for c in costs_full) / sum(c.total_flops for c in costs_other)
