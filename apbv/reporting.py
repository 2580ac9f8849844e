"""Warnings that point at the line of the caller's code, and errors.

The errors say what failed, or end a script.
"""

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# A decorator or a context manager adds a frame of its own module to the stack.
_PASSED_THROUGH = ("torch.utils._contextlib", "contextlib")


def warn_renamed(former: str, name: str) -> None:
    """Warn the caller of the caller that a former name goes with the next release."""
    warnings.warn(f"{former} is now {name}", DeprecationWarning, stacklevel=3)


def warn_caller(message: str) -> None:
    """Warn as if the innermost line outside this package did.

    Python shows a line's warning once.
    """
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level = level + 1
        frame = frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "apbv" or module in _PASSED_THROUGH


@contextmanager
def raised_as(kind: type[Exception], what: str, *caught: type[Exception]) -> Iterator[None]:
    """Replace errors of some types in the body by one that says what failed, and why.

    Raises:
        kind: one of them was caught.
    """
    try:
        yield
    except caught as error:
        raise kind(f"{what}: {error}") from error


def report_fault(error: BaseException) -> None:
    """Print the traceback of a fault of this package, which ends this process."""
    report_error("".join(traceback.format_exception(error)).rstrip(), on_every_process=True)


def report_error(text: str, on_every_process: bool = False) -> None:
    """Print the reason why this process exits.

    Under torchrun once per machine, and in torchrun's summary, too.

    Args:
        on_every_process: print it here even if another process of this machine prints its own.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            extra = {"timestamp": str(int(time.time()))}  # as torchrun's record has it
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if path is None or is_first or on_every_process:
        sys.stderr.write(f"{text}\n")  # one write: hosts share the terminal
