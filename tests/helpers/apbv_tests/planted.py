"""Errors that are raised on one host: of each kind, and faults of the package, which are of none.

They are planted where a host reads the prompt, a stage without exchanges, or in the forward pass of
the language model, within exchanges.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from apbv import errors
from apbv.input.media.video import VideoError
from apbv.input.prompts.prompt_reader import PromptReader
from apbv.prefilling import forward


def mismatched_lengths() -> None:
    """What a mistake in a kernel's wrapper looks like."""
    list(zip([1, 2], [1], strict=True))


def wrong_invariant() -> None:
    raise AssertionError("the rows are not those of the layout")


class ConnectionLost(Exception):
    """An error of somebody's library, which has attributes of the names that ours have."""

    host = "example.org"
    stage = "connecting"
    code = "invalid_request"
    kind = "backend"


@dataclass(frozen=True)
class Planted:
    """An error, and what becomes of it on every host.

    Attributes:
        raised: the error, or a function that raises it.
        kind: the class of the error that every host raises; None for a fault: the host where it
            happened raises it itself, and the others a HostError.
        exit_status: of a program that it ends, on the host where it happened.
        http_status: of a server's reply.
    """

    raised: object
    kind: type[errors.ApbvError] | None
    exit_status: int
    http_status: int

    def go_off(self, *_, **__) -> None:
        """Raise the error."""
        if isinstance(self.raised, BaseException):
            raise self.raised
        self.raised()


PLANTED = {
    "request": Planted(
        errors.InvalidRequestError("the prompt is odd"), errors.InvalidRequestError, 65, 400
    ),
    "video": Planted(VideoError("a.mp4: no such file"), VideoError, 65, 400),
    "config": Planted(
        errors.InvalidConfigError("the lengths do not fit"), errors.InvalidConfigError, 78, 400
    ),
    "model": Planted(
        errors.UnsupportedModelError("no such layer"), errors.UnsupportedModelError, 79, 400
    ),
    "memory": Planted(
        errors.NotEnoughMemoryError("too little memory"), errors.NotEnoughMemoryError, 71, 503
    ),
    "storage": Planted(errors.StorageError("it is not stored"), errors.StorageError, 74, 503),
    "backend": Planted(
        errors.BackendUnavailableError("no such kernel"), errors.BackendUnavailableError, 69, 503
    ),
    "host": Planted(errors.HostError("the network is cut"), errors.HostError, 75, 500),
    "output": Planted(
        errors.ModelOutputError("NaN or infinite logits"), errors.ModelOutputError, 70, 500
    ),
    # Errors of Python and torch that stand for a kind.
    "allocator": Planted(
        torch.OutOfMemoryError("CUDA out of memory"), errors.NotEnoughMemoryError, 71, 503
    ),
    "allocator of a CPU": Planted(
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        errors.NotEnoughMemoryError,
        71,
        503,
    ),
    "full disk": Planted(
        OSError(errno.ENOSPC, "No space left on device"), errors.StorageError, 74, 503
    ),
    # Faults of the package.
    "lengths": Planted(mismatched_lengths, None, 70, 500),
    "invariant": Planted(wrong_invariant, None, 70, 500),
    "library": Planted(ConnectionLost("the site is gone"), None, 70, 500),
    "runtime": Planted(RuntimeError("the stream is gone"), None, 70, 500),
}
PLACES = {"reading": (PromptReader, "read"), "prefill": (forward, "run_prompt")}


@contextmanager
def planted(name: str, place: str) -> Iterator[None]:
    """Have this host meet an error wherever it comes to a place."""
    owner, function = PLACES[place]
    with mock.patch.object(owner, function, PLANTED[name].go_off):
        yield


def script_with(folder: Path, script: Path, name: str, place: str, host: int) -> Path:
    """A script that is another one, but for an error on one of its hosts."""
    path = folder / "planted_script.py"
    path.write_text(
        f"""
import os
import runpy
import sys

from apbv_tests.planted import planted
from contextlib import nullcontext

is_bad = os.environ.get("RANK", "0") == "{host}"
sys.argv[0] = {str(script)!r}
with planted({name!r}, {place!r}) if is_bad else nullcontext():
    runpy.run_path({str(script)!r}, run_name="__main__")
"""
    )
    return path
