"""The images or the video of a prompt, and how hosts share the work on them, chunk by chunk."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..hosts import HostGroup
from ..layout import split_evenly
from ..model.parts import ModelParts
from .files import FileIdentity
from .pixels import GivenPixels, Pixels

# What decoding, preprocessing and a vision tower hold at once for a chunk, in multiples of its frames (decoded,
# waiting, being resized) and of its fp32 pixels (twice over, and activations of several times their size).
_FRAME_COPIES, PIXEL_COPIES = 3, 12
# A share is cut into so many chunks, for its stages to overlap, unless the chunks are smaller than is worth it.
_CHUNKS_PER_SHARE = 8
_LEAST_BYTES = 32 * 2**20


class PromptError(ValueError):
    """This model cannot answer the prompt; the message says why."""


@dataclass(frozen=True)
class VideoSource:
    """The file and the frames that a video's pixels come from.

    Attributes:
        file: the video file, as it was when it was read.
        frames: indices of the sampled frames.
        frame_parallel: whether every host reads its share of them, instead of all.
    """

    file: FileIdentity
    frames: tuple[int, ...]
    frame_parallel: bool


@dataclass(frozen=True)
class VisualInput:
    """The images or the video of a prompt, and this host's share of the work on it.

    A temporal patch is what the model makes of one frame, or of several that it merges; all images of a prompt
    count as a single one. A row is a visual token's embedding; rows are numbered in prompt order.

    Attributes:
        kind: ``"video"`` or ``"image"``.
        patches: for every host, the temporal patches that it encodes; ascending with the host.
        host: the host whose share ``pixels`` are.
        num_rows: the visual tokens in the prompt.
        rows_per_temporal_patch: the visual tokens of one; 0 for images, which are not cut.
        bytes_per_temporal_patch: an estimate of the memory in use while one is encoded.
        pixels: of this host's share; None if it is empty, or encoded already.
        patches_per_chunk: how many temporal patches every host encodes at a time; None: not agreed on yet.
        replicated: whether every host encodes everything.
        source: which frames of which video; None where the caller prepared the pixels, and for images.
    """

    kind: str
    patches: tuple[range, ...]
    host: int
    num_rows: int
    rows_per_temporal_patch: int = 0
    bytes_per_temporal_patch: int = 0
    pixels: Pixels | None = None
    patches_per_chunk: int | None = None
    replicated: bool = False
    source: VideoSource | None = None

    @property
    def num_temporal_patches(self) -> int:
        """The temporal patches of the whole video."""
        return max(share.stop for share in self.patches)

    @property
    def pieces(self) -> tuple[range, ...]:
        """The rows that each host encodes."""
        return tuple(self.rows_of(share) for share in self.patches)

    def rows_of(self, patches: range) -> range:
        """Return the rows of adjacent temporal patches; rows of none (LLaVA's newline) end the last one."""
        return range(self._first_row(patches.start), self._first_row(patches.stop))

    def _first_row(self, patch: int) -> int:
        return self.num_rows if patch == self.num_temporal_patches else patch * self.rows_per_temporal_patch

    def chunk(self, host: int, number: int, size: int) -> range:
        """Return the temporal patches of a host's chunk; none behind its last.

        Args:
            size: the temporal patches of a chunk; the last may have fewer.
        """
        return self.patches[host][number * size : (number + 1) * size]

    def num_chunks(self, size: int) -> int:
        """Count the chunks of the longest share."""
        return max(-(-len(share) // size) for share in self.patches)

    def chunk_size(self, num_bytes: int) -> int:
        """Return how many temporal patches are encoded at a time.

        Args:
            num_bytes: how much memory their frames, pixels and activations may take.
        """
        longest = max(map(len, self.patches))
        if not self.bytes_per_temporal_patch:
            return max(longest, 1)
        fitting = num_bytes // self.bytes_per_temporal_patch
        wanted = max(-(-longest // _CHUNKS_PER_SHARE), _LEAST_BYTES // self.bytes_per_temporal_patch)
        return max(min(fitting, wanted), 1)

    def of_frames(self, source: VideoSource, num_bytes: int) -> "VisualInput":
        """Return the same video, of which only the frames are known yet.

        Args:
            num_bytes: of the decoded frames.
        """
        per_patch = _FRAME_COPIES * num_bytes // self.num_temporal_patches
        per_patch += self.bytes_per_temporal_patch
        return replace(self, pixels=None, source=source, bytes_per_temporal_patch=per_patch)


def visual_from_batch(
    parts: ModelParts, batch: Mapping[str, Any], num_rows: int, hosts: HostGroup, frame_parallel: bool
) -> VisualInput:
    """Take a prompt's images or video out of a processor's batch.

    Args:
        num_rows: the visual placeholders in the prompt.

    Raises:
        PromptError: no pixels, a mix of images and video, more than one video.
    """
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
        values = {name: batch[name] for name in names if batch.get(name) is not None}
        return VisualInput(
            kind="image",
            patches=tuple(split_evenly(range(1), hosts.size)),
            host=hosts.rank,
            num_rows=num_rows,
            pixels=GivenPixels(values, range(1)) if hosts.rank == 0 else None,
        )
    num_patches = _num_temporal_patches(batch, pixels)
    patches = _share_out(num_patches, hosts, frame_parallel)
    mine = patches[hosts.rank]
    values = {"pixel_values_videos": pixels}
    if batch.get("video_grid_thw") is not None:
        values["video_grid_thw"] = batch["video_grid_thw"]
    return VisualInput(
        kind="video",
        patches=patches,
        host=hosts.rank,
        num_rows=num_rows,
        rows_per_temporal_patch=(num_rows - parts.num_rows_ending_video) // num_patches,
        bytes_per_temporal_patch=PIXEL_COPIES * pixels.nbytes // num_patches,
        pixels=GivenPixels(values, mine) if mine else None,
        replicated=not frame_parallel,
    )


def _share_out(num_patches: int, hosts: HostGroup, frame_parallel: bool) -> tuple[range, ...]:
    """Share a video's temporal patches out among the hosts that encode them (Eq. 6)."""
    everything = range(num_patches)
    return tuple(split_evenly(everything, hosts.size) if frame_parallel else [everything] * hosts.size)


def _num_temporal_patches(batch: Mapping[str, Any], pixels: Tensor) -> int:
    """Count the temporal patches of the video, which can be encoded apart from one another."""
    grid = batch.get("video_grid_thw")
    videos = len(grid) if grid is not None else pixels.shape[0] if pixels.dim() == 5 else 1
    if videos != 1:
        raise PromptError(f"a prompt may have one video, not {videos}")
    if grid is not None:
        return int(grid[0, 0])
    return pixels.shape[1] if pixels.dim() == 5 else pixels.shape[0]
