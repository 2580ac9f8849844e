"""A batch's files in OpenAI's format: lines of requests, and lines of answers to continue."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import InvalidRequestError, StorageError
from ...reporting import raised_as

_HEAD = b'{"id": "batch_req_'  # every line of answers begins so
_MAY_PASS = (408, 429)  # statuses, beside all from 500 on


class Requests:
    """The lines of requests, or of one shard of them; read once.

    Args:
        path: a file or a pipe; ``-``: standard input.
        shard: I and N: lines I, I + N, …, counted from 0.

    Raises:
        InvalidRequestError: the file cannot be opened.
    """

    def __init__(self, path: Path, shard: tuple[int, int] = (0, 1)):
        self._path = Path("/dev/stdin") if str(path) == "-" else path
        self._shard = shard
        with raised_as(InvalidRequestError, f"cannot read {path}", OSError):
            self._file = self._path.open("rb")

    def lines(self, max_bytes: int) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not empty, with their numbers, from 1.

        Args:
                max_bytes: the most bytes of a usable line; a longer one is cut off behind its next
                byte.
        """
        yield from self._in_shard(_cut_lines(self._file, max_bytes + 1))

    def count(self) -> int | None:
        """Return the number of lines that are not empty; None if only reading them would tell."""
        if not self._path.is_file():
            return None
        with self._path.open("rb") as file:
            return sum(1 for _ in self._in_shard(_cut_lines(file, 2**20)))

    def _in_shard(self, lines: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
        index, size = self._shard
        for number, line in enumerate(lines, start=1):
            if (number - 1) % size == index and not line.isspace():
                yield number, line


def _cut_lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file, long ones without their ends."""
    while line := file.readline(max_bytes):
        yield line
        while line and not line.endswith(b"\n"):
            line = file.readline(max_bytes)


class Answers:
    """The file of answers, which one process at a time has open.

    Its lines are whole, and on disk when :meth:`add` returns. A last line that was not completely
    written, as by a process that was killed, is removed.

    Args:
        path: the file, which need not exist.
        retry_errors: remove errors that may pass: statuses 408, 429 and those from 500 on.

    Attributes:
        path: the file's resolved path.
        ids: the custom ids that it has.
        lines: the numbers of lines without a usable custom id that it has an error for.
        num_failed: its errors.

    Raises:
        StorageError: the file cannot be written, is in use, or holds something else.
    """

    def __init__(self, path: Path, retry_errors: bool = False):
        self.path = path.resolve()
        self.ids: set[str] = set()
        self.lines: set[int] = set()
        self.num_failed = 0
        if self.path.exists() and not self.path.is_file():
            raise StorageError(f"cannot continue {self.path}: it must be a regular file")
        with raised_as(StorageError, f"cannot write {self.path}", OSError):
            self._open(retry_errors)

    def _open(self, retry_errors: bool) -> None:
        """Open the file, read its answers, and remove what does not stay.

        With ``retry_errors`` the lines that stay are copied to another file, which replaces it.
        """
        self._file = _open_locked(self.path)
        target = self._file
        if retry_errors:
            target = _open_locked(self.path.with_name(f"{self.path.name}.part"))
            target.truncate(0)
        self._size = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                begins_as_answer = line.startswith(_HEAD) or _HEAD.startswith(line)
                if begins_as_answer and not line.endswith(b"\n"):
                    break
                if self._take(number, line, retry_errors):
                    self._size += target.write(line) if retry_errors else len(line)
        target.truncate(self._size)
        os.fsync(target.fileno())
        os.replace(target.name, self.path)
        self._file = target
        folder = os.open(self.path.parent, os.O_RDONLY)
        with suppress(OSError):  # some file systems cannot
            os.fsync(folder)
        os.close(folder)

    def _take(self, number: int, line: bytes, retry_errors: bool) -> bool:
        """Note a line's answer; return whether it is to stay."""
        reason = f"line {number} of {self.path} is not an answer"
        with raised_as(StorageError, reason, ValueError, LookupError, TypeError):
            answer = json.loads(line)
            custom_id = answer["custom_id"]
            response = answer["response"]
            error = answer["error"]
            status = 200 if response is None else response["status_code"]
            if retry_errors and (status in _MAY_PASS or status >= 500):
                return False
            if status != 200 or error is not None:
                self.num_failed += 1
            if custom_id is None:
                self.lines.add(error["line"])
            else:
                self.ids.add(custom_id)
        return True

    def add(self, request_id: str, custom_id: str | None, response: Any, error: Any = None) -> None:
        """Append an answer.

        Raises:
            OSError: it cannot be written.
        """
        answer = {
            "id": f"batch_req_{request_id}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        line = json.dumps(answer).encode() + b"\n"
        if self._file.write(line) < len(line):
            self._file.truncate(self._size)
            raise OSError("the disk is full")
        self._size += len(line)
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Leave the file to others."""
        self._file.close()


def _open_locked(path: Path) -> BinaryIO:
    """Open a file to append to, without a buffer.

    Raises:
        StorageError: another process has it open so.
    """
    file = path.open("ab", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageError(f"{path} is in use by another batch") from error
    except OSError:  # a file system without locks
        pass
    return file
