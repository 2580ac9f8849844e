"""Settings that have moved into a group, and still work under their former names."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from typing import Any, TypeVar

from ..reporting import warn_renamed

Config = TypeVar("Config", bound=type)


def regrouped(group: str, kind: type) -> Callable[[Config], Config]:
    """Let a config take settings of a group as its own, as it did before they were a group.

    They work as arguments and as attributes until the next release, with a DeprecationWarning.

    Args:
        group: the config's field of the group.
        kind: the group's class, whose defaults are those of the config.
    """
    moved = [field.name for field in fields(kind)]

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
                settings[group] = replace(settings.get(group, kind()), **former)
            construct(self, **settings)

        target.__init__ = construct_with_former
        for name in moved:
            setattr(config, name, _former_attribute(config, group, name))
        return config

    return decorate


def _former_attribute(config: type, group: str, name: str) -> property:
    """Make the attribute of a setting that the group has now."""

    def read(self) -> Any:
        warn_renamed(f"{config.__name__}.{name}", f"{config.__name__}.{group}.{name}")
        return getattr(getattr(self, group), name)

    return property(read, doc=f"The former name of ``{group}.{name}``, until the next release.")
