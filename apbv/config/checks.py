"""Config fields with their constraints, from which the command line builds its options.

What a field means stands in the docstring of its config (:mod:`apbv.config.descriptions`).
"""

from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar

from ..errors import ApbvError, InvalidConfigError, InvalidRequestError


class Checked:
    """Validates every field of a dataclass on construction.

    A field whose default is None may be None.

    Args:
        name: prefix of a field's name in errors.
        error: raised for a wrong value.
    """

    _prefix: ClassVar[str]
    _error: ClassVar[type[ApbvError]]

    def __init_subclass__(cls, name: str = "", error: type[ApbvError] = InvalidConfigError):
        cls._prefix = name
        cls._error = error

    def __post_init__(self):
        assert is_dataclass(self), "configs are dataclasses"
        for each in fields(self):
            value = getattr(self, each.name)
            may_be = each.metadata.get("may_be")
            if may_be is None or (value is None and each.default is None):
                continue
            if not may_be(value):
                says = each.metadata["says"]
                if says is None:
                    says = f"be one of {', '.join(map(str, each.metadata['choices']))}"
                raise self._error(f"{self._prefix}{each.name} must {says}, not {value!r:.200}")


@dataclass(frozen=True)
class Allowed:
    """Which values a field may have: those of some classes that pass a test.

    True and False do not count as numbers.
    """

    kinds: tuple[type, ...]
    test: Callable[[Any], bool] | None = None

    def __call__(self, value: Any) -> bool:
        is_of_kind = isinstance(value, self.kinds) and (
            type(value) is not bool or bool in self.kinds
        )
        return is_of_kind and (self.test is None or self.test(value))


def setting(
    default: Any,
    says: str | None,
    may_be: Callable[[Any], bool],
    kind: type = str,
    choices: Collection[str | int] | None = None,
):
    """Make a field.

    Args:
        says: the requirement, for the error message; None: to be one of the choices.
        may_be: whether a value meets it.
        kind: type of the command-line option.
        choices: the allowed names.
    """
    checks = {"says": says, "may_be": may_be, "kind": kind, "choices": choices}
    return field(default=default, metadata=checks)


def switch(default: bool):
    """Make a field that is on or off."""
    return setting(default, "be true or false", Allowed((bool,)), bool)


def one_of(known: Collection[str | int], default: Any = MISSING):
    """Make a field that takes one of these values, also of those that are added to them later."""
    kind = type(next(iter(known)))
    may_be = Allowed((kind,), lambda value: value in known)
    return setting(default, None, may_be, kind, known)


def integer(low: int, high: int, default: int | None):
    """Make a field with an integer from low to high."""
    if high > 2**20:
        power = (high + 1).bit_length() - 1
        limit = f"2^{power}-1"
    elif high == 2**20:
        limit = "2^20"
    else:
        limit = str(high)
    says = f"be an integer in {low} .. {limit}"
    return setting(default, says, Allowed((int,), lambda value: low <= value <= high), int)


def number(says: str, may_be: Callable[[float], bool], default: float | None):
    """Make a field with a number."""
    return setting(default, says, Allowed((int, float), may_be), float)


def instance_of(*kinds: type, says: str | None = None, default: Any = None):
    """Make a field with an object of one of these classes."""
    return setting(default, says or f"be a {kinds[0].__name__}", Allowed(kinds))


def function():
    """Make a field with a function, or None."""
    return setting(None, "be a function", callable)


def require_type(kind: type, **given: Any) -> None:
    """Check that arguments of a request are of a class, or None.

    Raises:
        InvalidRequestError: one is not; the message names it.
    """
    for name, value in given.items():
        if value is not None and not isinstance(value, kind):
            raise InvalidRequestError(f"{name} must be a {kind.__name__}, not {value!r:.80}")
