"""Visual embeddings of a prompt's video as frames, sharded over hosts.

A *frame* is a temporal patch here: one frame, or several that the model merges.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...device.copies import numbers_in, to_device
from ...errors import PromptError
from ...hosts import HostGroup
from ...hosts.row_exchange import move_rows
from ...input.prompts.model_inputs import ModelInputs
from ...model.parts import ModelParts


class KeptRows(NamedTuple):
    """A host's rows of a video after a reduction; all retained rows of a frame are on one host.

    Attributes:
        places: ``[K]``, ascending, where the rows belong: tokens of the video, numbered frame by
            frame.
        values: ``[K, (1 + L) * d]``. A row that was made of several has the place of one of them.
    """

    places: Tensor
    values: Tensor


@dataclass(frozen=True)
class SharedVideo:
    """Video whose frames' embeddings are on the hosts that encoded them.

    Attributes:
        rows: ``[F, h * w, (1 + L) * d]`` of this host's F frames, with the L vectors of deepstack.
        shares: for every host the numbers of the frames that it has, ascending with the host.
        height, width: h and w of every frame, in tokens.
        hidden_size: d.
        hosts: the hosts.
    """

    rows: Tensor = field(repr=False)
    shares: tuple[range, ...]
    height: int
    width: int
    hidden_size: int
    hosts: HostGroup

    @property
    def mine(self) -> range:
        """The numbers of this host's frames."""
        return self.shares[self.hosts.rank]

    @property
    def num_frames(self) -> int:
        """T, the frames of the whole video."""
        return max(share.stop for share in self.shares)

    @property
    def frame_size(self) -> int:
        """h * w, the visual tokens of a frame."""
        return self.height * self.width

    @property
    def embeddings(self) -> Tensor:
        """The rows without deepstack, ``[F, h * w, d]``."""
        return self.rows[..., : self.hidden_size]

    def fetch(self, frames_for: Sequence[Sequence[int]], rows: Tensor) -> Tensor:
        """Send every host the frames that it needs; collective.

        Args:
            frames_for: for every host, the numbers of the frames that it needs, ascending; every
                host knows all of them.
            rows: ``[F, h * w, x]`` of this host's frames, x as on every host.

        Returns:
            ``[frames that this host needs, h * w, x]``.
        """
        frames_of = [numbers_in(share) for share in self.shares]
        needed = [torch.tensor(list(frames), dtype=torch.long) for frames in frames_for]
        return move_rows(rows, frames_of, needed, self.hosts)

    def kept(self, places: Tensor) -> KeptRows:
        """Keep rows as they are.

        Args:
            places: ``[K]``, ascending, the rows to keep; rows of other hosts' frames are ignored.
        """
        first = self.mine.start * self.frame_size
        stop = self.mine.stop * self.frame_size
        places = places[(places >= first) & (places < stop)]
        local_places = to_device(places - first, self.rows.device)
        return KeptRows(places, self.rows.flatten(0, 1)[local_places])

    def gather(self, local: Tensor) -> Tensor:
        """All-gather per-frame results; collective.

        Args:
            local: ``[F, ...]`` of this host's frames.

        Returns:
            ``[T, ...]``, the same on every host, in CPU memory.
        """
        num_frames_of = [len(share) for share in self.shares]
        return torch.cat(self.hosts.gather_rows(local, num_frames_of).wait()).cpu()


# Keeps ``count`` tokens of a video, or fewer where that does not come out even, and at least one;
# collective.
Reducer = Callable[[SharedVideo, int], KeptRows]


@dataclass(frozen=True)
class VideoPlace:
    """Place of a video among a prompt's temporal patches and rows.

    Attributes:
        patches: its temporal patches.
        in_frames: the rows that belong to its frames.
        ending: the rows after these, which belong to no frame.
        height, width: of its frames, in tokens.
    """

    patches: range
    in_frames: range
    ending: range
    height: int
    width: int


def videos_of(parts: ModelParts, inputs: ModelInputs) -> list[VideoPlace]:
    """Find the videos of a prompt; none in a prompt of text or of images only."""
    visual = inputs.visual
    if visual is None:
        return []
    places = []
    for item, patches in zip(visual.items, visual.item_patches, strict=True):
        if item.kind == "video":
            rows = visual.rows_of(patches)
            height, width = frame_shape(parts, inputs, patches.start)
            end_of_frames = rows.stop - item.num_ending_rows
            place = VideoPlace(
                patches=patches,
                in_frames=range(rows.start, end_of_frames),
                ending=range(end_of_frames, rows.stop),
                height=height,
                width=width,
            )
            places.append(place)
    return places


def require_whole_frames(inputs: ModelInputs, what: str) -> None:
    """Reject a prompt that lacks tokens of its frames.

    Args:
        what: an option that compares frames token by token.

    Raises:
        PromptError: some are missing.
    """
    if inputs.visual is not None and not all(item.is_whole for item in inputs.visual.items):
        raise PromptError(
            f"{what} compares whole frames, but the model's processor left out tokens that repeat "
            "a frame: set use_token_compression to false in the config of its video processor"
        )


def num_in_frames(parts: ModelParts, inputs: ModelInputs) -> int:
    """Count the visual tokens of a prompt that belong to frames of videos."""
    return sum(len(video.in_frames) for video in videos_of(parts, inputs))


def frame_shape(parts: ModelParts, inputs: ModelInputs, patch: int = 0) -> tuple[int, int]:
    """Return the rows and columns of visual tokens in a frame of one of the prompt's videos.

    Args:
        patch: the frame's number among the prompt's temporal patches.
    """
    visual = inputs.require_visual()
    rows = visual.frames[patch]
    item = visual.items[visual.item_of(patch)]
    if item.kept is not None:
        _, rows_kept, columns_kept = item.kept.shape
        return rows_kept, columns_kept
    if not parts.uses_mrope:
        side = round(len(rows) ** 0.5)
        return side, len(rows) // side
    tokens = parts.is_visual(inputs.input_ids[0]).nonzero().flatten()[rows.start : rows.stop]
    height = len(inputs.position_ids[1, 0, tokens].unique())
    return height, len(rows) // height


def shared_video(
    parts: ModelParts, inputs: ModelInputs, video: VideoPlace, rows: Tensor, hosts: HostGroup
) -> SharedVideo:
    """Lay a video's rows out as frames.

    Args:
        rows: ``[rows of this host's share, (1 + L) * d]`` of the whole prompt.
    """
    visual = inputs.require_visual()
    patches = video.patches

    def within(patch: int) -> int:
        """Return the nearest frame of this video, or its end."""
        return min(max(patch, patches.start), patches.stop) - patches.start

    shares = tuple(range(within(share.start), within(share.stop)) for share in visual.patches)
    share = shares[hosts.rank]
    size = video.height * video.width
    begin = 0
    if share:
        first_row = video.in_frames.start + share.start * size
        begin = first_row - visual.pieces[hosts.rank].start
    frames = rows[begin : begin + len(share) * size].view(len(share), size, rows.shape[1])
    return SharedVideo(frames, shares, video.height, video.width, parts.hidden_size, hosts)
