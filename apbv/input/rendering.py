"""Rendering what a caller asks through the model's own chat template."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from ..model.parts import ModelParts
from .visual import PromptError

Message = dict[str, Any]


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as text, and the files it refers to.

    Attributes:
        text: the rendered chat template; placeholders stand for the video or the images.
        video: path of the one video, or None.
        images: the images, in prompt order; one that was given as a tensor stays a tensor.
        query_char: the character of ``text`` at which the question begins, after a text context, or with the last
            message of a text chat; None otherwise.
        has_context: whether the caller told context and question apart; the last message of a chat may hold both.
        has_template: whether a chat template was applied, special tokens included.
    """

    text: str
    video: str | None
    images: list[Image.Image | Tensor]
    query_char: int | None
    has_context: bool
    has_template: bool


def render_prompt(
    parts: ModelParts,
    processor,
    prompt: str | None,
    *,
    video: str | Path | None = None,
    images: Sequence[Any] | None = None,
    context: str | None = None,
    messages: Sequence[Message] | None = None,
) -> RenderedPrompt:
    """Render a question about at most one source, or a whole chat.

    Args:
        processor: the model's processor; for a text-only model its tokenizer.
        prompt: the question.
        video: a video file.
        images: image files, PIL images, or tensors ``[3, H, W]``, which may have a shape but no pixels.
        context: a long text that the question is about.
        messages: instead of all these, a chat in transformers' format, whose content parts name local files
            (``{"type": "video", "video": "clip.mp4"}``).

    Raises:
        PromptError: an empty prompt, several sources, a source the model cannot read, an unreadable image.
    """
    images = list(images or ())
    if messages is None:
        sources = {"video": video, "images": images or None, "context": context}
        given = [name for name, source in sources.items() if source is not None]
        if len(given) > 1:
            raise PromptError(f"a prompt is about one source, but {' and '.join(given)} were given")
        if prompt is None or not prompt.strip():
            raise PromptError("the prompt is empty")
        if context is not None and not context.strip():
            raise PromptError("the context is empty")
        content = [{"type": "video"}] if video is not None else [{"type": "image"} for _ in images]
        text = prompt.strip() if context is None else f"{context.strip()}\n\n{prompt.strip()}"
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
        question = f"\n\n{prompt.strip()}" if context is not None else None
    else:
        if any(source is not None for source in (prompt, video, context)) or images:
            raise PromptError("messages come instead of prompt, video, images and context, not beside them")
        messages, videos, images = _collect_sources(messages)
        if len(videos) > 1 or (videos and images):
            raise PromptError(
                f"a chat may hold images or one video, not {len(videos)} videos and {len(images)} images"
            )
        video = videos[0] if videos else None
        question = _text_of(messages[-1]) if len(messages) > 1 and not (videos or images) else None
    if (video is not None or images) and not parts.is_video_model:
        raise PromptError(f"{parts.family} models read text only, but the prompt has a video or an image")
    rendered, has_template = _apply_template(parts, processor, messages)
    return RenderedPrompt(
        text=rendered,
        video=None if video is None else str(video),
        images=[_load_image(image) for image in images],
        query_char=None if question is None else _find_question(rendered, question),
        has_context=context is not None,
        has_template=has_template,
    )


def _collect_sources(messages: Sequence[Message]) -> tuple[list[Message], list[Any], list[Any]]:
    """Put bare placeholders in place of a chat's files: the chat, its videos and its images, in order."""
    plain, files = [], {"video": [], "image": []}
    for message in messages:
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise PromptError(f"a message needs a role and a content, got {message!r:.200}")
        content = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        parts = []
        for part in content:
            kind = part.get("type")
            if kind == "text":
                parts.append({"type": "text", "text": part["text"]})
                continue
            if kind not in files:
                raise PromptError(f"a content part must be text, image or video, not {kind!r}")
            source = next((part[name] for name in (kind, "path") if part.get(name) is not None), None)
            if source is None or str(source).startswith(("http://", "https://")):
                raise PromptError(f"a {kind} part must name a local file as {kind!r} or 'path', got {part!r:.200}")
            files[kind].append(source)
            parts.append({"type": kind})
        plain.append({"role": message["role"], "content": parts})
    if not plain or not any(_text_of(message).strip() for message in plain):
        raise PromptError("the chat is empty")
    return plain, files["video"], files["image"]


def _text_of(message: Message) -> str:
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def _apply_template(parts: ModelParts, processor, messages: list[Message]) -> tuple[str, bool]:
    if getattr(processor, "chat_template", None) is None:
        return "\n\n".join(map(_text_of, messages)), False
    if not parts.is_video_model:  # text models' templates expect plain strings
        messages = [{**message, "content": _text_of(message)} for message in messages]
    return processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False), True


def _find_question(rendered: str, question: str) -> int:
    start = rendered.rfind(question.rstrip())
    if start < 0:
        raise PromptError("the model's chat template alters the question, so its start cannot be found")
    return start


def _load_image(image: Any) -> Image.Image | Tensor:
    if isinstance(image, Tensor):
        return image
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    try:
        with Image.open(image) as opened:
            return opened.convert("RGB")
    except Exception as error:  # of a damaged file, Pillow's decoders raise nearly anything
        raise PromptError(f"cannot read the image {image}: {error}") from error
