"""From a request to an order: files opened, tokens counted, limits kept. On host 0, beside the engine's thread."""

import copy
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from ..engine import Engine
from ..inputs import video_skeleton
from ..models import inspect_model
from ..prompt import RenderedPrompt, render_prompt
from ..video import probe, sample_fps, sample_uniform
from .media import Media, MediaError, MediaSettings, opened
from .order import Order
from .protocol import ApiError, ChatRequest, ImagePart, TextPart

_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


@dataclass(frozen=True, kw_only=True)
class RequestSettings:
    """What requests may ask for, and what they get where they do not say.

    Attributes:
        max_model_len: tokens of prompt and answer together; None: as many as the model was made for.
        max_new_tokens, temperature, top_p, num_frames, fps: where a request names none.
        max_frames: of a video, or images.
        max_decoded_bytes: of the frames or images of one request as RGB, in the size they are stored in.
        media: what URLs may mean.
    """

    max_model_len: int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    num_frames: int = 64
    fps: float | None = None
    max_frames: int = 2048
    max_decoded_bytes: int = 8 * 2**30
    media: MediaSettings = field(default_factory=MediaSettings)


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
        self._lock = threading.Lock()
        self.max_model_len = settings.max_model_len or self._parts.max_position_embeddings

    def read(
        self, request: ChatRequest, stack: ExitStack, is_wanted: Callable[[], bool] = lambda: True
    ) -> ReadRequest:
        """Open a request's files, for as long as the stack lasts, and check its lengths.

        Args:
            is_wanted: asked before each file, as fetching many may take long.

        Raises:
            ApiError: with status 400 where something is not allowed, unreadable or too long, with 503 where the
                request is not wanted any more.
        """
        settings, media = self._settings, []
        messages = [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": self._read_parts(
                    message.content, f"messages.{number}.content", media, stack, is_wanted
                ),
            }
            for number, message in enumerate(request.messages)
        ]
        num_frames = request.num_frames or min(settings.num_frames, settings.max_frames)
        if num_frames > settings.max_frames:
            raise ApiError(400, f"num_frames may be at most {settings.max_frames}", param="num_frames")
        order = Order(
            messages=messages,
            files=[file.relative for file in media],
            num_frames=num_frames,
            fps=settings.fps if request.fps is None else request.fps,
            max_new_tokens=request.token_limit or settings.max_new_tokens,
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

    def _read_parts(
        self,
        content: str | list,
        where: str,
        media: list[Media],
        stack: ExitStack,
        is_wanted: Callable[[], bool],
    ) -> list[dict[str, Any]]:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        parts = []
        for number, part in enumerate(content):
            if isinstance(part, TextPart):
                parts.append({"type": "text", "text": part.text})
                continue
            kind, url = ("image", part.image_url) if isinstance(part, ImagePart) else ("video", part.video_url)
            if len(media) == self._settings.max_frames:
                raise ApiError(400, f"at most {self._settings.max_frames} images are allowed", param="messages")
            if not is_wanted():
                raise ApiError(503, "the server is stopping, or the client has gone")
            try:
                parts.append({"type": kind, "file": len(media)})
                media.append(stack.enter_context(opened(url.url, self._settings.media)))
            except MediaError as error:
                raise ApiError(400, str(error), param=f"{where}.{number}.{kind}_url") from error
        return parts

    def _count_tokens(self, order: Order, media: list[Media]) -> int:
        """The prompt's length. What else the engine would refuse shows too, but for damaged frames of a video."""
        kinds = [part["type"] for message in order.messages for part in message["content"] if "file" in part]
        self._require_small(
            sum(_image_bytes(file) for file, kind in zip(media, kinds, strict=True) if kind == "image")
        )
        rendered = render_prompt(
            self._parts, self._processor, None, messages=order.chat([file.path for file in media])
        )
        return len(self._tokenize(rendered, order)["input_ids"][0])

    def _tokenize(self, rendered: RenderedPrompt, order: Order):
        if rendered.video is not None:
            info = probe(rendered.video)
            if order.fps is None:
                frames = sample_uniform(info, order.num_frames)
            else:
                frames = sample_fps(info, order.fps, max_frames=order.num_frames)
            self._require_small(len(frames) * info.height * info.width * 3)
            return video_skeleton(self._processor, rendered.text, info, frames)
        if rendered.images:
            return self._processor(text=[rendered.text], images=rendered.images, return_tensors="pt")
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        return tokenizer([rendered.text], add_special_tokens=not rendered.has_template)

    def _require_small(self, num_bytes: int) -> None:
        if num_bytes > self._settings.max_decoded_bytes:
            raise ApiError(
                400,
                f"the frames or images take {num_bytes} bytes, but at most {self._settings.max_decoded_bytes} are "
                "allowed; ask for fewer frames",
                param="messages",
            )


def described(error: Exception, media: list[Media]) -> str:
    """What an error says, with files called as the request calls them."""
    text = str(error) or type(error).__name__
    for file in media:
        text = text.replace(str(file.path), file.name)
        if file.relative is None:  # other hosts have it elsewhere, by the same name
            text = re.sub(rf"\S*/{file.path.name}", lambda _, name=file.name: name, text)
    return text


def _image_bytes(file: Media) -> int:
    """Of an image as RGB, from its header.

    Raises:
        ApiError: it is no image, or of a format whose decoder runs more than a decoder.
    """
    try:
        with Image.open(file.path, formats=_IMAGE_FORMATS) as image:
            return image.width * image.height * 3
    except Exception as error:
        formats = ", ".join(_IMAGE_FORMATS)
        raise ApiError(400, f"cannot read {file.name} as an image ({formats})", param="messages") from error
