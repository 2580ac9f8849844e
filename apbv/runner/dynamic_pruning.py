"""DyCoke's second stage: each decoding step attends to the visual tokens that matter to it.

Source: Tao et al., *DyCoke: Dynamic Compression of Tokens for Fast Video Large Language Models*
(CVPR 2025), Section 3.3. The first stage, which prunes before the language model, is
:mod:`apbv.prefilling.reduction.dycoke`.

- The first L layers of a decoding step attend to all tokens. The L-th one's attention to the visual
  tokens, mean over heads, ranks them; the layers that follow attend to the best, and to all text.
- What is left out stays in the KV, so that a later step can attend to it again.
- A step whose attention is like the one before, by a cosine similarity of at least 0.9, keeps the
  tokens that were chosen.

What is different here: in the authors' program such a step leaves out nothing. It keeps ⌊V (1 - P)⌋
of V visual tokens, and here their number is rounded, and at least one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..model.attention import NewTokenAttention

_SIMILAR = 0.9  # from this cosine similarity on the chosen tokens stay


@dataclass(frozen=True)
class DecodePruning:
    """How decoding steps leave out visual tokens.

    Attributes:
        share: the share of the visual tokens that a step attends to, of all in the KV.
        layer: how many layers attend to all tokens; at least one.
    """

    share: float
    layer: int


class DynamicPruning:
    """Attention of an answer's newest tokens, which in deeper layers leaves out visual tokens.

    It is a :class:`~apbv.model.attention.LayerAttention` for all steps of one answer, whose KV is
    on this host alone.

    Args:
        settings: how many tokens are left out, and where.
        is_visual: bool ``[n]``: which rows of every layer's KV are those of visual tokens.
        backend: what computes attention, as in :class:`apbv.PrefillConfig`.
    """

    def __init__(self, settings: DecodePruning, is_visual: Tensor, backend: str):
        self._layer = settings.layer
        self._attention = NewTokenAttention(backend)
        self._visual_rows = is_visual.nonzero().flatten()
        self._text_rows = (~is_visual).nonzero().flatten()
        self._num_rows = len(is_visual)
        num_visual = len(self._visual_rows)
        self._num_kept = max(1, round(settings.share * num_visual))
        self._is_needed = self._num_kept < num_visual
        # Of the step before, on the device: its attention, and the places that were chosen.
        self._scores: Tensor | None = None
        self._kept: Tensor | None = None
        self._rows: Tensor | None = None  # those that this step attends to

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        if self._is_needed and layer == self._layer - 1:
            self._choose(q, k, scale)
        if self._is_needed and layer >= self._layer:
            assert self._rows is not None, "a layer before has chosen"
            k = k.index_select(2, self._rows)
            v = v.index_select(2, self._rows)
        return self._attention(q, k, v, scale, layer)

    def _choose(self, q: Tensor, k: Tensor, scale: float) -> None:
        """Choose what the following layers attend to, by the newest token's attention."""
        device = q.device
        if self._visual_rows.device != device:
            self._visual_rows = self._visual_rows.to(device)
            self._text_rows = self._text_rows.to(device)
        scores = _attention_of_last(q, k, scale)[self._visual_rows]
        best = scores.argsort(descending=True, stable=True)[: self._num_kept]
        if self._scores is not None and self._kept is not None:
            # Compared on the device, for which the CPU does not wait.
            similarity = functional.cosine_similarity(scores, self._scores, dim=0)
            best = torch.where(similarity < _SIMILAR, best, self._kept)
        self._scores = scores
        self._kept = best
        new_rows = torch.arange(self._num_rows, k.shape[2], device=device)
        prompt_rows = torch.cat([self._text_rows, self._visual_rows[best]]).sort().values
        self._rows = torch.cat([prompt_rows, new_rows])


def _attention_of_last(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return the last token's attention to all tokens, mean over heads, ``[T]``.

    Args:
        q, k, scale: as in :class:`~apbv.model.attention.LayerAttention`.
    """
    num_kv_heads = k.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // num_kv_heads
    queries = q[0, :, -1].to(dtype).view(num_kv_heads, group, -1)
    products = queries @ k[0].to(dtype).transpose(1, 2) * scale  # [Hkv, heads of a group, T]
    return products.softmax(dim=-1).mean(dim=(0, 1))
