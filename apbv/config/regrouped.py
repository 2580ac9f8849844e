"""Settings that have moved into a group, and still work under their former names."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, TypeVar

from ..reporting import warn_renamed

Config = TypeVar("Config", bound=type)


@dataclass(frozen=True)
class Moved:
    """A setting of a config that a group has now.

    Attributes:
        former: its name as a setting of the config.
        group: the config's field of the group.
        kind: the group's class. Its defaults are in force where the config has no such group.
        name: its name in the group.
    """

    former: str
    group: str
    kind: type
    name: str


def moved_under_its_name(group: str, kind: type) -> list[Moved]:
    """Return all settings of a group, which had the same names before."""
    return [Moved(field.name, group, kind, field.name) for field in fields(kind)]


def regrouped(*all_moved: Moved) -> Callable[[Config], Config]:
    """Let a config take settings of its groups as its own, as it did before they were in groups.

    They work as arguments and as attributes until the next release, with a DeprecationWarning.
    """

    def decorate(config: Config) -> Config:
        target: Any = config  # whose constructor is replaced
        construct = target.__init__

        @wraps(construct)
        def construct_with_former(self, **settings: Any) -> None:
            for moved in all_moved:
                if moved.former in settings:
                    warn_renamed(
                        f"{config.__name__}({moved.former}=…)",
                        f"{config.__name__}({moved.group}={moved.kind.__name__}({moved.name}=…))",
                    )
                    _move(moved, settings)
            construct(self, **settings)

        target.__init__ = construct_with_former
        for moved in all_moved:
            setattr(config, moved.former, _former_attribute(config, moved))
        return config

    return decorate


def _move(moved: Moved, settings: dict[str, Any]) -> None:
    """Move a setting into its group.

    One that has its default makes no group: it had no effect where the group has no place.
    """
    value = settings.pop(moved.former)
    given = settings.get(moved.group)
    defaults = moved.kind()
    group = replace(defaults if given is None else given, **{moved.name: value})
    if given is not None or group != defaults:
        settings[moved.group] = group


def _former_attribute(config: type, moved: Moved) -> property:
    """Make the attribute of a setting that a group has now."""
    group_default = next(field.default for field in fields(config) if field.name == moved.group)
    if group_default is None:
        # A config without the group has its defaults in force.
        path = f"settings_of({moved.kind.__name__}).{moved.name}"
    else:
        path = f"{moved.group}.{moved.name}"

    def read(self) -> Any:
        warn_renamed(f"{config.__name__}.{moved.former}", f"{config.__name__}.{path}")
        group = getattr(self, moved.group)
        return getattr(moved.kind() if group is None else group, moved.name)

    return property(read, doc=f"The former name of ``{path}``, until the next release.")
