"""This module defines the manifest of a prefilled prompt on disk: what it says, and when it is valid.

A directory holds ``manifest.json`` and, in the subfolder that the manifest names, ``prompt.safetensors`` with
``logits [1, V]`` and ``position_ids`` (``[3, n]`` for M-RoPE models, else ``[n]``), and for every layer and shard
one file with ``keys`` and ``values``, ``[H_kv, T, D]``, after RoPE, in token order. A shard is what one writer
held: some runs of tokens, and a range of KV heads. Shards are listed by groups of layers, because layers hold
different tokens where some were dropped between them; else there is one group.

:mod:`apbv.kv.writer` saves such a directory, and :mod:`apbv.kv.reader` reads it. Sizes, checksums and a digest of
the manifest reveal what was cut off or changed.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from operator import index
from pathlib import Path
from typing import Any

import torch

from .assembly import cover_once, length

FORMAT, FORMAT_VERSION = "apbv-kv", 2  # this version also reads 1, which had neither groups nor reductions
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
        files: one per layer of its group.
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
class LayerGroup:
    """A LayerGroup is some adjacent layers, which hold the same tokens of the prompt.

    Their tokens are numbered from 0 to ``num_tokens - 1``, in token order.

    Attributes:
        layers: the range ``[start, stop)`` of layers.
        num_tokens: how many tokens each of them holds.
        shards: one per writer; together they hold every token of every KV head exactly once.
    """

    layers: tuple[int, int]
    num_tokens: int
    shards: tuple[Shard, ...]

    @classmethod
    def of(cls, record: dict[str, Any]) -> "LayerGroup":
        """Build a group from its JSON."""
        layers, shards = tuple(map(index, record["layers"])), tuple(map(Shard.of, record["shards"]))
        return cls(layers, index(record["num_tokens"]), shards)


def join_writers(written: Iterable[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Join what several writers have written of the same layers.

    Args:
        written: the groups of all writers; those of the first one are all there are, in order of layers.
    """
    shards: dict[tuple, list[Shard]] = {}
    for group in written:
        shards.setdefault((group.layers, group.num_tokens), []).extend(group.shards)
    return tuple(LayerGroup(*same, tuple(of_all)) for same, of_all in shards.items())


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


@dataclass(frozen=True)
class StoredReduction:
    """A StoredReduction says which of a prompt's visual tokens were left out.

    Attributes:
        method, ratio: as in :class:`apbv.ReduceConfig`.
        num_before: how many visual tokens there were.
        kept: which of them are left, ascending; in the last layers, where tokens were dropped between layers.
    """

    method: str
    ratio: float
    num_before: int
    kept: tuple[int, ...]

    @classmethod
    def of(cls, record: dict[str, Any]) -> "StoredReduction":
        """Build a reduction from its JSON."""
        numbers = {"num_before": index(record["num_before"]), "kept": tuple(map(index, record["kept"]))}
        return cls(**{**record, **numbers})


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A Manifest describes everything that a directory of saved KV holds.

    Attributes:
        generation: the subfolder with the tensors.
        apbv_version: the version of apbv that saved it.
        model: the model that computed the KV.
        dtype: of keys and values, as torch names it.
        num_kv_heads, head_dim: sizes of the KV.
        num_tokens: n.
        token_ids: the whole prompt.
        context_start, query_start: as in :class:`apbv.ModelInputs`.
        positions: the rule that gave the rotary positions, ``"transformers"`` or ``"vllm"``.
        rope_delta: the largest position plus one, minus n, where positions are not 0 .. n-1; else None.
        visual: the video or the images; None for a prompt of text.
        method: the prefill method that ran.
        exact: whether its KV is that of full attention.
        density: the share of the scores that was computed, where attention was sparse; else None.
        reduction: which visual tokens were left out; None where none was. Before the language model: the tokens
            above are those that are left. Between its layers: they are the whole prompt, which the first layers
            hold.
        anchor_len, passing_len: l_a and l_p.
        prompt: the file of logits and positions.
        groups: all layers, in order.
    """

    generation: str
    apbv_version: str
    model: ModelIdentity
    dtype: str
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
    density: float | None
    reduction: StoredReduction | None
    anchor_len: int
    passing_len: int
    prompt: StoredFile
    groups: tuple[LayerGroup, ...]

    def __post_init__(self):
        _require_inside(self.generation)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of keys and values."""
        return getattr(torch, self.dtype)

    @property
    def num_layers(self) -> int:
        """The decoder layers."""
        return self.groups[-1].layers[1]

    @property
    def is_whole(self) -> bool:
        """Whether every layer holds all n tokens."""
        return all(group.num_tokens == self.num_tokens for group in self.groups)

    def group_of(self, layer: int) -> LayerGroup:
        """Return the group of a layer.

        Raises:
            IndexError: there is no such layer.
        """
        for group in self.groups:
            if group.layers[0] <= layer < group.layers[1]:
                return group
        raise IndexError(f"layer {layer} is not one of the KV's {self.num_layers}")

    def files(self) -> Iterator[StoredFile]:
        """Yield every file that the manifest names."""
        yield self.prompt
        for group in self.groups:
            for shard in group.shards:
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
    version = record.get("format_version")
    if version not in (1, FORMAT_VERSION):
        raise StorageError(f"saved KV in {path} has format {version}; this version reads 1 and {FORMAT_VERSION}")
    digest = record.pop("sha256", None)
    if digest != digest_of(record):
        raise StorageError(f"{path / MANIFEST_NAME} was changed since it was saved: its digest is wrong")
    read: dict[str, Callable] = {
        "model": lambda value: ModelIdentity(**value),
        "visual": lambda value: value and VisualIdentity(**value),
        "reduction": lambda value: value and StoredReduction.of(value),
        "prompt": lambda value: StoredFile(**value),
        "token_ids": tuple,
        "groups": lambda value: tuple(map(LayerGroup.of, value)),
    }
    try:
        if version == 1:
            record = _from_format_1(record)
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
        StorageError: a token or a layer is missing, a token is in several shards, or layers lack other tokens than
            the reduction says.
    """
    edges = pairwise((0, *(group.layers[1] for group in manifest.groups)))
    if (
        not manifest.groups
        or len(manifest.token_ids) != manifest.num_tokens
        or any(group.layers != run or run[0] >= run[1] for group, run in zip(manifest.groups, edges, strict=True))
        or any(len(shard.files) != length(group.layers) for group in manifest.groups for shard in group.shards)
    ):
        raise StorageError(f"the manifest for {path} does not name every token and every layer")
    if not _tells_what_is_left_out(manifest):
        raise StorageError(f"the layers for {path} do not hold the tokens that their reduction has left")
    for group in manifest.groups:
        shards = ((shard.tokens, shard.kv_heads) for shard in group.shards)
        if not cover_once(shards, range(manifest.num_kv_heads), range(group.num_tokens)):
            raise StorageError(f"the shards for {path} do not hold every token exactly once")


def _tells_what_is_left_out(manifest: Manifest) -> bool:
    """Return whether the reduction explains which visual tokens layers lack, and no others."""
    if manifest.reduction is None:
        return manifest.is_whole
    reduction, num_visual = manifest.reduction, manifest.visual.num_tokens
    num_lacking = [manifest.num_tokens - group.num_tokens for group in manifest.groups]
    chosen = pairwise((-1, *reduction.kept, reduction.num_before))
    return (
        num_lacking[0] == 0
        and all(0 <= count <= manifest.query_start - manifest.context_start for count in num_lacking)
        and all(before < after for before, after in chosen)
        and len(reduction.kept) == num_visual - num_lacking[-1]
        and (manifest.is_whole or num_visual == reduction.num_before)
    )


def _from_format_1(record: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest of the first format, whose layers are one group, as one of this format."""
    group = {
        "layers": [0, record["num_layers"]],
        "num_tokens": record["num_tokens"],
        "shards": record["shards"],
    }
    return {**record, "groups": [group], "density": None, "reduction": None}


def _require_inside(name: str) -> None:
    if Path(name).name != name or name == "..":
        raise StorageError(f"the manifest names {name!r}, which is not in its folder")


def digest_of(record: Any) -> str:
    """Compute the digest of a manifest's JSON without its digest."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
