"""Turns samples into prompts."""

import re
from collections.abc import Mapping
from typing import Any

from .samples import LETTERS, Sample

LETTERED = "{question}\n{options}\nAnswer with the option's letter from the given choices directly."
OPEN = "{question}"
_FIELD = re.compile(r"\{(question|options|subtitles)\}")


def fill(template: str, sample: Sample, subtitles: str = "") -> str:
    """Put a sample's question, its lettered options and subtitles into a template."""
    lettered = (f"{letter}. {option}" for letter, option in zip(LETTERS, sample.options, strict=False))
    values = {"question": sample.question, "options": "\n".join(lettered), "subtitles": subtitles}
    return _FIELD.sub(lambda found: values[found[1]], template)


def request_of(sample: Sample, prompt: str) -> Mapping[str, Any]:
    """Return a question with its files, as arguments of :meth:`apbv.Engine.generate`."""
    files = {"video": sample.videos, "images": sample.images, "audio": sample.audio}
    return {"prompt": prompt, **{name: list(paths) for name, paths in files.items() if paths}}
