"""Content parts of a chat's messages, in the forms in which people write them."""

from collections.abc import Mapping
from typing import Any

_FILES = ("image", "video", "audio")
# A type as people write it: the one that OpenAI's API has for it, or vLLM's server.
_TYPES = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "text", "thinking": "text"}
_TYPES |= {"input_audio": "input_audio"}
_TYPES |= {name: f"{kind}_url" for kind in _FILES for name in (kind, f"{kind}_url", f"input_{kind}")} | _TYPES

# Options beside a file, as in qwen-vl-utils: how a video's frames are sampled and how large they are, and others, which
# nothing here reads.
VIDEO_OPTIONS = ("fps", "nframes", "num_frames", "max_frames", "min_pixels", "max_pixels")
OTHER_FILE_OPTIONS = (
    "min_frames",
    "total_pixels",
    "resized_height",
    "resized_width",
    "video_start",
    "video_end",
    "start",
    "end",
    "raw_fps",
    "sample_fps",
    "do_resize",
    "do_sample_frames",
    "max_dynamic_patch",
    "min_dynamic_patch",
)


def in_openais_form(part: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return a part with the type and the field of that name that OpenAI's API has for it.

    Taken are also ``{"type": "video", "video": FILE}`` as in Qwen's and transformers' examples, there also with
    ``url``, ``path`` or ``base64``, a URL as a plain string, parts without a type if one key says it, and plain
    texts. Options of a file stand beside it, also if they were given with its URL. What an earlier answer consists of
    (``output_text``, ``refusal``, ``thinking``) is text, as in vLLM. A part in no such form is returned as it is.
    """
    part = {"type": "text", "text": part} if isinstance(part, str) else dict(part)
    name = part.get("type")
    if name is None:
        said = [key for key in _TYPES if part.get(key) is not None]
        name = said[0] if len(said) == 1 else None
    if not isinstance(name, str) or name not in _TYPES:
        return part
    part["type"] = kind = _TYPES[name]
    keys = (kind, name, kind.removesuffix("_url"), *(("url", "path", "base64") if kind.endswith("_url") else ()))
    key = next((key for key in keys if part.get(key) is not None), None)
    if key is None:
        return part
    source = part.pop(key)
    if key == "base64" and isinstance(source, str):
        source = f"data:;base64,{source.rpartition(',')[2]}"
    if not kind.endswith("_url"):
        part[kind] = source
    elif not isinstance(source, Mapping):
        part[kind] = {"url": source}
    else:
        inside = {name for name in (*VIDEO_OPTIONS, *OTHER_FILE_OPTIONS) if name in source and name not in part}
        part[kind] = {name: value for name, value in source.items() if name not in inside}
        part |= {name: source[name] for name in inside}
    return part
