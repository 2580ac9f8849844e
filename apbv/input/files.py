"""Recognising a file that was read before."""

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileIdentity:
    """A file's path, size and date when it was looked at; where they are equal, the content counts as the same.

    Attributes:
        path: absolute, without links.
        size: bytes.
        mtime_ns: when it was last written, in nanoseconds.
    """

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str | Path) -> "FileIdentity":
        """Look at a file.

        Raises:
            OSError: there is no such file.
        """
        path = Path(path).resolve()
        found = path.stat()
        return cls(str(path), found.st_size, found.st_mtime_ns)

    def sha256(self) -> str:
        """Compute the SHA-256 of the file's content.

        Raises:
            ValueError: the file is not there any more, or was written since.
        """
        digest = hashlib.sha256()
        try:
            with open(self.path, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            is_same = FileIdentity.of(self.path) == self
        except OSError as error:
            raise ValueError(f"cannot read {self.path} again: {error}") from error
        if not is_same:
            raise ValueError(f"{self.path} was changed after it was read")
        return digest.hexdigest()
