"""Compares what must be the same on every process of a host group, and says what differs."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ErrorReport

_MOST_CHARACTERS = 120  # of a value that a message quotes


class Agreement:
    """What must be the same on every process at the end of a stage."""

    def __init__(self) -> None:
        self._values: dict[str, str | Mapping[str, Any]] = {}

    def content(self, what: str, data: bytes) -> None:
        """Require equal bytes; an error names them without quoting.

        Args:
            what: the name, with an article: ``"the prompt"``.
            data: compared by its digest.
        """
        self._values[what] = hashlib.sha256(data).hexdigest()

    def settings(self, what: str, values: Mapping[str, Any]) -> None:
        """Require equal settings; an error quotes those that differ.

        Args:
            what: the name, with an article: ``"the request"``.
            values: by the settings' names, JSON-ready.
        """
        self._values[what] = values

    @property
    def values(self) -> Mapping[str, str | Mapping[str, Any]]:
        """The digests and settings by name, JSON-ready: two are equal only if everything agrees."""
        return self._values


@dataclass(frozen=True)
class StageReport:
    """How a stage ended on one process, as it is sent to the others.

    Attributes:
        error: the error; None: it ended well.
        values: :attr:`Agreement.values`.
    """

    error: ErrorReport | None
    values: Mapping[str, Any]

    @classmethod
    def of(cls, error: Exception | None, agreement: Agreement) -> "StageReport":
        """Return the report of this process."""
        return cls(None if error is None else ErrorReport.of(error), agreement.values)

    def to_json(self) -> list[Any]:
        """Return the report JSON-ready, for :meth:`from_json` on another process."""
        return [None if self.error is None else self.error.to_json(), self.values]

    @classmethod
    def from_json(cls, fields: list[Any]) -> "StageReport":
        """Return the report that :meth:`to_json` made."""
        error, values = fields
        return cls(None if error is None else ErrorReport.from_json(error), values)

    @property
    def digest(self) -> bytes:
        """A digest of the report, by which processes find that all of theirs are equal."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).digest()


def describe_difference(
    first: Mapping[str, Any], other: Mapping[str, Any], first_name: str, other_name: str
) -> str | None:
    """Describe the first difference between two processes' agreements; None if there is none.

    Args:
        first, other: their :attr:`Agreement.values`, after a transfer as JSON.
        first_name, other_name: the names of the processes.
    """
    for what, value in first.items():
        # What only one of them requires comes last.
        if what not in other or value == other[what]:
            continue
        if isinstance(value, str):
            return f"{what} of {other_name} differs from that of {first_name}"
        differences = []
        for name in _names_that_differ(value, other[what]):
            other_value = _quoted(_value(other[what], name))
            first_value = _quoted(_value(value, name))
            differences.append(
                f"{name} is {other_value} on {other_name}, but {first_value} on {first_name}"
            )
        return f"{what} must be the same on every host: {'; '.join(differences)}"
    if first.keys() != other.keys():
        return f"{other_name} makes another call than {first_name}"
    return None


def _names_that_differ(
    first: Mapping[str, Any], other: Mapping[str, Any], prefix: str = ""
) -> list[str]:
    """Return the names of the settings that differ.

    Nested settings are named with dots: ``prefill.method``.
    """
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
