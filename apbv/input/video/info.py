"""A video's frames and packets, as :func:`apbv.input.video.probe` finds them."""

import io
import zipfile
from dataclasses import dataclass, field, fields

import numpy as np

# No codec displays a frame further from its place in the file than this, in frames.
_MAX_REORDER = 32
# Stands for a time, or for a byte offset, that the container does not give.
NO_TIME = np.iinfo(np.int64).min
NO_POSITION = -1


class VideoError(ValueError):
    """The file cannot be used as a video; the message names the file and the reason."""


@dataclass(frozen=True, eq=False)
class Packets:
    """The compressed packets of a video stream in decoding order, as columns that become read-only.

    Attributes:
        pts, dts: int64, presentation and decoding times in units of the stream's time base; ``NO_TIME`` where a
            container has none.
        pos: int64, byte offsets in the file; ``NO_POSITION`` where the container does not know them.
        size: int64, bytes.
        key: bool, whether decoding may start there.
        shown: bool; false where a packet is decoded because others refer to it, but is no frame of the video.
    """

    pts: np.ndarray
    dts: np.ndarray
    pos: np.ndarray
    size: np.ndarray
    key: np.ndarray
    shown: np.ndarray

    def __post_init__(self):
        _freeze(self, np.int64, "pts", "dts", "pos", "size")
        _freeze(self, np.bool_, "key", "shown")

    def __len__(self) -> int:
        return len(self.pts)

    @property
    def keyframes(self) -> np.ndarray:
        """The indices of the packets that decoding may start from; at least one."""
        return np.flatnonzero(self.key) if self.key.any() else np.zeros(1, np.intp)

    def are_distinct(self) -> bool:
        """Return whether presentation time, byte offset and size tell every packet from the others.

        Decoding times are left out: some containers store none, and what ffmpeg makes up depends on where
        reading started.
        """
        order = np.lexsort((self.size, self.pos, self.pts))
        same = np.ones(max(len(self) - 1, 0), np.bool_)
        for column in (self.pts, self.pos, self.size):
            same &= np.diff(column[order]) == 0
        return not same.any()


@dataclass(frozen=True, eq=False)
class VideoInfo:
    """A video file's frames, numbered in presentation order; only those that can be decoded count.

    Attributes:
        path: the file.
        timestamps: float64, seconds since the first frame, strictly ascending.
        height, width: pixels, as displayed.
        fps: frames per second on average: (num_frames - 1) / (last - first time); of a single frame what the
            container says.
        transpose, flip_vertical, flip_horizontal: how a stored image is displayed: transposed first, then flipped.
        packets: all packets; None where the file must be decoded from the start.
        frame_packets: int64, for each frame the index of its packet; empty where there are no packets.
    """

    path: str
    timestamps: np.ndarray = field(repr=False)
    height: int
    width: int
    fps: float
    transpose: bool
    flip_vertical: bool
    flip_horizontal: bool
    packets: Packets | None = field(repr=False)
    frame_packets: np.ndarray = field(repr=False)

    def __post_init__(self):
        _freeze(self, np.float64, "timestamps")
        _freeze(self, np.int64, "frame_packets")

    @property
    def num_frames(self) -> int:
        """The number of frames that can be decoded."""
        return len(self.timestamps)

    @property
    def duration(self) -> float:
        """The length in seconds, with the last frame shown for the mean frame interval."""
        return self.num_frames / self.fps

    def to_bytes(self) -> bytes:
        """Write it down, for another host to read by :meth:`from_bytes`."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "packets"}
        if self.packets is not None:
            values |= {"packets." + f.name: getattr(self.packets, f.name) for f in fields(Packets)}
        file = io.BytesIO()
        np.savez(file, **values)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "VideoInfo":
        """Read what :meth:`to_bytes` wrote; nothing in it is executed.

        Raises:
            ValueError: it is something else.
        """
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as stored:
                values = {name: stored[name] for name in stored.files}
            columns = [values.pop("packets." + f.name, None) for f in fields(Packets)]
            packets = None if columns[0] is None else Packets(*columns)
            scalars = {name: value.item() for name, value in values.items() if value.ndim == 0}
            return cls(packets=packets, **values | scalars)
        except (AttributeError, EOFError, OSError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"this is no description of a video: {error}") from error


def is_nearly_sorted(pts: np.ndarray) -> bool:
    """Return whether the values are distinct and out of order by no more than the reordering of frames."""
    order = np.argsort(pts, kind="stable")
    moved = np.abs(order - np.arange(len(order))).max(initial=0)
    return bool(moved <= _MAX_REORDER and (np.diff(pts[order]) > 0).all())


def _freeze(record, dtype, *names: str) -> None:
    """Make read-only arrays of a frozen record's fields, which may be any sequences of numbers."""
    for name in names:
        array = np.array(getattr(record, name), dtype)
        array.flags.writeable = False
        object.__setattr__(record, name, array)
