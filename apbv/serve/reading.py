"""From a request to an order: files opened, tokens counted, limits kept. On host 0, beside the engine's thread."""

import copy
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..engine import Engine
from ..input.model_inputs import video_skeleton
from ..input.rendering import RenderedPrompt, render_prompt
from ..input.video import probe, require_frame_rate, sample_fps, sample_uniform
from ..model.parts import inspect_model
from .media import FolderError, Media, MediaError, MediaSettings, opened
from .order import Order
from .protocol import ApiError, ChatRequest, ImagePart, TextPart

_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Cameras and encoders write about ten. Each is a pass over all of the image, and takes a few bytes.
_MAX_SCANS = 100
_START_OF_SCAN = b"\xff\xda"


@dataclass(frozen=True, kw_only=True)
class RequestSettings:
    """What requests may ask for, and what they get where they do not say.

    Attributes:
        max_model_len: tokens of prompt and answer together; None: as many as the model was made for.
        temperature, top_p, fps: where a request names none.
        max_new_tokens, num_frames: likewise; None: the engine's.
        max_frames: of a video, or images.
        max_decoded_bytes: of the frames of one request as RGB, in the size they are stored in.
        max_image_bytes: of the images of one request, likewise; every host decodes and scales all of them. Of an
            animation only the first frame is decoded.
        media: what URLs may mean.

    Raises:
        ValueError: fps is no frame rate.
    """

    max_model_len: int | None = None
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    num_frames: int | None = None
    fps: float | None = None
    max_frames: int = 2048
    max_decoded_bytes: int = 8 * 2**30
    max_image_bytes: int = 2**29
    media: MediaSettings = field(default_factory=MediaSettings)

    def __post_init__(self):
        if self.fps is not None:
            require_frame_rate(self.fps)


@dataclass(frozen=True)
class ReadRequest:
    """A request that the engine can be given.

    Attributes:
        order: for every host.
        media: the order's files, on host 0.
        stop: strings that end the answer.
    """

    order: Order
    media: list[Media]
    stop: list[str]


class Reader:
    """Reads requests; from any thread.

    It has a processor of its own, as a tokenizer must not be used by two threads at once.
    """

    def __init__(self, engine: Engine, settings: RequestSettings):
        self._parts = inspect_model(engine.model)
        self._processor = copy.deepcopy(engine.processor)
        self._settings = settings
        self._num_frames = settings.num_frames or engine.num_frames
        self._max_new_tokens = settings.max_new_tokens or engine.max_new_tokens
        self._lock = threading.Lock()
        self.max_model_len = settings.max_model_len or self._parts.max_position_embeddings
        self._needs_pixels = _needs_pixels(self._processor)

    def read(
        self, request: ChatRequest, stack: ExitStack, is_wanted: Callable[[], bool] = lambda: True
    ) -> ReadRequest:
        """Open a request's files, for as long as the stack lasts, and check its lengths.

        Args:
            is_wanted: asked before each file, as fetching many may take long.

        Raises:
            ApiError: with status 400 where something is not allowed, unreadable or too long, with 503 where the
                request is not wanted any more, or the folder of media files cannot be read.
        """
        settings, media = self._settings, []
        deadline = time.monotonic() + settings.media.fetch_seconds

        def open_file(url: str) -> Media:
            if len(media) == settings.max_frames:
                raise ApiError(400, f"at most {settings.max_frames} images are allowed", param="messages")
            if not is_wanted():
                raise ApiError(503, "the server is stopping, or the client has gone")
            return stack.enter_context(opened(url, settings.media, deadline))

        messages = [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": _read_parts(message.content, f"messages.{number}.content", media, open_file),
            }
            for number, message in enumerate(request.messages)
        ]
        num_frames = request.num_frames or min(self._num_frames, settings.max_frames)
        if num_frames > settings.max_frames:
            raise ApiError(400, f"num_frames may be at most {settings.max_frames}", param="num_frames")
        order = Order(
            messages=messages,
            files=[file.relative for file in media],
            num_frames=num_frames,
            fps=settings.fps if request.fps is None else request.fps,
            max_new_tokens=request.token_limit or self._max_new_tokens,
            temperature=settings.temperature if request.temperature is None else request.temperature,
            top_p=settings.top_p if request.top_p is None else request.top_p,
            seed=secrets.randbits(63) if request.seed is None else request.seed % 2**64,
        )
        try:
            with self._lock:
                num_tokens = self._count_tokens(order, media)
        except ApiError:
            raise
        except Exception as error:  # chat templates and decoders raise nearly anything
            raise ApiError(400, described(error, media), param="messages") from error
        room = self.max_model_len - num_tokens
        if room < (request.token_limit or 1):
            raise ApiError(
                400,
                f"the prompt has {num_tokens} tokens and the answer may take {request.token_limit or 1}, but the "
                f"maximum context length is {self.max_model_len} tokens",
                param="messages",
                code="context_length_exceeded",
            )
        if order.max_new_tokens > room:
            order = Order(**{**vars(order), "max_new_tokens": room})
        return ReadRequest(order, media, request.stop_strings)

    def _count_tokens(self, order: Order, media: list[Media]) -> int:
        """The prompt's length. What else the engine would refuse shows too, but for damaged frames and images."""
        kinds = [part["type"] for message in order.messages for part in message["content"] if "file" in part]
        sizes = [_image_size(file) if kind == "image" else None for file, kind in zip(media, kinds, strict=True)]
        _require_small("images", [size for size in sizes if size], self._settings.max_image_bytes)
        files = [
            file.path if size is None or self._needs_pixels else _without_pixels(*size)
            for file, size in zip(media, sizes, strict=True)
        ]
        rendered = render_prompt(self._parts, self._processor, None, messages=order.chat(files))
        return len(self._tokenize(rendered, order)["input_ids"][0])

    def _tokenize(self, rendered: RenderedPrompt, order: Order):
        if rendered.video is not None:
            info = probe(rendered.video)
            if order.fps is None:
                frames = sample_uniform(info, order.num_frames)
            else:
                frames = sample_fps(info, order.fps, max_frames=order.num_frames)
            _require_small("frames", [(info.height, info.width)] * len(frames), self._settings.max_decoded_bytes)
            return video_skeleton(self._processor, rendered.text, info, frames)
        if rendered.images:
            return self._processor(text=[rendered.text], images=rendered.images, return_tensors="pt")
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        return tokenizer([rendered.text], add_special_tokens=not rendered.has_template)


def _read_parts(
    content: str | list, where: str, media: list[Media], open_file: Callable[[str], Media]
) -> list[dict[str, Any]]:
    """A message's parts, whose files join ``media``."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts = []
    for number, part in enumerate(content):
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
            continue
        kind, url = ("image", part.image_url) if isinstance(part, ImagePart) else ("video", part.video_url)
        try:
            parts.append({"type": kind, "file": len(media)})
            media.append(open_file(url.url))
        except MediaError as error:
            raise ApiError(400, str(error), param=f"{where}.{number}.{kind}_url") from error
        except FolderError as error:
            raise ApiError(503, str(error)) from error
    return parts


def _require_small(what: str, sizes: list[tuple[int, int]], most: int) -> None:
    num_bytes = sum(height * width * 3 for height, width in sizes)
    if num_bytes > most:
        raise ApiError(
            400,
            f"the {what} take {num_bytes} bytes as RGB, but at most {most} are allowed; ask for fewer {what}",
            param="messages",
        )


def _without_pixels(height: int, width: int) -> Tensor:
    """What has an image's shape, which is all that the prompt's length depends on."""
    return torch.empty(3, height, width, dtype=torch.uint8, device="meta")


def _needs_pixels(processor) -> bool:
    """Whether the processor cannot do with :func:`_without_pixels`, as those that work on arrays cannot."""
    if not hasattr(processor, "image_processor"):
        return False
    try:
        processor.image_processor(images=[_without_pixels(64, 64)], return_tensors="pt")
        return False
    except Exception:  # of whatever kind: then it is given images
        return True


def described(error: Exception, media: list[Media]) -> str:
    """What an error says, with files called as the request calls them."""
    text = str(error) or type(error).__name__
    for file in media:
        text = text.replace(str(file.path), file.name)
        if file.relative is None:  # other hosts have it elsewhere, by the same name
            text = re.sub(rf"\S*/{file.path.name}", lambda _, name=file.name: name, text)
    return text


def _image_size(file: Media) -> tuple[int, int]:
    """Height and width of an image, from its header.

    Raises:
        ApiError: it is no image, of a format whose decoder runs more than a decoder, or decodes endlessly.
    """
    try:
        with Image.open(file.path, formats=_IMAGE_FORMATS) as image:
            size, format = (image.height, image.width), image.format
        num_scans = file.path.read_bytes().count(_START_OF_SCAN) if format in ("JPEG", "MPO") else 0
    except Exception as error:
        formats = ", ".join(_IMAGE_FORMATS)
        raise ApiError(400, f"cannot read {file.name} as an image ({formats})", param="messages") from error
    if num_scans > _MAX_SCANS:
        raise ApiError(400, f"{file.name} has more than {_MAX_SCANS} scans", param="messages")
    return size
