"""Settings that have moved into a group, and still work under their former names."""

from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, replace
from functools import wraps
from typing import Any, TypeVar

from ..reporting import warn_renamed

Config = TypeVar("Config", bound=type)


def regrouped(group: str, kind: type, names: Iterable[str] = ()) -> Callable[[Config], Config]:
    """Let a config take settings of a group as its own, as it did before they were a group.

    They work as arguments and as attributes until the next release, with a DeprecationWarning.

    Args:
        group: the config's field of the group.
        kind: the group's class. It is made of the former settings where the group's default is
            None.
        names: the settings, by default all of the group.
    """
    moved = tuple(names) or tuple(field.name for field in fields(kind))

    def decorate(config: Config) -> Config:
        target: Any = config  # whose constructor is replaced
        construct = target.__init__

        @wraps(construct)
        def construct_with_former(self, **settings: Any) -> None:
            former = {name: settings.pop(name) for name in moved if name in settings}
            for name in former:
                warn_renamed(
                    f"{config.__name__}({name}=…)",
                    f"{config.__name__}({group}={kind.__name__}({name}=…))",
                )
            if former:
                given = settings.get(group, _default(config, group))
                settings[group] = kind(**former) if given is None else replace(given, **former)
            construct(self, **settings)

        target.__init__ = construct_with_former
        for name in moved:
            setattr(config, name, _former_attribute(config, group, name))
        return config

    return decorate


def _default(config: type, group: str) -> Any:
    """Return the default of a config's field; None if it has none."""
    for field in fields(config):
        if field.name == group and field.default is not MISSING:
            return field.default
    return None


def _former_attribute(config: type, group: str, name: str) -> property:
    """Make the attribute of a setting that the group has now."""

    def read(self) -> Any:
        warn_renamed(f"{config.__name__}.{name}", f"{config.__name__}.{group}.{name}")
        return getattr(getattr(self, group), name)

    return property(read, doc=f"The former name of ``{group}.{name}``, until the next release.")
