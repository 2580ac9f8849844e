"""Rendering what a caller asks through the model's own chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..model.parts import ModelParts
from .images import Picture
from .templates import Message, apply_template, text_parts
from .visual import PromptError

# More files than a prompt of an hour's frames as single images has; every host opens all of them.
MOST_SOURCES = 4096


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as text, and the files it refers to.

    Attributes:
        text: the rendered chat template; placeholders stand for videos, images and sounds. Empty where the caller
            gave token ids.
        videos: paths of the videos, in prompt order.
        pictures: the images, in prompt order.
        query_char: the character of ``text`` at which the question begins, after a text context, or with the last
            message of a text chat; None otherwise.
        has_context: whether the caller told context and question apart; the last message of a chat may hold both.
        has_template: whether a chat template was applied, special tokens included.
        token_ids: the prompt as the caller gave it, where that was as token ids.
        sounds: paths of the audio files, in prompt order.
    """

    text: str
    videos: list[str]
    pictures: list[Picture]
    query_char: int | None
    has_context: bool
    has_template: bool
    token_ids: tuple[int, ...] | None = None
    sounds: tuple[str, ...] = ()


def render_prompt(
    parts: ModelParts,
    processor,
    prompt: str | None,
    *,
    videos: Sequence[str | Path] = (),
    images: Sequence[Any] = (),
    sounds: Sequence[str | Path] = (),
    context: str | None = None,
    messages: Sequence[Message] | None = None,
    template: Mapping[str, Any] | None = None,
) -> RenderedPrompt:
    """Render a question about videos, images and sounds, or about a text, or a whole chat.

    Args:
        processor: the model's processor; for a text-only model its tokenizer.
        prompt: the question.
        videos: video files; they come first.
        images: image files, PIL images, or tensors ``[3, H, W]``, which may have a shape but no pixels; they come
            behind the videos.
        sounds: audio files; they come behind the images.
        context: a long text that the question is about.
        messages: instead of all these, a chat in transformers' format, whose content parts name local files
            (``{"type": "video", "video": "clip.mp4"}``), in any order.
        template: options of the chat template, see :func:`~apbv.input.templates.apply_template`.

    Raises:
        PromptError: an empty prompt, a text beside videos, images or sounds, too many of these, a source the model
            cannot read, an unreadable image, a chat that the template refuses.
    """
    videos, images, sounds = ([_local(source) for source in sources] for sources in (videos, images, sounds))
    if messages is None:
        if context is not None and (videos or images or sounds):
            shown = "video" if videos else "images" if images else "audio"
            raise PromptError(
                f"a prompt is about a text, or about videos, images and audio, but {shown} and context were given"
            )
        if prompt is None or not prompt.strip():
            raise PromptError("the prompt is empty")
        if context is not None and not context.strip():
            raise PromptError("the context is empty")
        content = [{"type": "video"} for _ in videos] + [{"type": "image"} for _ in images]
        content += [{"type": "audio"} for _ in sounds]
        text = prompt.strip() if context is None else f"{context.strip()}\n\n{prompt.strip()}"
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
        question = [f"\n\n{prompt.strip()}"] if context is not None else None
    else:
        if any(source is not None for source in (prompt, context)) or videos or images or sounds:
            raise PromptError("messages come instead of prompt, video, images, audio and context, not beside them")
        messages, videos, images, sounds = _collect_sources(messages)
        is_text_chat = len(messages) > 1 and not (videos or images or sounds)
        question = [text.strip() for text in text_parts(messages[-1])] if is_text_chat else None
    if (videos or images) and not parts.is_video_model:
        raise PromptError(f"{parts.family} models read text only, but the prompt has a video or an image")
    if sounds and not parts.hears:
        raise PromptError(f"{parts.family} models do not hear, but the prompt has audio")
    if len(videos) + len(images) + len(sounds) > MOST_SOURCES:
        raise PromptError(
            f"a prompt may show at most {MOST_SOURCES} videos and images, not {len(videos)} videos and "
            f"{len(images)} images" + (f", with {len(sounds)} audio files" if sounds else "")
        )
    rendered, has_template = apply_template(processor, messages, parts.is_video_model, template or {})
    query_char = None if question is None else _find_question(rendered, question)
    if query_char is None and context is not None:
        raise PromptError("the model's chat template alters the question, so its start cannot be found")
    return RenderedPrompt(
        text=rendered,
        videos=[_path(video, "a video") for video in videos],
        pictures=[Picture.of(image) for image in images],
        query_char=query_char,
        has_context=context is not None,
        has_template=has_template,
        sounds=tuple(_path(sound, "audio") for sound in sounds),
    )


def _collect_sources(messages: Sequence[Message]) -> tuple[list[Message], list[Any], list[Any], list[Any]]:
    """Put bare placeholders in place of a chat's files: the chat, its videos, images and audio files, in order."""
    plain, files = [], {"video": [], "image": [], "audio": []}
    for message in messages:
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise PromptError(f"a message needs a role and a content, got {message!r:.200}")
        content = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list | tuple):
            raise PromptError(f"a message's content must be a text or a list of parts, got {content!r:.200}")
        parts = []
        for part in content:
            if not isinstance(part, Mapping):
                raise PromptError(f"a content part must be a dictionary with a type, got {part!r:.200}")
            kind = part.get("type")
            if kind == "text":
                if not isinstance(part.get("text"), str):
                    raise PromptError(f"a text part must have a text, got {part!r:.200}")
                parts.append({"type": "text", "text": part["text"]})
                continue
            if kind not in files:
                raise PromptError(f"a content part must be text, image, video or audio, not {kind!r}")
            source = next((part[name] for name in (kind, "path") if part.get(name) is not None), None)
            if source is None:
                raise PromptError(f"{kind} parts must name a local file as {kind!r} or 'path', got {part!r:.200}")
            files[kind].append(_local(source))
            parts.append({"type": kind})
        plain.append({"role": message["role"], "content": parts})
    if not any(text.strip() for message in plain for text in text_parts(message)):
        raise PromptError("the chat is empty")
    return plain, files["video"], files["image"], files["audio"]


def _find_question(rendered: str, question: Sequence[str]) -> int | None:
    """Find where a question's last occurrence begins, whose parts may stand apart; None where one is altered."""
    start = len(rendered)
    for part in reversed([part for part in question if part]):
        start = rendered.rfind(part, 0, start)
        if start < 0:
            return None
    return None if start == len(rendered) else start


def _path(source: Any, what: str) -> str:
    """Return the path of a video or of audio, which come as files only."""
    if not isinstance(source, str | Path):
        raise PromptError(f"{what} must be a file, not of type {type(source).__name__}")
    return str(source)


def _local(source: Any) -> Any:
    """Return a source as it is, unless it is an address."""
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        raise PromptError(f"videos, images and audio must be local files, not {source:.200}")
    return source
