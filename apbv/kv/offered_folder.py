"""This module keeps a directory of KV for as long as it is offered, and removes what crashes have left."""

import fcntl
import re
import shutil
from pathlib import Path
from typing import IO

from .manifest import StorageError

_LOCK = ".offered"
_NAME = re.compile("[0-9a-f]{32}")


class OfferedFolder:
    """An OfferedFolder holds the KV of one transfer on disk until it is removed; one process owns it.

    Args:
        parent: the directory in which to make it.
        transfer: its name.

    Raises:
        StorageError: it cannot be made.
    """

    def __init__(self, parent: Path, transfer: str):
        self.path = parent / transfer
        try:
            self.path.mkdir(parents=True)
            self._lock = _locked(self.path / _LOCK, "x")
        except OSError as error:
            raise StorageError(f"cannot offer KV in {parent}: {error}") from error

    def remove(self) -> None:
        """Remove the directory with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_orphans(parent: Path) -> None:
    """Remove the folders whose owners have ended without having removed them."""
    for lock in parent.glob(f"*/{_LOCK}"):
        if not _NAME.fullmatch(lock.parent.name):
            continue
        try:
            held = _locked(lock, "r+")
        except OSError:
            continue  # it has an owner, or is being removed
        shutil.rmtree(lock.parent, ignore_errors=True)
        held.close()


def _locked(path: Path, mode: str) -> IO:
    file = open(path, mode)  # noqa: SIM115  (held until the folder is removed)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file
