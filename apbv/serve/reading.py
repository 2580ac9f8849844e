"""Turning a request into an order: opening its files, counting its tokens, and keeping the limits.

This runs on host 0, beside the engine's thread.
"""

import copy
import re
import secrets
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
from ..input.visual import PromptError
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
# Bytes that decoding an image allocates, in multiples of it as RGB: as stored, RGB, upright, an array, a tensor.
_IMAGE_COPIES = 6
# Characters of a text that is read beside others without their noticing; and of a text's beginning, for each token
# that fits, by which it is judged whether to read the rest.
_LIGHT_CHARS, _CHARS_PER_TOKEN = 2**16, 8


@dataclass(frozen=True, kw_only=True)
class RequestSettings:
    """The limits on requests, and the defaults for what they do not say.

    Attributes:
        max_model_len: tokens of prompt and answer together; None: as many as the model was made for.
        temperature, top_p, fps: the default of the request's field of that name.
        max_new_tokens, num_frames: likewise; None: the engine's default.
        max_frames: the most frames of all videos of a request, with its images.
        max_packets: the most packets that a video may have, which is about as many as it has frames.
        max_decoded_bytes: the most bytes that the frames of one request may take as RGB, in their stored size.
        max_image_bytes: the most bytes that may be allocated to decode the images of one request. Of an animation
            only the first frame is decoded.
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
    max_packets: int = 2**20
    max_decoded_bytes: int = 8 * 2**30
    max_image_bytes: int = 3 * 2**30
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

    No file is read and no template is rendered under a lock. A tokenizer must not be used by two threads at once,
    so there are two: whatever takes long, a short text does not wait for it.
    """

    def __init__(self, engine: Engine, settings: RequestSettings, private_files: PrivateFiles):
        self._engine = engine
        self._parts, self._videos = inspect_model(engine.model), engine.videos
        self._num_frames = settings.num_frames or engine.num_frames
        self._light, self._heavy = (
            PromptReader(self._parts, copy.deepcopy(engine.processor), self._num_frames, videos=engine.videos)
            for _ in range(2)
        )
        self._settings, self._private_files = settings, private_files
        self._max_new_tokens = settings.max_new_tokens or engine.max_new_tokens
        self.max_model_len = settings.max_model_len or self._parts.max_position_embeddings
        self._max_chars = self.max_model_len * max(map(len, self._light.tokenizer.get_vocab()))

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
        settings, field, prompts = self._settings, request.prompt_field, self._prompts_for(request)
        media, asked = [], {}
        if request.json_schema is not None:
            try:
                self._engine.grammars.begin(request.json_schema)
            except ValueError as error:
                raise ApiError(400, str(error), param="response_format") from error
        if isinstance(request, CompletionRequest):
            given = request.the_prompt
            is_text = isinstance(given, str)
            if is_text:
                self._require_fits(prompts, given, field)
            asked["token_ids"] = prompts.tokenize(given, request.add_special_tokens) if is_text else given
        else:
            media, asked = self._open_chat(request, stack, is_wanted)
        # Of an answer that another server gives, this one chooses the first token.
        least = min(request.min_tokens or 0, 1) if request.hands_over else request.min_tokens or 0
        limit = 1 if request.hands_over else request.token_limit
        prompt = self._lay_out(prompts, asked, media, field, is_wanted)
        num_tokens, wanted = prompt.batch["input_ids"].shape[1], max(limit or 1, least)
        room = self.max_model_len - num_tokens
        if room < wanted:
            raise self._too_long(f"{num_tokens} tokens and the answer may take {wanted}", field)
        sampling = SamplingParams(
            max_new_tokens=min(limit or max(request.default_limit or self._max_new_tokens, least), room),
            temperature=settings.temperature if request.temperature is None else request.temperature,
            top_p=settings.top_p if request.top_p is None else request.top_p,
            top_k=max(request.top_k or 0, 0),
            min_p=request.min_p or 0.0,
            repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=self._bias_of(request),
            logprobs=request.num_logprobs,
            json_schema=request.json_schema,
            seed=secrets.randbits(63) if request.seed is None else request.seed % 2**64,
            ignore_eos=bool(request.ignore_eos),
            min_tokens=least,
        )
        order = Order(asked, [file.relative for file in media], sampling, request.hands_over, request.num_answers)
        return ReadyRequest(order, num_tokens, media, request, prompt)

    def _bias_of(self, request: GenerationRequest) -> tuple[tuple[int, float], ...]:
        """Return a request's logit bias; ApiError where the model has no such token."""
        bias, vocab_size = request.logit_bias or {}, self._parts.vocab_size
        if any(token >= vocab_size for token in bias):
            raise ApiError(400, f"the model's token ids go from 0 to {vocab_size - 1}", param="logit_bias")
        return tuple(bias.items())

    def tokenize(self, request: TokenizeRequest) -> list[int]:
        """Return the tokens that the model would read; raises ApiError as :meth:`read`."""
        prompts, is_wanted = self._prompts_for(request), lambda: True
        if request.prompt is not None:
            self._require_fits(prompts, request.prompt, "prompt")
            return prompts.tokenize(request.prompt, request.add_special_tokens is not False)
        with ExitStack() as stack:
            media, asked = self._open_chat(request, stack, is_wanted)
            return _token_ids(self._lay_out(prompts, asked, media, "messages", is_wanted))

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return how the vocabulary spells tokens that it has."""
        return self._light.tokenizer.convert_ids_to_tokens(token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            ApiError: with status 400 where the model has no such token, or cannot take so many.
        """
        vocab_size = self._parts.vocab_size
        if len(token_ids) > self.max_model_len:
            raise ApiError(400, f"at most {self.max_model_len} tokens are allowed", param="tokens")
        if any(token >= vocab_size for token in token_ids):
            raise ApiError(400, f"the model's token ids go from 0 to {vocab_size - 1}", param="tokens")
        return self._light.tokenizer.decode(token_ids)

    def is_light(self, request: GenerationRequest | TokenizeRequest) -> bool:
        """Return whether a request is a short text, which takes no time to read."""
        num_chars, has_files = _weigh(request)
        return num_chars <= _LIGHT_CHARS and not has_files

    def _prompts_for(self, request: GenerationRequest | TokenizeRequest) -> PromptReader:
        """Return what reads a request; ApiError if it is too long even of the vocabulary's longest tokens."""
        num_chars, _ = _weigh(request)
        if num_chars > self._max_chars:
            raise self._too_long(f"{num_chars} characters", request.prompt_field)
        return self._light if self.is_light(request) else self._heavy

    def _too_long(self, what: str, field: str) -> ApiError:
        message = f"the prompt has {what}, but the maximum context length is {self.max_model_len} tokens"
        return ApiError(400, message, param=field, code="context_length_exceeded")

    def _require_fits(self, prompts: PromptReader, text: str, field: str) -> None:
        """Refuse a text whose beginning is too long already, before all of it is tokenized."""
        head = text[: _CHARS_PER_TOKEN * self.max_model_len]
        if len(head) < len(text) and (num_tokens := len(prompts.tokenize(head, False))) > self.max_model_len:
            raise self._too_long(f"more than {num_tokens} tokens", field)

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
            _require_wanted(is_wanted)
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

    def _lay_out(
        self,
        prompts: PromptReader,
        asked: dict[str, Any],
        media: list[Media],
        field: str,
        is_wanted: Callable[[], bool],
    ) -> Skeleton:
        """Find the prompt's tokens, and what it shows.

        Raises:
            ApiError: with status 400 where the engine would refuse it, except for damaged frames and images.
        """
        deadline = time.monotonic() + self._settings.media.fetch_seconds

        def check(num_packets: int) -> None:
            if num_packets >= self._settings.max_packets or time.monotonic() > deadline:
                raise PromptError(f"a video takes too long to look through: {num_packets} packets and more")
            _require_wanted(is_wanted)

        try:
            messages = asked.get("messages", ())
            kinds = [part["type"] for message in messages for part in message["content"] if "file" in part]
            sizes = [_image_size(file) for file, kind in zip(media, kinds, strict=True) if kind == "image"]
            _require_small("images", sizes, self._settings.max_image_bytes, _IMAGE_COPIES)
            question = Order(asked, [], SamplingParams()).question([file.path for file in media])
            rendered = prompts.render(question)
            self._require_fits(prompts, rendered.text, field)
            videos = prompts.sample([self._videos.probe(path, check) for path in rendered.videos], question)
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
            _require_wanted(is_wanted)
            return prompts.lay_out(rendered, videos)
        except ApiError:
            raise
        except Exception as error:  # chat templates and decoders raise nearly anything
            raise ApiError(400, client_message(error, media), param=field) from error


def _weigh(request: GenerationRequest | TokenizeRequest) -> tuple[int, bool]:
    """Count the characters of a request's texts, and say whether it names files."""
    contents = [message.content for message in getattr(request, "messages", None) or ()]
    prompt = getattr(request, "prompt", None)
    contents += [prompt] if isinstance(prompt, str) else []
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    texts = [content for content in contents if isinstance(content, str)]
    texts += [part.text for part in parts if isinstance(part, TextPart)]
    options = [getattr(request, name, None) for name in ("chat_template_kwargs", "response_format")]
    num_chars = sum(map(len, texts)) + sum(len(str(each)) for each in options if each)
    return num_chars, any(not isinstance(part, TextPart) for part in parts)


def _require_wanted(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise ApiError(503, "the server is stopping, or the client has gone")


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


def _require_small(what: str, sizes: list[tuple[int, int]], most: int, copies: int = 1) -> None:
    num_bytes = sum(height * width * 3 * copies for height, width in sizes)
    if num_bytes > most:
        raise ApiError(
            400,
            f"the {what} take {num_bytes} bytes to decode, but at most {most} are allowed; ask for fewer {what}",
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
