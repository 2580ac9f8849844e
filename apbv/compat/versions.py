"""Installed versions of what apbv plugs into: which were tried, and what differs between them."""

import re
from functools import cache
from importlib.metadata import version

# The newest releases that the tests pass with.
NEWEST_TRIED = {"torch": (2, 15), "transformers": (5, 24), "av": (19, 0)}


@cache
def release(package: str) -> tuple[int, int]:
    """Return an installed package's major and minor version, without importing it."""
    major, minor = re.findall(r"\d+", version(package))[:2]
    return int(major), int(minor)


def untried() -> str | None:
    """Say which packages are newer than any release that apbv was tried with; None: none is."""
    newer = [
        f"{package} {version(package)} (tried: up to {'.'.join(map(str, newest))})"
        for package, newest in NEWEST_TRIED.items()
        if release(package) > newest
    ]
    return ", ".join(newer) or None


def how_to_install(extra: str) -> str:
    """Return the command that installs one of apbv's extras.

    Apbv is on no package index, only in its checkout.
    """
    return f'pip install -c constraints.txt -e ".[{extra}]" in apbv\'s checkout'


# The name by which the forward of transformers' models takes a KV cache.
CACHE_ARGUMENT = "cache" if release("transformers") >= (5, 24) else "past_key_values"
