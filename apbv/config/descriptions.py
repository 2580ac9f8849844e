"""What the docstring of a config says of each field, for the command line and for tables."""

import inspect
import re
from typing import NamedTuple

_ENTRY = re.compile(r"    (\w+(?:, \w+)*): (.*)")
# A sentence ends at a full stop that is not of a range or an abbreviation.
_END_OF_SENTENCE = re.compile(r"(?<=[^ .]\.) (?=[^a-z])")
_ROLE = re.compile(r":\w+:`~?\.*(?:[\w.]*\.)?(\w+)`")
_CODE = re.compile(r"``\"?(.+?)\"?``")


class Description(NamedTuple):
    """What a docstring says of a field.

    Attributes:
        text: all of it; names and values are marked as code.
        summary: the first sentence, without its full stop and as plain text.
        default: what None stands for, as plain text; None: the docstring does not say it.
        codes: the names and values that the summary or the default mentions as code.
    """

    text: str
    summary: str
    default: str | None
    codes: tuple[str, ...]


def describe(config: type, field_name: str) -> Description:
    """Return the description of a field in the docstring of its class, or of one above that.

    In its section "Attributes" a field's first sentence is the summary, and a sentence that begins
    with "None: " says what the default stands for.

    Raises:
        KeyError: the field is not described.
    """
    for owner in config.__mro__:
        text = _attributes(owner).get(field_name)
        if text is not None:
            break
    else:
        raise KeyError(f"{config.__name__} does not describe {field_name}")
    text = _ROLE.sub(r"``\1``", text)
    sentences = _END_OF_SENTENCE.split(text)
    summary = sentences[0].removesuffix(".")
    default = None
    for sentence in sentences[1:]:
        if sentence.startswith("None: "):
            default = sentence.removeprefix("None: ").removesuffix(".")
            break
    codes = tuple(_CODE.findall(f"{summary} {default or ''}"))
    return Description(
        text=text,
        summary=_plain(summary),
        default=None if default is None else _plain(default),
        codes=codes,
    )


def _plain(text: str) -> str:
    return _CODE.sub(r"\1", text)


def _attributes(owner: type) -> dict[str, str]:
    """Return the entries of a class's section "Attributes" by name, each as one line."""
    entries: dict[str, str] = {}
    names: list[str] = []
    is_inside = False
    for line in inspect.cleandoc(owner.__dict__.get("__doc__") or "").splitlines():
        entry = _ENTRY.fullmatch(line)
        if line == "Attributes:":
            is_inside = True
        elif not line.startswith("    "):
            is_inside = is_inside and not line  # another section ends it, an empty line does not
        elif is_inside and entry is not None:
            names = entry[1].split(", ")
            entries |= dict.fromkeys(names, entry[2])
        elif is_inside:
            for name in names:
                entries[name] += f" {line.strip()}"
    return entries
