"""Counts each host's arithmetic in one prefill, the KV that it keeps, and what it receives.

Nothing runs. A multiply-add is 2 FLOPs; causal attention of l rows has exactly l (l + 1) / 2
(query, key) pairs. Left out are element-wise operations (norms, rotary positions, activations).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import torch

from apbv import PrefillConfig
from apbv.errors import InvalidRequestError
from apbv.layout import ContextLayout, intersect, split_evenly
from apbv.model.families import RULE_CHUNK, DecoderSizes, family_of
from apbv.prefilling import methods
from apbv.prefilling.methods.anchor import share_anchor

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
# Vision towers whose MLPs have a gate.
_GATED = ("qwen2_5_vl", "qwen2_5_omni_thinker", "glm4v")
# Exact methods: hosts share all rows, and no token is replicated.
_EXACT = ("zigzag_ring", "ulysses")
# Methods that compute the query in a pass of its own, behind the context's.
_SEPARATE_QUERY = ("star", "apb")


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
        """Read the sizes from a vision-language config.

        Families differ in the names of fields and in what follows the tower.

        Raises:
            InvalidRequestError: the family is unknown.
        """
        # The layers.
        vision = config.vision_config
        family = family_of(config).row.like
        width = config.get_text_config().hidden_size
        layers = vision.num_hidden_layers
        deepstack = DecoderSizes.from_config(config).deepstack
        if family == "qwen2_vl":
            hidden = vision.embed_dim
            mlp = hidden * vision.mlp_ratio
        else:
            hidden = vision.hidden_size
            mlp = vision.intermediate_size
        if family == "glm4v":
            # Its intermediate_size is the merger's.
            mlp = vision.out_hidden_size
        mlp_matrices = 3 if family in _GATED else 2
        weights = layers * hidden * (4 * hidden + mlp_matrices * mlp)

        # What merges patches into tokens, and projects them.
        if family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_thinker"):
            patches = vision.spatial_merge_size**2
            outer = (1 + deepstack) * patches * hidden * (patches * hidden + width)
        elif family == "glm4v":
            # A convolution, a projection and a gated MLP.
            patches = vision.spatial_merge_size**2
            outer = patches * hidden * width + width**2 + 3 * width * vision.intermediate_size
        elif family == "video_llama_3":
            # Four patches of a frame make a token; of an image, each patch would.
            patches = 4
            outer = width * (hidden + width)
        elif family == "internvl":
            patches = int(1 / config.downsample_ratio) ** 2
            outer = width * (patches * hidden + width)
        elif family == "llava_onevision":
            # All patches are projected, then a frame's side is halved, rounded up.
            side = vision.image_size // vision.patch_size
            patches = (side / -(-side // 2)) ** 2
            outer = patches * width * (hidden + width)
        elif family == "llava_next_video":
            # A frame's side is halved, then its tokens are projected.
            patches = 4
            outer = width * (hidden + width)
        else:
            raise InvalidRequestError(f"the cost model does not know the vision tower of {family}")

        # The patch embedding, of three colors.
        if isinstance(vision.patch_size, int):
            patch_area = vision.patch_size**2
        else:
            patch_area = prod(vision.patch_size)
        patch_frames = getattr(vision, "temporal_patch_size", 1)
        outer += patches * 3 * patch_frames * patch_area * hidden

        has_class_token = family == "internvl" or vision.model_type == "clip_vision_model"
        class_tokens = 1 if has_class_token else 0
        return cls(layers, hidden, weights, patches, class_tokens, outer, deepstack)


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
        """Read the sizes from a transformers config of a text or vision-language model.

        Raises:
            InvalidRequestError: the vision tower is of an unknown family.
        """
        vision = None
        if hasattr(config, "vision_config"):
            vision = VisionShape.from_config(config)
        return super().from_config(config, bytes_per_number=bytes_per_number, vision=vision)

    @property
    def token_weights(self) -> dict[str, int]:
        """Count the weights of all layers that compute a token, by part."""
        # Of attention q, k, v and o.
        attention_width = 2 * (self.heads + self.kv_heads) * self.head_dim
        projections = self.kv_layers * self.hidden * attention_width
        if self.linear is not None:
            # A hybrid's attention has a gate of its outputs, as wide as q.
            projections += self.kv_layers * self.hidden * self.heads * self.head_dim
            # Of linear attention q, k and v, the gate and o, and two numbers that control the rule.
            values = self.linear.value_heads * self.linear.value_dim
            linear_width = self.linear.channels + 2 * values + 2 * self.linear.value_heads
            projections += len(self.linear.layers) * self.hidden * linear_width
        # Of MLPs gate, up and down, and a router.
        mlp = self.layers * self.hidden * (3 * self.intermediate + self.experts)
        return {"projections": projections, "mlp": mlp}

    def rule_macs(self, is_map: bool) -> int:
        """Count a token's multiply-adds in the rule of linear attention, in all layers.

        The rule is transformers', chunk by chunk.

        Args:
            is_map: whether a block's map is computed, whose values are wider by Dk.
        """
        if self.linear is None:
            return 0
        key_dim = self.linear.key_dim
        value_dim = self.linear.value_dim
        if is_map:
            value_dim += key_dim
        head_macs = RULE_CHUNK * (3 * key_dim + 2 * value_dim) + 3 * key_dim * value_dim
        return len(self.linear.layers) * self.linear.value_heads * head_macs

    def layouts(self, layout: ContextLayout) -> Counter[ContextLayout]:
        """Count the layers with attention that have each layout of a prompt."""
        return Counter(layout.in_layer(layer, self.kv_layers) for layer in range(self.kv_layers))

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
        frame_tokens: tokens of a frame before a reduction leaves some out, assumed to be equally
            many of every frame; None: nothing is left out before the language model.
    """

    tokens: range
    frames: int
    frame_tokens: int | None = None

    def pieces(self, num_hosts: int) -> list[tuple[int, range]]:
        """Return for every host how many frames it encodes, and the tokens that these become."""
        if self.frame_tokens is None:
            # Tokens beyond an equal number per frame (LLaVA-OneVision's newline) belong to the last
            # frame.
            per_frame = len(self.tokens) // self.frames
        else:
            # What a reduction leaves of a frame need not be a whole number of tokens.
            per_frame = len(self.tokens) / self.frames
        edges = [self.tokens.start + int(frame * per_frame) for frame in range(self.frames)]
        edges.append(self.tokens.stop)
        pieces = []
        for share in split_evenly(range(self.frames), num_hosts):
            pieces.append((len(share), range(edges[share.start], edges[share.stop])))
        return pieces


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
    """Compute the cost of one prefill, host by host.

    Importance is taken to be ``peak``, and ``apbv`` to fuse the query.

    Args:
        shape: the model's sizes.
        method: a name in :data:`METHODS`; all are full attention on host 0 where the layout has no
            blocks.
        layout: what the method's ``plan`` returned.
        video: the prompt's video, if it has one.
        density: the share of blocks' causal attention to themselves that is computed, from the
            figures of a prefill with sparse attention. The choice of sparse blocks is not counted.

    Raises:
        InvalidRequestError: the method has no sparse attention.
    """
    if not 0 < density <= 1 or (density < 1 and method in _EXACT):
        raise InvalidRequestError(f"{method} does not compute {density:g} of its attention")
    if not layout.is_split:
        method = "full"
    costs = []
    for host in range(layout.num_hosts):
        host_cost = _host_cost(shape, method, layout, host, video)
        host_cost.flops["block_to_self"] = round(density * host_cost.flops["block_to_self"])
        costs.append(host_cost)
    return costs


def cost_of_prompt(
    shape: Shape,
    hosts: int,
    prompt: tuple[int, int, int, Video | None],
    config: PrefillConfig,
    density: float = 1.0,
) -> tuple[ContextLayout, list[HostCost]]:
    """Return the layout of a prefill on GPUs, and its cost on every host.

    Args:
        prompt: n, where the context and the question start, and the video.
        config: the method and the reduction.

    Raises:
        InvalidRequestError: visual tokens are to be pruned of a text, or as :func:`cost`.
    """
    num_tokens, start, stop, video = prompt
    if video is None and config.reduce is not None:
        raise InvalidRequestError(
            f"{config.reduce.method} leaves visual tokens out: it needs the frames of a video"
        )
    if config.reduce is not None:
        # Equally many tokens are assumed to be left of every frame.
        num_visual = len(video.tokens)
        num_left = max(1, round(num_visual * config.reduce.ratio))
        num_pruned = num_visual - num_left
        frame_tokens = num_visual // video.frames if num_pruned else None
        video = replace(video, tokens=range(start, start + num_left), frame_tokens=frame_tokens)
        num_tokens -= num_pruned
        stop -= num_pruned
    method = methods.METHODS[config.method]
    layout = method.plan(hosts, num_tokens, start, stop, config)
    device = torch.device("cuda")
    layout = share_anchor(layout, method.facts, config, shape, device, shape.bytes_per_number)
    return layout, cost(shape, config.method, layout, video=video, density=density)


def _host_cost(
    shape: Shape, method: str, layout: ContextLayout, host: int, video: Video | None
) -> HostCost:
    flops = Counter()

    # Projections and MLPs, of the context's rows and of a separate pass of the query.
    rows = _total_len(layout.local_spans(host))
    query_rows = len(layout.query) if method in _SEPARATE_QUERY else 0
    for part, weights in shape.token_weights.items():
        flops[part] = 2 * rows * weights
        flops["query_pass"] += 2 * query_rows * weights

    # Linear attention: the rule itself, and the maps of blocks.
    flops["linear"] = 2 * rows * shape.rule_macs(is_map=False)
    if layout.num_hosts > 1:
        mapped_rows = _total_len(layout.blocks_of(host))
        if layout.splits_anchor:
            mapped_rows += len(layout.anchor_part(host))
        flops["linear"] += 2 * mapped_rows * shape.rule_macs(is_map=True)

    # Attention, and the scoring of pairs to pass on.
    for layer_layout, num_layers in shape.layouts(layout).items():
        for part, scores in _scores(shape, method, layer_layout, host).items():
            # Attention multiplies by K and by V, the scoring by K only.
            flops_per_number = 2 if part == "scoring" else 4
            flops[part] += flops_per_number * num_layers * shape.head_dim * scores

    # The logits of the last token.
    if layout.last_token_host in (None, host):
        flops["lm_head"] = 2 * shape.hidden * shape.vocab

    # The vision tower, which sees a frame before tokens are left out.
    if video is not None:
        num_frames, _ = video.pieces(layout.num_hosts)[host]
        frame_tokens = video.frame_tokens
        if frame_tokens is None:
            frame_tokens = len(video.tokens) // video.frames
        flops["vision"] = round(num_frames * shape.vision.frame_flops(frame_tokens))

    received = Counter()
    if layout.num_hosts > 1:
        received = _received(shape, method, layout, host, video)
    kv_bytes = shape.kv_bytes * _total_len(layout.cache_spans(host))
    return HostCost(flops, received, kv_bytes)


def _total_len(spans: Iterable[range]) -> int:
    return sum(len(span) for span in spans)


def _scores(shape: Shape, method: str, layout: ContextLayout, host: int) -> dict[str, int]:
    """Count the (query head, query row, key) triples of one layer on one host, by part."""
    if method == "full":
        pairs = sum(causal_pairs(len(span)) for span in layout.local_spans(host))
        return {"block_to_self": shape.heads * pairs}
    heads = shape.heads
    blocks = layout.virtual_hosts(host)
    if method == "ulysses":
        # A host computes some of the heads, over all tokens.
        heads = len(_query_heads(shape, layout)[host])
        blocks = range(layout.num_hosts)
    if method in _EXACT:
        pairs = _exact_pairs(layout, blocks)
    else:
        pairs = _passing_pairs(method, layout, blocks, host)
    return {part: heads * count for part, count in pairs.items()}


def _exact_pairs(layout: ContextLayout, blocks: Iterable[int]) -> dict[str, int]:
    """Count the (query row, key) pairs of some blocks by part, for a method of :data:`_EXACT`."""
    pairs = {"block_to_self": 0, "block_to_earlier": 0}
    for number in blocks:
        block = layout.blocks[number]
        pairs["block_to_self"] += causal_pairs(len(block))
        pairs["block_to_earlier"] += len(block) * block.start
    return pairs


def _passing_pairs(
    method: str, layout: ContextLayout, blocks: Iterable[int], host: int
) -> dict[str, int]:
    """Count a host's (query row, key) pairs by part, for methods with anchors and passing.

    Args:
        blocks: the host's blocks, by number.
    """
    anchor = layout.anchor_len
    part = layout.anchor_part(host)
    query = len(layout.query)
    last = len(layout.blocks) - 1
    pairs = {
        "block_to_self": 0,
        "anchor": causal_pairs(part.stop) - causal_pairs(part.start),
        "block_to_anchor": 0,
        "block_to_passing": 0,
        "query": 0,
        "scoring": 0,
    }

    # Blocks.
    num_rows = 0
    for number in blocks:
        rows = len(layout.blocks[number])
        num_rows += rows
        pairs["block_to_self"] += causal_pairs(rows)
        # A copy in front of the prompt's first block would repeat what the block begins with.
        if number > 0 or not layout.anchor_copy:
            pairs["block_to_anchor"] += rows * anchor
        num_passed = sum(layout.num_passed(earlier) for earlier in range(number))
        pairs["block_to_passing"] += rows * num_passed
        # The last block passes nothing on, and one that passes on all of itself need not choose.
        if number != last and 0 < layout.num_passed(number) < rows:
            pairs["scoring"] += query * rows

    # The query.
    pairs["query"] = query * (len(layout.anchor_slice(host)) + num_rows)
    if host == 0:
        # Host 0 keeps the query's own KV.
        pairs["query"] += causal_pairs(query)
    if method in _SEPARATE_QUERY:
        # A copy of the query in the context's pass attends to the anchor and to itself.
        pairs["query"] += query * anchor + causal_pairs(query)
    return pairs


def _received(
    shape: Shape, method: str, layout: ContextLayout, host: int, video: Video | None
) -> Counter:
    """Count the bytes that one of several hosts receives, by what they are."""
    received = Counter()
    layers = shape.kv_layers
    number_bytes = shape.bytes_per_number
    num_others = layout.num_hosts - 1
    blocks = layout.virtual_hosts(host)
    local_tokens = sum(len(layout.blocks[number]) for number in blocks)
    other_tokens = layout.num_tokens - local_tokens

    # Attention to what other hosts have.
    if method == "zigzag_ring":
        received["ring"] = shape.kv_bytes * other_tokens
    elif method == "ulysses":
        heads = _query_heads(shape, layout)[host]
        states = (len(heads) + 2 * _num_kv_heads(shape, heads)) * other_tokens
        outputs = (shape.heads - len(heads)) * local_tokens
        received["all_to_all"] = layers * (states + outputs) * shape.head_dim * number_bytes
    elif method != "full":
        # All buffers are as long as the longest, and the last block sends an empty one.
        num_passed = 0
        for layer_layout, num_layers in shape.layouts(layout).items():
            num_passed += layer_layout.max_passed * num_layers
        layer_kv_bytes = shape.kv_bytes // layers
        received["passing"] = layer_kv_bytes * num_others * len(blocks) * num_passed
        if layout.splits_anchor:
            part_bytes = layer_kv_bytes * layout.longest_anchor_part
            received["anchor"] = layers * num_others * part_bytes
        # A row's output and its log-sum-exp.
        row_bytes = shape.heads * (shape.head_dim * number_bytes + max(4, number_bytes))
        received["query_merge"] = layers * num_others * len(layout.query) * row_bytes

    # Linear attention: maps of blocks, or the states of a prompt that host 0 computes alone.
    linear = shape.linear
    if linear is not None:
        input_bytes = linear.last_inputs * number_bytes
        if len(blocks) > 0:
            num_runs = len(blocks)
            if layout.splits_anchor:
                num_runs += 1
            layer_bytes = num_others * num_runs * (4 * linear.block_map + input_bytes)
        elif host > 0:
            # Those before the question, before its last token and behind it.
            layer_bytes = 3 * (4 * linear.state + input_bytes)
        else:
            layer_bytes = 0
        received["states"] = len(linear.layers) * layer_bytes

    # The last token's logits, and embeddings that other hosts' vision towers made.
    if layout.last_token_host not in (None, host):
        received["logits"] = shape.vocab * number_bytes
    if video is not None:
        _, encoded = video.pieces(layout.num_hosts)[host]
        num_missing = 0
        for span in layout.local_spans(host):
            needed = intersect(span, video.tokens)
            num_missing += len(needed) - len(intersect(needed, encoded))
        row_bytes = (1 + shape.vision.num_deepstack) * shape.hidden * number_bytes
        received["embeddings"] = num_missing * row_bytes
    return received


def causal_pairs(rows: int) -> int:
    """Count the (query, key) pairs of causal attention among these rows."""
    return rows * (rows + 1) // 2


def _query_heads(shape: Shape, layout: ContextLayout) -> list[range]:
    """Return each host's query heads under ``ulysses``."""
    return split_evenly(range(shape.heads), layout.num_hosts)


def _num_kv_heads(shape: Shape, heads: range) -> int:
    """Count the KV heads that some query heads attend with."""
    if len(heads) == 0:
        return 0
    group = shape.heads // shape.kv_heads
    first = heads.start // group
    stop = -(-heads.stop // group)
    return stop - first


def _total_flops(costs: list[HostCost]) -> list[int]:
    return [host_cost.flops.total() for host_cost in costs]


def flop_ratio(costs_full: list[HostCost], costs_other: list[HostCost]) -> float:
    """Divide the busiest hosts' FLOPs: the speedup where every host brings its own cores."""
    return max(_total_flops(costs_full)) / max(_total_flops(costs_other))


def work_ratio(costs_full: list[HostCost], costs_other: list[HostCost]) -> float:
    """Divide all hosts' FLOPs: the speedup where all hosts share the same cores."""
    return sum(_total_flops(costs_full)) / sum(_total_flops(costs_other))


def explain(method: str, layout: ContextLayout, costs: list[HostCost], full: list[HostCost]) -> str:
    """Format what the busiest host of a prefill does.

    Args:
        layout: of the first of its layers.
        costs: what it costs every host.
        full: what full attention on one host costs.
    """
    totals = _total_flops(costs)
    busiest = totals.index(max(totals))
    flops = costs[busiest].flops

    # The layout.
    lines = [
        f"{method}, {layout.num_hosts} hosts, {layout.num_tokens} tokens: anchor "
        f"{layout.anchor_len}, {len(layout.blocks)} blocks, passing {layout.passing_len}, query "
        f"{len(layout.query)}"
    ]

    # The busiest host's FLOPs, by part.
    title = f"on host {busiest}"
    lines.append(f"  {title:<17}{'TFLOP':>12}{'share':>8}")
    for part in PARTS:
        count = flops[part]
        if count:
            lines.append(f"  {part:<17}{count / 1e12:>12.4f}{count / flops.total():>8.1%}")

    # Speedups, the cache, and what the busiest host receives.
    lines.append(
        f"FLOPs of full over this: busiest host {flop_ratio(full, costs):.2f}, all hosts together "
        f"{work_ratio(full, costs):.2f}"
    )
    kv_megabytes = ", ".join(f"{host_cost.kv_bytes / 1e6:.1f}" for host_cost in costs)
    lines.append(f"KV: {kv_megabytes} MB per host")
    received = []
    for kind, count in costs[busiest].received.items():
        if count:
            received.append(f"{kind} {count / 1e6:.2f} MB")
    lines.append(f"received: {', '.join(received) or 'nothing'}")
    return "\n".join(lines)
