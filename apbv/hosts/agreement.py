"""Compares what must be the same on every process of a host group, and says what differs."""

import hashlib
from collections.abc import Mapping
from typing import Any

# What is compared: bytes by their digest, which a message cannot quote, or settings by name, which
# it quotes.
Fact = bytes | Mapping[str, Any]

_MOST_CHARACTERS = 120


def comparable(facts: Mapping[str, Fact]) -> dict[str, str | Mapping[str, Any]]:
    """Return facts as JSON-ready values, which are equal only if the facts are: bytes become their
    digest."""
    return {
        what: hashlib.sha256(fact).hexdigest() if isinstance(fact, bytes) else fact
        for what, fact in facts.items()
    }


def describe_difference(
    first: Mapping[str, Any], other: Mapping[str, Any], first_name: str, other_name: str
) -> str | None:
    """Describe how the facts of two processes differ; None if they are equal.

    Args:
        first, other: what :func:`comparable` returned there, after a transfer as JSON.
        first_name, other_name: the names of the processes.
    """
    for what, fact in first.items():
        if what not in other or fact == other[what]:
            continue
        if isinstance(fact, str):
            return f"{what} of {other_name} differs from that of {first_name}"
        names = _names_that_differ(fact, other[what])
        said = [
            f"{name} is {_quoted(_value(other[what], name))} on {other_name}, but "
            f"{_quoted(_value(fact, name))} on "
            f"{first_name}"
            for name in names
        ]
        return f"{what} must be the same on every host: {'; '.join(said)}"
    if first.keys() != other.keys():
        return f"{other_name} makes another call than {first_name}"
    return None


def _names_that_differ(
    first: Mapping[str, Any], other: Mapping[str, Any], prefix: str = ""
) -> list[str]:
    """Return the names of the settings that differ; of settings within a setting with dots:
    ``prefill.method``."""
    names = []
    for name in dict.fromkeys([*first, *other]):
        mine = first.get(name)
        theirs = other.get(name)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            names += _names_that_differ(mine, theirs, f"{prefix}{name}.")
        elif mine != theirs:
            names.append(prefix + name)
    return names


def _value(settings: Mapping[str, Any], name: str) -> Any:
    """Return the value of a setting, by its name with dots."""
    value: Any = settings
    for part in name.split("."):
        value = value.get(part)
    return value


def _quoted(value: Any) -> str:
    """Quote a value for a message, in one line and not at length."""
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
