"""Turns a request into an order: opens its files, counts its tokens, and checks the limits.

This runs on host 0, concurrently with the engine's thread.
"""

import copy
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from PIL import Image

from ...config import SamplingParams
from ...decode.thoughts import (
    CLOSING_TAGS,
    TAGS,
    ThoughtParsing,
    behind_thought,
    opened_thought,
    token_ids_of,
)
from ...engine import Engine
from ...errors import InvalidConfigError, InvalidRequestError, PromptError
from ...grammar.checks import GrammarCheckError, GrammarChecksBusyError
from ...grammar.grammars import json_rule
from ...grammar.schemas import fixed_texts
from ...input.prompts.prompt_reader import PromptReader
from ...input.prompts.rendering import template_text, template_words, tool_instructions
from ...input.prompts.tokenized_prompt import TokenizedPrompt
from ...request.request import RequestSettings
from ..api_error import ApiError
from ..control.ready_request import ReadyRequest
from ..control.work_order import ReplyOptions, WorkOrder, build_question
from ..formats.call_formats import call_format
from ..formats.tool_calls import CallParsing
from ..media.files import FolderError, Media, MediaError, PrivateFiles, client_message, open_media
from ..settings import ServerSettings
from .requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    Part,
    TokenizeRequest,
    warn_of_ignored,
)

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
# Multiple of an image's bytes as RGB that decoding it allocates: as stored, as RGB, upright, as an
# array, and as a tensor.
_IMAGE_COPIES = 6
_LIGHT_CHARS = 2**16  # characters of a text that can be read without delaying others
# Characters for each token that fits, at the beginning of a text: its tokens are counted before the
# rest is read.
_CHARS_PER_TOKEN = 8


def _is_always_wanted() -> bool:
    return True


class Reader:
    """Reads requests; any thread may call it.

    No file is read and no template is rendered under a lock. A tokenizer must not be used by two
    threads at once, so there are two: whatever takes long, a short text does not wait for it.

    Args:
        max_tokens: the most tokens of a prompt and its answer that can ever run; longer prompts are
            rejected.
    """

    def __init__(
        self, engine: Engine, settings: ServerSettings, private_files: PrivateFiles, max_tokens: int
    ):
        self._engine = engine
        self._parts = engine.parts
        self._videos = engine.videos
        self._num_frames = settings.num_frames or engine.num_frames
        self._light = self._new_prompt_reader()
        self._heavy = self._new_prompt_reader()
        instructions = tool_instructions(engine.processor)
        self._shows_tools = instructions is not None
        self._call_format = call_format(instructions)
        self._template_words = template_words(engine.processor)
        self._template_text = template_text(engine.processor)
        self._settings = settings
        self._private_files = private_files
        self._max_new_tokens = settings.max_new_tokens or engine.max_new_tokens
        context_length = settings.max_model_len or self._parts.max_position_embeddings
        self.max_model_len = min(context_length, max_tokens)
        longest_token = max(len(token) for token in self._light.tokenizer.get_vocab())
        self._max_chars = self.max_model_len * longest_token

    def _new_prompt_reader(self) -> PromptReader:
        """Return a prompt reader with a tokenizer of its own."""
        processor = copy.deepcopy(self._engine.processor)
        return PromptReader(self._parts, processor, self._num_frames, videos=self._videos)

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
        prompts = self._prompts_for(request)
        if isinstance(request, ChatRequest):
            self._require_tools_known(request)
        constraint = self.constraint_of(request, is_wanted)

        # Open its files.
        media: list[Media] = []
        if isinstance(request, CompletionRequest):
            question_fields: dict[str, Any] = {"token_ids": self._token_ids(request, prompts)}
        else:
            assert isinstance(request, ChatRequest), "there are two kinds of requests"
            media, question_fields = self._open_chat(request, stack, is_wanted)

        # Count its tokens.
        prompt = self._lay_out(prompts, question_fields, media, request.prompt_field, is_wanted)
        num_tokens = prompt.batch["input_ids"].shape[1]
        max_new_tokens = self._max_new_tokens_of(request, num_tokens)

        # Find the thought and the calls in its answers.
        thoughts = None
        if isinstance(request, ChatRequest):
            thoughts = ThoughtParsing.of_prompt(
                self._settings.reasoning_parser, prompt.rendered.text, request.continued_texts
            )
        if thoughts is not None and request.is_constrained:
            constraint = self._behind_thought(constraint, thoughts, prompt, is_wanted)
        calls = None
        shown_tags: tuple[str, ...] = () if thoughts is None else TAGS
        if request.may_call:
            calls = self._call_parsing(request, prompt.rendered.text, thoughts)
            shown_tags = (*calls.form.tags, *TAGS)

        # Write the order.
        sampling = self._sampling(request, max_new_tokens, constraint)
        order = WorkOrder(
            question_fields=question_fields,
            files=[file.relative for file in media],
            settings=RequestSettings(
                sampling=sampling,
                positions="vllm" if request.hands_over else "transformers",
                num_wanted=sampling.require_max_new_tokens(),
            ),
            reply=ReplyOptions(
                num_answers=request.num_answers,
                streams=bool(request.stream),
                stop_strings=request.stop_strings,
                stop_token_ids=request.stop_token_ids or (),
                shown_token_ids=token_ids_of(shown_tags, prompts.tokenizer),
            ),
            hands_over=request.hands_over,
        )
        return ReadyRequest(
            order=order,
            num_tokens=num_tokens,
            media=media,
            prompt_field=request.prompt_field,
            prompt=prompt,
            calls=calls,
            thoughts=thoughts,
        )

    def _call_parsing(
        self, request: GenerationRequest, prompt_text: str, thoughts: ThoughtParsing | None
    ) -> CallParsing:
        """Return how calls are found in a request's answers.

        Args:
            prompt_text: the prompt as rendered.
            thoughts: how the thought before them is found; None: it is not separated.
        """
        call_format = self._call_format
        assert call_format is not None, "requests with tools are refused without one"
        opened = None
        if thoughts is None:
            opened = opened_thought(prompt_text, request.continued_texts)
        parameters = {function["name"]: function["parameters"] for function in request.functions}
        return CallParsing(
            form=call_format,
            max_calls=1 if request.makes_one_call else None,
            parameters=parameters,
            thought=opened,
            has_thoughts=not request.is_constrained,
        )

    def _token_ids(self, request: CompletionRequest, prompts: PromptReader) -> list[int]:
        """Return a completion prompt's tokens.

        Raises:
            ApiError: with status 400 if it is longer than the context, as its beginning shows.
        """
        prompt = request.prompt
        if isinstance(prompt, str):
            self._require_fits(prompts, prompt, request.prompt_field)
            return prompts.tokenize(prompt, request.add_special_tokens)
        if len(prompt) > self.max_model_len:
            raise self._too_long(f"{len(prompt)} tokens", request.prompt_field)
        return [token for token in prompt if isinstance(token, int)]

    def _max_new_tokens_of(self, request: GenerationRequest, num_tokens: int) -> int:
        """Return an answer's token limit; ApiError if the context leaves less room than requested.

        Args:
            num_tokens: the prompt's tokens.
        """
        limit = request.token_limit
        min_tokens = request.min_tokens or 0
        needed = max(limit or 1, min_tokens)
        room = self.max_model_len - num_tokens
        if room < needed:
            lengths = f"{num_tokens} tokens and the answer needs up to {needed}"
            raise self._too_long(lengths, request.prompt_field)
        if limit is None:
            default_limit = request.default_limit or self._max_new_tokens
            assert default_limit is not None, "an engine has a default"
            limit = max(default_limit, min_tokens)
        return min(limit, room)

    def _sampling(
        self, request: GenerationRequest, max_new_tokens: int, constraint: dict[str, str | None]
    ) -> SamplingParams:
        """Return a request's sampling parameters, with the server's and the model's defaults.

        Args:
            constraint: the fields from :meth:`constraint_of`.

        Raises:
            ApiError: with status 400 if the model does not have a token of ``logit_bias``.
        """
        logit_bias = request.logit_bias or {}
        self._require_known(logit_bias, "logit_bias")
        temperature = self._settings.temperature
        if temperature is None:
            temperature = self._engine.sampling.temperature
        fields: dict[str, Any] = {"temperature": temperature, "top_p": self._settings.top_p}
        fields |= request.model_dump(include=_SAMPLING, exclude_none=True)
        fields |= constraint
        sampling = SamplingParams(
            **fields,
            max_new_tokens=max_new_tokens,
            top_k=None if request.top_k is None else max(request.top_k, 0),
            logit_bias=tuple(logit_bias.items()),
            logprobs=request.num_logprobs,
            seed=secrets.randbits(63) if request.seed is None else request.seed % 2**64,
            min_tokens=request.min_tokens or 0,
        )
        return sampling.filled(self._engine.sampling)

    def constraint_of(
        self, request: GenerationRequest, is_wanted: Callable[[], bool]
    ) -> dict[str, str | None]:
        """Return the JSON schema or grammar that an answer has to follow, as a sampling parameter.

        Raises:
            ApiError: the schema or grammar is invalid, or could not be checked.
        """
        schema = request.json_schema
        if schema is not None:
            self._require_valid("response_format", is_wanted, json_schema=schema)
            self._require_writable("response_format", schema)
        if not request.may_call or (schema is None and not request.must_call):
            return {"json_schema": schema}
        for function in request.functions:
            self._require_writable("tools", json.dumps(function["parameters"]))
        answer_schema = None
        if schema is not None and not request.must_call:
            answer_schema = json.loads(schema)
        assert self._call_format is not None, "requests with tools are refused without one"
        with _rejecting("tools"):
            grammar = self._call_format.grammar(
                request.functions,
                added_tokens=self._light.tokenizer.get_added_vocab(),
                is_single=request.makes_one_call,
                answer_schema=answer_schema,
            )
        self._require_valid("tools", is_wanted, json_schema=None, grammar=grammar)
        return {"grammar": grammar}

    def _behind_thought(
        self,
        constraint: dict[str, str | None],
        thoughts: ThoughtParsing,
        prompt: TokenizedPrompt,
        is_wanted: Callable[[], bool],
    ) -> dict[str, str | None]:
        """Return a constraint that holds behind the thought with which an answer may begin.

        Args:
            constraint: the fields from :meth:`constraint_of`.
            prompt: the prompt, which may have opened or closed the thought.

        Raises:
            ApiError: as :meth:`constraint_of`.
        """
        openings: list[str] = []
        end = prompt.rendered.text.rstrip()
        for opening in thoughts.openings:
            is_closed = end.endswith(CLOSING_TAGS[opening])
            if opening in self._template_text and not is_closed:
                openings.append(opening)
        if thoughts.opened is None and not openings:
            return constraint
        grammar = constraint.get("grammar")
        if grammar is None:
            schema = constraint["json_schema"]
            assert schema is not None, "one of both constrains the answer"
            grammar = f"start: json\njson: {json_rule(json.loads(schema))}"
        tokens = self._light.tokenizer.get_added_vocab()
        grammar = behind_thought(grammar, thoughts, openings, tokens)
        self._require_valid("response_format", is_wanted, json_schema=None, grammar=grammar)
        return {"grammar": grammar}

    def _require_writable(self, field: str, json_schema: str) -> None:
        """Reject a schema that prescribes the text of a special token: no answer can have it."""
        added_tokens = self._light.tokenizer.added_tokens_decoder.values()
        special_texts = [token.content for token in added_tokens if token.special]
        for text in fixed_texts(json_schema):
            for special_text in special_texts:
                if special_text in text:
                    message = (
                        f"a constant or a property's name has the special token {special_text!r}, "
                        "which no answer can have"
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
        """Return the tokens that the model would read.

        Raises:
            ApiError: with status 400 or 503, as :meth:`read`.
        """
        prompts = self._prompts_for(request)
        if request.prompt is not None:
            self._require_fits(prompts, request.prompt, "prompt")
            return prompts.tokenize(request.prompt, request.add_special_tokens is not False)
        self._require_tools_known(request)
        with ExitStack() as stack:
            media, question_fields = self._open_chat(request, stack, _is_always_wanted)
            prompt = self._lay_out(prompts, question_fields, media, "messages", _is_always_wanted)
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
        return _num_chars(request) <= _LIGHT_CHARS and not _has_files(request)

    def _prompts_for(self, request: GenerationRequest | TokenizeRequest) -> PromptReader:
        """Return the prompt reader for a request.

        Raises:
            ApiError: with status 400 if the request is too long even in the vocabulary's longest
                tokens.
        """
        num_chars = _num_chars(request)
        if num_chars > self._max_chars:
            raise self._too_long(f"{num_chars} characters", request.prompt_field)
        return self._light if self.is_light(request) else self._heavy

    def _too_long(self, length: str, field: str) -> ApiError:
        message = (
            f"the prompt has {length}, but the maximum context length is {self.max_model_len} "
            "tokens"
        )
        return ApiError(400, message, param=field, code="context_length_exceeded")

    def _require_fits(self, prompts: PromptReader, text: str, field: str) -> None:
        """Reject a text whose beginning is too long already, before all of it is tokenized."""
        num_head_chars = _CHARS_PER_TOKEN * self.max_model_len
        if len(text) <= num_head_chars:
            return
        num_tokens = len(prompts.tokenize(text[:num_head_chars], False))
        if num_tokens > self.max_model_len:
            raise self._too_long(f"more than {num_tokens} tokens", field)

    def _open_chat(
        self,
        request: ChatRequest | TokenizeRequest,
        stack: ExitStack,
        is_wanted: Callable[[], bool],
    ) -> tuple[list[Media], dict[str, Any]]:
        """Open a chat's files; return them, and the fields of an order's question."""
        settings = self._settings
        deadline = time.monotonic() + settings.media.fetch_seconds
        media: list[Media] = []
        messages = []
        for index, message in enumerate(request.messages or ()):
            parts: list[dict[str, Any]] = []
            messages.append({**message.rest, "content": parts})
            if isinstance(message.content, str):
                parts.append({"type": "text", "text": message.content})
                continue
            for part_index, part in enumerate(message.content or ()):
                if part.type == "text":
                    parts.append({"type": "text", "text": part.text})
                    continue
                if len(media) == settings.media.max_frames:
                    limit = f"at most {settings.media.max_frames} videos and images are allowed"
                    raise ApiError(400, limit, param="messages")
                _require_wanted(is_wanted)
                field = f"messages.{index}.content.{part_index}.{part.type}"
                file = self._open_part(part, field, deadline, stack)
                parts.append({"type": part.kind, "file": len(media), **part.options})
                media.append(file)
        template_variables = request.chat_template_kwargs or {}
        warn_of_ignored("chat_template_kwargs", template_variables.keys() - self._template_words)
        num_frames = request.num_frames or min(self._num_frames, settings.media.max_frames)
        if num_frames > settings.media.max_frames:
            limit = f"num_frames may be at most {settings.media.max_frames}"
            raise ApiError(400, limit, param="num_frames")
        question_fields = {
            "messages": messages,
            "num_frames": num_frames,
            "fps": settings.fps if request.fps is None else request.fps,
            "template": request.template,
            "tools": [tool.described for tool in request.tools or ()],
            "audio_in_video": request.audio_in_video,
        }
        return media, question_fields

    def _open_part(self, part: Part, field: str, deadline: float, stack: ExitStack) -> Media:
        """Open the file of a message's part, for as long as the stack lasts.

        Args:
            field: the part's name in error replies.
            deadline: when fetching must be done, by ``time.monotonic``.

        Raises:
            ApiError: with status 400 if the file is not allowed or cannot be read, with 503 if the
                folder of media files cannot be read.
        """
        content = getattr(part, part.type)
        if part.type == "input_audio":
            url = f"data:audio/{content.format};base64,{content.data}"
        else:
            url = content.url
        opened_file = open_media(url, self._settings, self._private_files, deadline)
        try:
            return stack.enter_context(opened_file)
        except MediaError as error:
            raise ApiError(400, str(error), param=field) from error
        except FolderError as error:
            raise ApiError(503, str(error)) from error

    def _lay_out(
        self,
        prompts: PromptReader,
        question_fields: dict[str, Any],
        media: list[Media],
        field: str,
        is_wanted: Callable[[], bool],
    ) -> TokenizedPrompt:
        """Find the prompt's tokens, and what it shows.

        Args:
            field: the field with the prompt, for errors.

        Raises:
            ApiError: with status 400 where the engine would reject it, except for damaged frames
                and images.
        """
        try:
            return self._lay_out_within_limits(prompts, question_fields, media, field, is_wanted)
        except (InvalidRequestError, InvalidConfigError) as error:
            message = client_message(str(error) or type(error).__name__, media)
            raise ApiError(error.http_status, message, param=field) from error

    def _lay_out_within_limits(
        self,
        prompts: PromptReader,
        question_fields: dict[str, Any],
        media: list[Media],
        field: str,
        is_wanted: Callable[[], bool],
    ) -> TokenizedPrompt:
        """Find the prompt's tokens, and what it shows; errors are not yet those of the API."""
        settings = self._settings
        deadline = time.monotonic() + settings.media.fetch_seconds

        def check(num_packets: int) -> None:
            if num_packets >= settings.media.max_packets or time.monotonic() > deadline:
                raise PromptError(f"a video takes too long to scan: {num_packets} packets or more")
            _require_wanted(is_wanted)

        # Images.
        image_sizes = []
        for file, kind in zip(media, _file_kinds(question_fields), strict=True):
            if kind == "image":
                image_sizes.append(_image_size(file))
        _require_small("images", image_sizes, settings.media.max_image_bytes, _IMAGE_COPIES)

        # Text.
        paths = [file.path for file in media]
        question = build_question(question_fields, paths)
        rendered = prompts.render(question)
        self._require_fits(prompts, rendered.text, field)

        # Videos.
        infos = [self._videos.probe(path, check) for path in rendered.videos]
        videos = prompts.sample(infos, question, rendered.sampling)
        num_frames = len(image_sizes) + sum(len(video.frames) for video in videos)
        if num_frames > settings.media.max_frames:
            message = (
                f"the videos and images have {num_frames} frames, but at most "
                f"{settings.media.max_frames} are allowed; ask for fewer with num_frames, which "
                "applies per video"
            )
            raise ApiError(400, message, param="messages")
        frame_sizes = []
        for video in videos:
            frame_sizes += [(1, video.info.most_pixels)] * len(video.frames)
        _require_small("frames", frame_sizes, settings.media.max_decoded_bytes)

        _require_wanted(is_wanted)
        return prompts.lay_out(rendered, videos)


@contextmanager
def _rejecting(field: str) -> Iterator[None]:
    """Reject a request whose schema or grammar cannot be compiled."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise ApiError(400, str(error), param=field) from error


def _num_chars(request: GenerationRequest | TokenizeRequest) -> int:
    """Count the characters of a request's texts, template variables, schema, tools and calls."""
    num_chars = 0
    prompt = getattr(request, "prompt", None)
    if isinstance(prompt, str):
        num_chars += len(prompt)
    for message in _messages(request):
        for text in (*message.texts, message.reasoning, message.reasoning_content):
            num_chars += len(text or "")
        if message.tool_calls:
            num_chars += len(str(message.tool_calls))
    for name in ("chat_template_kwargs", "response_format", "tools"):
        option = getattr(request, name, None)
        if option:
            num_chars += len(str(option))
    return num_chars


def _has_files(request: GenerationRequest | TokenizeRequest) -> bool:
    for message in _messages(request):
        if not isinstance(message.content, list):
            continue
        if any(part.type != "text" for part in message.content):
            return True
    return False


def _messages(request: GenerationRequest | TokenizeRequest) -> Sequence[Message]:
    """Return a chat's messages; none for other requests."""
    return getattr(request, "messages", None) or ()


def _file_kinds(question_fields: dict[str, Any]) -> list[str]:
    """Return the kind of each file of a question, such as ``image``."""
    kinds = []
    for message in question_fields.get("messages", ()):
        kinds += [part["type"] for part in message["content"] if "file" in part]
    return kinds


def _require_wanted(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise ApiError(503, "the server is stopping, or the client has gone")


def _require_small(
    name: str, sizes: list[tuple[int, int]], max_bytes: int, num_copies: int = 1
) -> None:
    """Reject images or frames that take too much memory as RGB.

    Args:
        name: what they are called in the error.
        sizes: the height and width of each.
        num_copies: how many times each is in memory.
    """
    num_bytes = sum(height * width * 3 * num_copies for height, width in sizes)
    if num_bytes > max_bytes:
        message = (
            f"the {name} take {num_bytes} bytes to decode, but at most {max_bytes} are allowed; "
            f"ask for fewer {name}"
        )
        raise ApiError(400, message, param="messages")


def _image_size(file: Media) -> tuple[int, int]:
    """Read the height and width of an image from its header.

    Raises:
        ApiError: the file is not an image of an allowed format, or would take too long to decode.
            Other formats have decoders that run more than a decoder.
    """
    try:
        with Image.open(file.path, formats=_IMAGE_FORMATS) as image:
            size = (image.height, image.width)
            image_format = image.format
        num_scans = 0
        if image_format in ("JPEG", "MPO"):
            num_scans = file.path.read_bytes().count(_START_OF_SCAN)
    except Exception as error:
        formats = ", ".join(_IMAGE_FORMATS)
        message = f"cannot read {file.name} as an image ({formats})"
        raise ApiError(400, message, param="messages") from error
    if num_scans > _MAX_SCANS:
        raise ApiError(400, f"{file.name} has more than {_MAX_SCANS} scans", param="messages")
    return size
