"""Makes clips of given size, length and keyframe distance, and reads them with other libraries."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)
from apbv.errors import InvalidRequestError

# isort: split
import av
import numpy as np
from av.video.frame import PictureType
from PIL import Image
from transformers.video_utils import VideoMetadata

from apbv.testing.clips import write_mp4

_GRAINS = 16  # different fields of film grain


@dataclass(frozen=True)
class ClipSpec:
    """The specification of a clip.

    Attributes:
        height, width: pixels; multiples of 4 and of 2.
        gop: frames from one keyframe to the next.
        num_frames, fps: length and frame rate.
        source: a video file whose frames are scaled, and repeated as often as needed. None: a drawn
            texture that moves smoothly.

    Raises:
        InvalidRequestError: a frame cannot be cut into the planes of 4:2:0 video, or a length is
            not positive.
    """

    height: int
    width: int
    gop: int
    num_frames: int
    fps: int
    source: Path | None = None

    def __post_init__(self):
        if self.height % 4 or self.width % 2 or self.num_frames < 1:
            raise InvalidRequestError(
                f"{self}: the height must be divisible by 4, the width by 2, and a frame is needed"
            )


def write_clip(spec: ClipSpec, path: Path) -> Path:
    """Write a clip, and return its path.

    Raises:
        InvalidRequestError: the source cannot be read.
    """
    frames = _drawn_frames(spec) if spec.source is None else _frames_of_file(spec)
    x264 = f"keyint={spec.gop}:min-keyint={spec.gop}:scenecut=0:bframes=3:log-level=0"
    options = {"preset": "veryfast", "x264-params": x264}
    try:
        write_mp4(itertools.islice(frames, spec.num_frames), path, spec.fps, **options)
    except (av.error.FFmpegError, IndexError) as error:
        raise InvalidRequestError(f"cannot make a clip of {spec.source}: {error}") from error
    return path


def _frames_of_file(spec: ClipSpec) -> Iterator[av.VideoFrame]:
    """Yield a file's frames over and over, scaled."""
    while True:
        with av.open(str(spec.source)) as file:
            for frame in file.decode(file.streams.video[0]):
                frame = frame.reformat(spec.width, spec.height, "yuv420p")
                # Else the encoder makes keyframes of the file's own.
                frame.pict_type = PictureType.NONE
                yield frame


def _drawn_frames(spec: ClipSpec) -> Iterator[av.VideoFrame]:
    """Yield frames of a camera that pans over a ground, past a moving object, with grain."""
    rng = np.random.default_rng(0)
    height = spec.height
    width = spec.width
    ground = _texture(rng, 2 * height, 2 * width)
    colours = [_texture(rng, height, width) for _ in range(2)]
    object_ = _texture(rng, height // 4, width // 4)
    grains = rng.integers(-3, 4, (_GRAINS, height, width), np.int8).view(np.uint8)
    for number in range(spec.num_frames):
        seconds = number / spec.fps
        # The ground.
        y = _on_a_curve(seconds / 23, height)
        x = _on_a_curve(seconds / 17, width)
        luma = ground[y : y + height, x : x + width].copy()
        # The object.
        top = _on_a_curve(seconds / 5, height * 3 // 4)
        left = _on_a_curve(seconds / 7, width * 3 // 4)
        luma[top : top + height // 4, left : left + width // 4] = object_
        # The grain. It wraps around nowhere: textures keep clear of 0 and 255.
        luma += grains[rng.integers(_GRAINS)]
        # Both colours, at half the resolution, as rows of the frame's width.
        planes = [luma]
        for colour in colours:
            chroma = colour[y // 2 : y // 2 + height // 2, x // 2 : x // 2 + width // 2]
            planes.append(chroma.reshape(-1, width))
        yield av.VideoFrame.from_ndarray(np.concatenate(planes), format="yuv420p")


def _on_a_curve(turns: float, extent: int) -> int:
    """Return an even place in 0 .. extent that swings to and fro."""
    return round(extent / 2 * (1 + math.sin(2 * math.pi * turns))) // 2 * 2


def _texture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Draw noise at several scales: uint8 ``[height, width]`` in 32 .. 224."""
    total = np.zeros((height, width), np.float32)
    for scale in (4, 16, 64):
        small = rng.uniform(-1, 1, (height // scale + 2, width // scale + 2)).astype(np.float32)
        large = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        total += scale**0.5 * np.asarray(large)
    total -= total.min()
    return (32 + 192 * total / total.max()).astype(np.uint8)


# Every reader takes a file, a number of threads and a function that chooses frames by their number.
# It returns them as uint8 ``[frames, height, width, 3]``, and what a processor wants to know of the
# video.
Read = tuple[np.ndarray, VideoMetadata]
Choose = Callable[[int], list[int]]


def read_with_opencv(path: str, threads: int, choose: Choose) -> Read:
    """Read as vLLM does by default: decode all up to the last chosen frame, convert chosen ones."""
    import cv2

    cv2.setNumThreads(threads)
    video = cv2.VideoCapture(path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, threads])
    try:
        count = int(video.get(cv2.CAP_PROP_FRAME_COUNT))
        fps = video.get(cv2.CAP_PROP_FPS)
        height = int(video.get(cv2.CAP_PROP_FRAME_HEIGHT))
        width = int(video.get(cv2.CAP_PROP_FRAME_WIDTH))
        indices = choose(count)
        row = 0
        frames = np.empty((len(indices), height, width, 3), np.uint8)
        for number in range(indices[-1] + 1):
            if not video.grab():
                raise InvalidRequestError(f"{path}: OpenCV does not read frame {number}")
            if number == indices[row]:
                _, picture = video.retrieve()
                frames[row] = cv2.cvtColor(picture, cv2.COLOR_BGR2RGB)
                row += 1
    finally:
        video.release()
    return frames, _metadata(frames, count, fps, indices)


def read_with_decord2(path: str, threads: int, choose: Choose) -> Read:
    """Read as qwen-vl-utils and transformers do with decord: by one call for all chosen frames."""
    import decord

    video = decord.VideoReader(path, num_threads=threads)
    indices = choose(len(video))
    frames = video.get_batch(indices).asnumpy()
    return frames, _metadata(frames, len(video), video.get_avg_fps(), indices)


def read_with_torchcodec(path: str, threads: int, choose: Choose) -> Read:
    """Read as vLLM and transformers do with torchcodec: by one call for all chosen frames."""
    from torchcodec.decoders import VideoDecoder

    video = VideoDecoder(
        path, dimension_order="NHWC", num_ffmpeg_threads=threads, seek_mode="exact"
    )
    indices = choose(len(video))
    frames = video.get_frames_at(indices).data.numpy()
    return frames, _metadata(frames, len(video), video.metadata.average_fps, indices)


def read_with_pyav(path: str, threads: int, choose: Choose) -> Read:
    """Read plainly: decode every frame up to the last chosen one, and convert chosen ones."""
    with av.open(path) as file:
        stream = file.streams.video[0]
        stream.codec_context.thread_count = threads
        indices = choose(stream.frames)
        row = 0
        frames = np.empty((len(indices), stream.height, stream.width, 3), np.uint8)
        for number, frame in enumerate(file.decode(stream)):
            if number == indices[row]:
                frames[row] = frame.to_ndarray(format="rgb24")
                row += 1
                if row == len(indices):
                    break
        return frames, _metadata(frames, stream.frames, float(stream.average_rate), indices)


def _metadata(frames: np.ndarray, count: int, fps: float, indices: list[int]) -> VideoMetadata:
    _, height, width, _ = frames.shape
    return VideoMetadata(
        count,
        fps,
        width=width,
        height=height,
        duration=count / fps,
        frames_indices=indices,
    )


READERS = {
    "opencv": read_with_opencv,
    "decord2": read_with_decord2,
    "torchcodec": read_with_torchcodec,
    "pyav": read_with_pyav,
}
# The names of the packages with the readers, where they differ.
PACKAGES = {"opencv": "opencv-python-headless", "pyav": "av"}
