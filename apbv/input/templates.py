"""Applying a model's chat template to a chat, so that the prompt is the one that vLLM makes of the same chat.

What another server continues from are the KV of exactly its own tokens.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .visual import PromptError

Message = dict[str, Any]

_PROBE = "probe"


def text_parts(message: Message) -> list[str]:
    """Return the texts of a message whose content is a list of parts."""
    return [part["text"] for part in message["content"] if part["type"] == "text"]


def apply_template(
    processor, messages: Sequence[Message], has_parts: bool, options: Mapping[str, Any]
) -> tuple[str, bool]:
    """Render a chat.

    Args:
        processor: the model's processor; for a text-only model its tokenizer.
        messages: the chat, every content a list of parts.
        has_parts: whether the template is known to read lists of parts, as those of models that see do.
        options: ``add_generation_prompt`` (default True), ``continue_final_message`` (default False) as
            transformers has them, and values of the template's own variables.

    Returns:
        The prompt, and whether there is a template; without one the texts stand below one another.

    Raises:
        PromptError: an option is no variable of a template but an argument of transformers' call, or the template
            refuses the chat.
    """
    template = _template_of(processor)
    if template is None:
        return "\n\n".join("".join(text_parts(message)) for message in messages), False
    chat = _without_developers(messages) if not re.search("""["']developer["']""", template) else list(messages)
    if not (has_parts or _reads_parts(processor)):
        chat = [{**message, "content": "\n".join(filter(None, text_parts(message)))} for message in chat]
    options = {"add_generation_prompt": True, **options}
    if options["add_generation_prompt"] and options.get("continue_final_message"):
        raise PromptError("continue_final_message needs add_generation_prompt to be false")
    options = _known(processor, template, options)
    try:
        return processor.apply_chat_template(chat, tokenize=False, **options), True
    except Exception as error:  # templates raise what they like
        raise PromptError(f"the chat template refuses the chat: {error}") from error


def _template_of(processor) -> str | None:
    """Return the chat template's text; of several templates that of the default one."""
    template = getattr(processor, "chat_template", None)
    return template.get("default") if isinstance(template, Mapping) else template


def _reads_parts(processor) -> bool:
    """Return whether the chat template reads a content that is a list of parts, and not a string only."""
    chat = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
    try:
        rendered = processor.apply_chat_template(chat, add_generation_prompt=False, tokenize=False)
    except Exception:  # of whatever kind: a string is what it wants
        return False
    return _PROBE in rendered and "'type'" not in rendered  # else it left the list out, or printed it


def _without_developers(messages: Sequence[Message]) -> list[Message]:
    """Make a developer's messages system messages, and one of them all at the chat's beginning."""
    if not any(message["role"] == "developer" for message in messages):
        return list(messages)
    is_system = [message["role"] in ("system", "developer") for message in messages]
    if is_system.index(True) == 0 and sum(is_system) == 1:
        return [{**messages[0], "role": "system"}, *messages[1:]]
    texts = ["\n".join(text_parts(message)) for message, system in zip(messages, is_system, strict=True) if system]
    merged = {"role": "system", "content": [{"type": "text", "text": "\n\n".join(filter(None, texts))}]}
    return [merged, *(message for message, system in zip(messages, is_system, strict=True) if not system)]


def _known(processor, template: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a template reads.

    Raises:
        PromptError: one is an argument of transformers' call.
    """
    variables = options.keys() - {"add_generation_prompt", "continue_final_message"}
    if reserved := variables & inspect.signature(processor.apply_chat_template).parameters.keys():
        raise PromptError(f"chat_template_kwargs: {min(reserved)!r} is no variable of a chat template")
    unknown = {name for name in variables if not re.search(rf"\b{re.escape(name)}\b", template)}
    return {name: value for name, value in options.items() if name not in unknown}
