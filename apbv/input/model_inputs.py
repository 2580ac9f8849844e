"""Turning a question and its sources into what the model reads: token ids, positions and pixels.

The text half is computed for the whole prompt on every host (integers are cheap); pixels only for the piece
that this host encodes. Token ids come from the model's own transformers processor, run on tensors without
storage, so that no host has to hold the whole video to know what the prompt looks like.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import DEFAULT_QUERY_LEN
from ..hosts import HostGroup
from ..model.parts import ModelParts
from .files import FileIdentity
from .frames import FramePiece, video_skeleton
from .pixels import Pixels
from .video import VideoInfo
from .visual import PromptError, VideoSource, VisualInput, visual_from_batch

POSITION_RULES = ("transformers", "vllm")


@dataclass(frozen=True)
class ModelInputs:
    """A prompt as the model reads it: token ids, positions, and pixels.

    Attributes:
        input_ids: ``[1, n]``.
        position_ids: rotary positions, ``[3, 1, n]`` (time, height, width) for M-RoPE models, else ``[1, n]``.
        context_start: where the context begins: at the first visual token, or 0. What comes before it belongs to
            the anchor.
        query_start: where the query block begins: behind the last visual token, or at a text's question.
        visual: images or video; None for a text prompt.
        position_rule: whose rule gave ``position_ids``, one of :data:`POSITION_RULES`.
    """

    input_ids: Tensor
    position_ids: Tensor
    context_start: int
    query_start: int
    visual: VisualInput | None = None
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

    def require_room(self, max_positions: int, num_new: int = 1) -> None:
        """Make sure that the prompt and its answer lie at positions that the model was made for.

        Args:
            max_positions: how many positions the model was made for.
            num_new: tokens that the answer may take.

        Raises:
            PromptError: the prompt and its answer need more.
        """
        needed = max(int(self.position_ids.max()) + 1, self.next_position + num_new)
        if needed > max_positions:
            raise PromptError(
                f"the prompt's {self.num_tokens} tokens and an answer of {num_new} take {needed} positions, but "
                f"the model was made for {max_positions} (max_position_embeddings)"
            )

    def without_pixels(self) -> "ModelInputs":
        """Return the same prompt with its pixels released."""
        return self if self.visual is None else replace(self, visual=replace(self.visual, pixels=None))

    def at_vllm_positions(self, parts: ModelParts) -> "ModelInputs":
        """Return the same prompt at the positions that vLLM gives it, for KV that vLLM is to continue from.

        There every run of text or of visual tokens begins one past the greatest position before it. In
        transformers' Qwen2-VL and Qwen2.5-VL text after a video begins past the longer side of its frames,
        which comes earlier where the video's time positions reach further. Other models have one rule.
        """
        visual = parts.is_visual(self.input_ids[0])
        edges = (visual[1:] != visual[:-1]).nonzero().flatten() + 1
        position_ids, start = self.position_ids.clone(), 0
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
        frame_parallel: bool = True,
        query_start: int | None = None,
        query_len: int = DEFAULT_QUERY_LEN,
    ) -> "ModelInputs":
        """Take over what a transformers processor or tokenizer returned for one prompt.

        Args:
            parts: the model.
            batch: ``input_ids [1, n]`` and, where there are any, ``attention_mask``, ``pixel_values`` or
                ``pixel_values_videos`` with their grids; the whole of them, on every host.
            frame_parallel: each host keeps its share of the frames, instead of all.
            query_start: where the query begins in a text prompt. A visual prompt's query begins after its last
                visual token.
            query_len: where ``query_start`` is not given, so many tokens at a text's end are its query.

        Raises:
            PromptError: an empty, batched or padded prompt, a mix of images and video, more than one video.
        """
        input_ids = _check_batch(batch)
        visual_mask = parts.is_visual(input_ids[0])
        if not visual_mask.any():
            if "pixel_values" in batch or "pixel_values_videos" in batch:
                raise PromptError("pixels were given, but the prompt has no placeholder tokens for them")
            start = max(0, input_ids.shape[1] - query_len) if query_start is None else query_start
            return cls(input_ids, _positions(parts, batch), 0, start)
        where = visual_mask.nonzero().flatten()
        return cls(
            input_ids=input_ids,
            position_ids=_positions(parts, batch),
            context_start=int(where[0]),
            query_start=int(where[-1]) + 1,
            visual=visual_from_batch(parts, batch, len(where), hosts, frame_parallel),
        )

    @classmethod
    def from_video(
        cls,
        parts: ModelParts,
        processor,
        text: str,
        info: VideoInfo,
        frames: Sequence[int],
        hosts: HostGroup,
        frame_parallel: bool = True,
    ) -> "tuple[ModelInputs, FramePiece]":
        """Make the prompt of one video, without its pixels, and find the piece that this host has to read.

        Args:
            processor: the model's transformers processor.
            text: the rendered chat template, with the video's placeholder.
            info: the video.
            frames: indices of the sampled frames, ascending.
            frame_parallel: each host reads its share of the frames, instead of all.

        Returns:
            The prompt, to which :meth:`with_frames` adds the pixels, and this host's piece.

        Raises:
            PromptError: as :meth:`from_processor`.
        """
        skeleton = video_skeleton(processor, text, info, frames)
        return cls.from_skeleton(parts, skeleton, info, frames, hosts, frame_parallel)

    @classmethod
    def from_skeleton(
        cls,
        parts: ModelParts,
        skeleton: Mapping[str, Any],
        info: VideoInfo,
        frames: Sequence[int],
        hosts: HostGroup,
        frame_parallel: bool = True,
    ) -> "tuple[ModelInputs, FramePiece]":
        """Take over what :func:`video_skeleton` returned for these frames, as :meth:`from_video` does."""
        inputs = cls.from_processor(parts, skeleton, hosts, frame_parallel)
        visual = inputs.visual
        mine = visual.patches[hosts.rank]
        num_merged = -(-len(frames) // visual.num_temporal_patches)  # frames of one temporal patch
        piece = FramePiece(
            video=info,
            frames=tuple(frames[mine.start * num_merged : mine.stop * num_merged]),
            num_merged=num_merged,
            grid=skeleton.get("video_grid_thw"),
        )
        source = VideoSource(FileIdentity.of(info.path), tuple(frames), frame_parallel)
        visual = visual.of_frames(source, num_bytes=3 * info.height * info.width * len(frames))
        return replace(inputs, visual=visual), piece

    def with_pixels(self, pixels: Pixels, patches_per_chunk: int | None = None) -> "ModelInputs":
        """Return the same prompt with this host's share of the pixels.

        Args:
            patches_per_chunk: see :class:`~apbv.input.visual.VisualInput`.
        """
        visual = replace(self.visual, pixels=pixels, patches_per_chunk=patches_per_chunk)
        return replace(self, visual=visual)


def _check_batch(batch: Mapping[str, Any]) -> Tensor:
    if "input_ids" not in batch:
        raise PromptError("the inputs have no input_ids")
    input_ids = torch.as_tensor(batch["input_ids"]).cpu()
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise PromptError(f"one prompt at a time: input_ids must be [1, n], not {list(input_ids.shape)}")
    if input_ids.shape[1] == 0:
        raise PromptError("the prompt is empty")
    mask = batch.get("attention_mask")
    if mask is not None and not bool(torch.as_tensor(mask).bool().all()):
        raise PromptError("padded prompts are not supported: attention_mask must be all ones")
    return input_ids


def _positions(parts: ModelParts, batch: Mapping[str, Any]) -> Tensor:
    """Compute the rotary positions of the whole prompt by the model's own rule."""
    input_ids = torch.as_tensor(batch["input_ids"]).cpu()
    arange = torch.arange(input_ids.shape[1])[None]
    if not parts.uses_mrope:
        return arange
    if not parts.is_visual(input_ids).any():
        return arange.expand(3, 1, -1)
    if "mm_token_type_ids" not in batch:
        raise PromptError("M-RoPE positions need mm_token_type_ids, which the processor returns beside input_ids")
    names = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    grids = {name: batch[name] for name in names if batch.get(name) is not None}
    grids = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in grids.items()}
    position_ids, _ = parts.model.model.get_rope_index(input_ids, **grids)
    return position_ids
