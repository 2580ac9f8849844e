"""Taking the videos and images out of what a transformers processor returned for a whole prompt."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..hosts import HostGroup
from ..model.parts import ModelParts
from .pixels import GivenPixels
from .visual import PIXEL_COPIES, PromptError, VisualInput, VisualItem, equal_row_starts, share_out

# An item of a batch: what it is, its rows, and its pixels.
_Found = tuple[VisualItem, int, dict[str, Any]]


def visual_from_batch(
    parts: ModelParts, batch: Mapping[str, Any], input_ids: Tensor, hosts: HostGroup, frame_parallel: bool
) -> VisualInput:
    """Take a prompt's videos and images out of a processor's batch.

    Args:
        input_ids: ``[n]``, the prompt.

    Raises:
        PromptError: no pixels, or not those of the prompt's placeholders.
    """
    kinds = _kinds(parts, input_ids)
    if batch.get("pixel_values") is None and batch.get("pixel_values_videos") is None:
        raise PromptError("the prompt has placeholder tokens for images or video, but no pixels were given")
    images, videos = _images(parts, batch), _videos(parts, batch, kinds.count("video"))
    found: list[_Found] = []
    start = 0
    row_starts: list[int] = []
    while start < len(kinds):
        kind = kinds[start]
        item, num_rows, values = next(images if kind == "image" else videos, (None, 0, {}))
        if item is None or kinds[start : start + num_rows] != [kind] * num_rows:
            raise PromptError(
                f"the prompt's {len(kinds)} placeholder tokens are not those of the pixels that were given, which "
                f"are of {'no' if item is None else 'another'} {kind} at token {start} of them"
            )
        row_starts += equal_row_starts(start, item.num_patches, num_rows, item.num_ending_rows)
        start += num_rows
        found.append((item, num_rows, values))
    if next(images, None) or next(videos, None):
        raise PromptError("pixels were given of more images or videos than the prompt has placeholders for")
    visual = share_out([item for item, _, _ in found], [*row_starts, start], hosts, frame_parallel)
    given = [
        (item.kind, patches, values) for (item, _, values), patches in zip(found, visual.item_patches, strict=True)
    ]
    return visual.with_pixels(GivenPixels(given))


def _kinds(parts: ModelParts, input_ids: Tensor) -> list[str]:
    """Say of every placeholder whether it is an image's or a video's; of InternVL's, which has one, a video's."""
    is_image = input_ids == parts.image_token_id
    if parts.family == "internvl":
        is_image = torch.zeros_like(is_image)
    return ["image" if image else "video" for image in is_image[parts.is_visual(input_ids)].tolist()]


def _videos(parts: ModelParts, batch: Mapping[str, Any], num_rows: int) -> Iterator[_Found]:
    # InternVL has one name for both, and encodes a video frame and a tile of an image alike.
    pixels = batch.get("pixel_values" if parts.family == "internvl" else "pixel_values_videos")
    if pixels is None:
        return
    ending, grids = parts.num_rows_ending_video, batch.get("video_grid_thw")
    if grids is None:
        videos = pixels if pixels.dim() == 5 else pixels[None]
        for video in videos:
            rows = num_rows // len(videos)
            item = VisualItem("video", len(video), ending, PIXEL_COPIES * video[0].nbytes)
            yield item, rows, {"pixel_values_videos": video[None] if pixels.dim() == 5 else video}
        return
    first = 0
    for grid in torch.as_tensor(grids).cpu():
        num_patches, count = int(grid[0]), int(grid.prod())
        values = pixels[first : first + count]
        item = VisualItem("video", num_patches, ending, PIXEL_COPIES * values.nbytes // num_patches)
        yield item, count // parts.patches_per_row, {"pixel_values_videos": values, "video_grid_thw": grid[None]}
        first += count


def _images(parts: ModelParts, batch: Mapping[str, Any]) -> Iterator[_Found]:
    pixels = batch.get("pixel_values")
    if pixels is None or parts.family == "internvl":
        return
    grids = batch.get("image_grid_thw")
    if grids is None:
        counts = torch.as_tensor(batch.get("batch_num_images", [1] * len(pixels))).tolist()
        of_sample = [count for count in counts for _ in range(count)]
        for number, size in enumerate(torch.as_tensor(batch["image_sizes"]).cpu()):
            values = {
                "pixel_values": pixels[number : number + 1],
                "image_sizes": size[None],
                # transformers asks of it only whether it is 1.
                "batch_num_images": torch.tensor([of_sample[number]]),
            }
            item = VisualItem("image", patch_bytes=PIXEL_COPIES * pixels[number].nbytes)
            yield item, parts.num_image_rows(size, of_sample[number] == 1), values
        return
    first = 0
    for grid in torch.as_tensor(grids).cpu():
        count = int(grid.prod())
        values = {"pixel_values": pixels[first : first + count], "image_grid_thw": grid[None]}
        item = VisualItem("image", patch_bytes=PIXEL_COPIES * values["pixel_values"].nbytes)
        yield item, count // parts.patches_per_row, values
        first += count
