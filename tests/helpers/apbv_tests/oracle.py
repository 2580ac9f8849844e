"""APB-V's attention by its definition, in one process: a dense mask of which key each query may
see.

Nothing here is shared with the implementation: the blocks are cut anew, scores are taken head by
head, and the mask is applied to plain softmax attention over the whole sequence.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface, DynamicCache

from apbv import SparseConfig

from apbv_tests.sparse_oracle import chosen_pairs


@dataclass
class DenseOracle:
    """Attention for a whole prompt of n tokens in order; used as a model's attention
    implementation.

    Attributes:
        anchor_len, query_start: where the anchor ends and the query begins.
        num_blocks: virtual hosts.
        passing_len: l_p.
        importance: ``peak``, ``softmax`` or ``dot``.
        separate_query: the query sees only the anchor and itself here, and runs again afterwards.
        sparse: which parts of a block's attention to itself are computed; None: all.
        early_passing_len: l_p in the first quarter of the layers with attention, where it is more.
        passing_weights: of each of equally long runs of the layers with attention, relative to
            their mean; None: the same in all.
        num_passed: l_p in the layer that runs.
        keys, values: what each layer saw, ``[1, Hkv, n, D]``.
        masks: which keys each token saw in each layer, bool ``[Hq, n, n]``.
    """

    anchor_len: int
    query_start: int
    num_blocks: int
    passing_len: int
    importance: str = "peak"
    separate_query: bool = False
    sparse: SparseConfig | None = None
    early_passing_len: int = 0
    passing_weights: tuple[float, ...] | None = None
    num_passed: int = 0
    keys: list = field(default_factory=list)
    values: list = field(default_factory=list)
    masks: list = field(default_factory=list)

    def __post_init__(self):
        if self.importance not in ("peak", "softmax", "dot"):
            raise ValueError(f"the oracle has no importance {self.importance!r}")

    def blocks(self) -> list[list[int]]:
        context = list(range(self.anchor_len, self.query_start))
        cuts = []
        start = 0
        for block in range(self.num_blocks):
            length = len(context) // self.num_blocks + (block < len(context) % self.num_blocks)
            cuts.append(context[start : start + length])
            start += length
        return cuts

    def scores(self, q, k, block, kv_head, group, scale):
        """Importance of the keys of one block for one KV head, ``[l_b]``."""
        heads = range(kv_head * group, (kv_head + 1) * group)
        keys = k[0, kv_head, block]
        rows = []
        for head in heads:
            rows.extend(q[0, head, self.query_start :])
        if self.importance in ("peak", "softmax"):
            weights = torch.stack([torch.softmax(keys @ row * scale, dim=0) for row in rows])
            return weights.amax(dim=0) if self.importance == "peak" else weights.mean(dim=0)
        # "dot": the highest mean score of five neighbouring keys
        mean = torch.stack([keys @ row * scale for row in rows]).mean(dim=0)
        last = len(block) - 1
        highest = []
        for j in range(len(block)):
            neighbours = mean[max(0, j - 2) : min(last, j + 2) + 1]
            highest.append(neighbours.max())
        return torch.stack(highest)

    def visible(self, query, key, scale):
        """Which keys each token would see if later ones were not hidden, bool ``[Hkv, n, n]``."""
        n = key.shape[2]
        group = query.shape[1] // key.shape[1]
        visible = torch.zeros(key.shape[1], n, n, dtype=torch.bool)
        visible[:, : self.anchor_len, : self.anchor_len] = True
        passed = torch.zeros(key.shape[1], n, dtype=torch.bool)
        for block in self.blocks():
            visible[:, block, : self.anchor_len] = True
            visible[:, block] |= passed[:, None]
            visible[:, block[0] : block[-1] + 1, block[0] : block[-1] + 1] = True
            if self.num_passed == 0:
                continue
            for kv_head in range(key.shape[1]):
                best = self.scores(query, key, block, kv_head, group, scale)
                # Of equal keys the earlier.
                best = best.argsort(descending=True, stable=True)[: self.num_passed]
                passed[kv_head, torch.tensor(block)[best]] = True
        visible[:, self.query_start :] = True
        if self.separate_query:
            visible[:, self.query_start :, self.anchor_len : self.query_start] = False
        return visible

    def lengths_of_layers(self, config) -> dict[int, int]:
        """l_p of each layer with attention, by its number among all layers."""
        kinds = getattr(config, "layer_types", None) or config.num_hidden_layers * ["attention"]
        layers = [number for number, kind in enumerate(kinds) if kind != "linear_attention"]
        lengths = {}
        weights = self.passing_weights or [1]
        for run, weight in enumerate(weights):
            start = -(-run * len(layers) // len(weights))
            stop = -(-(run + 1) * len(layers) // len(weights))
            for layer in layers[start:stop]:
                lengths[layer] = round(self.passing_len * weight * len(weights) / sum(weights))
        for layer in layers[: -(-len(layers) // 4)]:
            lengths[layer] = max(lengths[layer], self.early_passing_len)
        return lengths

    def attend(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        n = key.shape[2]
        group = query.shape[1] // key.shape[1]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        self.keys.append(key)
        self.values.append(value)
        self.num_passed = self.lengths_of_layers(module.config)[module.layer_idx]
        visible = self.visible(query, key, scale) & torch.ones(n, n, dtype=torch.bool).tril()
        visible = visible.repeat_interleave(group, dim=0)[None]
        if self.sparse is not None:
            for block in map(torch.tensor, filter(None, self.blocks())):
                own = query[0, :, block], key[0, :, block]
                visible[0, :, block[:, None], block] &= chosen_pairs(*own, scale, self.sparse)
        self.masks.append(visible[0])
        return masked_attention(query, key, value, visible, scale), None


@dataclass
class ContextOracle:
    """Attention for the context alone, with the masks that its tokens had beside the query.

    Attributes:
        masks: those of the next layers.
    """

    masks: list

    def attend(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        n = query.shape[2]
        visible = self.masks.pop(0)[None, :, :n, :n]
        return masked_attention(query, key, value, visible, scale), None


def masked_attention(query, key, value, visible, scale):
    """Attention ``[1, n, Hq, D]`` to the visible keys, bool ``[1, Hq, n, n]``."""
    group = query.shape[1] // key.shape[1]
    k = key.repeat_interleave(group, dim=1)
    v = value.repeat_interleave(group, dim=1)
    weights = (
        (query @ k.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf")).softmax(dim=-1)
    )
    return (weights @ v).transpose(1, 2).contiguous()


@contextmanager
def with_attention(model, oracle: DenseOracle | ContextOracle):
    """Give the language model the oracle's attention."""
    AttentionInterface.register("dense_oracle", oracle.attend)
    config = model.get_decoder().config
    before = config._attn_implementation
    model.get_decoder().set_attn_implementation("dense_oracle")
    try:
        yield
    finally:
        config._attn_implementation = before


def decoder_inputs(model, batch: dict) -> dict:
    """What a model makes of a prompt on its way into the language model."""
    given = {}
    hook = model.get_decoder().register_forward_pre_hook(
        lambda *call: given.update(call[2]), with_kwargs=True
    )
    model(**batch, use_cache=False)
    hook.remove()
    return given


@torch.no_grad()
def run_oracle(model, batch, oracle: DenseOracle):
    """Logits ``[1, V]`` of the last token with the oracle's attention in every layer of the
    language model.

    With a separate query pass (text models only) the query runs a second time, with the model's own
    attention, after the context alone: over its keys and values, and a hybrid's states after it.
    """
    with with_attention(model, oracle):
        logits = model(**batch, use_cache=False).logits[:, -1]
    if not oracle.separate_query:
        return logits
    cache = DynamicCache(config=model.config)
    context, query = batch["input_ids"].tensor_split([oracle.query_start], dim=1)
    with with_attention(model, ContextOracle(oracle.masks)):
        model(input_ids=context, past_key_values=cache)
    logits = model(input_ids=query, past_key_values=cache).logits
    attending = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    oracle.keys = [layer.keys for layer in attending]
    oracle.values = [layer.values for layer in attending]
    return logits[:, -1]


def oracle_of(settings: dict, num_hosts: int, query_start: int, prefix: int) -> DenseOracle:
    """What a method means, said anew."""
    method = settings.get("method", "apbv")
    sparse = settings.get("sparse")
    if method == "star":
        first_block = -(-query_start // num_hosts)
        return DenseOracle(
            first_block, query_start, num_hosts - 1, 0, separate_query=True, sparse=sparse
        )
    anchor_len = max(settings["anchor_len"], prefix) if settings["anchor_len"] else 0
    num_blocks = num_hosts * (1 if method == "apb" or settings.get("zigzag") is False else 2)
    is_separate = method == "apb" or settings.get("fused_query") is False
    passed = settings["passing_len"], settings.get("importance", "peak")
    early = settings.get("early_passing_len", 0)
    weights = settings.get("passing_weights")
    return DenseOracle(
        anchor_len, query_start, num_blocks, *passed, is_separate, sparse, early, weights
    )


def as_double(batch: dict) -> dict:
    return {
        name: value.double() if value.is_floating_point() else value
        for name, value in batch.items()
    }
