"""Renders a question with the model's own chat template, in the same way as vLLM.

KV transfer to another server needs exactly the same tokens.
"""

import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname, urlopen

from PIL import Image

from .. import demo
from ..config import FRAME_RATE
from ..config.checks import Checked, instance_of, integer, number
from ..model.parts import ModelParts
from ..refusals import refuse
from ..warn import raised_as
from .content import (
    OTHER_FILE_OPTIONS,
    VIDEO_OPTIONS,
    OptionError,
    in_openais_form,
    require_consistent,
)
from .images import Picture
from .sizes import PixelLimits
from .visual import PromptError

# More files than a prompt of an hour's frames as single images has; every host opens all of them.
MOST_SOURCES = 4096
Message = dict[str, Any]

_PROBE = "probe"
_COUNT = "be an integer of at least 1", lambda given: type(given) is int and given >= 1
_TIME = (
    "be a number of seconds, not negative",
    lambda given: type(given) in (int, float) and 0 <= given < math.inf,
)
_MAY_BE = {"fps": FRAME_RATE, "video_start": _TIME, "video_end": _TIME}
# OpenAI's resolution of an image: the model's processor has its own.
_DETAIL = "detail"
# What an assistant's message has thought: vLLM's name for it, and the older one. The first that is
# given counts.
_REASONING = ("reasoning", "reasoning_content")


@dataclass(frozen=True)
class Question(Checked):
    """Question about videos, images and audio clips, or about a text.

    Attributes:
        prompt: the question.
        video: a video file, or several, which come in this order; ``"demo"``: the bundled clip.
            Kept as a list, as images and audio are.
        images: after the videos: an image file, a PIL image or a tensor ``[3, H, W]``, or several.
        context: a long text.
        messages: a chat in transformers' format, instead of all these.
        num_frames: frames sampled evenly from each video; with ``fps`` the maximum; None: the
            model's default.
        fps: sample at this rate instead.
        token_ids: a text as the model reads it, instead of prompt, sources and messages. No chat
            template is applied, and its last tokens are the question
            (:attr:`apbv.PrefillConfig.query_len`).
        template: options of the chat template, see :func:`apply_template`.
        audio: after the images: an audio file, or several; of a video its audio.
        audio_in_video: whether the videos' own audio is heard among their frames; None: where the
            model hears and they have any.
        tools: functions that the model may call, as transformers' chat templates take them.

    Raises:
        ValueError: a value is of another type, or out of range.
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
        for name in ("video", "images", "audio"):
            value = getattr(self, name)
            if value is None:
                files = []
            elif isinstance(value, list | tuple):
                files = list(value)
            else:
                files = [value]
            object.__setattr__(self, name, files)
        if "demo" in self.video and not Path("demo").exists():
            videos = [demo.video_path() if video == "demo" else video for video in self.video]
            object.__setattr__(self, "video", videos)


@dataclass(frozen=True)
class VideoSampling:
    """How the frames of one video are sampled, and how large they are, where its part of a message
    says so.

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
    def of(cls, given: Mapping[str, Any]) -> "VideoSampling":
        """Take the options of a content part, as :func:`_options` returned them."""
        return cls(
            num_frames=given.get("nframes", given.get("num_frames")),
            fps=given.get("fps"),
            min_frames=given.get("min_frames"),
            max_frames=given.get("max_frames"),
            start=given.get("video_start"),
            end=given.get("video_end"),
            limits=_limits(given),
        )


def _options(kind: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a content part has for its file.

    Raises:
        PromptError: one is out of range, unknown, or does not apply, or two contradict each other.
    """
    # A text may have other fields, such as those of a cache, but no options of files.
    known = {"type", part["type"], _DETAIL, *VIDEO_OPTIONS}
    unknown = [name for name in part if name not in known and part[name] is not None]
    unknown = [name for name in unknown if kind != "text" or name in OTHER_FILE_OPTIONS]
    if unknown:
        raise PromptError(f"unknown in a content part of type {kind}: {', '.join(sorted(unknown))}")
    given = {name: part[name] for name in VIDEO_OPTIONS if part.get(name) is not None}
    for name, value in given.items():
        says, may_be = _MAY_BE.get(name, _COUNT)
        if not may_be(value):
            raise PromptError(
                f"{name} of {'an' if kind == 'image' else 'a'} {kind} must {says}, not "
                f"{value!r:.50}"
            )
    try:
        require_consistent(kind, given)
    except OptionError as error:
        raise PromptError(str(error)) from None
    return given


def _limits(given: Mapping[str, Any]) -> PixelLimits:
    """Take the limits on an image's or a frame's size out of a part's options."""
    exact = (given["resized_height"], given["resized_width"]) if "resized_height" in given else None
    return PixelLimits(
        given.get("min_pixels"), given.get("max_pixels"), given.get("total_pixels"), exact
    )


@dataclass(frozen=True)
class RenderedPrompt:
    """Prompt as text, and the files it refers to.

    Attributes:
        text: the rendered chat template; placeholders stand for videos, images and audio clips.
            Empty where the caller gave token ids.
        videos: paths of the videos, in prompt order.
        pictures: the images, in prompt order.
        query_char: the character of ``text`` at which the question begins, after a text context, or
            with the last message of a text chat; None otherwise.
        has_context: whether the caller told context and question apart; the last message of a chat
            may hold both.
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


def render_prompt(parts: ModelParts, processor, asked: Question) -> RenderedPrompt:
    """Render a question about videos, images and audio clips, or about a text, or a whole chat.

    Args:
        processor: the model's processor; for a text-only model its tokenizer.

    Raises:
        PromptError: an empty prompt, a text beside videos, images or audio clips, too many of
            these, a source the model cannot read, an unreadable image, a chat that the template
            rejects, tools that it does not show, a chat for a model without a template, a lone
            surrogate.
    """
    prompt = asked.prompt
    context = asked.context
    sampling: list[VideoSampling] = []
    limits: list[PixelLimits | None] = []
    if asked.messages is None:
        videos = asked.video
        images = asked.images
        sounds = asked.audio
        limits = [None] * len(images)
        source = None
        if videos:
            source = "video"
        elif images:
            source = "images"
        elif sounds:
            source = "audio"
        if context is not None:
            try:
                refuse(context="context", source=source)
            except ValueError as error:
                raise PromptError(str(error)) from None
        if prompt is None or not prompt.strip():
            raise PromptError("the prompt is empty")
        if context is not None and not context.strip():
            raise PromptError("the context is empty")
        content = [{"type": "video"}] * len(videos) + [{"type": "image"}] * len(images)
        content += [{"type": "audio"}] * len(sounds)
        text = prompt.strip() if context is None else f"{context.strip()}\n\n{prompt.strip()}"
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
        question = [f"\n\n{prompt.strip()}"] if context is not None else None
    else:
        if prompt is not None or context is not None or asked.video or asked.images or asked.audio:
            raise PromptError(
                "pass either messages or prompt, video, images, audio and context, not both"
            )
        messages, files, sampling, limits = _collect_sources(asked.messages)
        videos = files["video"]
        images = files["image"]
        sounds = files["audio"]
        is_text_chat = len(messages) > 1 and not (videos or images or sounds)
        question = [text.strip() for text in text_parts(messages[-1])] if is_text_chat else None
    if (videos or images) and not parts.sees:
        raise PromptError(
            f"{parts.family} models read text only, but the prompt has a video or an image"
        )
    if videos and not parts.sees_video:
        raise PromptError(f"{parts.family} models read images only, but the prompt has a video")
    if sounds and not parts.hears:
        raise PromptError(f"{parts.family} models take no audio, but the prompt has audio")
    if len(videos) + len(images) + len(sounds) > MOST_SOURCES:
        raise PromptError(
            f"a prompt may have at most {MOST_SOURCES} videos and images, not {len(videos)} videos "
            f"and {len(images)} images" + (f", with {len(sounds)} audio files" if sounds else "")
        )
    for what, sources in (("a video", videos), ("audio", sounds)):
        for source in sources:
            if not isinstance(source, str | Path):
                raise PromptError(f"{what} must be a file, not of type {type(source).__name__}")
    options = asked.template or {}
    rendered, has_template = apply_template(processor, messages, parts.sees, options, asked.tools)
    if asked.messages is not None and not has_template:
        raise PromptError(
            "the model has no chat template, which messages need: pass a prompt instead"
        )
    _require_characters(rendered)
    if asked.tools and tool_instructions(processor) is None:
        raise PromptError("the model's chat template knows no tools")
    query_char = None if question is None else _find_question(rendered, question)
    if query_char is None and context is not None:
        raise PromptError(
            "the model's chat template alters the question, so its start cannot be found"
        )
    return RenderedPrompt(
        text=rendered,
        videos=list(map(str, videos)),
        pictures=list(map(Picture.of, images, limits)),
        query_char=query_char,
        has_context=context is not None,
        has_template=has_template,
        sounds=tuple(map(str, sounds)),
        sampling=tuple(sampling),
    )


def _require_characters(text: str) -> None:
    """Reject a text with half of a surrogate pair: UTF-16's halves are not characters, and have no
    tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(error.start - 20, 0) : error.end + 20]
        raise PromptError(f"the prompt has half of a surrogate pair, in {around!r}") from error


def _collect_sources(
    messages: Sequence[Message],
) -> tuple[list[Message], dict[str, list[Any]], list[VideoSampling], list[PixelLimits]]:
    """Replace a chat's files by placeholders.

    Returns:
        The chat; its videos, images and audio files by their kind, in order; how the frames of each
        video are sampled; and the limits on each image.
    """
    plain = []
    files = {"video": [], "image": [], "audio": []}
    sampling = []
    limits = []
    for message in messages:
        if not isinstance(message, dict) or "role" not in message:
            raise PromptError(f"a message needs a role and a content, got {message!r:.200}")
        if misplaced := sorted(message.keys() & {*VIDEO_OPTIONS, *OTHER_FILE_OPTIONS}):
            raise PromptError(
                "options of files stand beside the file, not in its message: "
                f"{', '.join(misplaced)}"
            )
        calls = message.get("tool_calls")
        thought = _thought(message)
        if "content" not in message and not calls and not thought:
            raise PromptError(f"a message needs a role and a content, got {message!r:.200}")
        content = message.get("content")
        if content is None and (calls or thought):
            content = []
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list | tuple):
            raise PromptError(
                f"a message's content must be a string or a list of parts, got {content!r:.200}"
            )
        parts = []
        for part in content:
            told = in_openais_form(part) if isinstance(part, Mapping | str) else {}
            kind = str(told.get("type")).removesuffix("_url")
            if kind == "text" and isinstance(told.get("text"), str):
                _options(kind, told)
                parts.append({"type": "text", "text": told["text"]})
                continue
            source = told.get(told.get("type")) if kind in files else None
            if not isinstance(source, Mapping) or source.get("url") is None:
                raise PromptError(
                    "a content part must be a dictionary of type 'text' with a 'text', or of type "
                    "'image', 'video' or 'audio' with a local file under that key, got "
                    f"{part!r:.200}"
                )
            beside = {name: value for name, value in source.items() if name != "url"}
            options = _options(kind, {**beside, **told})
            if kind == "video":
                sampling.append(VideoSampling.of(options))
            elif kind == "image":
                limits.append(_limits(options))
            files[kind].append(_local(kind, source["url"]))
            parts.append({"type": kind})
        kept = {
            name: value
            for name, value in message.items()
            if name not in ("tool_calls", *_REASONING)
        }
        kept |= {"content": parts, **thought}
        if calls:
            kept["tool_calls"] = [_parsed(call) for call in calls]
        plain.append(kept)
    if not any(text.strip() for message in plain for text in text_parts(message)):
        raise PromptError("the chat is empty")
    return plain, files, sampling, limits


def _thought(message: Message) -> dict[str, str]:
    """Return the reasoning of an assistant's message by both names that templates read, as vLLM
    passes it."""
    if message["role"] != "assistant":
        return {}
    given = [message[name] for name in _REASONING if message.get(name) is not None]
    if not given:
        return {}
    if not isinstance(given[0], str):
        raise PromptError(f"a message's reasoning must be a text, got {given[0]!r:.200}")
    return dict.fromkeys(_REASONING, given[0])


def _local(kind: str, source: Any) -> Any:
    """Return the path that a ``file:`` URL names, or the image in a ``data:`` URL; anything else as
    it is."""
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
    """Return a tool call with its arguments as an object, which templates read; OpenAI's API has
    them as JSON."""
    try:
        function = call["function"]
        given = function.get("arguments") or {}
        arguments = json.loads(given) if isinstance(given, str) else given
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
        message = (
            "a tool call's arguments have NaN, Infinity or half of a surrogate pair, which JSON "
            "has not"
        )
        raise PromptError(f"{message}, got {call!r:.200}") from None
    except (RecursionError, TypeError):
        pass  # another object than JSON has; the template decides
    return {**call, "function": {**function, "arguments": arguments}}


def _find_question(rendered: str, question: Sequence[str]) -> int | None:
    """Find the start of a question's last occurrence, whose parts may be separated; None if one is
    altered."""
    start = len(rendered)
    for part in reversed([part for part in question if part]):
        start = rendered.rfind(part, 0, start)
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
        has_parts: whether the template is known to read lists of parts, as those of models that see
            do.
        options: ``add_generation_prompt`` (default True), ``continue_final_message`` (default
            False) as transformers has them, and values of the template's own variables.
        tools: of :class:`Question`.

    Returns:
        The prompt, and whether there is a template; without one the texts stand below one another.

    Raises:
        PromptError: an option is not a chat-template variable but an argument of transformers'
            call, or an option of a file, or the template rejects the chat.
    """
    template = _template(processor)
    if template is None:
        return "\n\n".join("".join(text_parts(message)) for message in messages), False
    chat = list(messages)
    if "developer" in map(itemgetter("role"), chat) and not re.search(
        """["']developer["']""", template
    ):
        chat = _without_developers(chat)
    reads_parts = has_parts or _reads_parts(processor)
    for place, message in enumerate(chat):
        if reads_parts and message["role"] != "tool":
            continue
        texts = text_parts(message)
        # vLLM gives every template the text of a tool as a string.
        if not reads_parts or len(texts) == len(message["content"]):
            chat[place] = {**message, "content": "\n".join(filter(None, texts))}
    options = {"add_generation_prompt": True, **options}
    if options["add_generation_prompt"] and options.get("continue_final_message"):
        raise PromptError("continue_final_message needs add_generation_prompt to be false")
    variables = options.keys() - {"add_generation_prompt", "continue_final_message"}
    if reserved := variables & inspect.signature(processor.apply_chat_template).parameters.keys():
        raise PromptError(
            f"chat_template_kwargs: {min(reserved)!r} is not a chat-template variable"
        )
    if misplaced := sorted(variables & {*VIDEO_OPTIONS, *OTHER_FILE_OPTIONS}):
        raise PromptError(
            f"a chat template samples no files: {', '.join(misplaced)} cannot be followed"
        )
    for unknown in variables - template_words(processor):
        del options[unknown]
    if tools:
        options["tools"] = list(tools)
    with raised_as(
        PromptError, "the chat template rejects the chat", Exception
    ):  # templates may raise anything
        return processor.apply_chat_template(chat, tokenize=False, **options), True


def _template(processor) -> str | None:
    """Return a processor's chat template; None: it has none."""
    template = getattr(processor, "chat_template", None)
    # The first kind has several.
    return template.get("default") if isinstance(template, Mapping) else template


def template_words(processor) -> set[str]:
    """Return all words of a chat template, its variables among them."""
    return set(re.findall(r"\w+", _template(processor) or ""))


def tool_instructions(processor) -> str | None:
    """Return a prompt with the chat template's words about how to call a tool; None: it shows no
    tools."""
    tool = {
        "type": "function",
        "function": {"name": _PROBE, "description": "", "parameters": {"properties": {}}},
    }
    with suppress(PromptError):
        chat = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
        rendered, _ = apply_template(processor, chat, False, {}, [tool])
        return rendered if _PROBE in rendered else None


def _reads_parts(processor) -> bool:
    """Return whether the chat template reads a content that is a list of parts, and not a string
    only."""
    chat = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
    try:
        rendered = processor.apply_chat_template(chat, add_generation_prompt=False, tokenize=False)
    except Exception:  # of any kind: it wants a string
        return False
    # Else it left the list out, or printed it.
    return _PROBE in rendered and "'type'" not in rendered


def _without_developers(messages: Sequence[Message]) -> list[Message]:
    """Turn developer messages into system messages, merged into one at the chat's beginning."""
    is_system = [message["role"] in ("system", "developer") for message in messages]
    if is_system.index(True) == 0 and sum(is_system) == 1:
        return [{**messages[0], "role": "system"}, *messages[1:]]
    texts = [
        "\n".join(text_parts(message))
        for message, system in zip(messages, is_system, strict=True)
        if system
    ]
    merged = {
        "role": "system",
        "content": [{"type": "text", "text": "\n\n".join(filter(None, texts))}],
    }
    return [
        merged,
        *(message for message, system in zip(messages, is_system, strict=True) if not system),
    ]
