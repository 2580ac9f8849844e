"""From a question and its sources to what the model reads: token ids, positions and pixels.

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
from ..layout import split_evenly
from ..model.parts import ModelParts
from .files import FileIdentity
from .video import VideoInfo, read_frames

POSITION_RULES = ("transformers", "vllm")


class PromptError(ValueError):
    """The prompt cannot be answered by this model; the message says why."""


@dataclass(frozen=True)
class VideoSource:
    """Where a video's pixels come from.

    Attributes:
        file: the video.
        frames: indices of the sampled frames.
        frame_parallel: whether every host reads its share of them, instead of all.
    """

    file: FileIdentity
    frames: tuple[int, ...]
    frame_parallel: bool


@dataclass(frozen=True)
class VisualInput:
    """The images or the video of a prompt, and this host's share of the work on it.

    Attributes:
        kind: ``"video"`` or ``"image"``.
        pieces: for every host, the rows (visual tokens, in prompt order) that it encodes.
        pixels: keyword arguments of the model's ``get_*_features`` for this host's piece; None if it is empty.
        num_units: temporal patches of this host's piece.
        rows_per_unit: rows of one temporal patch; 0 for images, which are not cut.
        ends_video: whether this host's piece ends the video.
        replicated: whether every host encodes everything.
        source: which frames of which video; None where the caller prepared the pixels, and for images.
    """

    kind: str
    pieces: tuple[range, ...]
    pixels: dict[str, Any] | None
    num_units: int
    rows_per_unit: int
    ends_video: bool
    replicated: bool = False
    source: VideoSource | None = None


@dataclass(frozen=True)
class ModelInputs:
    """One prompt.

    Attributes:
        input_ids: ``[1, n]``.
        position_ids: rotary positions, ``[3, 1, n]`` (time, height, width) for M-RoPE models, else ``[1, n]``.
        context_start: what comes before it belongs to the anchor: the tokens before the first visual one.
        query_start: first token of the query block: after the last visual token, or of a text's question.
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
        return self.input_ids.shape[1]

    @property
    def next_position(self) -> int:
        """The rotary position of the first generated token: one past the last prompt token's."""
        return int(self.position_ids.flatten()[-1]) + 1

    @property
    def num_visual_tokens(self) -> int:
        return 0 if self.visual is None else max(piece.stop for piece in self.visual.pieces)

    def require_room(self, max_positions: int, num_new: int = 1) -> None:
        """Make sure that the prompt and its answer lie at positions that the model was made for.

        Args:
            max_positions: how many these are.
            num_new: tokens that the answer may take.

        Raises:
            PromptError: they do not.
        """
        needed = max(int(self.position_ids.max()) + 1, self.next_position + num_new)
        if needed > max_positions:
            raise PromptError(
                f"the prompt's {self.num_tokens} tokens and an answer of {num_new} take {needed} positions, but "
                f"the model was made for {max_positions} (max_position_embeddings)"
            )

    def without_pixels(self) -> "ModelInputs":
        """The same prompt with its pixels released."""
        return self if self.visual is None else replace(self, visual=replace(self.visual, pixels=None))

    def at_vllm_positions(self, parts: ModelParts) -> "ModelInputs":
        """The same prompt at the positions that vLLM gives it, for KV that vLLM is to continue from.

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
            visual=_visual_from_batch(parts, batch, len(where), hosts, frame_parallel),
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
        """The prompt of one video, without its pixels, and the piece of it that this host has to read.

        Args:
            text: the rendered chat template, with the video's placeholder.
            frames: indices of the sampled frames, ascending.
        """
        skeleton = video_skeleton(processor, text, info, frames)
        inputs = cls.from_processor(parts, skeleton, hosts, frame_parallel)
        units = _num_units(skeleton)
        per_unit = -(-len(frames) // units)  # frames of one temporal patch
        mine = _shares(units, hosts, frame_parallel)[hosts.rank]
        piece = FramePiece(
            video=info,
            frames=tuple(frames[mine.start * per_unit : mine.stop * per_unit]),
            grid=skeleton.get("video_grid_thw"),
        )
        source = VideoSource(FileIdentity.of(info.path), tuple(frames), frame_parallel)
        visual = replace(inputs.visual, pixels=None, source=source)
        return replace(inputs, visual=visual), piece

    def with_frames(self, processor, piece: "FramePiece", frames: Tensor) -> "ModelInputs":
        """Add this host's pixels. ``frames`` is uint8 ``[t, H, W, 3]``, as read for ``piece``."""
        pixels = preprocess_frames(processor, frames, piece.grid) if len(frames) else None
        return replace(self, visual=replace(self.visual, pixels=pixels))


@dataclass(frozen=True)
class FramePiece:
    """The frames one host reads, and the patch grid ``[1, 3]`` of the whole video where the model has one."""

    video: VideoInfo
    frames: tuple[int, ...]
    grid: Tensor | None

    def read(self) -> Tensor:
        """Decode them: uint8 ``[t, H, W, 3]``."""
        return torch.from_numpy(read_frames(self.video, list(self.frames)))


def video_skeleton(processor, text: str, info: VideoInfo, frames: Sequence[int]) -> dict[str, Any]:
    """What the processor returns for a whole video, computed on tensors that have a shape but no pixels.

    The processor's timestamps are frame index over frame rate. For a variable frame rate the indices are
    therefore those of the nearest frames at the average rate.
    """
    from transformers.video_utils import VideoMetadata

    pixels = torch.empty(len(frames), 3, info.height, info.width, dtype=torch.uint8, device="meta")
    metadata = VideoMetadata(
        total_num_frames=info.num_frames,
        fps=info.fps,
        width=info.width,
        height=info.height,
        duration=info.duration,
        frames_indices=[round(info.timestamps[index] * info.fps) for index in frames],
    )
    return processor(
        text=[text],
        videos=[pixels],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="pt",
    )


def preprocess_frames(processor, frames: Tensor, grid: Tensor | None) -> dict[str, Tensor]:
    """The processor's pixels of a piece of a video, bit-equal to the same piece of the whole.

    Args:
        frames: uint8 ``[t, H, W, 3]``; t is a multiple of the temporal patch except at the video's end.
        grid: ``[1, 3]`` patches (time, height, width) of the whole video, where the model has such a grid:
            there the frame size depends on the whole video's length, so it is pinned.
    """
    video_processor = processor.video_processor
    frames = frames.permute(0, 3, 1, 2)
    if grid is None:
        return _pixels(video_processor(videos=[frames], do_sample_frames=False, return_tensors="pt"))
    if video_processor.do_resize:
        from transformers.image_utils import SizeDict
        from transformers.video_processing_utils import BaseVideoProcessor

        _, height, width = (grid[0] * video_processor.patch_size).tolist()
        # The base class's resize goes to a given size; the families' own would compute one from the piece.
        frames = BaseVideoProcessor.resize(
            video_processor,
            frames[None],
            size=SizeDict(height=height, width=width),
            resample=video_processor.resample,
        )[0]
    return _pixels(video_processor(videos=[frames], do_resize=False, do_sample_frames=False, return_tensors="pt"))


def _pixels(output: Mapping[str, Any]) -> dict[str, Tensor]:
    return {n: output[n] for n in ("pixel_values_videos", "pixel_values", "video_grid_thw") if n in output}


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
    """Rotary positions of the whole prompt, from the model's own rule."""
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


def _visual_from_batch(
    parts: ModelParts, batch: Mapping[str, Any], num_rows: int, hosts: HostGroup, frame_parallel: bool
) -> VisualInput:
    pixels, is_video = batch.get("pixel_values_videos"), True
    if batch.get("pixel_values") is not None:
        if pixels is not None:
            raise PromptError("a prompt may have images or one video, not both")
        # InternVL has one name for both, and encodes a video frame and a tile of an image alike.
        pixels, is_video = batch["pixel_values"], parts.family == "internvl"
    if pixels is None:
        raise PromptError("the prompt has placeholder tokens for images or video, but no pixels were given")
    if not is_video:
        # Images are few: host 0 encodes them all. How one is tiled can depend on the others beside it.
        names = ("pixel_values", "image_grid_thw", "image_sizes", "batch_num_images")
        return VisualInput(
            kind="image",
            pieces=_rows_of_units(split_evenly(range(1), hosts.size), 1, num_rows, num_rows),
            pixels={n: batch[n] for n in names if batch.get(n) is not None} if hosts.rank == 0 else None,
            num_units=1,
            rows_per_unit=0,
            ends_video=False,
        )
    units = _num_units(batch)
    per_unit = (num_rows - parts.num_rows_ending_video) // units
    shares = _shares(units, hosts, frame_parallel)
    mine = shares[hosts.rank]
    return VisualInput(
        kind="video",
        pieces=_rows_of_units(shares, units, per_unit, num_rows),
        pixels=_slice_pixels(batch, mine) if mine else None,
        num_units=len(mine),
        rows_per_unit=per_unit,
        ends_video=bool(mine) and mine.stop == units,
        replicated=not frame_parallel,
    )


def _shares(units: int, hosts: HostGroup, frame_parallel: bool) -> list[range]:
    """The temporal patches that each host encodes (Eq. 6)."""
    return split_evenly(range(units), hosts.size) if frame_parallel else [range(units)] * hosts.size


def _video_pixels(batch: Mapping[str, Any]) -> Tensor:
    pixels = batch.get("pixel_values_videos")
    return batch["pixel_values"] if pixels is None else pixels


def _num_units(batch: Mapping[str, Any]) -> int:
    """Temporal patches of the video: what can be encoded apart from one another."""
    grid, pixels = batch.get("video_grid_thw"), _video_pixels(batch)
    videos = len(grid) if grid is not None else pixels.shape[0] if pixels.dim() == 5 else 1
    if videos != 1:
        raise PromptError(f"a prompt may have one video, not {videos}")
    if grid is not None:
        return int(grid[0, 0])
    return pixels.shape[1] if pixels.dim() == 5 else pixels.shape[0]


def _rows_of_units(shares: Sequence[range], units: int, per_unit: int, num_rows: int) -> tuple[range, ...]:
    """Rows of each share of units. Rows that are no unit's (LLaVA's newline) end the last one."""
    edge = [unit * per_unit for unit in range(units)] + [num_rows]
    return tuple(range(edge[share.start], edge[share.stop]) for share in shares)


def _slice_pixels(batch: Mapping[str, Any], units: range) -> dict[str, Tensor]:
    pixels, grid = _video_pixels(batch), batch.get("video_grid_thw")
    if grid is None:
        picked = pixels[:, units.start : units.stop] if pixels.dim() == 5 else pixels[units.start : units.stop]
        return {"pixel_values_videos": picked}
    patches = int(grid[0, 1] * grid[0, 2])
    grid = grid.clone()
    grid[0, 0] = len(units)
    return {
        "pixel_values_videos": pixels[units.start * patches : units.stop * patches],
        "video_grid_thw": grid,
    }
