"""Counts the arithmetic of one prefill on every host, the KV that it keeps, and what it receives
from others.

Nothing runs. A multiply-add is 2 FLOPs; causal attention of l rows has exactly l (l + 1) / 2
(query, key) pairs. Left out are element-wise operations (norms, rotary positions, activations).
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from apbv import PrefillConfig
from apbv.layout import ContextLayout, intersect, split_evenly
from apbv.model.parts import RULE_CHUNK, DecoderSizes, prompts_like
from apbv.prefilling import methods

# "block_to_earlier": an exact method's blocks attend to everything before them. Full attention is
# one block that attends to itself.
ATTENTION = (
    "anchor",
    "block_to_anchor",
    "block_to_passing",
    "block_to_earlier",
    "block_to_self",
    "query",
)
# "query_pass": the projections and the MLP of a separate pass of the query.
# "linear": the rule of linear attention, and the maps that hosts exchange
# (apbv.prefilling.split_linear_attention).
PARTS = ("vision", "projections", "mlp", *ATTENTION, "scoring", "linear", "query_pass", "lm_head")
METHODS = ("full", "zigzag_ring", "ulysses", "star", "apb", "apbv")
_GATED = ("qwen2_5_vl", "qwen2_5_omni_thinker", "glm4v")  # vision towers whose MLPs have a gate
_SHARED_OUT = ("zigzag_ring", "ulysses")  # exact, and no token is replicated


@dataclass(frozen=True)
class VisionShape:
    """The sizes of a vision tower.

    The tower attends within one temporal patch ("frame") at a time, in every layer; for Qwen2.5-VL,
    where most layers attend within smaller windows, this is an upper bound.

    Attributes:
        layers, hidden: depth and width.
        weights: weights of all layers, which are a row's multiply-adds without attention.
        patches_per_token: patches that become one token (the square of the spatial merge).
        class_tokens: number of rows of a frame that are not patches.
        outer_macs: a token's multiply-adds outside the layers (patch embedding, mergers or
            projector).
        num_deepstack: number of further rows of the decoder's width that the decoder reads per
            token.
    """

    layers: int
    hidden: int
    weights: int
    patches_per_token: float
    class_tokens: int
    outer_macs: float
    num_deepstack: int

    def frame_flops(self, tokens: int) -> float:
        """Count the FLOPs of a frame by its number of tokens."""
        rows = tokens * self.patches_per_token + self.class_tokens
        attention_macs = 2 * self.layers * rows**2 * self.hidden
        return 2 * (rows * self.weights + attention_macs + tokens * self.outer_macs)

    @classmethod
    def from_config(cls, config) -> "VisionShape":
        """Read the sizes from a vision-language config; families differ in names and in what
        follows the tower.

        Raises:
            ValueError: the family is unknown.
        """
        vision = config.vision_config
        family = prompts_like(config.model_type)
        width = config.get_text_config().hidden_size
        layers = vision.num_hidden_layers
        deepstack = DecoderSizes.from_config(config).deepstack
        hidden = vision.embed_dim if family == "qwen2_vl" else vision.hidden_size
        mlp = hidden * vision.mlp_ratio if family == "qwen2_vl" else vision.intermediate_size
        if family == "glm4v":  # the other is the merger's
            mlp = vision.out_hidden_size
        if family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_thinker"):
            patches = vision.spatial_merge_size**2
            outer = (1 + deepstack) * patches * hidden * (patches * hidden + width)
        elif family == "glm4v":  # a convolution, a projection and a gated MLP
            patches = vision.spatial_merge_size**2
            outer = patches * hidden * width + width**2 + 3 * width * vision.intermediate_size
        elif family == "video_llama_3":  # of a frame four patches make a token, of an image each
            patches = 4
            outer = width * (hidden + width)
        elif family == "internvl":
            patches = int(1 / config.downsample_ratio) ** 2
            outer = width * (patches * hidden + width)
        elif (
            family == "llava_onevision"
        ):  # all patches are projected, then a frame's side is halved
            side = vision.image_size // vision.patch_size
            patches = (side / -(-side // 2)) ** 2
            outer = patches * width * (hidden + width)
        elif family == "llava_next_video":  # a frame's side is halved, then projected
            patches = 4
            outer = width * (hidden + width)
        else:
            raise ValueError(f"the cost model does not know the vision tower of {family}")
        sides = [vision.patch_size] * 2 if isinstance(vision.patch_size, int) else vision.patch_size
        outer += patches * 3 * getattr(vision, "temporal_patch_size", 1) * prod(sides) * hidden
        weights = layers * hidden * (4 * hidden + (3 if family in _GATED else 2) * mlp)
        has_class_token = family == "internvl" or vision.model_type == "clip_vision_model"
        return cls(layers, hidden, weights, patches, int(has_class_token), outer, deepstack)


@dataclass(frozen=True)
class Shape(DecoderSizes):
    """The sizes of a model's decoder and vision tower.

    Attributes:
        bytes_per_number: bytes of one weight, and of one number of the KV.
        vision: its vision tower; None for a text model.
    """

    bytes_per_number: int = 2
    vision: VisionShape | None = None

    @classmethod
    def from_config(cls, config, bytes_per_number: int = 2) -> "Shape":
        """Read the sizes from a transformers config of a text model or of a vision-language model
        around one.

        Raises:
            ValueError: the vision tower is of an unknown family.
        """
        vision = VisionShape.from_config(config) if hasattr(config, "vision_config") else None
        return super().from_config(config, bytes_per_number=bytes_per_number, vision=vision)

    @property
    def token_weights(self) -> dict[str, int]:
        """Count the weights of all layers that compute a token.

        Of attention q, k, v and o; of a hybrid's, whose outputs have a gate, one more as wide as q,
        and those of linear attention: q, k and v, gate, the numbers that control the rule, and o.
        Of MLPs gate, up and down, and a router.
        """
        projections = (
            self.kv_layers * 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        )
        if self.linear is not None:
            values = self.linear.value_heads * self.linear.value_dim
            projections += self.kv_layers * self.hidden * self.heads * self.head_dim
            widths = self.linear.channels + 2 * values + 2 * self.linear.value_heads
            projections += len(self.linear.layers) * self.hidden * widths
        return {
            "projections": projections,
            "mlp": self.layers * self.hidden * (3 * self.intermediate + self.experts),
        }

    def rule_macs(self, is_map: bool) -> int:
        """Count the multiply-adds of linear attention for one token in all layers, by transformers'
        rule.

        Args:
            is_map: of the map of a block, whose values are wider by Dk.
        """
        if self.linear is None:
            return 0
        keys = self.linear.key_dim
        values = self.linear.value_dim + is_map * self.linear.key_dim
        head = RULE_CHUNK * (3 * keys + 2 * values) + 3 * keys * values
        return len(self.linear.layers) * self.linear.value_heads * head

    def layouts(self, layout: ContextLayout) -> Counter[ContextLayout]:
        """Count the layers with attention that have each layout of a prompt."""
        linear = () if self.linear is None else self.linear.layers
        return Counter(
            layout.in_layer(layer, self.layers)
            for layer in range(self.layers)
            if layer not in linear
        )

    @property
    def kv_bytes(self) -> int:
        """Count the bytes of one token's K and V in all layers."""
        return self.kv_token * self.bytes_per_number


@dataclass(frozen=True)
class Video:
    """The video of a prompt.

    Attributes:
        tokens: the run of its placeholders; timestamps between them, as in Qwen3-VL, count as
            placeholders.
        frames: number of temporal patches.
        frame_tokens: tokens of a frame before a reduction leaves some out, of every frame equally
            many, as is assumed; None: nothing is left out before the language model.
    """

    tokens: range
    frames: int
    frame_tokens: int | None = None

    def pieces(self, num_hosts: int) -> list[tuple[int, range]]:
        """Return for every host how many frames it encodes, and the tokens that these become."""
        frames = range(self.frames)
        shares = split_evenly(frames, num_hosts)
        # Tokens beyond an equal number per frame (LLaVA-OneVision's newline) belong to the last
        # frame.
        count = len(self.tokens)
        per_frame = len(self.tokens) // self.frames
        ends = [
            frame * (per_frame if self.frame_tokens is None else count / self.frames)
            for frame in frames
        ]
        edges = [self.tokens.start + int(end) for end in ends] + [self.tokens.stop]
        return [(len(share), range(edges[share.start], edges[share.stop])) for share in shares]


@dataclass(frozen=True)
class HostCost:
    """The cost of a prefill on one host, over all layers.

    Attributes:
        flops: FLOPs by part (:data:`PARTS`).
        received: bytes from other hosts, by what they are.
        kv_bytes: bytes of the KV that this host keeps.
    """

    flops: Counter
    received: Counter
    kv_bytes: int


def cost(
    shape: Shape,
    method: str,
    layout: ContextLayout,
    *,
    video: Video | None = None,
    density: float = 1.0,
) -> list[HostCost]:
    """Compute the cost of one prefill, host by host. Importance is ``peak``, and ``apbv`` fuses the
    query.

    Args:
        shape: the model's sizes.
        method: a name in :data:`METHODS`; all are full attention on host 0 where the layout has no
            blocks.
        layout: what the method's ``plan`` returned.
        video: the prompt's video, if it has one.
        density: the share of blocks' causal attention to themselves that is computed, as the
            figures of a prefill with sparse attention give it; how these blocks are chosen is left
            out.

    Raises:
        ValueError: the method has no sparse attention.
    """
    if not 0 < density <= 1 or (density < 1 and method in _SHARED_OUT):
        raise ValueError(f"{method} does not compute {density:g} of its attention")
    if not layout.is_split:
        method = "full"
    separate = method in ("star", "apb")
    costs = [
        _host_cost(shape, method, layout, host, separate, video) for host in range(layout.num_hosts)
    ]
    for host in costs:
        host.flops["block_to_self"] = round(density * host.flops["block_to_self"])
    return costs


def cost_of_prompt(
    shape: Shape,
    hosts: int,
    prompt: tuple[int, int, int, Video | None],
    config: PrefillConfig,
    density: float = 1.0,
) -> tuple[ContextLayout, list[HostCost]]:
    """Return the layout of a prefill, and its cost on every host.

    Args:
        prompt: n, where the context and the question start, and the video.
        config: the method and the reduction.

    Raises:
        ValueError: visual tokens are to be pruned of a text, or as :func:`cost`.
    """
    num_tokens, start, stop, video = prompt
    if video is None and config.reduce is not None:
        raise ValueError(
            f"{config.reduce.method} leaves visual tokens out: it needs the frames of a video"
        )
    gone = 0
    if config.reduce is not None:  # of every frame as many tokens are left, as is assumed
        count = len(video.tokens)
        kept = max(1, round(count * config.reduce.ratio))
        gone = count - kept
        per_frame = count // video.frames
        video = replace(
            video, tokens=range(start, start + kept), frame_tokens=per_frame if gone else None
        )
    layout = methods.METHODS[config.method].plan(
        hosts, num_tokens - gone, start, stop - gone, config
    )
    return layout, cost(shape, config.method, layout, video=video, density=density)


def _host_cost(shape, method, layout, host, separate, video) -> HostCost:
    flops = Counter()
    rows = sum(map(len, layout.local_spans(host)))
    for part, weights in shape.token_weights.items():
        flops[part] = 2 * rows * weights
        flops["query_pass"] += 2 * len(layout.query) * weights * separate
    flops["linear"] = 2 * rows * shape.rule_macs(False)
    if layout.num_hosts > 1:
        flops["linear"] += 2 * sum(map(len, layout.block_rows(host)[:-1])) * shape.rule_macs(True)
    for of_layers, num_layers in shape.layouts(layout).items():
        for part, scores in _scores(shape, method, of_layers, host, separate).items():
            # Attention multiplies by K and by V, the scoring by K only.
            flops[part] += (2 if part == "scoring" else 4) * num_layers * shape.head_dim * scores
    if layout.last_token_host in (None, host):
        flops["lm_head"] = 2 * shape.hidden * shape.vocab
    if video is not None:
        frames, _ = video.pieces(layout.num_hosts)[host]
        encoded = (
            len(video.tokens) // video.frames if video.frame_tokens is None else video.frame_tokens
        )
        flops["vision"] = round(frames * shape.vision.frame_flops(encoded))
    received = _received(shape, method, layout, host, video) if layout.num_hosts > 1 else Counter()
    return HostCost(flops, received, shape.kv_bytes * sum(map(len, layout.cache_spans(host))))


def _scores(shape, method, layout, host, separate) -> dict[str, int]:
    """Count the (query head, query row, key) triples of one layer on one host, by part."""
    if method == "full":
        return {
            "block_to_self": shape.heads
            * sum(causal_pairs(len(span)) for span in layout.local_spans(host))
        }
    heads = shape.heads
    blocks = layout.virtual_hosts(host)
    if method == "ulysses":  # a share of the heads, over all tokens
        heads = len(_query_heads(shape, layout)[host])
        blocks = range(layout.num_hosts)
    rows = {v: len(layout.blocks[v]) for v in blocks}
    pairs = {"block_to_self": sum(map(causal_pairs, rows.values()))}
    if method in _SHARED_OUT:
        pairs["block_to_earlier"] = sum(rows[v] * layout.blocks[v].start for v in blocks)
    else:
        anchor = layout.anchor_len
        query = len(layout.query)
        last = len(layout.blocks) - 1
        pairs["anchor"] = causal_pairs(anchor)
        # A copy in front of the prompt's first block would repeat what the block begins with.
        pairs["block_to_anchor"] = anchor * sum(
            rows[v] for v in blocks if v or not layout.anchor_copy
        )
        pairs["block_to_passing"] = sum(
            rows[v] * sum(map(layout.num_passed, range(v))) for v in blocks
        )
        pairs["query"] = query * (len(layout.anchor_slice(host)) + sum(rows.values()))
        pairs["query"] += causal_pairs(query) if host == 0 else 0  # host 0 keeps the query's own KV
        pairs["query"] += query * anchor + causal_pairs(query) if separate else 0
        # The last block passes nothing on, and one that passes on all of itself need not choose.
        chosen = [rows[v] for v in blocks if v != last and 0 < layout.num_passed(v) < rows[v]]
        pairs["scoring"] = query * sum(chosen)
    return {part: heads * count for part, count in pairs.items()}


def _received(shape, method, layout, host, video) -> Counter:
    """Count the bytes that one of several hosts receives, by what they are."""
    received = Counter()
    layers = shape.kv_layers
    size = shape.bytes_per_number
    others = layout.num_hosts - 1
    here = sum(len(layout.blocks[v]) for v in layout.virtual_hosts(host))
    if method == "zigzag_ring":
        received["ring"] = shape.kv_bytes * (layout.num_tokens - here)
    elif method == "ulysses":
        heads = _query_heads(shape, layout)[host]
        group = shape.heads // shape.kv_heads
        kv_heads = -(-heads.stop // group) - heads.start // group if len(heads) else 0
        states = (len(heads) + 2 * kv_heads) * (layout.num_tokens - here)
        outputs = (shape.heads - len(heads)) * here
        received["all_to_all"] = layers * (states + outputs) * shape.head_dim * size
    elif method != "full":
        # All buffers are as long as the longest, and the last block sends an empty one.
        passed = sum(
            of_layers.max_passed * count for of_layers, count in shape.layouts(layout).items()
        )
        received["passing"] = (
            shape.kv_bytes // layers * others * len(layout.virtual_hosts(host)) * passed
        )
        row = shape.heads * (shape.head_dim * size + max(4, size))  # the output and its log-sum-exp
        received["query_merge"] = layers * others * len(layout.query) * row
    if (
        linear := shape.linear
    ) is not None:  # maps of blocks, or the states of a prompt that host 0 computes
        inputs = linear.last_inputs * size
        num_maps = others * len(layout.virtual_hosts(host))
        of_layer = num_maps * (4 * linear.block_map + inputs) or (host > 0) * (
            4 * linear.state + inputs
        )
        received["states"] = len(linear.layers) * of_layer
    if layout.last_token_host not in (None, host):
        received["logits"] = shape.vocab * size
    if video is not None:
        _, encoded = video.pieces(layout.num_hosts)[host]
        needed = [intersect(span, video.tokens) for span in layout.local_spans(host)]
        missing = sum(len(run) - len(intersect(run, encoded)) for run in needed)
        received["embeddings"] = missing * (1 + shape.vision.num_deepstack) * shape.hidden * size
    return received


def causal_pairs(rows: int) -> int:
    """Count the (query, key) pairs of causal attention among these rows."""
    return rows * (rows + 1) // 2


def _query_heads(shape: Shape, layout: ContextLayout) -> list[range]:
    return split_evenly(range(shape.heads), layout.num_hosts)


def flop_ratio(costs_full: list[HostCost], costs_other: list[HostCost]) -> float:
    """Divide the busiest hosts' FLOPs: the speedup where every host brings its own cores."""
    return max(c.flops.total() for c in costs_full) / max(c.flops.total() for c in costs_other)


def work_ratio(costs_full: list[HostCost], costs_other: list[HostCost]) -> float:
    """Divide all hosts' FLOPs: the speedup where all hosts share the same cores."""
    return sum(c.flops.total() for c in costs_full) / sum(c.flops.total() for c in costs_other)


def explain(method: str, layout: ContextLayout, costs: list[HostCost], full: list[HostCost]) -> str:
    """Format what the busiest host of a prefill does.

    Args:
        layout: of the first of its layers.
        costs: what it costs every host.
        full: what full attention on one host costs.
    """
    busiest = max(range(len(costs)), key=lambda host: costs[host].flops.total())
    mine = costs[busiest]
    parts = [(part, mine.flops[part]) for part in PARTS if mine.flops[part]]
    received = ", ".join(
        f"{kind} {count / 1e6:.2f} MB" for kind, count in mine.received.items() if count
    )
    lines = [
        f"{method}, {layout.num_hosts} hosts, {layout.num_tokens} tokens: anchor "
        f"{layout.anchor_len}, {len(layout.blocks)} blocks, passing {layout.passing_len}, query "
        f"{len(layout.query)}",
        f"  {f'on host {busiest}':<17}{'TFLOP':>12}{'share':>8}",
        *(
            f"  {part:<17}{count / 1e12:>12.4f}{count / mine.flops.total():>8.1%}"
            for part, count in parts
        ),
        f"FLOPs of full over this: busiest host {flop_ratio(full, costs):.2f}, all hosts together "
        f"{work_ratio(full, costs):.2f}",
        f"KV: {', '.join(f'{host.kv_bytes / 1e6:.1f}' for host in costs)} MB per host",
        f"received: {received or 'nothing'}",
    ]
    return "\n".join(lines)
