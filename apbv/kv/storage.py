"""A prefilled prompt on disk: KV as safetensors, and a manifest that says what it is.

A directory holds ``manifest.json`` and, in the subfolder that the manifest names, ``prompt.safetensors`` with
``logits [1, V]`` and ``position_ids`` (``[3, n]`` for M-RoPE models, else ``[n]``), and for every layer and shard
one file with ``keys`` and ``values``, ``[H_kv, T, D]``, after RoPE, in token order. A shard is what one writer
held: some runs of tokens, and a range of KV heads.

Saving again writes another subfolder and then replaces the manifest in one step, so that a crash at any moment
leaves the old state or none. Sizes, checksums and a digest of the manifest tell what was cut off or changed.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..layout import intersect

FORMAT, FORMAT_VERSION = "apbv-kv", 1
_MANIFEST, _LOCK, _PROMPT, _SUBFOLDER = "manifest.json", ".lock", "prompt.safetensors", "kv-"


class StorageError(ValueError):
    """Saved KV cannot be written, read or used; the message says why."""


@dataclass(frozen=True)
class StoredFile:
    """A file in the manifest's subfolder."""

    name: str
    bytes: int
    crc32: int

    def __post_init__(self):
        if Path(self.name).name != self.name:
            raise StorageError(f"a manifest names the file {self.name!r}, which is not in its folder")


@dataclass(frozen=True)
class Shard:
    """What one writer held.

    Attributes:
        tokens: runs ``[start, stop)`` of token numbers, ascending.
        kv_heads: the range ``[start, stop)`` of KV heads.
        files: one per layer.
    """

    tokens: tuple[tuple[int, int], ...]
    kv_heads: tuple[int, int]
    files: tuple[StoredFile, ...]

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Shard":
        """Out of JSON."""
        return cls(
            tokens=tuple(map(tuple, record["tokens"])),
            kv_heads=tuple(record["kv_heads"]),
            files=tuple(StoredFile(**file) for file in record["files"]),
        )


@dataclass(frozen=True)
class ModelIdentity:
    """Which model computed the KV.

    Attributes:
        name: where it was loaded from.
        revision: the hub's commit; None for a directory.
        family: its ``model_type``.
        config_sha256: of its configuration (see :mod:`apbv.model.digest`).
        weights_sha256: of its language model, which tells fine-tuned siblings apart.
    """

    name: str
    revision: str | None
    family: str
    config_sha256: str
    weights_sha256: str


@dataclass(frozen=True)
class VisualIdentity:
    """What a prompt shows.

    Attributes:
        kind: ``"video"`` or ``"image"``.
        num_tokens: placeholders, all images together.
        sha256: of the video file; None where the caller prepared the pixels.
    """

    kind: str
    num_tokens: int
    sha256: str | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a directory holds.

    Attributes:
        generation: the subfolder with the tensors.
        num_tokens: n.
        token_ids: the whole prompt.
        context_start, query_start: as in :class:`apbv.ModelInputs`.
        positions: whose rule gave the rotary positions, ``"transformers"`` or ``"vllm"``.
        rope_delta: the largest position plus one, minus n, where positions are not 0 .. n-1; else None.
        method: the method that ran; ``exact``: whether its KV is that of full attention.
        anchor_len, passing_len: l_a and l_p.
    """

    generation: str
    apbv_version: str
    model: ModelIdentity
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int
    token_ids: tuple[int, ...]
    context_start: int
    query_start: int
    positions: str
    rope_delta: int | None
    visual: VisualIdentity | None
    method: str
    exact: bool
    anchor_len: int
    passing_len: int
    prompt: StoredFile
    shards: tuple[Shard, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


class SavedKV:
    """A prompt's KV on disk, checked when opened and again when read.

    Attributes:
        path: the directory.
        manifest: what it holds.
    """

    def __init__(self, path: Path, manifest: Manifest):
        self.path, self.manifest = path, manifest

    @classmethod
    def open(cls, path: str | Path) -> "SavedKV":
        """Read and check a directory's manifest, and that its files are there in full size.

        Raises:
            StorageError: it is missing, of another format, incomplete, or was changed.
        """
        path = Path(path)
        try:
            saved = cls(path, _read_manifest(path, json.loads((path / _MANIFEST).read_text(encoding="utf-8"))))
        except StorageError:
            raise
        except FileNotFoundError:
            raise StorageError(f"there is no saved KV in {path}: it has no {_MANIFEST}") from None
        except (OSError, ValueError, RecursionError) as error:  # what is no JSON, or nested or long beyond reason
            raise StorageError(f"cannot read {path / _MANIFEST}: {error}") from error
        for file in saved._files():
            try:
                size = (saved._folder / file.name).stat().st_size
            except OSError as error:
                raise StorageError(f"saved KV in {path} is incomplete: {error}") from error
            if size != file.bytes:
                raise StorageError(f"{saved._folder / file.name} has {size} bytes instead of {file.bytes}")
        return saved

    def prompt(self) -> dict[str, Tensor]:
        """``logits [1, V]`` of the last token and ``position_ids``, ``[3, n]`` or ``[n]``.

        Raises:
            StorageError: the file was changed, or is gone.
        """
        return self._read(self.manifest.prompt)

    def layer(
        self, index: int, tokens: range | Sequence[range] | None = None, kv_heads: range | None = None
    ) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, each ``[H_kv, T, D]``; by default of all heads and tokens.

        Args:
            tokens: a run of them, or several, which are put one behind the other.

        Raises:
            StorageError: a file was changed, or is gone.
        """
        manifest = self.manifest
        tokens = range(manifest.num_tokens) if tokens is None else tokens
        wanted = [tokens] if isinstance(tokens, range) else tokens
        kv_heads = range(manifest.num_kv_heads) if kv_heads is None else kv_heads
        shape = len(kv_heads), sum(map(len, wanted)), manifest.head_dim
        keys, values = (torch.empty(shape, dtype=manifest.torch_dtype) for _ in range(2))
        for shard in manifest.shards:
            heads = intersect(kv_heads, range(*shard.kv_heads))
            runs = list(_rows_in(shard, wanted))
            if not heads or not runs:
                continue
            stored = self._read(shard.files[index])
            expected = (_length(shard.kv_heads), sum(map(_length, shard.tokens)), manifest.head_dim)
            of_shard = slice(heads.start - shard.kv_heads[0], heads.stop - shard.kv_heads[0])
            of_result = slice(heads.start - kv_heads.start, heads.stop - kv_heads.start)
            for name, result in (("keys", keys), ("values", values)):
                states = stored.get(name)
                if states is None or states.shape != expected or states.dtype != manifest.torch_dtype:
                    raise StorageError(f"{self._folder / shard.files[index].name} does not hold what it should")
                for rows, places in runs:
                    result[of_result, places] = states[of_shard, rows]
        return keys, values

    @property
    def _folder(self) -> Path:
        return self.path / self.manifest.generation

    def _files(self) -> Iterator[StoredFile]:
        yield self.manifest.prompt
        for shard in self.manifest.shards:
            yield from shard.files

    def _read(self, file: StoredFile) -> dict[str, Tensor]:
        path = self._folder / file.name
        try:
            content = path.read_bytes()
            if len(content) != file.bytes or zlib.crc32(content) != file.crc32:
                raise StorageError(f"{path} was changed since it was saved: its checksum is wrong")
            return safetensors.torch.load(content)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"cannot read {path}: {error}") from error


class Writer:
    """Writes one state into a directory; used by one process of each writer, at the same time.

    Args:
        path: the directory, made where it is missing; all writers have to see the same one.
        generation: the subfolder, the same for all.
    """

    def __init__(self, path: Path, generation: str):
        self.path, self.generation = path, generation
        self._folder, self._is_published = path / generation, False

    @staticmethod
    def new_generation() -> int:
        """A number that no other save has, for :meth:`folder_name`."""
        return secrets.randbits(62)

    @staticmethod
    def folder_name(generation: int) -> str:
        return f"{_SUBFOLDER}{generation:016x}"

    def write_shard(
        self,
        number: int,
        tokens: Sequence[range],
        kv_heads: range,
        layers: Sequence[tuple[Tensor, Tensor]],
    ) -> Shard:
        """One writer's share, layer by layer.

        Args:
            number: of the shard; another one for every writer.
            layers: keys and values ``[1, H_kv, T, D]``, rows in the order of ``tokens``.
        """
        files = tuple(
            self._write(
                f"layer-{index:05d}.shard-{number:05d}.safetensors",
                {"keys": keys[0].contiguous(), "values": values[0].contiguous()},
            )
            for index, (keys, values) in enumerate(layers)
        )
        runs = tuple((run.start, run.stop) for run in tokens if len(run))
        return Shard(runs, (kv_heads.start, kv_heads.stop), files)

    def write_prompt(self, logits: Tensor, position_ids: Tensor) -> StoredFile:
        """See :meth:`SavedKV.prompt`."""
        return self._write(_PROMPT, {"logits": logits.contiguous(), "position_ids": position_ids.contiguous()})

    def publish(self, manifest: Manifest) -> None:
        """Check that everybody's files are here, and let the manifest name them instead of the ones before.

        Raises:
            StorageError: a file is missing: the writers do not share the directory.
        """
        saved = SavedKV(self.path, manifest)
        for file in saved._files():
            path = self._folder / file.name
            if not path.exists() or path.stat().st_size != file.bytes:
                raise StorageError(f"{path} is missing: every host has to see the same directory {self.path}")
        _require_complete(manifest, self.path)
        record = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(manifest)}
        content = json.dumps({**record, "sha256": _digest(record)})
        fresh = self._folder / _MANIFEST  # until it is moved, removed with the rest of a save that failed
        _write_through(fresh, content.encode())
        _sync_folder(self._folder)
        os.replace(fresh, self.path / _MANIFEST)
        self._is_published = True
        _sync_folder(self.path)
        for leftover in self.path.glob(f"{_SUBFOLDER}*"):
            if leftover.name != self.generation:
                shutil.rmtree(leftover, ignore_errors=True)

    def discard(self) -> None:
        """Remove what a save that failed has written."""
        if not self._is_published:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, name: str, tensors: dict[str, Tensor]) -> StoredFile:
        content = safetensors.torch.save({key: tensor.cpu() for key, tensor in tensors.items()})
        _write_through(self._folder / name, content)
        return StoredFile(name, len(content), zlib.crc32(content))


@contextmanager
def alone_in(path: Path) -> Iterator[None]:
    """Make a directory where it is missing, and be the only one who saves to it.

    Raises:
        StorageError: somebody else is saving there, or it cannot be made.
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
            raise StorageError(f"somebody else is saving KV in {path}") from None
        yield


def _read_manifest(path: Path, record: Any) -> Manifest:
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise StorageError(f"{path / _MANIFEST} is not a manifest of saved KV")
    if record.get("format_version") != FORMAT_VERSION:
        raise StorageError(
            f"saved KV in {path} has format {record.get('format_version')}; this version reads {FORMAT_VERSION}"
        )
    digest = record.pop("sha256", None)
    if digest != _digest(record):
        raise StorageError(f"{path / _MANIFEST} was changed since it was saved: its digest is wrong")
    read: dict[str, Callable] = {
        "model": lambda value: ModelIdentity(**value),
        "visual": lambda value: value and VisualIdentity(**value),
        "prompt": lambda value: StoredFile(**value),
        "token_ids": tuple,
        "shards": lambda value: tuple(map(Shard.of, value)),
    }
    try:
        values = {field.name: record[field.name] for field in fields(Manifest)}
        for field in fields(Manifest):
            if field.name in read:
                values[field.name] = read[field.name](values[field.name])
            elif not isinstance(values[field.name], field.type):
                raise TypeError(f"{field.name} is {values[field.name]!r:.50}")
        manifest = Manifest(**values)
        _require_complete(manifest, path)
    except (LookupError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{path / _MANIFEST} is not a manifest of saved KV: {type(error).__name__}: {error}"
        ) from error
    return manifest


def _rows_in(shard: Shard, wanted: Sequence[range]) -> Iterator[tuple[slice, slice]]:
    """The shard's rows of some runs of tokens, and where they stand in these, one behind the other."""
    row = 0
    for run in shard.tokens:
        place = 0
        for tokens in wanted:
            common = intersect(range(*run), tokens)
            if common:
                start, at = row + common.start - run[0], place + common.start - tokens.start
                yield slice(start, start + len(common)), slice(at, at + len(common))
            place += len(tokens)
        row += _length(run)


def _require_complete(manifest: Manifest, path: Path) -> None:
    """Every token of every KV head is in exactly one shard, and every layer of a shard in a file."""
    if len(manifest.token_ids) != manifest.num_tokens or any(
        len(shard.files) != manifest.num_layers for shard in manifest.shards
    ):
        raise StorageError(f"the manifest for {path} does not name every token and every layer")
    cells = sum(_length(shard.kv_heads) * sum(map(_length, shard.tokens)) for shard in manifest.shards)
    if cells == manifest.num_kv_heads * manifest.num_tokens:  # before memory is taken for them
        held = torch.zeros(manifest.num_kv_heads, manifest.num_tokens, dtype=torch.bool)
        for shard in manifest.shards:
            for start, stop in shard.tokens:
                held[slice(*shard.kv_heads), start:stop] = True
        if held.all():
            return
    raise StorageError(f"the shards for {path} do not hold every token exactly once")


def _length(run: tuple[int, int]) -> int:
    return run[1] - run[0]


def _digest(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _write_through(path: Path, content: bytes) -> None:
    """To the disk, not only to the operating system's memory."""
    try:
        path.parent.mkdir(exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def _sync_folder(path: Path) -> None:
    """Make the names in a folder as lasting as what they name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
