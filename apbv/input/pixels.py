"""Pixels for a vision tower, in chunks: given by the caller, or made from frames as these are read.

A chunk is some temporal patches of a video, or some images side by side. While the tower encodes
one, the next is preprocessed and the one after that decoded, each by a thread of its own; so no
more than a few chunks are in memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from ..allocator import return_freed_memory
from ..config import VideoConfig
from ..layout import intersect
from ..stats import StageTimer
from ..transfer import side_stream
from .images import Picture
from .sizes import resized
from .skeleton import SampledVideo, process
from .video import iter_frames, read_frames
from .visual import PixelChunk, Pixels

_LARGE_BYTES = 2**26


@dataclass(frozen=True)
class SourcePixels:
    """Pixels that are read from their files on demand.

    Attributes:
        readers: of every run of temporal patches (:attr:`~apbv.input.visual.VisualInput.runs`).
        timer: gets the number of frames and images read.
        runs_ahead: whether a thread makes chunks before they are asked for, or the caller's thread
            when it asks.
    """

    readers: tuple[tuple[range, "VideoReader | ImageReader"], ...]
    timer: StageTimer
    runs_ahead: bool = True

    def chunks(self, chunks: Sequence[range]) -> Iterator[PixelChunk]:
        """See :class:`Pixels`."""
        pixels = self._read(chunks)
        if self.runs_ahead:
            pixels = ahead(pixels)
        with closing(pixels):
            yield from pixels

    def _read(self, chunks: Sequence[range]) -> Iterator[PixelChunk]:
        # Plan: the chunks of every run of patches.
        shares = []
        num_read = 0
        num_frames = 0
        for run, reader in self.readers:
            chunks_of_run = [chunk for chunk in chunks if chunk.start in run]
            if chunks_of_run:
                shares.append((chunks_of_run, run.start, reader))
                num_frames += sum(map(len, chunks_of_run)) * reader.num_merged
        # Read.
        for chunks_of_run, first, reader in shares:
            with closing(reader.read(chunks_of_run, first)) as frames_of_chunks:
                for chunk, frames in zip(chunks_of_run, frames_of_chunks, strict=True):
                    num_read += len(frames)
                    self.timer.progress("decode_video", num_read, num_frames)
                    values, ready = reader.prepare(frames)
                    del frames
                    yield PixelChunk(values, chunk, reader.kind, ready)
            if isinstance(reader, ImageReader) and reader.num_bytes > _LARGE_BYTES:
                return_freed_memory()  # a peak that hardly any other request has


def ahead(chunks: Iterator[PixelChunk]) -> Iterator[PixelChunk]:
    """Produce each chunk in a thread while the previous one is in use.

    Args:
        chunks: a generator, which is closed with this one.
    """
    with ThreadPoolExecutor(1) as pool, closing(chunks):
        future = pool.submit(next, chunks, None)
        try:
            while (chunk := future.result()) is not None:
                future = pool.submit(next, chunks, None)
                yield chunk
        finally:
            wait([future])


@dataclass(frozen=True)
class GivenPixels:
    """Pixels given by the caller.

    Attributes:
        items: for every item its kind, its temporal patches, and its part of a processor's batch.
    """

    items: Sequence[tuple[str, range, Mapping[str, Any]]]

    def chunks(self, chunks: Sequence[range]) -> Iterator[PixelChunk]:
        """See :class:`Pixels`."""
        for chunk in chunks:
            kinds = []
            batches = []
            for kind, patches, values in self.items:
                patches_in_chunk = intersect(chunk, patches)
                if patches_in_chunk:
                    start = patches_in_chunk.start - patches.start
                    kinds.append(kind)
                    batches.append(_cut(kind, values, range(start, start + len(patches_in_chunk))))
            joined = {}
            for name in batches[0]:
                joined[name] = torch.cat([torch.as_tensor(batch[name]) for batch in batches])
            yield PixelChunk(joined, chunk, kinds[0])


class KeptPixels:
    """Pixels that are read once and kept, for a draft's vision tower during or after the target's.

    Any number of threads may iterate over them. :meth:`close` has to be called in the end.
    """

    def __init__(self, pixels: Pixels):
        self._pixels, self._lock, self._is_closed = pixels, Lock(), False
        self._kept: list[PixelChunk | Exception | None] = []  # in the end what ended them
        self._source: Iterator[PixelChunk] | None = None

    def chunks(self, chunks: Sequence[range]) -> Iterator[PixelChunk]:
        """See :class:`Pixels`; the chunks are those that the first caller wants."""
        for number in count():
            with self._lock:
                if self._is_closed:
                    raise ValueError("these pixels belong to a request that has ended")
                self._source = self._source or self._pixels.chunks(chunks)
                if number == len(self._kept):
                    try:
                        self._kept.append(next(self._source, None))
                    except Exception as error:
                        self._kept.append(error)
                chunk = self._kept[number]
            if chunk is None:
                return
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk
            del chunk

    def close(self) -> None:
        """Stop the reading threads, and drop the pixels."""
        with self._lock:
            self._is_closed = True
            self._kept = []
            if self._source is not None:
                self._source.close()


def _cut(kind: str, values: Mapping[str, Any], patches: range) -> dict[str, Any]:
    """Return the part of an item's pixels that is of some of its temporal patches."""
    if kind == "image":
        return dict(values)
    values, grid = dict(values), values.get("video_grid_thw")
    pixels = values["pixel_values_videos"]
    if grid is None:
        cut = slice(patches.start, patches.stop)
        return {"pixel_values_videos": pixels[:, cut] if pixels.dim() == 5 else pixels[cut]}
    rows = int(grid[0, 1] * grid[0, 2])  # of pixels, for one temporal patch
    grid = grid.clone()
    grid[0, 0] = len(patches)
    pixels = pixels[patches.start * rows : patches.stop * rows]
    return values | {"pixel_values_videos": pixels, "video_grid_thw": grid}


@dataclass(frozen=True)
class VideoReader:
    """Reads the frames of one video.

    Attributes:
        video: the video with its sampled frames.
        num_merged: the frames of one temporal patch.
        processor: the model's transformers processor.
        timer: the request's stage times.
        device, dtype: of the vision tower; on a GPU pixels are made there, else (None, too) in fp32
            on the CPU.
        config: how frames are decoded.
        runs_ahead: whether threads decode frames before they are asked for.
    """

    kind = "video"

    video: SampledVideo
    num_merged: int
    processor: Any
    timer: StageTimer
    device: torch.device | None = None
    dtype: torch.dtype = torch.float32
    config: VideoConfig = field(default_factory=VideoConfig)
    runs_ahead: bool = True

    def read(self, chunks: Sequence[range], first: int = 0) -> Iterator[Tensor]:
        """Decode frames: uint8 ``[t, H, W, 3]``; see :meth:`SourcePixels.chunks`.

        Args:
            first: the number of the video's first temporal patch.
        """
        start = chunks[0].start - first
        stop = chunks[-1].stop - first
        frames = self.video.frames[start * self.num_merged : stop * self.num_merged]
        size = len(chunks[0]) * self.num_merged
        threads = self.config.threads or 0
        if not self.runs_ahead:
            for start in range(0, len(frames), size):
                with self.timer.stage("decode_video"):
                    chunk = read_frames(self.video.info, frames[start : start + size], threads)
                yield torch.as_tensor(chunk)
            return

        with closing(
            iter_frames(
                self.video.info, frames, size, threads, partial(self.timer.stage, "decode_video")
            )
        ) as chunks:
            yield from map(torch.as_tensor, chunks)

    @torch.no_grad()
    def prepare(self, read: Tensor) -> "tuple[dict[str, Tensor], torch.cuda.Event | None]":
        """Make pixels of frames; see :meth:`SourcePixels.chunks`."""
        on_gpu = self.device is not None and self.device.type == "cuda"
        side = side_stream(self.device, "pixels") if on_gpu else None
        # The stage lies within the stream, whose time counts.
        with (
            nullcontext() if side is None else torch.cuda.stream(side),
            self.timer.stage("preprocess"),
        ):
            if side is None:
                return preprocess_frames(self.processor, read, self.video.grid), None
            read = read.pin_memory().to(self.device, non_blocking=True)
            values = preprocess_frames(self.processor, read, self.video.grid)
            values = {
                name: v.to(self.dtype) if v.is_floating_point() else v for name, v in values.items()
            }
            return values, side.record_event()


@dataclass(frozen=True)
class ImageReader:
    """Reads adjacent images of a prompt.

    Attributes:
        pictures: the images.
        processor: the model's transformers processor; it is used by one thread at a time.
        timer: the request's stage times.
        is_untiled: whether the processor is not to cut images into tiles, as LLaVA-OneVision's does
            with an image that is the only one of its sample.
    """

    kind = "image"
    num_merged = 1

    pictures: tuple[Picture, ...]
    processor: Any
    timer: StageTimer
    is_untiled: bool = False

    @property
    def num_bytes(self) -> int:
        """The images' size as RGB."""
        return sum(3 * picture.height * picture.width for picture in self.pictures)

    def read(self, chunks: Sequence[range], first: int = 0) -> Iterator[list[Any]]:
        """Decode images, as :meth:`VideoReader.read` does frames."""
        for chunk in chunks:
            with self.timer.stage("decode_video"):
                pictures = self.pictures[chunk.start - first : chunk.stop - first]
                images = [(picture.load(), picture.resized) for picture in pictures]
            yield images

    @torch.no_grad()
    def prepare(
        self, read: list[tuple[Any, tuple[int, int] | None]]
    ) -> tuple[dict[str, Any], None]:
        """Make pixels of images, each with the size that it gets; see
        :meth:`SourcePixels.chunks`."""
        with self.timer.stage("preprocess"):
            made = []
            for are_resized, run in groupby(read, lambda each: each[1] is not None):
                images = list(run)
                made.append(
                    self._resized(images)
                    if are_resized
                    else self._by_processor([each for each, _ in images])
                )
            if len(made) > 1:  # of a family that has a grid for each image
                return {name: torch.cat([each[name] for each in made]) for name in made[0]}, None
            return made[0], None

    def _resized(self, read: list[tuple[Any, tuple[int, int]]]) -> dict[str, Any]:
        """Make pixels of images at given sizes."""
        tensors = [
            (image if isinstance(image, Tensor) else pil_to_tensor(image), size)
            for image, size in read
        ]
        images = [resized(self.processor.image_processor, image, size) for image, size in tensors]
        return self._by_processor(images, do_resize=False)

    def _by_processor(self, read: list[Any], **options: Any) -> dict[str, Any]:
        """Make pixels of images as the model's processor does."""
        shown = read * 2 if self.is_untiled and len(read) == 1 else read  # a sample of several
        images = [shown] if self.is_untiled else shown
        batch = process(
            self.processor, self.processor.image_token * len(shown), images=images, **options
        )
        names = (
            "pixel_values",
            "image_grid_thw",
            "image_merge_sizes",
            "image_sizes",
            "batch_num_images",
        )
        values = {name: batch[name] for name in names if batch.get(name) is not None}
        if len(shown) > len(read):  # of the number in a sample the model asks only whether it is 1
            values |= {name: values[name][: len(read)] for name in ("pixel_values", "image_sizes")}
        return values


def preprocess_frames(
    processor, frames: Tensor, grid: Tensor | None, compares: bool = False
) -> dict[str, Tensor]:
    """Return the processor's pixels of a piece of a video, bit-equal to the same piece of the
    whole.

    Args:
        frames: uint8 ``[t, H, W, 3]``; t is a multiple of the temporal patch except at the video's
            end.
        grid: ``[1, 3]`` patches (time, height, width) of the whole video, where the model has such
            a grid: there the frame size depends on the whole video's length, so it is pinned.
        compares: whether to return, instead of pixels only, which tokens differ from the frame
            before.
    """
    video_processor = processor.video_processor
    frames = frames.permute(0, 3, 1, 2)
    options = {}
    if grid is not None:
        options["do_resize"] = False
    if grid is not None and video_processor.do_resize:
        from transformers.image_utils import SizeDict
        from transformers.video_processing_utils import BaseVideoProcessor

        _, height, width = (grid[0] * video_processor.patch_size).tolist()
        # The base class's resize goes to a given size; the families' own would compute one from the
        # piece.
        frames = BaseVideoProcessor.resize(
            video_processor,
            frames[None],
            size=SizeDict(height=height, width=width),
            resample=video_processor.resample,
        )[0]
    if hasattr(video_processor, "use_token_compression"):
        options["use_token_compression"] = compares
    output = video_processor(
        videos=[frames], do_sample_frames=False, return_tensors="pt", **options
    )
    names = ("pixel_values_videos", "pixel_values", "video_grid_thw", "video_merge_sizes")
    names += ("video_compression_mask",) * compares
    return {name: output[name] for name in names if name in output}
