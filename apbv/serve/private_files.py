"""Temporary files for the bytes that requests bring."""

import hashlib
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class PrivateFiles:
    """Files that only this user can read, in a folder that is deleted in the end; for any thread."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="apbv-")
        self._lock = threading.Lock()
        self._num_users: Counter[str] = Counter()  # of a file, by name
        self._is_closed = False

    def __enter__(self) -> "PrivateFiles":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Delete the folder, and let nobody make files any more."""
        with self._lock:
            self._is_closed = True
            self._folder.cleanup()

    @contextmanager
    def holding(self, data: bytes) -> Iterator[Path]:
        """Provide a file with this content, which is gone when nobody uses it any more.

        The same bytes are always the same file, by name and date, so that :mod:`apbv.prefilling.reuse` knows it
        again.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: after :meth:`close`.
        """
        name = hashlib.sha256(data).hexdigest()
        path = Path(self._folder.name, name)
        with self._lock:
            if self._is_closed:  # a file that was still being fetched would be left behind
                raise RuntimeError("the server has stopped")
            if not self._num_users[name]:
                _write(path, data)
            self._num_users[name] += 1
        try:
            yield path
        finally:
            with self._lock:
                self._num_users[name] -= 1
                if not self._num_users[name]:
                    del self._num_users[name]
                    path.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(0o700, exist_ok=True)  # whoever tidies up temporary files may have removed it
        path.touch(0o600)
        path.write_bytes(data)
        os.utime(path, (0, 0))
    except OSError:
        path.unlink(missing_ok=True)
        raise
