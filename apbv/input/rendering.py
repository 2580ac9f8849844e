"""Rendering what a caller asks through the model's own chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from ..model.parts import ModelParts
from .templates import Message, apply_template, text_parts
from .visual import PromptError


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as text, and the files it refers to.

    Attributes:
        text: the rendered chat template; placeholders stand for the video or the images. Empty where the caller
            gave token ids.
        video: path of the one video, or None.
        images: the images, in prompt order; one that was given as a tensor stays a tensor.
        query_char: the character of ``text`` at which the question begins, after a text context, or with the last
            message of a text chat; None otherwise.
        has_context: whether the caller told context and question apart; the last message of a chat may hold both.
        has_template: whether a chat template was applied, special tokens included.
        token_ids: the prompt as the caller gave it, where that was as token ids.
    """

    text: str
    video: str | None
    images: list[Image.Image | Tensor]
    query_char: int | None
    has_context: bool
    has_template: bool
    token_ids: tuple[int, ...] | None = None


def render_prompt(
    parts: ModelParts,
    processor,
    prompt: str | None,
    *,
    video: str | Path | None = None,
    images: Sequence[Any] | None = None,
    context: str | None = None,
    messages: Sequence[Message] | None = None,
    template: Mapping[str, Any] | None = None,
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
        template: options of the chat template, see :func:`~apbv.input.templates.apply_template`.

    Raises:
        PromptError: an empty prompt, several sources, a source the model cannot read, an unreadable image, a chat
            that the template refuses.
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
        question = [f"\n\n{prompt.strip()}"] if context is not None else None
    else:
        if any(source is not None for source in (prompt, video, context)) or images:
            raise PromptError("messages come instead of prompt, video, images and context, not beside them")
        messages, videos, images = _collect_sources(messages)
        if len(videos) > 1 or (videos and images):
            raise PromptError(
                f"a chat may hold images or one video, not {len(videos)} videos and {len(images)} images"
            )
        video = videos[0] if videos else None
        is_text_chat = len(messages) > 1 and not (videos or images)
        question = [text.strip() for text in text_parts(messages[-1])] if is_text_chat else None
    if (video is not None or images) and not parts.is_video_model:
        raise PromptError(f"{parts.family} models read text only, but the prompt has a video or an image")
    rendered, has_template = apply_template(processor, messages, parts.is_video_model, template or {})
    query_char = None if question is None else _find_question(rendered, question)
    if query_char is None and context is not None:
        raise PromptError("the model's chat template alters the question, so its start cannot be found")
    return RenderedPrompt(
        text=rendered,
        video=None if video is None else str(video),
        images=[_load_image(image) for image in images],
        query_char=query_char,
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
    if not any(text.strip() for message in plain for text in text_parts(message)):
        raise PromptError("the chat is empty")
    return plain, files["video"], files["image"]


def _find_question(rendered: str, question: Sequence[str]) -> int | None:
    """Find where a question's last occurrence begins, whose parts may stand apart; None where one is altered."""
    start = len(rendered)
    for part in reversed([part for part in question if part]):
        start = rendered.rfind(part, 0, start)
        if start < 0:
            return None
    return None if start == len(rendered) else start


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
