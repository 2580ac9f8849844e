"""Content parts of a chat's messages, in the forms in which people write them."""

from collections.abc import Mapping
from typing import Any

from ...errors import InvalidRequestError

# A type as people write it: the one that OpenAI's API has for it, or vLLM's server.
_TYPES = {
    "image": "image_url",
    "image_url": "image_url",
    "input_image": "image_url",
    "video": "video_url",
    "video_url": "video_url",
    "input_video": "video_url",
    "audio": "audio_url",
    "audio_url": "audio_url",
    "input_audio": "input_audio",
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "text",
    "thinking": "text",
}

# Options beside a file, as in qwen-vl-utils: how large an image or a video's frames are, from when
# to when a video is shown and how its frames are sampled, and others, which nothing here reads.
_EXACT = ("resized_height", "resized_width")
IMAGE_OPTIONS = ("min_pixels", "max_pixels", *_EXACT)
_BOUNDS = (("min_pixels", "max_pixels"), ("min_frames", "max_frames"), ("video_start", "video_end"))
_RATES = ("fps", "nframes", "num_frames")
VIDEO_OPTIONS = (
    *_RATES,
    "min_frames",
    "max_frames",
    "video_start",
    "video_end",
    "total_pixels",
    *IMAGE_OPTIONS,
)
OTHER_FILE_OPTIONS = (
    "audio_start",
    "audio_end",
    "start",
    "end",
    "raw_fps",
    "sample_fps",
    "do_resize",
    "do_sample_frames",
    "max_dynamic_patch",
    "min_dynamic_patch",
)


class OptionError(InvalidRequestError):
    """Raised where an option of a file does not apply, or contradicts another.

    Attributes:
        name: the option.
    """

    def __init__(self, name: str, message: str):
        super().__init__(message)
        self.name = name


def require_consistent(kind: str, given: Mapping[str, Any]) -> None:
    """Check the options beside a file, each of which is in range.

    Args:
        kind: of the part: ``"text"``, ``"image"``, ``"video"`` or ``"audio"``.
        given: values of :data:`VIDEO_OPTIONS` by name, without None.

    Raises:
        OptionError: one does not apply, or two contradict each other.
    """
    apply = {"video": VIDEO_OPTIONS, "image": IMAGE_OPTIONS}.get(kind, ())
    others = [name for name in given if name not in apply]
    if others:
        whose = "videos" if kind == "image" else "videos and images"
        raise OptionError(
            others[0], f"{', '.join(others)} beside {kind} cannot be followed: options of {whose}"
        )
    rates = [name for name in _RATES if name in given]
    if len(rates) > 1:
        raise OptionError(
            rates[0],
            f"of {', '.join(rates)} a video takes only one: either fps or nframes (num_frames)",
        )
    for low, high in _BOUNDS:
        least = given.get(low, 0)
        most = given.get(high)
        if most is not None and (least > most or (low == "video_start" and least == most)):
            article = "an" if kind == "image" else "a"
            raise OptionError(low, f"{low} of {article} {kind} is {least}, but {high} is {most}")
    exact = [name for name in _EXACT if name in given]
    if len(exact) == 1:
        raise OptionError(
            exact[0], "resized_height and resized_width are given together or not at all"
        )
    limits = [name for name in ("min_pixels", "max_pixels", "total_pixels") if name in given]
    if exact and limits:
        raise OptionError(
            limits[0],
            f"resized_height and resized_width set the size: they exclude {', '.join(limits)}",
        )


def in_openais_form(part: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return a part with the type and the field of that name that OpenAI's API has for it.

    It also takes ``{"type": "video", "video": FILE}`` from Qwen's and transformers' examples, with
    ``url``, ``path`` or ``base64`` instead of the second key, a URL as a plain string, parts
    without a type if one key tells it, and plain texts. Options of a file are put beside it, also
    if they were given with its URL. The parts of an earlier answer (``output_text``, ``refusal``,
    ``thinking``) are text, as in vLLM. A part in another form is returned as it is.
    """
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    part = dict(part)
    name = part.get("type")
    if name is None:
        keys = [key for key in _TYPES if part.get(key) is not None]
        if len(keys) == 1:
            name = keys[0]
    if not isinstance(name, str) or name not in _TYPES:
        return part
    kind = _TYPES[name]
    part["type"] = kind
    keys = [kind, name, kind.removesuffix("_url")]
    if kind.endswith("_url"):
        keys += ["url", "path", "base64"]
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
        # Move options of the file from beside its URL to beside the file.
        source = dict(source)
        for option in (*VIDEO_OPTIONS, *OTHER_FILE_OPTIONS):
            if option in source and option not in part:
                part[option] = source.pop(option)
        part[kind] = source
    return part
