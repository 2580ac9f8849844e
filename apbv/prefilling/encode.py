"""This module encodes frames in parallel (APB-V, Section 3.1) and gives every host its tokens' embeddings.

A *row* belongs to one visual placeholder token: the vision tower's embedding and, for models with deepstack, the L
vectors that are added to the hidden states after the first layers, side by side: ``[rows, (1 + L) * d]``. Rows are
numbered in prompt order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs, VisualInput
from ..layout import ContextLayout, intersect
from ..model.parts import ModelParts


@dataclass(frozen=True)
class LocalVisual:
    """A LocalVisual holds the rows of a host's local tokens, in local order; None for a prompt of text."""

    rows: Tensor | None

    def text_only(self) -> "LocalVisual":
        """Return the rows of local tokens that are all text: none."""
        return LocalVisual(None if self.rows is None else self.rows[:0])

    def merge_into(self, parts: ModelParts, input_ids: Tensor) -> tuple[Tensor, dict]:
        """Embed local tokens, with the rows in place of visual placeholders.

        Args:
            input_ids: ``[1, S]`` of this host's tokens.

        Returns:
            Embeddings ``[1, S, d]`` and the language model's further keyword arguments.
        """
        embeds = parts.embed_tokens(input_ids)
        if self.rows is None:
            return embeds, {}
        mask = parts.is_visual(input_ids)
        streams = self.rows.split(embeds.shape[-1], dim=-1)
        embeds = embeds.masked_scatter(mask[..., None], streams[0])
        if not parts.num_deepstack_layers:
            return embeds, {}
        return embeds, {"visual_pos_masks": mask, "deepstack_visual_embeds": list(streams[1:])}


@torch.no_grad()
def encode_visual(parts: ModelParts, visual: VisualInput | None) -> Tensor | None:
    """Run the vision tower on this host's share of the visual input.

    Returns:
        Rows ``[len(piece), (1 + L) * d]`` in the model's dtype, none for an empty piece; None for a text prompt.
    """
    if visual is None:
        return None
    if visual.pixels is None:
        return torch.empty(0, parts.row_width, dtype=parts.dtype, device=parts.device)
    pixels = {
        name: value.to(parts.device) if isinstance(value, Tensor) else value
        for name, value in visual.pixels.items()
    }
    features = _features(parts, visual.kind, pixels)
    main = _joined(features.pooler_output)
    main = main.reshape(-1, main.shape[-1])
    if parts.family == "llava_onevision" and visual.kind == "video":
        main = _with_newline_at_the_end_only(parts, main, visual)
    streams = [main, *(_joined(layer) for layer in getattr(features, "deepstack_features", None) or ())]
    return torch.cat(streams, dim=-1).to(parts.dtype)


def _features(parts: ModelParts, kind: str, pixels: dict):
    """Call the model family's own get_*_features, whose first argument's name differs between families."""
    base = parts.model.model
    first, *rest = pixels.values()
    if parts.family == "internvl":  # its video frames are images, and so are an image's tiles
        frames = first.flatten(0, 1) if first.dim() == 5 else first
        return base.get_image_features(frames, return_dict=True)
    if kind == "video":
        return base.get_video_features(first, *rest, return_dict=True)
    named = {name: value for name, value in pixels.items() if name != "pixel_values"}
    return base.get_image_features(first, **named, return_dict=True)


def _joined(features) -> Tensor:
    """Concatenate features, which some families return as one tensor per item."""
    return torch.cat(list(features)) if isinstance(features, (list, tuple)) else features


def _with_newline_at_the_end_only(parts: ModelParts, rows: Tensor, visual: VisualInput) -> Tensor:
    """End the whole video, and no other piece, with LLaVA-OneVision's learned newline row.

    transformers adds it to every piece, or (before 5.19) to none.
    """
    base = parts.model.model
    frame_rows = visual.num_temporal_patches * visual.rows_per_temporal_patch
    newline = base.image_newline[None].to(rows)
    return torch.cat([rows[:frame_rows], newline]) if visual.ends_video else rows[:frame_rows]


def exchange_visual(
    parts: ModelParts, inputs: ModelInputs, rows: Tensor | None, layout: ContextLayout, hosts: HostGroup
) -> LocalVisual:
    """Send every host the rows of its local tokens, and no others; collective.

    Args:
        rows: what :func:`encode_visual` returned on this host.

    Raises:
        ValueError: the vision tower's number of rows differs from the prompt's number of placeholders.
    """
    if rows is None:
        return LocalVisual(None)
    pieces = inputs.visual.pieces
    expected = pieces[hosts.rank]
    if rows.shape[0] != len(expected):
        raise ValueError(
            f"the vision tower made {rows.shape[0]} embeddings where the prompt has {len(expected)} placeholders"
        )
    # prefix[t]: visual tokens before token t, so that a span of tokens maps to a run of rows.
    prefix = torch.nn.functional.pad(parts.is_visual(inputs.input_ids[0]).long().cumsum(0), (1, 0)).tolist()
    needed = [
        [range(prefix[span.start], prefix[span.stop]) for span in layout.local_spans(host)]
        for host in range(hosts.size)
    ]
    needed_here = needed[hosts.rank]
    if inputs.visual.replicated or hosts.size == 1:
        return LocalVisual(torch.cat([rows[run.start : run.stop] for run in needed_here] or [rows[:0]]))
    outgoing = [
        torch.cat([rows[_shift(intersect(expected, run), -expected.start)] for run in runs] or [rows[:0]])
        for runs in needed
    ]
    lengths = [[len(intersect(piece, run)) for run in needed_here] for piece in pieces]
    received = hosts.all_to_all(outgoing, [(sum(counts), rows.shape[1]) for counts in lengths]).wait()
    # Each host sent its part of run 0, then of run 1, ...; pieces ascend with the host.
    by_host = [tensor.split(counts) for tensor, counts in zip(received, lengths, strict=True)]
    ordered = [by_host[host][run] for run in range(len(needed_here)) for host in range(hosts.size)]
    return LocalVisual(torch.cat(ordered or [rows[:0]]))


def _shift(run: range, by: int) -> slice:
    return slice(run.start + by, run.stop + by)
