"""Pixels for a vision tower, in chunks: given by the caller, or made from frames as these are read.

A chunk is some temporal patches of a video, or some images side by side. While the tower encodes
one, the next is preprocessed and the one after that decoded, each by a thread of its own; so no
more than a few chunks are in memory.
"""

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from ...config import VideoConfig
from ...device.allocator import return_freed_memory
from ...device.copies import side_stream
from ...errors import InvalidRequestError
from ...layout import intersect
from ...stats import StageTimer
from ..media.images import Picture
from ..media.sizes import resized
from ..media.video import iter_frames, read_frames
from .tokenized_prompt import SampledVideo, process
from .visual import PixelChunk, Pixels

# Images whose memory is given back at once.
_LARGE_BYTES = 2**26
# A processor's outputs that the model's get_image_features takes.
_IMAGE_VALUES = (
    "pixel_values",
    "image_grid_thw",
    "image_merge_sizes",
    "image_sizes",
    "batch_num_images",
)


class Reader(Protocol):
    """Reads adjacent items of one kind, and makes pixels of them."""

    @property
    def kind(self) -> str:
        """``"video"`` or ``"image"``."""
        ...

    @property
    def num_merged(self) -> int:
        """The frames of a temporal patch."""
        ...

    def read(self, chunks: Sequence[range], first: int = 0) -> Generator[Any, None, None]:
        """Yield what :meth:`prepare` takes of each chunk, a sequence of frames or images."""
        ...

    def prepare(self, read: Any) -> "tuple[dict[str, Any], torch.cuda.Event | None]":
        """Return pixels, and the event with which a GPU has made them; None: they are there."""
        ...


@dataclass(frozen=True)
class SourcePixels:
    """Pixels that are read from their files on demand.

    Attributes:
        readers: of every run of temporal patches
            (:attr:`~apbv.input.prompts.visual.VisualInput.runs`).
        timer: gets the number of frames and images read.
        runs_ahead: whether a thread makes chunks before they are asked for, or the caller's thread
            when it asks.
    """

    readers: tuple[tuple[range, "VideoReader | ImageReader"], ...]
    timer: StageTimer
    runs_ahead: bool = True

    def chunks(self, chunks: Sequence[range]) -> Generator[PixelChunk, None, None]:
        """Read, decode and preprocess chunks; implements
        :class:`~apbv.input.prompts.visual.Pixels`."""
        pixels = self._read(chunks)
        if self.runs_ahead:
            pixels = ahead(pixels)
        with closing(pixels):
            yield from pixels

    def _read(self, chunks: Sequence[range]) -> Generator[PixelChunk, None, None]:
        # Plan: the chunks of every run of patches.
        shares: list[tuple[list[range], int, Reader]] = []
        num_read = 0
        num_frames = 0
        for run, of_run in self.readers:
            chunks_of_run = [chunk for chunk in chunks if chunk.start in run]
            if chunks_of_run:
                shares.append((chunks_of_run, run.start, of_run))
                num_patches = sum(len(chunk) for chunk in chunks_of_run)
                num_frames += num_patches * of_run.num_merged
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


def ahead(chunks: Generator[PixelChunk, None, None]) -> Generator[PixelChunk, None, None]:
    """Produce each chunk in a thread while the previous one is in use.

    Args:
        chunks: a generator, which is closed with this one.
    """
    with ThreadPoolExecutor(1) as pool, closing(chunks):
        future = pool.submit(next, chunks, None)
        try:
            chunk = future.result()
            while chunk is not None:
                future = pool.submit(next, chunks, None)
                yield chunk
                chunk = future.result()
        finally:
            wait([future])


@dataclass(frozen=True)
class GivenPixels:
    """Pixels given by the caller.

    Attributes:
        items: for every item its kind, its temporal patches, and its part of a processor's batch.
    """

    items: Sequence[tuple[str, range, Mapping[str, Any]]]

    def chunks(self, chunks: Sequence[range]) -> Generator[PixelChunk, None, None]:
        """Cut chunks; implements :class:`~apbv.input.prompts.visual.Pixels`."""
        for chunk in chunks:
            kinds = []
            batches = []
            for kind, patches, values in self.items:
                patches_in_chunk = intersect(chunk, patches)
                if patches_in_chunk:
                    start = patches_in_chunk.start - patches.start
                    stop = patches_in_chunk.stop - patches.start
                    kinds.append(kind)
                    batches.append(_cut(kind, values, range(start, stop)))
            joined = {}
            for name in batches[0]:
                joined[name] = torch.cat([torch.as_tensor(batch[name]) for batch in batches])
            yield PixelChunk(joined, chunk, kinds[0])


class KeptPixels:
    """Pixels that are read once and kept, for a draft's vision tower during or after the target's.

    Any number of threads may iterate over them. :meth:`close` has to be called in the end.
    """

    def __init__(self, pixels: Pixels):
        self._pixels = pixels
        self._lock = Lock()
        self._is_closed = False
        # The chunks that were read; after the last, None, or the error that ended them.
        self._results: list[PixelChunk | Exception | None] = []
        self._source: Generator[PixelChunk, None, None] | None = None

    def chunks(self, chunks: Sequence[range]) -> Generator[PixelChunk, None, None]:
        """Read chunks, or return those in memory; implements
        :class:`~apbv.input.prompts.visual.Pixels`.

        All callers get the chunks that the first one asks for.
        """
        for number in count():
            with self._lock:
                if self._is_closed:
                    raise InvalidRequestError("these pixels belong to a request that has ended")
                if self._source is None:
                    self._source = self._pixels.chunks(chunks)
                if number == len(self._results):
                    try:
                        self._results.append(next(self._source, None))
                    except Exception as error:
                        self._results.append(error)
                result = self._results[number]
            if result is None:
                return
            if isinstance(result, Exception):
                raise result
            yield result
            del result

    def close(self) -> None:
        """Stop the reading threads, and drop the pixels."""
        with self._lock:
            self._is_closed = True
            self._results = []
            if self._source is not None:
                self._source.close()


def _cut(kind: str, values: Mapping[str, Any], patches: range) -> dict[str, Any]:
    """Return the pixels of some temporal patches of an item.

    Args:
        values: the item's part of a processor's batch.
        patches: numbered from the item's first.
    """
    part = dict(values)
    if kind == "image":
        return part
    pixels = values["pixel_values_videos"]
    grid = values.get("video_grid_thw")
    if grid is None:
        frames = slice(patches.start, patches.stop)
        pixels = pixels[:, frames] if pixels.dim() == 5 else pixels[frames]
        return {"pixel_values_videos": pixels}
    rows = int(grid[0, 1] * grid[0, 2])  # of pixels, for one temporal patch
    part["pixel_values_videos"] = pixels[patches.start * rows : patches.stop * rows]
    part["video_grid_thw"] = grid.clone()
    part["video_grid_thw"][0, 0] = len(patches)
    return part


@dataclass(frozen=True)
class VideoReader:
    """Reads the frames of one video.

    Attributes:
        video: the video with its sampled frames.
        num_merged: the frames of one temporal patch.
        processor: the model's transformers processor.
        timer: the request's stage times.
        device, dtype: of the vision tower. On a GPU pixels are made there and in this type,
            otherwise, and without a device, on the CPU in fp32.
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

    def read(self, chunks: Sequence[range], first: int = 0) -> Generator[Tensor, None, None]:
        """Decode the frames of chunks, one chunk after the other: uint8 ``[t, H, W, 3]``.

        Args:
            chunks: adjacent temporal patches each, all of this video.
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
                    decoded = read_frames(self.video.info, frames[start : start + size], threads)
                yield torch.as_tensor(decoded)
            return

        at_work = partial(self.timer.stage, "decode_video")
        frames_of_chunks = iter_frames(self.video.info, frames, size, threads, at_work)
        with closing(frames_of_chunks):
            yield from map(torch.as_tensor, frames_of_chunks)

    @torch.no_grad()
    def prepare(self, read: Tensor) -> "tuple[dict[str, Tensor], torch.cuda.Event | None]":
        """Make pixels of decoded frames.

        Returns:
            Keyword arguments of the model's ``get_video_features``; and, where they are made on a
            GPU, the event that is recorded after their kernels.
        """
        if self.device is None or self.device.type != "cuda":
            with self.timer.stage("preprocess"):
                return preprocess_frames(self.processor, read, self.video.grid), None
        side = side_stream(self.device, "pixels")
        # The stage lies within the stream, whose time counts.
        with torch.cuda.stream(side), self.timer.stage("preprocess"):
            read = read.pin_memory().to(self.device, non_blocking=True)
            values = preprocess_frames(self.processor, read, self.video.grid)
            for name, value in values.items():
                if value.is_floating_point():
                    values[name] = value.to(self.dtype)
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

    def read(self, chunks: Sequence[range], first: int = 0) -> Generator[list[Any], None, None]:
        """Decode the images of chunks, one chunk after the other.

        Args:
            chunks: adjacent images each.
            first: the number of the first image's temporal patch.

        Returns:
            For each chunk its images, each with the size that it gets
            (:attr:`~apbv.input.media.images.Picture.resized`).
        """
        for chunk in chunks:
            with self.timer.stage("decode_video"):
                pictures = self.pictures[chunk.start - first : chunk.stop - first]
                images = [(picture.load(), picture.resized) for picture in pictures]
            yield images

    @torch.no_grad()
    def prepare(
        self, read: list[tuple[Any, tuple[int, int] | None]]
    ) -> tuple[dict[str, Any], None]:
        """Make pixels of decoded images, each with the size that it gets; None: the processor's.

        Returns:
            Keyword arguments of the model's ``get_image_features``, and None.
        """
        with self.timer.stage("preprocess"):
            batches = []
            for are_resized, run in groupby(read, _is_resized):
                images = list(run)
                if are_resized:
                    with_sizes = [(image, size) for image, size in images if size is not None]
                    batches.append(self._resized(with_sizes))
                else:
                    batches.append(self._by_processor([image for image, _ in images]))
            if len(batches) == 1:
                return batches[0], None
            # Of a family that has a grid for each image.
            joined = {}
            for name in batches[0]:
                joined[name] = torch.cat([batch[name] for batch in batches])
            return joined, None

    def _resized(self, read: list[tuple[Any, tuple[int, int]]]) -> dict[str, Any]:
        """Make pixels of images at given sizes."""
        images = []
        for image, size in read:
            if not isinstance(image, Tensor):
                image = pil_to_tensor(image)
            images.append(resized(self.processor.image_processor, image, size))
        return self._by_processor(images, do_resize=False)

    def _by_processor(self, read: list[Any], **options: Any) -> dict[str, Any]:
        """Make pixels of images as the model's processor does."""
        images = read
        if self.is_untiled and len(read) == 1:
            images = read * 2  # a sample of several images, which is not cut into tiles
        batch = process(
            self.processor,
            self.processor.image_token * len(images),
            images=[images] if self.is_untiled else images,
            **options,
        )
        values = {}
        for name in _IMAGE_VALUES:
            if batch.get(name) is not None:
                values[name] = batch[name]
        if len(images) > len(read):
            # batch_num_images stays: the model asks of it only whether it is 1.
            values["pixel_values"] = values["pixel_values"][: len(read)]
            values["image_sizes"] = values["image_sizes"][: len(read)]
        return values


def _is_resized(image_and_size: tuple[Any, tuple[int, int] | None]) -> bool:
    _, size = image_and_size
    return size is not None


def preprocess_frames(
    processor, frames: Tensor, grid: Tensor | None, compares: bool = False
) -> dict[str, Tensor]:
    """Return the processor's pixels of a piece of a video, bit-equal to that piece of the whole.

    Args:
        frames: uint8 ``[t, H, W, 3]``; t is a multiple of the temporal patch except at the video's
            end.
        grid: ``[1, 3]`` patches (time, height, width) of the whole video, where the model has such
            a grid: there the frame size depends on the whole video's length, so it is pinned.
        compares: whether to return, besides the pixels, which tokens differ from the frame before.
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
    names = ["pixel_values_videos", "pixel_values", "video_grid_thw", "video_merge_sizes"]
    if compares:
        names.append("video_compression_mask")
    return {name: output[name] for name in names if name in output}
