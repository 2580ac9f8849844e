"""Turns a request into an order: opens its files, counts its tokens, and checks the limits.

This runs on host 0, concurrently with the engine's thread.
"""

import copy
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ..config import SamplingParams
from ..engine import Engine
from ..grammar_checks import GrammarCheckError, GrammarChecksBusyError
from ..input.reading import PromptReader
from ..input.rendering import template_words, tool_instructions
from ..input.skeleton import Skeleton
from ..input.visual import PromptError
from ..schemas import fixed_texts
from .media import FolderError, Media, MediaError, PrivateFiles, open_media
from .requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
    warn_of_ignored,
)
from .settings import ServerSettings
from .thoughts import CLOSING_TAGS, opened_thought
from .tools import CallFormat, ToolCallParser, call_format
from .work_order import WorkOrder

# Fields of requests that the engine takes as they are.
_SAMPLING = {
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
}
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Cameras and encoders write about ten. Each is a pass over all of the image, and takes a few bytes.
_MAX_SCANS = 100
_START_OF_SCAN = b"\xff\xda"
# Bytes that decoding an image allocates, in multiples of it as RGB: as stored, RGB, upright, an
# array, a tensor.
_IMAGE_COPIES = 6
# Characters of a text that can be read without delaying others; and of a text's beginning, for each
# token that fits, by which it is judged whether to read the rest.
_LIGHT_CHARS = 2**16
_CHARS_PER_TOKEN = 8


def _is_always_wanted() -> bool:
    return True


@dataclass(frozen=True)
class ReadyRequest:
    """A request that is ready for the engine.

    Attributes:
        order: what every host is told.
        num_tokens: of the prompt.
        media: the order's files, on host 0.
        request: its body.
        prompt: what was read of its prompt; the engine of host 0 need not read it again.
        call_format: how the model writes calls of tools; None: it calls none.
        thought: the tag of the thought in which the prompt ends; None: in none.
    """

    order: WorkOrder
    num_tokens: int
    media: list[Media]
    request: GenerationRequest
    prompt: Skeleton | None = None
    call_format: CallFormat | None = None
    thought: str | None = None

    def call_parser(self) -> ToolCallParser:
        """Return a parser for an answer that may call tools."""
        request = self.request
        return ToolCallParser(
            self.call_format,
            max_calls=1 if request.makes_one_call else None,
            names={function["name"] for function in request.functions},
            thought=self.thought,
            has_thoughts=not request.is_constrained,
        )

    @property
    def paths(self) -> AbstractContextManager[list[Path]]:
        """The order's files on host 0, which its job keeps open."""
        return nullcontext([file.path for file in self.media])

    @property
    def token_ids(self) -> list[int]:
        """The prompt's tokens."""
        return self.prompt.batch["input_ids"][0].tolist()


class Reader:
    """Reads requests; any thread may call it.

    No file is read and no template is rendered under a lock. A tokenizer must not be used by two
    threads at once, so there are two: whatever takes long, a short text does not wait for it.

    Args:
        max_tokens: of a prompt and its answer that can ever run; longer prompts are rejected.
    """

    def __init__(
        self, engine: Engine, settings: ServerSettings, private_files: PrivateFiles, max_tokens: int
    ):
        self._engine = engine
        self._parts = engine.parts
        self._videos = engine.videos
        self._num_frames = settings.num_frames or engine.num_frames
        self._light, self._heavy = (
            PromptReader(
                self._parts, copy.deepcopy(engine.processor), self._num_frames, videos=engine.videos
            )
            for _ in range(2)
        )
        instructions = tool_instructions(engine.processor)
        self._shows_tools, self._call_format = instructions is not None, call_format(instructions)
        self._template_words = template_words(engine.processor)
        self._settings = settings
        self._private_files = private_files
        self._max_new_tokens = settings.max_new_tokens or engine.max_new_tokens
        self.max_model_len = min(
            settings.max_model_len or self._parts.max_position_embeddings, max_tokens
        )
        self._max_chars = self.max_model_len * max(map(len, self._light.tokenizer.get_vocab()))

    def read(
        self,
        request: GenerationRequest,
        stack: ExitStack,
        is_wanted: Callable[[], bool] = _is_always_wanted,
    ) -> ReadyRequest:
        """Open a request's files, for as long as the stack lasts, and check its lengths.

        Args:
            is_wanted: asked before each file, as fetching many may take long, and while a JSON
                schema is checked.

        Raises:
            ApiError: with status 400 where something is not allowed, unreadable or too long, with
                503 where the request is not wanted any more, or the folder of media files cannot be
                read.
        """
        settings = self._settings
        field = request.prompt_field
        prompts = self._prompts_for(request)
        media = []
        asked = {}
        self._require_tools_known(request)
        constraint = self._constraint(request, is_wanted)
        if isinstance(request, CompletionRequest):
            given = request.prompt
            is_text = isinstance(given, str)
            if is_text:
                self._require_fits(prompts, given, field)
            elif len(given) > self.max_model_len:
                raise self._too_long(f"{len(given)} tokens", field)
            asked["token_ids"] = (
                prompts.tokenize(given, request.add_special_tokens) if is_text else given
            )
        else:
            media, asked = self._open_chat(request, stack, is_wanted)
        least = request.min_tokens or 0
        limit = request.token_limit
        prompt = self._lay_out(prompts, asked, media, field, is_wanted)
        num_tokens = prompt.batch["input_ids"].shape[1]
        wanted = max(limit or 1, least)
        room = self.max_model_len - num_tokens
        if room < wanted:
            raise self._too_long(f"{num_tokens} tokens and the answer needs up to {wanted}", field)
        bias = request.logit_bias or {}
        self._require_known(bias, "logit_bias")
        defaults = {name: getattr(settings, name) for name in ("temperature", "top_p")}
        if defaults["temperature"] is None:
            defaults["temperature"] = self._engine.sampling.temperature
        sampling = SamplingParams(
            **defaults | request.model_dump(include=_SAMPLING, exclude_none=True),
            max_new_tokens=min(
                limit or max(request.default_limit or self._max_new_tokens, least), room
            ),
            top_k=request.top_k and max(request.top_k, 0),
            logit_bias=tuple(bias.items()),
            logprobs=request.num_logprobs,
            **constraint,
            seed=secrets.randbits(63) if request.seed is None else request.seed % 2**64,
            min_tokens=least,
        ).filled(self._engine.sampling)
        files = [file.relative for file in media]
        calls = self._call_format if request.may_call else None
        shown = self._shown_token_ids(calls, prompts.tokenizer) if calls else []
        thought = opened_thought(prompt.rendered.text, request.continued_texts) if calls else None
        order = WorkOrder(
            asked=asked,
            files=files,
            sampling=sampling,
            hands_over=request.hands_over,
            num_answers=request.num_answers,
            streams=bool(request.stream),
            stop_strings=request.stop_strings,
            stop_token_ids=request.stop_token_ids or (),
            shown_token_ids=shown,
        )
        return ReadyRequest(
            order=order,
            num_tokens=num_tokens,
            media=media,
            request=request,
            prompt=prompt,
            call_format=calls,
            thought=thought,
        )

    def _shown_token_ids(self, calls: CallFormat, tokenizer) -> list[int]:
        """Return the special tokens that a parser of calls has to see in the text."""
        special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        tags = (calls.opening, calls.closing, *CLOSING_TAGS.keys(), *CLOSING_TAGS.values())
        return [special[tag] for tag in tags if tag in special]

    def close(self) -> None:
        """Delete the files that requests brought; none can be read any more that has some."""
        self._private_files.close()

    def _constraint(
        self, request: GenerationRequest, is_wanted: Callable[[], bool]
    ) -> dict[str, str]:
        """Return the JSON schema or grammar that an answer has to follow; ApiError if that is
        invalid."""
        schema = request.json_schema
        if schema is not None:
            self._require_valid("response_format", is_wanted, json_schema=schema)
            self._require_writable("response_format", schema)
        if not request.may_call or (schema is None and not request.must_call):
            return {"json_schema": schema}
        answer = None if schema is None or request.must_call else json.loads(schema)
        added = self._light.tokenizer.get_added_vocab()
        for function in request.functions:
            self._require_writable("tools", json.dumps(function["parameters"]))
        with _rejecting("tools"):
            grammar = self._call_format.grammar(
                request.functions, added, request.makes_one_call, answer
            )
        self._require_valid("tools", is_wanted, json_schema=None, grammar=grammar)
        return {"grammar": grammar}

    def _require_writable(self, field: str, json_schema: str) -> None:
        """Reject a schema that prescribes the text of a special token: no answer can have it."""
        added = self._light.tokenizer.added_tokens_decoder.values()
        special = [token.content for token in added if token.special]
        for text in fixed_texts(json_schema):
            for token in special:
                if token in text:
                    message = (
                        f"a constant or a property's name has the special token {token!r}, which "
                        "no answer can have"
                    )
                    raise ApiError(400, message, param=field)

    def _require_valid(
        self, field: str, is_wanted: Callable[[], bool], **constraint: str | None
    ) -> None:
        """Reject a JSON schema or a grammar that no answer can follow.

        Raises:
            ApiError: with status 400; with 429 where too many others are being checked; or with 503
                where it could not be checked.
        """
        try:
            with _rejecting(field):
                self._engine.grammars.check(**constraint, is_wanted=is_wanted)
        except GrammarCheckError as error:
            status = 429 if isinstance(error, GrammarChecksBusyError) else 503
            raise ApiError(status, str(error), param=field, headers={"Retry-After": "1"}) from error

    def _require_tools_known(self, request: ChatRequest | TokenizeRequest) -> None:
        """Reject tools that the chat template does not show, or calls that could not be parsed."""
        if getattr(request, "tools", None) and not self._shows_tools:
            raise ApiError(400, "the model's chat template knows no tools", param="tools")
        if getattr(request, "may_call", False) and self._call_format is None:
            message = (
                "the chat template tells the model to call tools in a format that is not supported "
                "by this server, which leaves tool_choice none"
            )
            raise ApiError(400, message, param="tools")

    def _require_known(self, token_ids: Iterable[int], field: str) -> None:
        """Reject tokens that the model does not have."""
        vocab_size = self._parts.vocab_size
        if any(token >= vocab_size for token in token_ids):
            raise ApiError(400, f"the model's token ids go from 0 to {vocab_size - 1}", param=field)

    def tokenize(self, request: TokenizeRequest) -> list[int]:
        """Return the tokens that the model would read; raises ApiError as :meth:`read`."""
        prompts = self._prompts_for(request)
        if request.prompt is not None:
            self._require_fits(prompts, request.prompt, "prompt")
            return prompts.tokenize(request.prompt, request.add_special_tokens is not False)
        self._require_tools_known(request)
        with ExitStack() as stack:
            media, asked = self._open_chat(request, stack, _is_always_wanted)
            prompt = self._lay_out(prompts, asked, media, "messages", _is_always_wanted)
            return prompt.batch["input_ids"][0].tolist()

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return how the vocabulary spells tokens that it has."""
        return self._light.tokenizer.convert_ids_to_tokens(token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            ApiError: with status 400 if a token is unknown, or there are more than the context
                length.
        """
        if len(token_ids) > self.max_model_len:
            raise ApiError(400, f"at most {self.max_model_len} tokens are allowed", param="tokens")
        self._require_known(token_ids, "tokens")
        return self._light.tokenizer.decode(token_ids)

    def is_light(self, request: GenerationRequest | TokenizeRequest) -> bool:
        """Return whether a request is a short text, which takes no time to read."""
        num_chars, has_files = _weigh(request)
        return num_chars <= _LIGHT_CHARS and not has_files

    def _prompts_for(self, request: GenerationRequest | TokenizeRequest) -> PromptReader:
        """Return the reader for a request; ApiError if it is too long even in the vocabulary's
        longest tokens."""
        num_chars, _ = _weigh(request)
        if num_chars > self._max_chars:
            raise self._too_long(f"{num_chars} characters", request.prompt_field)
        return self._light if self.is_light(request) else self._heavy

    def _too_long(self, what: str, field: str) -> ApiError:
        message = (
            f"the prompt has {what}, but the maximum context length is {self.max_model_len} tokens"
        )
        return ApiError(400, message, param=field, code="context_length_exceeded")

    def _require_fits(self, prompts: PromptReader, text: str, field: str) -> None:
        """Reject a text whose beginning is too long already, before all of it is tokenized."""
        head = text[: _CHARS_PER_TOKEN * self.max_model_len]
        if (
            len(head) < len(text)
            and (num_tokens := len(prompts.tokenize(head, False))) > self.max_model_len
        ):
            raise self._too_long(f"more than {num_tokens} tokens", field)

    def _open_chat(
        self,
        request: ChatRequest | TokenizeRequest,
        stack: ExitStack,
        is_wanted: Callable[[], bool],
    ) -> tuple[list[Media], dict[str, Any]]:
        """Open a chat's files; return them, and the fields of an order's question."""
        settings = self._settings
        media = []
        deadline = time.monotonic() + settings.fetch_seconds

        messages = []
        for number, message in enumerate(request.messages):
            is_text = isinstance(message.content, str)
            parts = [{"type": "text", "text": message.content}] if is_text else []
            messages.append({**message.rest, "content": parts})
            for place, part in enumerate([] if is_text else message.content or ()):
                if part.type == "text":
                    parts.append({"type": "text", "text": part.text})
                    continue
                if len(media) == settings.max_frames:
                    most = f"at most {settings.max_frames} videos and images are allowed"
                    raise ApiError(400, most, param="messages")
                _require_wanted(is_wanted)
                sent = getattr(part, part.type)
                is_inline = part.type == "input_audio"
                url = f"data:audio/{sent.format};base64,{sent.data}" if is_inline else sent.url
                try:
                    file = stack.enter_context(
                        open_media(url, settings, self._private_files, deadline)
                    )
                except MediaError as error:
                    where = f"messages.{number}.content.{place}.{part.type}"
                    raise ApiError(400, str(error), param=where) from error
                except FolderError as error:
                    raise ApiError(503, str(error)) from error
                kind = part.type.removesuffix("_url").removeprefix("input_")
                parts.append({"type": kind, "file": len(media), **part.options})
                media.append(file)
        warn_of_ignored(
            "chat_template_kwargs",
            (request.chat_template_kwargs or {}).keys() - self._template_words,
        )
        num_frames = request.num_frames or min(self._num_frames, settings.max_frames)
        if num_frames > settings.max_frames:
            raise ApiError(
                400, f"num_frames may be at most {settings.max_frames}", param="num_frames"
            )
        return media, {
            "messages": messages,
            "num_frames": num_frames,
            "fps": settings.fps if request.fps is None else request.fps,
            "template": request.template,
            "tools": [tool.described for tool in request.tools or ()],
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
            ApiError: with status 400 where the engine would reject it, except for damaged frames
                and images.
        """
        deadline = time.monotonic() + self._settings.fetch_seconds

        def check(num_packets: int) -> None:
            if num_packets >= self._settings.max_packets or time.monotonic() > deadline:
                raise PromptError(f"a video takes too long to scan: {num_packets} packets or more")
            _require_wanted(is_wanted)

        try:
            messages = asked.get("messages", ())
            kinds = [
                part["type"]
                for message in messages
                for part in message["content"]
                if "file" in part
            ]
            sizes = [
                _image_size(file)
                for file, kind in zip(media, kinds, strict=True)
                if kind == "image"
            ]
            _require_small("images", sizes, self._settings.max_image_bytes, _IMAGE_COPIES)
            paths = [file.path for file in media]
            question = WorkOrder(asked, [], SamplingParams()).question(paths)
            rendered = prompts.render(question)
            self._require_fits(prompts, rendered.text, field)
            infos = [self._videos.probe(path, check) for path in rendered.videos]
            videos = prompts.sample(infos, question, rendered.sampling)
            num_frames = len(sizes) + sum(len(video.frames) for video in videos)
            if num_frames > self._settings.max_frames:
                raise ApiError(
                    400,
                    f"the videos and images have {num_frames} frames, but at most "
                    f"{self._settings.max_frames} are allowed; ask for fewer with num_frames, "
                    "which applies per video",
                    param="messages",
                )
            frames = [(1, video.info.most_pixels) for video in videos for _ in video.frames]
            _require_small("frames", frames, self._settings.max_decoded_bytes)
            _require_wanted(is_wanted)
            return prompts.lay_out(rendered, videos)
        except ApiError:
            raise
        except Exception as error:  # chat templates and decoders raise nearly anything
            raise ApiError(
                400, client_message(str(error) or type(error).__name__, media), param=field
            ) from error


@contextmanager
def _rejecting(field: str) -> Iterator[None]:
    """Reject a request whose schema or grammar cannot be compiled."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise ApiError(400, str(error), param=field) from error


def _weigh(request: GenerationRequest | TokenizeRequest) -> tuple[int, bool]:
    """Count the characters of a request's texts, and say whether it names files."""
    messages = getattr(request, "messages", None) or ()
    contents = [message.content or "" for message in messages]
    prompt = getattr(request, "prompt", None)
    contents += [prompt] if isinstance(prompt, str) else []
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    texts = [content for content in contents if isinstance(content, str)]
    texts += [part.text for part in parts if part.type == "text"]
    texts += [
        text
        for message in messages
        for text in (message.reasoning, message.reasoning_content)
        if text
    ]
    options = [
        getattr(request, name, None)
        for name in ("chat_template_kwargs", "response_format", "tools")
    ]
    options += [message.tool_calls for message in messages]
    num_chars = sum(map(len, texts)) + sum(len(str(each)) for each in options if each)
    return num_chars, any(part.type != "text" for part in parts)


def _require_wanted(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise ApiError(503, "the server is stopping, or the client has gone")


def _require_small(what: str, sizes: list[tuple[int, int]], most: int, copies: int = 1) -> None:
    num_bytes = sum(height * width * 3 * copies for height, width in sizes)
    if num_bytes > most:
        raise ApiError(
            400,
            f"the {what} take {num_bytes} bytes to decode, but at most {most} are allowed; ask for "
            f"fewer {what}",
            param="messages",
        )


def client_message(text: str, media: list[Media]) -> str:
    """Return an error's message, with files called what the request calls them."""
    for file in media:
        text = text.replace(str(file.path), file.name)
        if file.relative is None:  # other hosts have it elsewhere, by the same name
            text = re.sub(rf"\S*/{file.path.name}", lambda _, name=file.name: name, text)
    return text


def _image_size(file: Media) -> tuple[int, int]:
    """Read the height and width of an image from its header.

    Raises:
        ApiError: the file is not an image of an allowed format, or would take too long to decode.
            Other formats have decoders that run more than a decoder.
    """
    try:
        with Image.open(file.path, formats=_IMAGE_FORMATS) as image:
            size = (image.height, image.width)
            format = image.format
        num_scans = file.path.read_bytes().count(_START_OF_SCAN) if format in ("JPEG", "MPO") else 0
    except Exception as error:
        formats = ", ".join(_IMAGE_FORMATS)
        raise ApiError(
            400, f"cannot read {file.name} as an image ({formats})", param="messages"
        ) from error
    if num_scans > _MAX_SCANS:
        raise ApiError(400, f"{file.name} has more than {_MAX_SCANS} scans", param="messages")
    return size
