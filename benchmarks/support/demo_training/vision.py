"""Computes what the models make of training batches, faster than their own forward passes do."""

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from .data import PATCH_VALUES, Batch, BatchMaker


def packed_attention(module, query, key, value, attention_mask, scaling, **_):
    """Attend causally up to the first masked row, and by the mask from there on.

    On long clips this is twice as fast as one mask for all rows. Shapes are those of transformers' attention
    interface; the additive mask [B, 1, Q, L] holds the last rows only.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    before = query.shape[2] - attention_mask.shape[2]
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, :before], key[:, :, :before], value[:, :, :before], is_causal=True, scale=scaling
        ),
        F.scaled_dot_product_attention(query[:, :, before:], key, value, attn_mask=attention_mask, scale=scaling),
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register("demo_packed", packed_attention)
ATTENTION = {"text_config": "demo_packed", "vision_config": "sdpa"}


def encode_shots(visual: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """Compute the vision tower's output for all shots at once.

    The tower attends within one temporal patch only, and its own forward loops over the patches. As all have the
    same size, they can be one batch instead, which is several times faster here.

    Args:
        visual: the model's vision tower.
        pixels: normalised patches, float [shots, 4 * grid^2, 1176].

    Returns:
        float [shots, grid^2, hidden].
    """
    shots, patches, _ = pixels.shape
    grid = round((patches // 4) ** 0.5)
    numbers = torch.arange(patches)
    block, inner = numbers // 4, numbers % 4
    rows, columns = block // grid * 2 + inner // 2, block % grid * 2 + inner % 2
    hidden = visual.patch_embed(pixels.view(-1, PATCH_VALUES)).view(shots, patches, -1)
    cos, sin = visual.rotary_pos_emb(hidden, torch.stack([rows, columns], dim=-1))
    for layer in visual.blocks:
        attention = layer.attn
        qkv = attention.qkv(layer.norm1(hidden)).view(shots, patches, 3, attention.num_heads, -1)
        query, key, value = qkv.unbind(2)
        query, key = apply_rotary_pos_emb_vision(query, key, cos, sin)
        heads = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)))
        hidden = hidden + attention.proj(heads.transpose(1, 2).reshape(hidden.shape))
        hidden = hidden + layer.mlp(layer.norm2(hidden))
    return visual.merger(hidden.view(-1, hidden.shape[-1])).view(shots, grid**2, -1)


class FrozenVision:
    """The embeddings of every shot of the pools, by a vision tower that no longer learns.

    Args:
        visual: the tower.
        batches: the batches whose pools are embedded.

    Attributes:
        embeddings: by grid, float [shots, grid^2, hidden].
    """

    _SHOTS_AT_ONCE = 64

    def __init__(self, visual: nn.Module, batches: BatchMaker) -> None:
        self.visual, self.batches = visual, batches
        self.embeddings: dict[int, torch.Tensor] = {}
        for grid, pool in batches.pools.items():
            num_shots = len(pool.shots)
            self.embeddings[grid] = torch.empty(num_shots, grid**2, visual.config.out_hidden_size)
            for first in range(0, num_shots, self._SHOTS_AT_ONCE):
                self.embed(grid, list(range(first, min(first + self._SHOTS_AT_ONCE, num_shots))))

    @torch.no_grad()
    def embed(self, grid: int, places: list[int]) -> None:
        """Compute the embeddings of some shots again."""
        self.embeddings[grid][places] = encode_shots(self.visual, self.batches.pixels(grid, places))


def answer_logits(
    model: Qwen2_5_VLForConditionalGeneration,
    batch: Batch,
    visual: torch.Tensor,
    chosen: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the logits of a batch's labelled tokens.

    Args:
        model: target or draft, with the attention implementation "demo_packed".
        batch: the batch.
        visual: visual embeddings, [shots, grid^2, hidden].
        chosen: indices of the labelled tokens in the flattened labels, int64 [N].
        kept: which visual tokens of each clip the model sees, ascending, int64; None for all.

    Returns:
        float [N, vocabulary].
    """
    embeds = model.get_input_embeddings()(batch.input_ids)
    is_video = batch.input_ids == model.config.video_token_id
    embeds = embeds.masked_scatter(is_video[..., None], visual.float().flatten(0, 1))
    positions, mask = batch.positions, batch.mask
    length, behind = embeds.shape[1], mask.shape[2]
    if kept is not None:
        first, last = torch.arange(batch.first_visual), torch.arange(length - behind, length)
        seen = torch.cat([first, kept + batch.first_visual, last])
        embeds, positions, mask = embeds[:, seen], positions[..., seen], mask[..., seen]
    hidden = model.model.language_model(
        inputs_embeds=embeds,
        position_ids=positions,
        attention_mask={"full_attention": mask.to(torch.bfloat16)},
        use_cache=False,
    ).last_hidden_state[:, -behind:]
    # Padded to a multiple of 256, because the CPU's matrix kernels are compiled per shape.
    padded = F.pad(chosen, (0, -len(chosen) % 256))
    return model.lm_head(hidden.flatten(0, 1)[padded])[: len(chosen)].float()
