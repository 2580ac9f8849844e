"""Saved KV: a directory that one or several hosts write and any number of hosts read.

The directory holds ``manifest.json`` and, in the subfolder that the manifest names,
``prompt.safetensors`` with ``logits [1, V]`` and ``position_ids`` (``[3, n]`` for M-RoPE models,
else ``[n]``), and a hybrid's states of linear attention
(:attr:`apbv.model.linear_attention.LinearStates.named`); and for every layer of attention and shard
one file with ``keys`` and ``values``, ``[H_kv, T, D]``, after RoPE, in token order. A shard is one
writer's part: runs of tokens, and a range of KV heads.

Sizes, checksums and digests detect truncated or changed files. A crash at any moment leaves what
was saved before, or nothing: saving again writes another subfolder, and then replaces the manifest
in one step.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import InvalidRequestError, StorageError
from ..layout import intersect
from ..reporting import raised_as
from .facts import KVFacts, cover_once, digest_of_tokens, from_json, length, rows_of

FORMAT_VERSION = 4
MANIFEST_NAME = "manifest.json"
_PROMPT = "prompt.safetensors"
_SUBFOLDER = "kv-"
# Errors from reading a file that is not a manifest.
_MALFORMED = (
    AttributeError,
    OSError,
    OverflowError,
    RecursionError,
    RuntimeError,
    ValueError,
)


@dataclass(frozen=True)
class StoredFile:
    """A file in the manifest's subfolder, with its size in bytes and its checksum."""

    name: str
    bytes: int
    crc32: int

    def __post_init__(self):
        _require_inside(self.name)


@dataclass(frozen=True)
class Shard:
    """One writer's part of the KV.

    Attributes:
        tokens: runs ``[start, stop)`` of token numbers, ascending.
        kv_heads: the range ``[start, stop)`` of KV heads.
        files: one per layer.
    """

    tokens: tuple[tuple[int, int], ...]
    kv_heads: tuple[int, int]
    files: tuple[StoredFile, ...]


@dataclass(frozen=True)
class StoredVisual:
    """Videos and images of a prompt.

    Attributes:
        kind: ``"video"`` or ``"image"``, or ``"mixed"`` for a prompt with both.
        num_tokens: visual placeholder tokens of all videos and images together.
    """

    kind: str
    num_tokens: int


@dataclass(frozen=True)
class StoredReduction:
    """How visual tokens were pruned before the language model.

    Attributes:
        method, ratio: as in :class:`apbv.ReduceConfig`.
        num_before: number of visual tokens before pruning.
        kept: the numbers of the retained visual tokens, ascending.
    """

    method: str
    ratio: float
    num_before: int
    kept: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest(KVFacts):
    """Contents of a directory of saved KV.

    Attributes:
        generation: the subfolder with the tensors.
        apbv_version: the version of apbv that saved it.
        token_ids: the prompt's token ids, without pruned visual tokens.
        context_start, query_start: as in :class:`apbv.ModelInputs`.
        visual: the video or the images; None for a prompt of text.
        density: the share of the scores that was computed; None if attention was dense.
        reduction: which visual tokens were pruned; None if none were.
        anchor_len, passing_len: l_a and l_p.
        prompt: the file of logits and positions.
        shards: one per writer; together they hold every token of every KV head exactly once.
    """

    generation: str
    apbv_version: str
    token_ids: tuple[int, ...]
    context_start: int
    query_start: int
    visual: StoredVisual | None
    density: float | None
    reduction: StoredReduction | None
    anchor_len: int
    passing_len: int
    prompt: StoredFile
    shards: tuple[Shard, ...]

    def __post_init__(self):
        super().__post_init__()
        _require_inside(self.generation)

    def files(self) -> Iterator[StoredFile]:
        """Yield every file that the manifest names."""
        yield self.prompt
        for shard in self.shards:
            yield from shard.files

    def require_complete(self, path: Path) -> None:
        """Check that every token of every KV head and layer is in exactly one shard's file.

        Raises:
            StorageError: a token or a layer is missing, a token is in several shards, or the
                reduction does not explain which visual tokens are left.
        """
        # The tokens, and a file for each layer.
        has_all_tokens = (
            len(self.token_ids) == self.num_tokens
            and digest_of_tokens(self.token_ids) == self.tokens_sha256
        )
        has_all_layers = all(len(shard.files) == self.num_layers for shard in self.shards)
        if not has_all_tokens or not has_all_layers:
            raise StorageError(f"the manifest for {path} does not cover every token and layer")

        # The files' sizes, so that no manifest makes a reader allocate more than the files hold.
        token_bytes = 2 * self.head_dim * self.torch_dtype.itemsize
        for shard in self.shards:
            num_tokens = sum(length(run) for run in shard.tokens)
            num_bytes = num_tokens * length(shard.kv_heads) * token_bytes
            if any(file.bytes < num_bytes for file in shard.files):
                raise StorageError(f"the files for {path} are too small for their KV")

        # The reduction.
        if self.reduction is not None and not self._matches(self.reduction):
            raise StorageError(
                f"the KV in {path} does not match the tokens that its pruning retained"
            )

        # The shards.
        shards = [(shard.tokens, shard.kv_heads) for shard in self.shards]
        if not cover_once(shards, range(self.num_kv_heads), range(self.num_tokens)):
            raise StorageError(f"the shards for {path} do not cover every token exactly once")

    def _matches(self, reduction: StoredReduction) -> bool:
        """Return whether a reduction retains as many visual tokens as the prompt has.

        Their numbers must ascend, from 0 at least to below the number before pruning.
        """
        if self.visual is None or len(reduction.kept) != self.visual.num_tokens:
            return False
        with_bounds = (-1, *reduction.kept, reduction.num_before)
        return all(before < after for before, after in pairwise(with_bounds))


class SavedKV:
    """A prompt's KV on disk, of which any part can be read.

    Attributes:
        path: the directory.
        manifest: what the directory holds.
    """

    def __init__(self, path: Path, manifest: Manifest):
        self.path = path
        self.manifest = manifest
        self._folder = path / manifest.generation

    @classmethod
    def open(cls, path: str | Path) -> "SavedKV":
        """Read a directory's manifest, and check it and the sizes of the files that it names.

        Raises:
            StorageError: the manifest is missing, of another format, incomplete, or was changed.
        """
        path = Path(path)
        manifest_path = path / MANIFEST_NAME
        try:
            record = json.loads(manifest_path.read_text(encoding="utf-8"))
            version = record.pop("format_version", None)
            if version != FORMAT_VERSION:
                raise StorageError(f"it has format {version}; this version reads {FORMAT_VERSION}")
            saved = cls(path, from_json(Manifest, record))
            saved.manifest.require_complete(path)
        except FileNotFoundError:
            message = f"there is no saved KV in {path}: it has no {MANIFEST_NAME}"
            raise StorageError(message) from None
        except _MALFORMED as error:
            message = f"{manifest_path} is not a manifest of saved KV: {error}"
            raise StorageError(message) from error
        for file in saved.manifest.files():
            # The file may be missing, or the name invalid.
            with raised_as(StorageError, f"saved KV in {path} is incomplete", OSError, ValueError):
                size = (saved._folder / file.name).stat().st_size
            if size != file.bytes:
                raise StorageError(
                    f"{saved._folder / file.name} has {size} bytes instead of {file.bytes}"
                )
        return saved

    def prompt(self) -> dict[str, Tensor]:
        """Read the last token's logits, the position ids, and a hybrid's states.

        ``logits`` is ``[1, V]``, ``position_ids`` ``[3, n]`` or ``[n]``.

        Raises:
            StorageError: the file was changed, or is gone.
        """
        return self._read(self.manifest.prompt)

    def layer(
        self,
        index: int,
        tokens: range | Sequence[range] | None = None,
        kv_heads: range | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read a layer's keys and values, each ``[H_kv, T, D]``.

        Args:
            index: the layer, from 0.
            tokens: a run of tokens, or several, which are concatenated; None: all.
            kv_heads: a range of KV heads; None: all.

        Raises:
            InvalidRequestError: the layer, tokens or KV heads are out of range.
            StorageError: a file was changed, or is gone.
        """
        manifest = self.manifest
        if tokens is None:
            tokens = range(manifest.num_tokens)
        token_ranges = [tokens] if isinstance(tokens, range) else tokens
        if kv_heads is None:
            kv_heads = range(manifest.num_kv_heads)
        is_layer = index in range(manifest.num_layers)
        are_tokens = all(_is_within(run, manifest.num_tokens) for run in token_ranges)
        if not is_layer or not are_tokens or not _is_within(kv_heads, manifest.num_kv_heads):
            raise InvalidRequestError(
                f"the KV in {self.path} has no layer {index}, tokens {token_ranges}, KV heads "
                f"{kv_heads}"
            )
        shape = (len(kv_heads), sum(len(run) for run in token_ranges), manifest.head_dim)
        keys = torch.empty(shape, dtype=manifest.torch_dtype)
        values = torch.empty(shape, dtype=manifest.torch_dtype)
        for shard in manifest.shards:
            heads = intersect(kv_heads, range(*shard.kv_heads))
            runs = list(rows_of(shard.tokens, token_ranges))
            if not heads or not runs:
                continue
            stored_keys, stored_values = self._read_layer(shard, index)
            shard_heads = slice(heads.start - shard.kv_heads[0], heads.stop - shard.kv_heads[0])
            result_heads = slice(heads.start - kv_heads.start, heads.stop - kv_heads.start)
            for rows, places in runs:
                keys[result_heads, places] = stored_keys[shard_heads, rows]
                values[result_heads, places] = stored_values[shard_heads, rows]
        return keys, values

    def _read_layer(self, shard: Shard, index: int) -> tuple[Tensor, Tensor]:
        """Read all of a shard's keys and values of a layer."""
        manifest = self.manifest
        num_tokens = sum(length(run) for run in shard.tokens)
        expected_shape = (length(shard.kv_heads), num_tokens, manifest.head_dim)
        file = shard.files[index]
        stored = self._read(file)
        for name in ("keys", "values"):
            states = stored.get(name)
            is_expected = (
                states is not None
                and states.shape == expected_shape
                and states.dtype == manifest.torch_dtype
            )
            if not is_expected:
                raise StorageError(
                    f"{self._folder / file.name} does not hold the tensors that its manifest "
                    "describes"
                )
        return stored["keys"], stored["values"]

    def _read(self, file: StoredFile) -> dict[str, Tensor]:
        """Read a file's tensors, and check its size and checksum."""
        path = self._folder / file.name
        with raised_as(StorageError, f"cannot read {path}", OSError, SafetensorError):
            content = path.read_bytes()
            if len(content) != file.bytes or zlib.crc32(content) != file.crc32:
                raise StorageError(f"{path} was changed since it was saved: its checksum is wrong")
            return safetensors.torch.load(content)


class Writer:
    """Saves one host's share of a prefill.

    Each host has a writer for the same directory at the same time.

    Args:
        path: the directory, created if it is missing; all hosts must see the same one.
        token: a name that no other save in this directory has, the same on all hosts.
    """

    def __init__(self, path: Path, token: str):
        self.path = path
        self.generation = _SUBFOLDER + token
        self._folder = path / self.generation
        self._is_published = False

    def write_shard(
        self,
        number: int,
        tokens: Sequence[range],
        kv_heads: range,
        layers: Sequence[tuple[Tensor, Tensor]],
    ) -> Shard:
        """Write this host's share, layer by layer.

        Args:
            number: the shard's number, different for every writer.
            tokens: ascending runs of token numbers.
            kv_heads: the range of KV heads.
            layers: keys and values ``[1, H_kv, T, D]``, rows in the order of ``tokens``.
        """
        files = []
        for index, (keys, values) in enumerate(layers):
            name = f"layer-{index:05d}.shard-{number:05d}.safetensors"
            tensors = {"keys": keys[0].contiguous(), "values": values[0].contiguous()}
            files.append(self._write(name, tensors))
        runs = tuple((run.start, run.stop) for run in tokens if len(run))
        return Shard(runs, (kv_heads.start, kv_heads.stop), tuple(files))

    def write_prompt(self, **tensors: Tensor) -> StoredFile:
        """Write the tensors that :meth:`SavedKV.prompt` reads."""
        return self._write(_PROMPT, {name: tensor.contiguous() for name, tensor in tensors.items()})

    def publish(self, manifest: Manifest) -> None:
        """Check that all hosts' files are here, and replace the manifest by one that names them.

        Raises:
            StorageError: a file is missing, because the hosts do not share the directory.
        """
        for file in manifest.files():
            path = self._folder / file.name
            if not path.exists() or path.stat().st_size != file.bytes:
                raise StorageError(
                    f"{path} is missing: all hosts must share the directory {self.path}, and "
                    "nothing else may be saved there meanwhile"
                )
        manifest.require_complete(self.path)
        # It is written among the other files first, so that a failed save removes it with them.
        new_path = self._folder / MANIFEST_NAME
        record = {"format_version": FORMAT_VERSION, **asdict(manifest)}
        _write_to_disk(new_path, json.dumps(record).encode())
        _sync_folder(self._folder)
        os.replace(new_path, self.path / MANIFEST_NAME)
        self._is_published = True
        _sync_folder(self.path)
        for leftover in self.path.glob(f"{_SUBFOLDER}*"):
            if leftover.name != self.generation:
                shutil.rmtree(leftover, ignore_errors=True)

    def discard(self) -> None:
        """Remove the files of a failed save; do nothing after :meth:`publish`."""
        if not self._is_published:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, name: str, tensors: dict[str, Tensor]) -> StoredFile:
        content = safetensors.torch.save({key: tensor.cpu() for key, tensor in tensors.items()})
        _write_to_disk(self._folder / name, content)
        return StoredFile(name, len(content), zlib.crc32(content))


def _write_to_disk(path: Path, content: bytes) -> None:
    """Write a file, and flush it to disk (fsync)."""
    with raised_as(StorageError, f"cannot write {path}", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Flush a directory's entries to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_within(run: range, size: int) -> bool:
    return run.start >= 0 and run.stop <= size


def _require_inside(name: str) -> None:
    if Path(name).name != name or name == "..":
        raise StorageError(f"the manifest names {name!r}, which is not in its folder")
