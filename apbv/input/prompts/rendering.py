"""Renders a question with the model's own chat template, in the same way as vLLM.

KV transfer to another server needs exactly the same tokens.
"""

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, TypedDict
from urllib.parse import urlsplit
from urllib.request import url2pathname, urlopen

from PIL import Image

from ... import demo
from ...config import FRAME_RATE
from ...config.checks import Checked, instance_of, integer, number
from ...config.refusals import refuse
from ...errors import InvalidRequestError, PromptError
from ...model.parts import ModelParts
from ...reporting import raised_as
from ..media.images import Picture
from ..media.sizes import PixelLimits
from .content import (
    OTHER_FILE_OPTIONS,
    VIDEO_OPTIONS,
    OptionError,
    in_openais_form,
    require_consistent,
)

# An hour of frames as single images has fewer; bounded because every host opens them all.
MOST_SOURCES = 4096
Message = dict[str, Any]

_PROBE = "probe"


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


# What an option of a file must be, and a function that checks it. Options that are not in _CHECKS
# are counts.
_COUNT = ("be an integer of at least 1", _is_count)
_TIME = ("be a number of seconds, not negative", _is_time)
_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "fps": FRAME_RATE,
    "video_start": _TIME,
    "video_end": _TIME,
}
# OpenAI's resolution of an image: the model's processor has its own.
_DETAIL = "detail"
# Names of the reasoning in an assistant's message: vLLM's, and the older one. The first that is
# given counts.
_REASONING = ("reasoning", "reasoning_content")


class QuestionArguments(TypedDict, total=False):
    """The keyword arguments that make a :class:`Question` in calls of the library."""

    video: str | Path | Sequence[str | Path] | None
    images: Any | Sequence[Any] | None
    context: str | None
    messages: Sequence[dict] | None
    tools: Sequence[Any] | None
    num_frames: int | None
    fps: float | None
    audio: str | Path | Sequence[str | Path] | None
    audio_in_video: bool | None


@dataclass(frozen=True)
class Question(Checked, error=InvalidRequestError):
    """Question about videos, images and audio clips, or about a text.

    Attributes:
        prompt: the question.
        video: a video file, or several, which come in this order; ``"demo"``: the bundled clip.
            This attribute is always a list, and so are ``images`` and ``audio``.
        images: after the videos: an image file, a PIL image or a tensor ``[3, H, W]``, or several.
        context: a long text.
        messages: a chat in transformers' format, instead of all these.
        num_frames: frames sampled evenly from each video; with ``fps`` the maximum; None: the
            model's default.
        fps: sample at this rate instead.
        token_ids: a text as the model reads it, instead of prompt, sources and messages. No chat
            template is applied, and its last tokens are the question
            (:attr:`apbv.PrefillConfig.query_len`).
        template: options of the chat template (:func:`apply_template`).
        audio: after the images: an audio file, or several. Of a video file only the audio is used.
        audio_in_video: whether the videos' own audio is heard among their frames; None: if the
            model takes audio and they have any.
        tools: functions that the model may call, as transformers' chat templates take them.

    Raises:
        InvalidRequestError: a value is of another type, or out of range.
    """

    prompt: str | None = instance_of(str, says="be a text")
    video: str | Path | Sequence[str | Path] | None = None
    images: Any | Sequence[Any] | None = None
    context: str | None = instance_of(str, says="be a text")
    messages: Sequence[dict] | None = instance_of(list, tuple, says="be a list of messages")
    num_frames: int | None = integer(1, 2**31 - 1, None)
    fps: float | None = number(*FRAME_RATE, None)
    token_ids: Sequence[int] | None = None
    template: Mapping[str, Any] | None = None
    audio: str | Path | Sequence[str | Path] | None = None
    audio_in_video: bool | None = instance_of(bool)
    tools: Sequence[Any] | None = instance_of(list, tuple, says="be a list of tools")

    def __post_init__(self):
        super().__post_init__()
        # The dataclass is frozen, so that attributes are set like this.
        for name in ("video", "images", "audio"):
            value = getattr(self, name)
            if value is None:
                files = []
            elif isinstance(value, list | tuple):
                files = list(value)
            else:
                files = [value]
            object.__setattr__(self, name, files)
        files_of_videos = self.files("video")
        if "demo" in files_of_videos and not Path("demo").exists():
            videos = []
            for video in files_of_videos:
                videos.append(demo.video_path() if video == "demo" else video)
            object.__setattr__(self, "video", videos)

    def files(self, name: Literal["video", "images", "audio"]) -> list[Any]:
        """Return one of the attributes that are always a list."""
        return list(getattr(self, name))


@dataclass(frozen=True)
class VideoSampling:
    """How the frames of a video are sampled, and how large they are, by its part of a message.

    Attributes:
        num_frames: this many, evenly spaced.
        fps: at this rate instead.
        min_frames, max_frames: the fewest and most frames, with either.
        start, end: the seconds of the file between which frames are sampled; None: its beginning,
            and its end.
        limits: on the size of a frame.
    """

    num_frames: int | None = None
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    start: float | None = None
    end: float | None = None
    limits: PixelLimits = field(default_factory=PixelLimits)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "VideoSampling":
        """Take the options of a content part, from :func:`_options`."""
        return cls(
            num_frames=options.get("nframes", options.get("num_frames")),
            fps=options.get("fps"),
            min_frames=options.get("min_frames"),
            max_frames=options.get("max_frames"),
            start=options.get("video_start"),
            end=options.get("video_end"),
            limits=_limits(options),
        )


def _options(kind: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a content part has for its file.

    Raises:
        PromptError: one is out of range, unknown, or does not apply, or two contradict each other.
    """
    # Names.
    known = {"type", part["type"], _DETAIL, *VIDEO_OPTIONS}
    unknown = [name for name in part if name not in known and part[name] is not None]
    if kind == "text":
        # A text may have other fields, for a cache for example, but no options of files.
        unknown = [name for name in unknown if name in OTHER_FILE_OPTIONS]
    if unknown:
        raise PromptError(f"unknown in a content part of type {kind}: {', '.join(sorted(unknown))}")

    # Values.
    options = {}
    for name in VIDEO_OPTIONS:
        value = part.get(name)
        if value is None:
            continue
        requirement, is_valid = _CHECKS.get(name, _COUNT)
        if not is_valid(value):
            article = "an" if kind == "image" else "a"
            raise PromptError(f"{name} of {article} {kind} must {requirement}, not {value!r:.50}")
        options[name] = value
    try:
        require_consistent(kind, options)
    except OptionError as error:
        raise PromptError(str(error)) from None
    return options


def _limits(options: Mapping[str, Any]) -> PixelLimits:
    """Take the limits on an image's or a frame's size out of a part's options."""
    exact = None
    if "resized_height" in options:
        exact = (options["resized_height"], options["resized_width"])
    return PixelLimits(
        least=options.get("min_pixels"),
        most=options.get("max_pixels"),
        total=options.get("total_pixels"),
        exact=exact,
    )


@dataclass(frozen=True)
class RenderedPrompt:
    """Prompt as text, and the files it refers to.

    Attributes:
        text: the rendered chat template; placeholders stand for videos, images and audio clips.
            Empty where the caller gave token ids.
        videos: paths of the videos, in prompt order.
        pictures: the images, in prompt order.
        query_char: the character of ``text`` at which the question begins: after a text context, or
            at the last message of a chat without files; None otherwise.
        has_context: whether the caller gave context and question separately; in a chat the last
            message may have both.
        has_template: whether a chat template was applied, special tokens included.
        token_ids: the prompt as the caller gave it, where that was as token ids.
        sounds: paths of the audio files, in prompt order.
        sampling: how the frames of each video are sampled and how large they are; empty: all as the
            question says.
    """

    text: str
    videos: list[str]
    pictures: list[Picture]
    query_char: int | None
    has_context: bool
    has_template: bool
    token_ids: tuple[int, ...] | None = None
    sounds: tuple[str, ...] = ()
    sampling: tuple[VideoSampling, ...] = ()


def render_prompt(parts: ModelParts, processor, question: Question) -> RenderedPrompt:
    """Render a question about videos, images and audio clips, or about a text, or a whole chat.

    Args:
        processor: the model's processor; for a text-only model its tokenizer.

    Raises:
        PromptError: the prompt is empty; a context stands beside videos, images or audio clips;
            there are too many of these, or the model cannot read one; an image is unreadable; the
            template rejects the chat, alters the question, or knows no tools; there is no template
            for a chat; or the text has a lone surrogate.
    """
    # Take the chat, its files, and the texts of the question if it is to be found.
    if question.messages is None:
        chat = _chat_of(question)
    else:
        chat = _collect_sources(question)
    _require_readable(parts, chat)

    # Render.
    options = question.template or {}
    text, has_template = apply_template(
        processor, chat.messages, parts.sees, options, question.tools
    )
    if question.messages is not None and not has_template:
        raise PromptError(
            "the model has no chat template, which messages need: pass a prompt instead"
        )
    _require_characters(text)
    if question.tools and tool_instructions(processor) is None:
        raise PromptError("the model's chat template knows no tools")

    # Find the question.
    query_char = None
    if chat.question_texts is not None:
        query_char = _find_question(text, chat.question_texts)
    if query_char is None and question.context is not None:
        raise PromptError(
            "the model's chat template alters the question, so its start cannot be found"
        )

    pictures = []
    for image, limits in zip(chat.images, chat.limits, strict=True):
        pictures.append(Picture.of(image, limits))
    return RenderedPrompt(
        text=text,
        videos=[str(path) for path in chat.videos],
        pictures=pictures,
        query_char=query_char,
        has_context=question.context is not None,
        has_template=has_template,
        sounds=tuple(str(path) for path in chat.sounds),
        sampling=tuple(chat.sampling),
    )


@dataclass(frozen=True)
class _Chat:
    """Chat with placeholders for its files, and these.

    Attributes:
        messages: every content is a list of parts, in which a file is ``{"type": KIND}``.
        videos, images, sounds: the files, in the order of the chat.
        sampling: how the frames of each video are sampled; empty: all as the question says.
        limits: on the size of each image; None: the model's.
        question_texts: the texts that make the question, in order; None: it is not looked for.
    """

    messages: list[Message]
    videos: list[Any]
    images: list[Any]
    sounds: list[Any]
    sampling: list[VideoSampling]
    limits: list[PixelLimits | None]
    question_texts: list[str] | None


def _chat_of(question: Question) -> _Chat:
    """Make a chat of a prompt and its sources, or of a prompt and its context."""
    videos = question.files("video")
    images = question.files("images")
    sounds = question.files("audio")
    source = None
    if videos:
        source = "video"
    elif images:
        source = "images"
    elif sounds:
        source = "audio"
    if question.context is not None:
        try:
            refuse(context="context", source=source)
        except ValueError as error:
            raise PromptError(str(error)) from None
    if question.prompt is None or not question.prompt.strip():
        raise PromptError("the prompt is empty")
    if question.context is not None and not question.context.strip():
        raise PromptError("the context is empty")
    text = question.prompt.strip()
    question_texts = None
    if question.context is not None:
        question_texts = [f"\n\n{text}"]
        text = f"{question.context.strip()}\n\n{text}"
    content = [{"type": "video"}] * len(videos)
    content += [{"type": "image"}] * len(images)
    content += [{"type": "audio"}] * len(sounds)
    content.append({"type": "text", "text": text})
    return _Chat(
        messages=[{"role": "user", "content": content}],
        videos=videos,
        images=images,
        sounds=sounds,
        sampling=[],
        limits=[None] * len(images),
        question_texts=question_texts,
    )


def _require_readable(parts: ModelParts, chat: _Chat) -> None:
    """Reject files that the model cannot take, or too many.

    Raises:
        PromptError: the message says which.
    """
    videos = chat.videos
    images = chat.images
    sounds = chat.sounds
    if (videos or images) and not parts.sees:
        raise PromptError(
            f"{parts.family} models read text only, but the prompt has a video or an image"
        )
    if videos and not parts.sees_video:
        raise PromptError(f"{parts.family} models read images only, but the prompt has a video")
    if sounds and not parts.hears:
        raise PromptError(f"{parts.family} models take no audio, but the prompt has audio")
    if len(videos) + len(images) + len(sounds) > MOST_SOURCES:
        message = (
            f"a prompt may have at most {MOST_SOURCES} videos and images, not {len(videos)} videos "
            f"and {len(images)} images"
        )
        if sounds:
            message += f", with {len(sounds)} audio files"
        raise PromptError(message)
    for name, sources in (("a video", videos), ("audio", sounds)):
        for source in sources:
            if not isinstance(source, str | Path):
                raise PromptError(f"{name} must be a file, not of type {type(source).__name__}")


def _require_characters(text: str) -> None:
    """Reject a text with half of a surrogate pair, which is not a character and has no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(error.start - 20, 0) : error.end + 20]
        raise PromptError(f"the prompt has half of a surrogate pair, in {around!r}") from error


def _collect_sources(question: Question) -> _Chat:
    """Replace the files of a question's messages by placeholders."""
    if (
        question.prompt is not None
        or question.context is not None
        or question.video
        or question.images
        or question.audio
    ):
        raise PromptError(
            "pass either messages or prompt, video, images, audio and context, not both"
        )
    chat = _Chat(
        messages=[],
        videos=[],
        images=[],
        sounds=[],
        sampling=[],
        limits=[],
        question_texts=None,
    )
    for message in question.messages or ():
        _add_message(chat, message)
    texts = []
    for message in chat.messages:
        texts += text_parts(message)
    if not any(text.strip() for text in texts):
        raise PromptError("the chat is empty")
    if len(chat.messages) > 1 and not (chat.videos or chat.images or chat.sounds):
        last_texts = text_parts(chat.messages[-1])
        return replace(chat, question_texts=[text.strip() for text in last_texts])
    return chat


def _add_message(chat: _Chat, message: Message) -> None:
    """Add a message to a chat, with its files."""
    # Check it.
    if not isinstance(message, dict) or "role" not in message:
        raise PromptError(f"a message needs a role and a content, got {message!r:.200}")
    misplaced = sorted(message.keys() & {*VIDEO_OPTIONS, *OTHER_FILE_OPTIONS})
    if misplaced:
        raise PromptError(
            f"options of files stand beside the file, not in its message: {', '.join(misplaced)}"
        )
    calls = message.get("tool_calls")
    reasoning = _reasoning(message)
    if "content" not in message and not calls and not reasoning:
        raise PromptError(f"a message needs a role and a content, got {message!r:.200}")
    content = message.get("content")
    if content is None and (calls or reasoning):
        content = []
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list | tuple):
        raise PromptError(
            f"a message's content must be a string or a list of parts, got {content!r:.200}"
        )

    # Rewrite it.
    plain = {}
    for name, value in message.items():
        if name != "tool_calls" and name not in _REASONING:
            plain[name] = value
    plain["content"] = [_add_part(chat, part) for part in content]
    plain |= reasoning
    if calls:
        plain["tool_calls"] = [_parsed(call) for call in calls]
    chat.messages.append(plain)


def _add_part(chat: _Chat, part: Any) -> dict[str, str]:
    """Add a content part's file to a chat, if it has one.

    Returns:
        The part as templates read it.
    """
    normalized = in_openais_form(part) if isinstance(part, Mapping | str) else {}
    part_type = normalized.get("type")
    kind = str(part_type).removesuffix("_url")
    if kind == "text" and isinstance(normalized.get("text"), str):
        _options(kind, normalized)
        return {"type": "text", "text": normalized["text"]}
    source = None
    if kind in ("video", "image", "audio"):
        source = normalized.get(str(part_type))
    if not isinstance(source, Mapping) or source.get("url") is None:
        raise PromptError(
            "a content part must be a dictionary of type 'text' with a 'text', or of type "
            f"'image', 'video' or 'audio' with a local file under that key, got {part!r:.200}"
        )
    beside_url = {name: value for name, value in source.items() if name != "url"}
    options = _options(kind, {**beside_url, **normalized})
    file = _local(kind, source["url"])
    if kind == "video":
        chat.videos.append(file)
        chat.sampling.append(VideoSampling.of(options))
    elif kind == "image":
        chat.images.append(file)
        chat.limits.append(_limits(options))
    else:
        chat.sounds.append(file)
    return {"type": kind}


def _reasoning(message: Message) -> dict[str, str]:
    """Return an assistant's reasoning by both names that templates read, as vLLM passes it."""
    if message["role"] != "assistant":
        return {}
    for name in _REASONING:
        reasoning = message.get(name)
        if reasoning is None:
            continue
        if not isinstance(reasoning, str):
            raise PromptError(f"a message's reasoning must be a text, got {reasoning!r:.200}")
        return dict.fromkeys(_REASONING, reasoning)
    return {}


def _local(kind: str, source: Any) -> Any:
    """Return the path in a ``file:`` URL, or the image in a ``data:`` URL; others as they are."""
    if not isinstance(source, str) or not source.startswith(("file:", "data:")):
        return source
    with raised_as(PromptError, f"cannot read {source[:100]!r} as an image", OSError, ValueError):
        if source.startswith("file:"):
            return url2pathname(urlsplit(source).path)
        if kind != "image":
            return source
        with urlopen(source) as data:
            return Image.open(BytesIO(data.read()))


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object; OpenAI's API has them as JSON."""
    try:
        function = call["function"]
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(function["name"], str) or not isinstance(arguments, dict):
            raise TypeError
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        raise PromptError(
            "a tool call needs a function with a name, and arguments that are a JSON object, got "
            f"{call!r:.200}"
        ) from None
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise PromptError(
            "a tool call's arguments have NaN, Infinity or half of a surrogate pair, which JSON "
            f"has not, got {call!r:.200}"
        ) from None
    except (RecursionError, TypeError):
        pass  # another object than JSON has; the template decides
    return {**call, "function": {**function, "arguments": arguments}}


def _find_question(rendered: str, texts: Sequence[str]) -> int | None:
    """Find the start of a question's last occurrence.

    Args:
        rendered: the rendered chat.
        texts: the question's texts, between which the template may write something.

    Returns:
        Its first character's place; None if the template alters one of the texts, or all are empty.
    """
    start = len(rendered)
    for text in reversed(texts):
        if not text:
            continue
        start = rendered.rfind(text, 0, start)
        if start < 0:
            return None
    return None if start == len(rendered) else start


def text_parts(message: Message) -> list[str]:
    """Return the texts of a message whose content is a list of parts."""
    return [part["text"] for part in message["content"] if part["type"] == "text"]


def apply_template(
    processor,
    messages: Sequence[Message],
    has_parts: bool,
    options: Mapping[str, Any],
    tools: Sequence[Any] | None = None,
) -> tuple[str, bool]:
    """Render a chat.

    Args:
        processor: the model's processor; for a text-only model its tokenizer.
        messages: the chat, every content a list of parts.
        has_parts: whether the template is known to read lists of parts, as templates of vision
            models do.
        options: ``add_generation_prompt`` (default True), ``continue_final_message`` (default
            False) as transformers has them, and values of the template's own variables.
        tools: as in :class:`Question`.

    Returns:
        The prompt, and whether there is a template. Without one the prompt is the messages' texts
        with blank lines between them.

    Raises:
        PromptError: an option is not a chat-template variable but an argument of transformers'
            call, or an option of a file, or the template rejects the chat.
    """
    template = _template(processor)
    if template is None:
        texts = ["".join(text_parts(message)) for message in messages]
        return "\n\n".join(texts), False

    # Write the chat as the template reads it.
    chat = list(messages)
    has_developers = any(message["role"] == "developer" for message in chat)
    if has_developers and not re.search("""["']developer["']""", template):
        chat = _without_developers(chat)
    reads_parts = has_parts or _reads_parts(processor)
    for place, message in enumerate(chat):
        texts = text_parts(message)
        # vLLM gives every template the text of a tool as a string.
        is_text_of_tool = message["role"] == "tool" and len(texts) == len(message["content"])
        if not reads_parts or is_text_of_tool:
            chat[place] = {**message, "content": "\n".join(filter(None, texts))}

    # Check the template's variables, and drop those that it does not have.
    options = {"add_generation_prompt": True, **options}
    if options["add_generation_prompt"] and options.get("continue_final_message"):
        raise PromptError("continue_final_message needs add_generation_prompt to be false")
    variables = options.keys() - {"add_generation_prompt", "continue_final_message"}
    reserved = variables & inspect.signature(processor.apply_chat_template).parameters.keys()
    if reserved:
        raise PromptError(
            f"chat_template_kwargs: {min(reserved)!r} is not a chat-template variable"
        )
    misplaced = sorted(variables & {*VIDEO_OPTIONS, *OTHER_FILE_OPTIONS})
    if misplaced:
        raise PromptError(
            f"a chat template samples no files: {', '.join(misplaced)} cannot be followed"
        )
    for unknown in variables - template_words(processor):
        del options[unknown]
    if tools:
        options["tools"] = list(tools)

    # Templates may raise anything.
    with raised_as(PromptError, "the chat template rejects the chat", Exception):
        return processor.apply_chat_template(chat, tokenize=False, **options), True


def _template(processor) -> str | None:
    """Return a processor's chat template; None: it has none."""
    template = getattr(processor, "chat_template", None)
    if isinstance(template, Mapping):  # several, by their names
        return template.get("default")
    return template


def template_text(processor) -> str:
    """Return the source of a chat template; empty: there is none."""
    return _template(processor) or ""


def template_words(processor) -> set[str]:
    """Return all words of a chat template, its variables among them."""
    return set(re.findall(r"\w+", template_text(processor)))


def tool_instructions(processor) -> str | None:
    """Return a prompt with the chat template's text on how to call tools; None: it has none."""
    tool = {
        "type": "function",
        "function": {"name": _PROBE, "description": "", "parameters": {"properties": {}}},
    }
    with suppress(PromptError):
        chat = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
        rendered, _ = apply_template(processor, chat, False, {}, [tool])
        return rendered if _PROBE in rendered else None
    return None


def _reads_parts(processor) -> bool:
    """Return whether the chat template reads contents that are lists of parts, not only strings."""
    chat = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
    try:
        rendered = processor.apply_chat_template(chat, add_generation_prompt=False, tokenize=False)
    except Exception:  # of any kind: it wants a string
        return False
    # A template that does not read lists drops the text, or prints the list itself.
    return _PROBE in rendered and "'type'" not in rendered


def _without_developers(messages: Sequence[Message]) -> list[Message]:
    """Turn developer messages into system messages, merged into one at the chat's beginning."""
    system_messages = []
    other_messages = []
    for message in messages:
        if message["role"] in ("system", "developer"):
            system_messages.append(message)
        else:
            other_messages.append(message)
    if len(system_messages) == 1 and system_messages[0] is messages[0]:
        return [{**messages[0], "role": "system"}, *other_messages]
    texts = ["\n".join(text_parts(message)) for message in system_messages]
    text = "\n\n".join(filter(None, texts))
    merged = {"role": "system", "content": [{"type": "text", "text": text}]}
    return [merged, *other_messages]
