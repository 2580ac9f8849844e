"""This module defines the manifest of a prefilled prompt on disk: what it says, and when it is valid.

A directory holds ``manifest.json`` and, in the subfolder that the manifest names, ``prompt.safetensors`` with
``logits [1, V]`` and ``position_ids`` (``[3, n]`` for M-RoPE models, else ``[n]``), and for every layer and shard
one file with ``keys`` and ``values``, ``[H_kv, T, D]``, after RoPE, in token order. A shard is what one writer
held: some runs of tokens, and a range of KV heads.

:mod:`apbv.kv.writer` saves such a directory, and :mod:`apbv.kv.reader` reads it. Sizes, checksums and a digest of
the manifest reveal what was cut off or changed.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from .assembly import cover_once

FORMAT, FORMAT_VERSION = "apbv-kv", 1
MANIFEST_NAME = "manifest.json"


class StorageError(ValueError):
    """A StorageError says why saved KV cannot be written, read or used."""


@dataclass(frozen=True)
class StoredFile:
    """A StoredFile describes a file in the manifest's subfolder by its size in bytes and its checksum."""

    name: str
    bytes: int
    crc32: int

    def __post_init__(self):
        _require_inside(self.name)


@dataclass(frozen=True)
class Shard:
    """A shard is what one writer held of the KV.

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
        """Build a shard from its JSON."""
        return cls(
            tokens=tuple(map(tuple, record["tokens"])),
            kv_heads=tuple(record["kv_heads"]),
            files=tuple(StoredFile(**file) for file in record["files"]),
        )


@dataclass(frozen=True)
class ModelIdentity:
    """A ModelIdentity says which model computed the KV.

    Attributes:
        name: where it was loaded from.
        revision: the hub's commit; None for a directory.
        family: its ``model_type``.
        config_sha256: digest of its configuration (see :mod:`apbv.model.digest`).
        weights_sha256: digest of its language model's weights, which differ between fine-tuned siblings.
    """

    name: str
    revision: str | None
    family: str
    config_sha256: str
    weights_sha256: str


@dataclass(frozen=True)
class VisualIdentity:
    """A VisualIdentity says which videos and images a prompt is about.

    Attributes:
        kind: ``"video"`` or ``"image"``, or ``"mixed"`` of a prompt with both.
        num_tokens: visual placeholder tokens, of all of them together.
        sha256: digest of the file, or of the digests (in hex) of several, in prompt order; None where the caller
            prepared the pixels.
    """

    kind: str
    num_tokens: int
    sha256: str | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A Manifest describes everything that a directory of saved KV holds.

    Attributes:
        generation: the subfolder with the tensors.
        apbv_version: the version of apbv that saved it.
        model: the model that computed the KV.
        dtype: of keys and values, as torch names it.
        num_layers, num_kv_heads, head_dim: sizes of the KV.
        num_tokens: n.
        token_ids: the whole prompt.
        context_start, query_start: as in :class:`apbv.ModelInputs`.
        positions: the rule that gave the rotary positions, ``"transformers"`` or ``"vllm"``.
        rope_delta: the largest position plus one, minus n, where positions are not 0 .. n-1; else None.
        visual: the video or the images; None for a prompt of text.
        method: the prefill method that ran.
        exact: whether its KV is that of full attention.
        anchor_len, passing_len: l_a and l_p.
        prompt: the file of logits and positions.
        shards: one per writer; together they hold every token of every KV head exactly once.
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

    def __post_init__(self):
        _require_inside(self.generation)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of keys and values."""
        return getattr(torch, self.dtype)

    def files(self) -> Iterator[StoredFile]:
        """Yield every file that the manifest names."""
        yield self.prompt
        for shard in self.shards:
            yield from shard.files

    def to_json(self) -> str:
        """Return the content of ``manifest.json``, with its digest."""
        record = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps({**record, "sha256": digest_of(record)})


def parse_manifest(record: Any, path: Path) -> Manifest:
    """Turn the JSON of ``manifest.json`` into a manifest.

    Args:
        record: what the file holds.
        path: the directory, for error messages.

    Raises:
        StorageError: the manifest is of another format, incomplete, or was changed.
    """
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise StorageError(f"{path / MANIFEST_NAME} is not a manifest of saved KV")
    if record.get("format_version") != FORMAT_VERSION:
        raise StorageError(
            f"saved KV in {path} has format {record.get('format_version')}; this version reads {FORMAT_VERSION}"
        )
    digest = record.pop("sha256", None)
    if digest != digest_of(record):
        raise StorageError(f"{path / MANIFEST_NAME} was changed since it was saved: its digest is wrong")
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
        require_complete(manifest, path)
    except (LookupError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{path / MANIFEST_NAME} is not a manifest of saved KV: {type(error).__name__}: {error}"
        ) from error
    return manifest


def require_complete(manifest: Manifest, path: Path) -> None:
    """Check that each token of each KV head is in exactly one shard, and each layer of a shard in a file.

    Raises:
        StorageError: a token or a layer is missing, or a token is in several shards.
    """
    if len(manifest.token_ids) != manifest.num_tokens or any(
        len(shard.files) != manifest.num_layers for shard in manifest.shards
    ):
        raise StorageError(f"the manifest for {path} does not name every token and every layer")
    shards = ((shard.tokens, shard.kv_heads) for shard in manifest.shards)
    if not cover_once(shards, range(manifest.num_kv_heads), range(manifest.num_tokens)):
        raise StorageError(f"the shards for {path} do not hold every token exactly once")


def _require_inside(name: str) -> None:
    if Path(name).name != name or name == "..":
        raise StorageError(f"the manifest names {name!r}, which is not in its folder")


def digest_of(record: Any) -> str:
    """Compute the digest of a manifest's JSON without its digest."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
