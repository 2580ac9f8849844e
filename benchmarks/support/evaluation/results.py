"""Keeps answers in files of JSON Lines, so that an interrupted run goes on where it ended."""

import fcntl
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO


@dataclass
class Run:
    """The answers of one set of settings.

    Attributes:
        settings: what the answers depend on.
        records: the answers by the samples' keys, each with a ``text`` or an ``error``.
    """

    settings: Mapping[str, Any]
    records: dict[str, dict] = field(default_factory=dict)


def digest_of(settings: Mapping[str, Any]) -> str:
    """Return a short name for settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


class ResultsFile:
    """File with the answers of a run: its settings in the first line, and one answer in each other line.

    A line that was being written when a run was killed is taken off. No other process can write to it at the same
    time, where its file system has locks.

    Args:
        path: the file, which is created if it is missing.
        settings: what the answers depend on.

    Attributes:
        answered: the records in the file, by key; those of questions that failed are left out, to be tried again.

    Raises:
        ValueError: the file was written with other settings, is not a results file, or another process is writing
            to it; it stays as it is.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise ValueError(f"cannot keep results in {path}: {error}") from error
        try:
            _lock(self._file, path)
            self.answered = self._read(settings)
        except BaseException:
            self.close()
            raise

    def _read(self, settings: Mapping[str, Any]) -> dict[str, dict]:
        self._file.seek(0)
        text = self._file.read()
        length = text.rfind(b"\n") + 1  # of whole lines
        if not length and text and not text.startswith(b'{"settings":'):
            raise ValueError(f"{self.path} holds no results; take another file")
        runs = read_runs([self.path])
        for run in runs:
            _require_same(run.settings, settings, self.path)
        self._file.truncate(length)
        if not length:
            self.add({"settings": settings})
        return {key: record for run in runs for key, record in run.records.items() if "error" not in record}

    def add(self, record: Mapping) -> None:
        """Write an answer; it is in the file when this returns."""
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another process is writing to {path}; give each run and each shard a file") from None
    except OSError:
        pass  # a file system without locks


def _require_same(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    differing = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
    if differing:
        said = ", ".join(f"{name} {found.get(name)!r} and not {wanted.get(name)!r}" for name in differing)
        raise ValueError(f"{path} has answers with other settings: {said}; take another file")


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read files of results, and merge those with the same settings: shards, and parts of interrupted runs.

    Of a question that was asked twice the later answer counts, unless it failed. A last line that is cut off is
    left out.

    Raises:
        ValueError: a file cannot be read, or holds something else.
    """
    runs: dict[str, Run] = {}
    for path in paths:
        run = None
        for number, line in enumerate(_whole_lines(path), start=1):
            if isinstance(line, dict) and isinstance(line.get("settings"), dict):
                run = runs.setdefault(digest_of(line["settings"]), Run(line["settings"]))
            elif run is None or not isinstance(line, dict) or not ({"text", "error"} & line.keys()):
                raise ValueError(f"{path}, line {number}: not a result of these benchmarks")
            elif "error" not in line or "error" in run.records.get(line["key"], {"error": None}):
                run.records[line["key"]] = line
    return list(runs.values())


def _whole_lines(path: Path) -> list[Any]:
    try:
        text = path.read_bytes()
        lines = text[: text.rfind(b"\n") + 1].decode().split("\n")
        return [json.loads(line) for line in lines if line]
    except OSError as error:
        raise ValueError(f"cannot read the results {path}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} holds no results: {error}") from None
