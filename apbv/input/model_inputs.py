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

from ..config import DEFAULT_QUERY_LEN
from ..hosts import HostGroup
from ..model.parts import ModelParts
from ..refusals import refuse
from .audio import AudioInput, audio_from_batch
from .pixels import GivenPixels, Pixels
from .visual import (
    PIXEL_COPIES,
    PromptError,
    VisualInput,
    VisualItem,
    encoding_hosts,
    share_out,
)

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
        visual: images and videos; None for a prompt that shows nothing.
        audio: audio; None for a prompt without.
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
            PromptError: the prompt has audio, whose positions are those of transformers only.
            ValueError: vLLM has other rotary frequencies.
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
            frame_parallel: whether the hosts share out what is encoded, as in
                :class:`apbv.PrefillConfig`.

        Raises:
            PromptError: an empty, batched or padded prompt, or pixels of other images and videos
                than it shows.
        """
        input_ids = _check_batch(batch)
        shows = parts.is_visual(input_ids[0]).any()
        sounds = parts.is_audio(input_ids[0]).any()
        if not shows and ("pixel_values" in batch or "pixel_values_videos" in batch):
            raise PromptError(
                "pixels were given, but the prompt has no placeholder tokens for them"
            )
        if not sounds and batch.get("input_features") is not None:
            raise PromptError("audio was given, but the prompt has no placeholder tokens for it")
        if not (shows or sounds):
            start = max(0, input_ids.shape[1] - query_len) if query_start is None else query_start
            return cls(input_ids, _positions(parts, input_ids, batch), 0, start)
        hosts = encoding_hosts(hosts, frame_parallel)
        visual = visual_from_batch(parts, batch, input_ids[0], hosts) if shows else None
        audio = audio_from_batch(parts, batch, input_ids[0], hosts) if sounds else None
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
        where = parts.is_placeholder(input_ids[0]).nonzero().flatten()
        num_visual = int(parts.is_visual(input_ids[0]).sum())
        if visual is not None and visual.num_rows != num_visual:
            raise PromptError(
                f"the prompt has {num_visual} placeholder tokens, but its images and videos have "
                f"{visual.num_rows}"
            )
        position_ids = _positions(parts, input_ids, batch)
        behind = int(where[-1]) + 1
        # After a video that is heard, what ends its audio lies at the same position as what ends
        # the video; it does not belong to the question.
        same = position_ids[..., behind : behind + 1] == position_ids[..., behind + 1 : behind + 2]
        query_start = behind + int(same.numel() > 0 and bool(same.all()))
        return cls(input_ids, position_ids, int(where[0]), query_start, visual, audio)

    def with_pixels(self, pixels: Pixels, chunk_bytes: int | None = None) -> "ModelInputs":
        """Return the same prompt with this host's share of the pixels.

        Args:
            chunk_bytes: see :class:`~apbv.input.visual.VisualInput`.
        """
        has_share = bool(self.visual.patches[self.visual.host])
        visual = replace(self.visual, pixels=pixels if has_share else None, chunk_bytes=chunk_bytes)
        return replace(self, visual=visual)


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
    # InternVL has one placeholder, which here is a video's; GLM has one, whose type tells which it
    # is.
    is_image = (input_ids == parts.image_token_id) & (parts.family != "internvl")
    if parts.uses_mrope and batch.get("mm_token_type_ids") is not None:
        is_image = torch.as_tensor(batch["mm_token_type_ids"]).cpu()[0] == 1
    kinds = [
        "image" if image else "video" for image in is_image[parts.is_visual(input_ids)].tolist()
    ]
    if batch.get("pixel_values") is None and batch.get("pixel_values_videos") is None:
        raise PromptError(
            "the prompt has placeholder tokens for images or video, but no pixels were given"
        )
    left = {kind: _items(parts, batch, kind, kinds.count(kind)) for kind in ("image", "video")}
    found = []
    start = 0
    while start < len(kinds):
        kind = kinds[start]
        item, values = next(left[kind], (None, {}))
        if item is None or kinds[start : start + item.num_rows] != [kind] * item.num_rows:
            raise PromptError(
                f"the prompt's {len(kinds)} placeholder tokens do not match the pixels that were "
                f"given, which have {'no' if item is None else 'another'} {kind} at placeholder "
                f"{start}"
            )
        start += item.num_rows
        found.append((item, values))
    if any(next(items, None) for items in left.values()):
        raise PromptError(
            "pixels were given for more images or videos than the prompt has placeholders"
        )
    visual = share_out([item for item, _ in found], hosts)
    given = [
        (item.kind, own, values)
        for (item, values), own in zip(found, visual.item_patches, strict=True)
    ]
    return replace(visual, pixels=GivenPixels(given) if visual.patches[visual.host] else None)


def _items(
    parts: ModelParts, batch: Mapping[str, Any], kind: str, num_rows: int
) -> Iterator[tuple]:
    """Take the images or the videos of a batch apart: what each is, and its pixels.

    Args:
        num_rows: of all videos together, which have equally many where they have no grids.
    """
    # It has one name for both, and encodes frames and tiles alike.
    is_internvl = parts.family == "internvl"
    name = "pixel_values" if kind == "image" or is_internvl else "pixel_values_videos"
    pixels = batch.get(name)
    grids = batch.get(f"{kind}_grid_thw")
    if pixels is None or (kind == "image" and is_internvl):
        return
    if grids is not None:  # Qwen's patches lie side by side; a grid is (time, height, width)
        first = 0
        left = batch.get("video_compression_mask")
        merges = batch.get(f"{kind}_merge_sizes")
        for number, grid in enumerate(torch.as_tensor(grids).cpu()):
            num_patches = int(grid[0])
            count = int(grid.prod())
            own = pixels[first : first + count]
            kept = None
            values = {name: own, f"{kind}_grid_thw": grid[None]}
            num_rows = count // (parts.patches_per_row or 1)
            if merges is not None:
                values[f"{kind}_merge_sizes"] = torch.as_tensor(merges).cpu()[number : number + 1]
                side = int(merges[number])
                num_rows = count // side**2
                if kind == "video":
                    left = (
                        torch.ones(len(pixels), dtype=torch.bool)
                        if left is None
                        else torch.as_tensor(left).cpu()
                    )
                    kept = left[:num_rows].view(num_patches, *(grid[1:] // side))
                    left = left[num_rows:]
                    num_rows = int(kept.sum())
            num_bytes = PIXEL_COPIES * own.nbytes // num_patches
            yield VisualItem(kind, num_rows, num_patches, patch_bytes=num_bytes, kept=kept), values
            first += count
    elif kind == "video":
        videos = pixels if pixels.dim() == 5 else pixels[None]
        for video in videos:
            num_ending = parts.num_rows_ending_video
            num_bytes = PIXEL_COPIES * video[0].nbytes
            values = {"pixel_values_videos": video[None] if pixels.dim() == 5 else video}
            yield (
                VisualItem("video", num_rows // len(videos), len(video), num_ending, num_bytes),
                values,
            )
    else:
        sizes = batch.get("image_sizes")
        counts = batch.get("batch_num_images")
        of_sample = [1] * len(pixels)
        if counts is not None:
            of_sample = [count for count in torch.as_tensor(counts).tolist() for _ in range(count)]
        for number, own in enumerate(pixels):
            values = {"pixel_values": own[None]}
            size = None
            if sizes is not None:
                size = torch.as_tensor(sizes).cpu()[number]
                values["image_sizes"] = size[None]
            if counts is not None:  # transformers asks of it only whether it is 1
                values["batch_num_images"] = torch.tensor([of_sample[number]])
            num_rows = parts.num_image_rows(size, of_sample[number] == 1)
            shape = None if size is None else tuple(size.tolist())
            num_bytes = PIXEL_COPIES * own.nbytes
            yield VisualItem("image", num_rows, patch_bytes=num_bytes, size=shape), values
