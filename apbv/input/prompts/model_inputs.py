"""Model inputs of a question and its sources: token ids, positions and pixels.

Token ids and positions are computed for the whole prompt on every host (integers are cheap); pixels
only for the share that this host encodes. Token ids come from the model's own transformers
processor, run on tensors without storage, so that no host has to hold the whole video to know what
the prompt looks like.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...config import DEFAULT_QUERY_LEN
from ...config.refusals import refuse
from ...errors import InvalidRequestError, PromptError
from ...hosts import HostGroup
from ...model.parts import ModelParts
from .audio_input import AudioInput, audio_from_batch
from .pixels import GivenPixels, Pixels
from .visual import PIXEL_COPIES, VisualInput, VisualItem, encoding_hosts, share_out

POSITION_RULES = ("transformers", "vllm")


@dataclass(frozen=True)
class ModelInputs:
    """Model inputs of a prompt: token ids, positions, and pixels.

    Attributes:
        input_ids: ``[1, n]``.
        position_ids: rotary positions, ``[3, 1, n]`` (time, height, width) for M-RoPE models, else
            ``[1, n]``.
        context_start: where the context begins: at the first visual or audio token, or 0. What
            comes before it belongs to the anchor.
        query_start: where the query block begins: after the last visual or audio token, or at a
            text's question. From there on positions increase by one per token.
        visual: images and videos; None: the prompt has none.
        audio: audio; None: the prompt has none.
        position_rule: whose rule gave ``position_ids``, one of :data:`POSITION_RULES`.
    """

    input_ids: Tensor
    position_ids: Tensor
    context_start: int
    query_start: int
    visual: VisualInput | None = None
    audio: AudioInput | None = None
    position_rule: str = "transformers"

    @property
    def num_tokens(self) -> int:
        """The prompt's length n."""
        return self.input_ids.shape[1]

    @property
    def next_position(self) -> int:
        """The rotary position of the first generated token: one past the last prompt token's."""
        return int(self.position_ids.flatten()[-1]) + 1

    @property
    def num_visual_tokens(self) -> int:
        """The number of placeholders of images or video in the prompt."""
        return 0 if self.visual is None else self.visual.num_rows

    @property
    def num_audio_tokens(self) -> int:
        """The number of placeholders of audio in the prompt."""
        return 0 if self.audio is None else self.audio.num_rows

    def require_room(self, max_positions: int, num_new: int = 1) -> None:
        """Check that the prompt and its answer fit into the model's positions.

        Args:
            max_positions: the model's number of positions.
            num_new: tokens that the answer may take.

        Raises:
            PromptError: the prompt and its answer need more.
        """
        needed = max(int(self.position_ids.max()) + 1, self.next_position + num_new)
        if needed > max_positions:
            raise PromptError(
                f"the prompt's {self.num_tokens} tokens and an answer of {num_new} need {needed} "
                f"positions, but the model has {max_positions} (max_position_embeddings)"
            )

    def require_visual(self) -> VisualInput:
        """Return the images and videos of a prompt that has some.

        Raises:
            InvalidRequestError: it is a text.
        """
        if self.visual is None:
            raise InvalidRequestError("the prompt has neither images nor video")
        return self.visual

    def without_pixels(self) -> "ModelInputs":
        """Return the same prompt with its pixels and spectrograms released."""
        visual = None if self.visual is None else replace(self.visual, pixels=None)
        audio = None if self.audio is None else replace(self.audio, spectrograms=None)
        return replace(self, visual=visual, audio=audio)

    def at_vllm_positions(self, parts: ModelParts) -> "ModelInputs":
        """Return the same prompt at vLLM's positions, for KV from which vLLM decodes.

        There every run of text or of visual tokens begins one past the greatest position before it.
        In transformers' Qwen2-VL and Qwen2.5-VL text after a video begins past the longer side of
        its frames, which comes earlier where the video's time positions reach further. Other models
        have one rule.

        Raises:
            PromptError: the prompt has audio, which has transformers' positions only.
            InvalidConfigError: vLLM has other rotary frequencies.
        """
        refuse(offering='positions="vllm"', rope_by_length=parts.rope_by_length)
        if self.audio is not None:
            raise PromptError(
                "vLLM cannot continue a prompt with audio: use the positions of transformers"
            )
        visual = parts.is_visual(self.input_ids[0])
        edges = (visual[1:] != visual[:-1]).nonzero().flatten() + 1
        position_ids = self.position_ids.clone()
        start = 0
        for run in position_ids.tensor_split(edges, dim=-1):  # views
            run += start - run.min()
            start = int(run.max()) + 1
        return replace(self, position_ids=position_ids, position_rule="vllm")

    @classmethod
    def from_processor(
        cls,
        parts: ModelParts,
        batch: Mapping[str, Any],
        hosts: HostGroup,
        query_start: int | None = None,
        query_len: int = DEFAULT_QUERY_LEN,
        frame_parallel: bool = True,
    ) -> "ModelInputs":
        """Build from the output of a transformers processor or tokenizer for one prompt.

        Args:
            parts: the model.
            batch: ``input_ids [1, n]`` and, where there are any, ``attention_mask``,
                ``pixel_values`` or ``pixel_values_videos`` with their grids, ``input_features``
                with their mask; the whole of them, on every host.
            query_start: where the query begins in a text prompt. Another prompt's query begins
                after its last visual or audio token.
            query_len: if ``query_start`` is not given, the number of tokens at a text's end that
                are its query.
            frame_parallel: of :class:`apbv.PrefillConfig`: whether the hosts share out the
                encoding.

        Raises:
            PromptError: an empty, batched or padded prompt, or pixels of other images and videos
                than it shows.
        """
        # Check.
        input_ids = _check_batch(batch)
        has_visual = bool(parts.is_visual(input_ids[0]).any())
        has_audio = bool(parts.is_audio(input_ids[0]).any())
        if not has_visual and ("pixel_values" in batch or "pixel_values_videos" in batch):
            raise PromptError(
                "pixels were given, but the prompt has no placeholder tokens for them"
            )
        if not has_audio and batch.get("input_features") is not None:
            raise PromptError("audio was given, but the prompt has no placeholder tokens for it")

        # A text.
        if not (has_visual or has_audio):
            if query_start is None:
                query_start = max(0, input_ids.shape[1] - query_len)
            return cls(input_ids, _positions(parts, input_ids, batch), 0, query_start)

        # A prompt with images, video or audio.
        hosts = encoding_hosts(hosts, frame_parallel)
        visual = None
        if has_visual:
            visual = visual_from_batch(parts, batch, input_ids[0], hosts)
        audio = None
        if has_audio:
            audio = audio_from_batch(parts, batch, input_ids[0], hosts)
        return cls.of_sources(parts, batch, input_ids, visual, audio)

    @classmethod
    def of_sources(
        cls,
        parts: ModelParts,
        batch: Mapping[str, Any],
        input_ids: Tensor,
        visual: VisualInput | None,
        audio: AudioInput | None,
    ) -> "ModelInputs":
        """Make a prompt with placeholders of images, video or audio.

        Raises:
            PromptError: there are more or fewer placeholders than tokens, or positions need
                something that the batch lacks.
        """
        placeholders = parts.is_placeholder(input_ids[0]).nonzero().flatten()
        num_visual = int(parts.is_visual(input_ids[0]).sum())
        if visual is not None and visual.num_rows != num_visual:
            raise PromptError(
                f"the prompt has {num_visual} placeholder tokens, but its images and videos have "
                f"{visual.num_rows}"
            )
        position_ids = _positions(parts, input_ids, batch)
        query_start = int(placeholders[-1]) + 1
        # After a video with sound, the token that ends the audio and the one that ends the video
        # have the same position; the first does not belong to the question.
        if query_start + 1 < input_ids.shape[1]:
            ends_audio = position_ids[..., query_start] == position_ids[..., query_start + 1]
            if bool(ends_audio.all()):
                query_start += 1
        return cls(input_ids, position_ids, int(placeholders[0]), query_start, visual, audio)

    def with_pixels(self, pixels: Pixels, chunk_bytes: int | None = None) -> "ModelInputs":
        """Return the same prompt with this host's share of the pixels.

        Args:
            chunk_bytes: the memory that every host may take for a chunk; None: not agreed on yet.
        """
        visual = self.require_visual()
        share = visual.patches[visual.host]
        shown = replace(
            visual,
            pixels=pixels if share else None,
            chunk_bytes=chunk_bytes,
        )
        return replace(self, visual=shown)


def _check_batch(batch: Mapping[str, Any]) -> Tensor:
    if "input_ids" not in batch:
        raise PromptError("the inputs have no input_ids")
    input_ids = torch.as_tensor(batch["input_ids"]).cpu()
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise PromptError(
            f"one prompt at a time: input_ids must be [1, n], not {list(input_ids.shape)}"
        )
    if input_ids.shape[1] == 0:
        raise PromptError("the prompt is empty")
    mask = batch.get("attention_mask")
    if mask is not None and not bool(torch.as_tensor(mask).bool().all()):
        raise PromptError("padded prompts are not supported: attention_mask must be all ones")
    return input_ids


def _positions(parts: ModelParts, input_ids: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Compute the rotary positions of the whole prompt by the model's own rule."""
    arange = torch.arange(input_ids.shape[1])[None]
    if not parts.uses_mrope:
        return arange
    if not parts.is_placeholder(input_ids).any():
        return arange.expand(3, 1, -1)
    try:
        return parts.rotary_positions(input_ids, batch)
    except KeyError as error:
        raise PromptError(
            f"M-RoPE positions need {error}, which the processor returns with input_ids"
        ) from error
    except ValueError as error:
        raise PromptError(str(error)) from error


def visual_from_batch(
    parts: ModelParts, batch: Mapping[str, Any], input_ids: Tensor, hosts: HostGroup
) -> VisualInput:
    """Take a prompt's videos and images out of a processor's batch.

    Args:
        input_ids: ``[n]``, the prompt.

    Raises:
        PromptError: no pixels, or not those of the prompt's placeholders.
    """
    if batch.get("pixel_values") is None and batch.get("pixel_values_videos") is None:
        raise PromptError(
            "the prompt has placeholder tokens for images or video, but no pixels were given"
        )
    kinds = _kinds_of_placeholders(parts, batch, input_ids)

    # Give every run of placeholders the next image or video.
    remaining = {
        "image": _items(parts, batch, "image", kinds.count("image")),
        "video": _items(parts, batch, "video", kinds.count("video")),
    }
    items = []
    pixels = []
    start = 0
    while start < len(kinds):
        kind = kinds[start]
        item, values = next(remaining[kind], (None, {}))
        if item is None or kinds[start : start + item.num_rows] != [kind] * item.num_rows:
            raise PromptError(
                f"the prompt's {len(kinds)} placeholder tokens do not match the pixels that were "
                f"given, which have {'no' if item is None else 'another'} {kind} at placeholder "
                f"{start}"
            )
        start += item.num_rows
        items.append(item)
        pixels.append(values)
    for items_of_kind in remaining.values():
        if next(items_of_kind, None) is not None:
            raise PromptError(
                "pixels were given for more images or videos than the prompt has placeholders"
            )

    # Share them out.
    visual = share_out(items, hosts)
    if not visual.patches[visual.host]:
        return visual
    pixels_of_items = []
    for item, patches, values in zip(items, visual.item_patches, pixels, strict=True):
        pixels_of_items.append((item.kind, patches, values))
    return replace(visual, pixels=GivenPixels(pixels_of_items))


def _kinds_of_placeholders(
    parts: ModelParts, batch: Mapping[str, Any], input_ids: Tensor
) -> list[str]:
    """Return for each visual placeholder of a prompt what it stands for, an image or a video."""
    is_image = parts.family.is_image(input_ids, batch)
    are_images = is_image[parts.is_visual(input_ids)].tolist()
    return ["image" if image else "video" for image in are_images]


# An item of a batch, and its part of the batch.
_ItemPixels = tuple[VisualItem, dict[str, Any]]


def _items(
    parts: ModelParts, batch: Mapping[str, Any], kind: str, num_rows: int
) -> Iterator[_ItemPixels]:
    """Take the images or the videos of a batch apart.

    Args:
        kind: ``"image"`` or ``"video"``.
        num_rows: of all videos together, which have the same number each where they have no grids.
    """
    family = parts.family
    name = family.image_pixels if kind == "image" else family.video_pixels
    if name is None or batch.get(name) is None:
        return
    if batch.get(f"{kind}_grid_thw") is not None:
        yield from _items_with_grids(parts, batch, kind, name)
    elif kind == "video":
        yield from _videos(parts, batch[name], num_rows)
    else:
        yield from _images(parts, batch)


def _items_with_grids(
    parts: ModelParts, batch: Mapping[str, Any], kind: str, name: str
) -> Iterator[_ItemPixels]:
    """Take images or videos apart whose patches of pixels lie side by side, as in Qwen's models.

    Args:
        kind: ``"image"`` or ``"video"``.
        name: of the batch's pixels.
    """
    pixels = batch[name]
    grids = torch.as_tensor(batch[f"{kind}_grid_thw"]).cpu()
    merge_sizes = batch.get(f"{kind}_merge_sizes")
    # Which tokens of VideoLLaMA 3's videos the prompt has, from the next video on.
    mask = batch.get("video_compression_mask")
    if mask is None:
        mask = torch.ones(len(pixels), dtype=torch.bool)
    mask = torch.as_tensor(mask).cpu()
    start = 0
    for number, grid in enumerate(grids):  # time, height, width
        num_temporal = int(grid[0])
        num_patches = int(grid.prod())
        pixels_of_item = pixels[start : start + num_patches]
        values = {name: pixels_of_item, f"{kind}_grid_thw": grid[None]}
        num_rows = num_patches // (parts.patches_per_row or 1)
        kept = None
        if merge_sizes is not None:
            merge_size = torch.as_tensor(merge_sizes).cpu()[number : number + 1]
            values[f"{kind}_merge_sizes"] = merge_size
            side = int(merge_size)
            num_rows = num_patches // side**2
            if kind == "video":
                kept = mask[:num_rows].view(num_temporal, *(grid[1:] // side))
                mask = mask[num_rows:]
                num_rows = int(kept.sum())
        item = VisualItem(
            kind=kind,
            num_rows=num_rows,
            num_patches=num_temporal,
            patch_bytes=PIXEL_COPIES * pixels_of_item.nbytes // num_temporal,
            kept=kept,
        )
        yield item, values
        start += num_patches


def _videos(parts: ModelParts, pixels: Tensor, num_rows: int) -> Iterator[_ItemPixels]:
    """Take videos of one size apart.

    Args:
        pixels: ``[videos, frames, ...]``, or of one video ``[frames, ...]``.
        num_rows: of all videos together.
    """
    is_batch = pixels.dim() == 5
    videos = pixels if is_batch else pixels[None]
    for video in videos:
        item = VisualItem(
            kind="video",
            num_rows=num_rows // len(videos),
            num_patches=len(video),
            num_ending_rows=parts.num_rows_ending_video,
            patch_bytes=PIXEL_COPIES * video[0].nbytes,
        )
        yield item, {"pixel_values_videos": video[None] if is_batch else video}


def _images(parts: ModelParts, batch: Mapping[str, Any]) -> Iterator[_ItemPixels]:
    """Take the images of a LLaVA model's batch apart."""
    pixels = batch["pixel_values"]
    sizes = batch.get("image_sizes")
    images_per_sample = batch.get("batch_num_images")

    # The number of images in each image's sample.
    nums_in_sample = [1] * len(pixels)
    if images_per_sample is not None:
        nums_in_sample = []
        for num_images in torch.as_tensor(images_per_sample).tolist():
            nums_in_sample += [num_images] * num_images

    for number, image in enumerate(pixels):
        values = {"pixel_values": image[None]}
        size = None
        if sizes is not None:
            size = torch.as_tensor(sizes).cpu()[number]
            values["image_sizes"] = size[None]
        if images_per_sample is not None:  # transformers asks of it only whether it is 1
            values["batch_num_images"] = torch.tensor([nums_in_sample[number]])
        item = VisualItem(
            kind="image",
            num_rows=parts.num_image_rows(size, is_tiled=nums_in_sample[number] == 1),
            patch_bytes=PIXEL_COPIES * image.nbytes,
            size=None if size is None else tuple(size.tolist()),
        )
        yield item, values
