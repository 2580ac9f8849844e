"""This module saves KV so that a crash at any moment leaves what was saved before, or nothing.

Saving again writes another subfolder and then replaces the manifest in one step.
"""

import fcntl
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
from torch import Tensor

from .manifest import MANIFEST_NAME, Manifest, Shard, StorageError, StoredFile, require_complete

_LOCK, _PROMPT, _SUBFOLDER = ".lock", "prompt.safetensors", "kv-"


class Writer:
    """A Writer saves one host's share of a prefill; all hosts have one for the same directory at the same time.

    Args:
        path: the directory, created if it is missing; all hosts must see the same one.
        generation: the subfolder, the same on all hosts.
    """

    def __init__(self, path: Path, generation: str):
        self.path, self.generation = path, generation
        self._folder, self._is_published = path / generation, False

    @staticmethod
    def new_generation() -> int:
        """Draw a number that no other save has, for :meth:`folder_name`."""
        return secrets.randbits(62)

    @staticmethod
    def folder_name(generation: int) -> str:
        """Return the name of a generation's subfolder."""
        return f"{_SUBFOLDER}{generation:016x}"

    def write_shard(
        self,
        number: int,
        first_layer: int,
        tokens: Sequence[range],
        kv_heads: range,
        layers: Sequence[tuple[Tensor, Tensor]],
    ) -> Shard:
        """Write this host's share of a group of layers, layer by layer.

        Args:
            number: the shard's number, different for every writer.
            first_layer: the group's first layer.
            tokens: ascending runs of token numbers.
            kv_heads: the range of KV heads.
            layers: keys and values ``[1, H_kv, T, D]``, rows in the order of ``tokens``.
        """
        files = tuple(
            self._write(
                f"layer-{index:05d}.shard-{number:05d}.safetensors",
                {"keys": keys[0].contiguous(), "values": values[0].contiguous()},
            )
            for index, (keys, values) in enumerate(layers, first_layer)
        )
        runs = tuple((run.start, run.stop) for run in tokens if len(run))
        return Shard(runs, (kv_heads.start, kv_heads.stop), files)

    def write_prompt(self, logits: Tensor, position_ids: Tensor) -> StoredFile:
        """Write what :meth:`apbv.kv.reader.SavedKV.prompt` reads."""
        return self._write(_PROMPT, {"logits": logits.contiguous(), "position_ids": position_ids.contiguous()})

    def publish(self, manifest: Manifest) -> None:
        """Check that all hosts' files are here, and replace the manifest by one that names them.

        Raises:
            StorageError: a file is missing, because the hosts do not share the directory.
        """
        for file in manifest.files():
            path = self._folder / file.name
            if not path.exists() or path.stat().st_size != file.bytes:
                raise StorageError(f"{path} is missing: every host has to see the same directory {self.path}")
        require_complete(manifest, self.path)
        fresh = self._folder / MANIFEST_NAME  # until it is moved, a failed save removes it with the rest
        _write_to_disk(fresh, manifest.to_json().encode())
        _sync_folder(self._folder)
        os.replace(fresh, self.path / MANIFEST_NAME)
        self._is_published = True
        _sync_folder(self.path)
        for leftover in self.path.glob(f"{_SUBFOLDER}*"):
            if leftover.name != self.generation:
                shutil.rmtree(leftover, ignore_errors=True)

    def discard(self) -> None:
        """Remove what a failed save has written; do nothing after :meth:`publish`."""
        if not self._is_published:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, name: str, tensors: dict[str, Tensor]) -> StoredFile:
        content = safetensors.torch.save({key: tensor.cpu() for key, tensor in tensors.items()})
        _write_to_disk(self._folder / name, content)
        return StoredFile(name, len(content), zlib.crc32(content))


@contextmanager
def lock_for_saving(path: Path) -> Iterator[None]:
    """Create a directory if it is missing, and keep other processes from saving to it.

    Raises:
        StorageError: another process is saving there, or the directory cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / _LOCK, "w")  # noqa: SIM115  (closed below, and with the process)
    except OSError as error:
        raise StorageError(f"cannot save KV in {path}: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StorageError(f"another process is saving KV in {path}") from None
        yield


def _write_to_disk(path: Path, content: bytes) -> None:
    """Write a file to the disk, not only to the operating system's memory."""
    try:
        path.parent.mkdir(exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def _sync_folder(path: Path) -> None:
    """Write the names of a folder's files to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
