"""Turning a request into an order: opening its files, counting its tokens, and keeping the limits.

This runs on host 0, beside the engine's thread.
"""

import copy
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from ..config import SamplingParams, require_frame_rate
from ..engine import Engine
from ..input.reading import PromptReader
from ..input.skeleton import Skeleton
from ..model.parts import inspect_model
from .media import FolderError, Media, MediaError, MediaSettings, PrivateFiles, open_media
from .order import Order
from .requests import (
    ApiError,
    AudioPart,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ImagePart,
    InputAudioPart,
    TextPart,
    TokenizeRequest,
    VideoPart,
)
from .text import AnswerText

_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Cameras and encoders write about ten. Each is a pass over all of the image, and takes a few bytes.
_MAX_SCANS = 100
_START_OF_SCAN = b"\xff\xda"


@dataclass(frozen=True, kw_only=True)
class RequestSettings:
    """The limits on requests, and the defaults for what they do not say.

    Attributes:
        max_model_len: tokens of prompt and answer together; None: as many as the model was made for.
        temperature, top_p, fps: the default of the request's field of that name.
        max_new_tokens, num_frames: likewise; None: the engine's default.
        max_frames: the most frames of all videos of a request, with its images.
        max_decoded_bytes: the most bytes that the frames of one request may take as RGB, in their stored size.
        max_image_bytes: the most bytes that the images of one request may take likewise. Of an animation only the
            first frame is decoded.
        media: the limits on files.

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
class ReadyRequest:
    """A request that is ready for the engine.

    Attributes:
        order: what every host is told.
        num_tokens: of the prompt.
        media: the order's files, on host 0.
        request: its body.
        prompt: what was read of its prompt; the engine of host 0 need not read it again.
    """

    order: Order
    num_tokens: int
    media: list[Media]
    request: GenerationRequest
    prompt: Skeleton | None = None

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """The prompt's tokens, where the reply is to have them."""
        return _token_ids(self.prompt) if self.request.return_token_ids else None

    def answer_text(self, decode: Callable[[Sequence[int]], str]) -> AnswerText:
        """Return the text of the answer to come; see there for ``decode``."""
        stop, token_ids = self.request.stop_strings, self.request.stop_token_ids or []
        return AnswerText(decode, stop, token_ids, self.order.sampling.min_tokens)


class Reader:
    """Reads requests; any thread may call it.

    It has a processor of its own, as a tokenizer must not be used by two threads at once.
    """

    def __init__(self, engine: Engine, settings: RequestSettings, private_files: PrivateFiles):
        parts, processor = inspect_model(engine.model), copy.deepcopy(engine.processor)
        self._num_frames = settings.num_frames or engine.num_frames
        self._prompts = PromptReader(parts, processor, self._num_frames, videos=engine.videos)
        self._settings, self._private_files = settings, private_files
        self._max_new_tokens = settings.max_new_tokens or engine.max_new_tokens
        self._lock = threading.Lock()
        self.max_model_len = settings.max_model_len or parts.max_position_embeddings

    def read(
        self, request: GenerationRequest, stack: ExitStack, is_wanted: Callable[[], bool] = lambda: True
    ) -> ReadyRequest:
        """Open a request's files, for as long as the stack lasts, and check its lengths.

        Args:
            is_wanted: asked before each file, as fetching many may take long.

        Raises:
            ApiError: with status 400 where something is not allowed, unreadable or too long, with 503 where the
                request is not wanted any more, or the folder of media files cannot be read.
        """
        settings, field = self._settings, request.prompt_field
        media, asked = [], {}
        if isinstance(request, CompletionRequest):
            given = request.the_prompt
            is_text = isinstance(given, str)
            asked["token_ids"] = self._text_to_tokens(given, request.add_special_tokens) if is_text else given
        else:
            media, asked = self._open_chat(request, stack, is_wanted)
        # Of an answer that another server gives, this one chooses the first token.
        least = min(request.min_tokens or 0, 1) if request.hands_over else request.min_tokens or 0
        limit = 1 if request.hands_over else request.token_limit
        prompt = self._lay_out(asked, media, field)
        num_tokens, wanted = prompt.batch["input_ids"].shape[1], max(limit or 1, least)
        room = self.max_model_len - num_tokens
        if room < wanted:
            raise ApiError(
                400,
                f"the prompt has {num_tokens} tokens and the answer may take {wanted}, but the maximum context "
                f"length is {self.max_model_len} tokens",
                param=field,
                code="context_length_exceeded",
            )
        sampling = SamplingParams(
            max_new_tokens=min(limit or max(request.default_limit or self._max_new_tokens, least), room),
            temperature=settings.temperature if request.temperature is None else request.temperature,
            top_p=settings.top_p if request.top_p is None else request.top_p,
            seed=secrets.randbits(63) if request.seed is None else request.seed % 2**64,
            ignore_eos=bool(request.ignore_eos),
            min_tokens=least,
        )
        order = Order(asked, [file.relative for file in media], sampling, request.hands_over)
        return ReadyRequest(order, num_tokens, media, request, prompt)

    def tokenize(self, request: TokenizeRequest) -> list[int]:
        """Return the tokens that the model would read; raises ApiError as :meth:`read`."""
        if request.prompt is not None:
            return self._text_to_tokens(request.prompt, request.add_special_tokens is not False)
        with ExitStack() as stack:
            media, asked = self._open_chat(request, stack, lambda: True)
            return _token_ids(self._lay_out(asked, media, "messages"))

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return how the vocabulary spells tokens that it has."""
        with self._lock:
            return self._prompts.tokenizer.convert_ids_to_tokens(token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            ApiError: with status 400 where the model has no such token.
        """
        vocab_size = self._prompts.parts.vocab_size
        if any(token >= vocab_size for token in token_ids):
            raise ApiError(400, f"the model's token ids go from 0 to {vocab_size - 1}", param="tokens")
        with self._lock:
            return self._prompts.tokenizer.decode(token_ids)

    def _text_to_tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        with self._lock:
            return self._prompts.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]

    def _open_chat(
        self, request: ChatRequest | TokenizeRequest, stack: ExitStack, is_wanted: Callable[[], bool]
    ) -> tuple[list[Media], dict[str, Any]]:
        """Open a chat's files; return them, and the fields of an order's question."""
        settings, media = self._settings, []
        deadline = time.monotonic() + settings.media.fetch_seconds

        def open_file(url: str) -> Media:
            if len(media) == settings.max_frames:
                raise ApiError(
                    400, f"at most {settings.max_frames} videos and images are allowed", param="messages"
                )
            if not is_wanted():
                raise ApiError(503, "the server is stopping, or the client has gone")
            return stack.enter_context(open_media(url, settings.media, self._private_files, deadline))

        messages = [
            {
                "role": message.role,
                "content": _read_parts(message.content, f"messages.{number}.content", media, open_file),
            }
            for number, message in enumerate(request.messages)
        ]
        num_frames = request.num_frames or min(self._num_frames, settings.max_frames)
        if num_frames > settings.max_frames:
            raise ApiError(400, f"num_frames may be at most {settings.max_frames}", param="num_frames")
        return media, {
            "messages": messages,
            "num_frames": num_frames,
            "fps": settings.fps if request.fps is None else request.fps,
            "template": request.template,
            "audio_in_video": request.audio_in_video,
        }

    def _lay_out(self, asked: dict[str, Any], media: list[Media], field: str) -> Skeleton:
        """Find the prompt's tokens, and what it shows.

        Raises:
            ApiError: with status 400 where the engine would refuse it, except for damaged frames and images.
        """
        try:
            with self._lock:
                return self._read(asked, media)
        except ApiError:
            raise
        except Exception as error:  # chat templates and decoders raise nearly anything
            raise ApiError(400, client_message(error, media), param=field) from error

    def _read(self, asked: dict[str, Any], media: list[Media]) -> Skeleton:
        messages = asked.get("messages", ())
        kinds = [part["type"] for message in messages for part in message["content"] if "file" in part]
        sizes = [_image_size(file) for file, kind in zip(media, kinds, strict=True) if kind == "image"]
        _require_small("images", sizes, self._settings.max_image_bytes)
        question = Order(asked, [], SamplingParams()).question([file.path for file in media])
        rendered = self._prompts.render(question)
        videos = self._prompts.sample([self._prompts.videos.probe(path) for path in rendered.videos], question)
        num_frames = len(sizes) + sum(len(video.frames) for video in videos)
        if num_frames > self._settings.max_frames:
            raise ApiError(
                400,
                f"the videos and images have {num_frames} frames, but at most {self._settings.max_frames} are "
                "allowed; ask for fewer with num_frames, which counts for each video",
                param="messages",
            )
        frames = [(video.info.height, video.info.width) for video in videos for _ in video.frames]
        _require_small("frames", frames, self._settings.max_decoded_bytes)
        return self._prompts.lay_out(rendered, videos)


def _token_ids(prompt: Skeleton) -> list[int]:
    return prompt.batch["input_ids"][0].tolist()


def _read_parts(
    content: str | list, where: str, media: list[Media], open_file: Callable[[str], Media]
) -> list[dict[str, Any]]:
    """Read a message's content parts, and append their files to ``media``."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts = []
    for number, part in enumerate(content):
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
            continue
        kind, url = _file_of(part)
        try:
            parts.append({"type": kind, "file": len(media)})
            media.append(open_file(url))
        except MediaError as error:
            raise ApiError(400, str(error), param=f"{where}.{number}.{part.type}") from error
        except FolderError as error:
            raise ApiError(503, str(error)) from error
    return parts


def _file_of(part: ImagePart | VideoPart | AudioPart | InputAudioPart) -> tuple[str, str]:
    """Return what a part is for the chat template, and the URL of its file."""
    if isinstance(part, InputAudioPart):
        return "audio", f"data:audio/{part.input_audio.format};base64,{part.input_audio.data}"
    kind = part.type.removesuffix("_url")
    return kind, getattr(part, part.type).url


def _require_small(what: str, sizes: list[tuple[int, int]], most: int) -> None:
    num_bytes = sum(height * width * 3 for height, width in sizes)
    if num_bytes > most:
        raise ApiError(
            400,
            f"the {what} take {num_bytes} bytes as RGB, but at most {most} are allowed; ask for fewer {what}",
            param="messages",
        )


def client_message(error: Exception, media: list[Media]) -> str:
    """Return an error's message, with files called what the request calls them."""
    text = str(error) or type(error).__name__
    for file in media:
        text = text.replace(str(file.path), file.name)
        if file.relative is None:  # other hosts have it elsewhere, by the same name
            text = re.sub(rf"\S*/{file.path.name}", lambda _, name=file.name: name, text)
    return text


def _image_size(file: Media) -> tuple[int, int]:
    """Read the height and width of an image from its header.

    Raises:
        ApiError: the file is no image of an allowed format, or would take endlessly to decode. Other formats have
            decoders that run more than a decoder.
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
