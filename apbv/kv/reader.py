"""This module reads saved KV, checked when it is opened and again when it is read."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..layout import intersect
from .assembly import length, rows_of
from .manifest import MANIFEST_NAME, Manifest, StorageError, StoredFile, parse_manifest


class SavedKV:
    """A SavedKV is a prompt's KV on disk, of which any part can be read.

    Attributes:
        path: the directory.
        manifest: what the directory holds.
    """

    def __init__(self, path: Path, manifest: Manifest):
        self.path, self.manifest = path, manifest

    @classmethod
    def open(cls, path: str | Path) -> "SavedKV":
        """Read a directory's manifest, and check it and the sizes of the files that it names.

        Raises:
            StorageError: the manifest is missing, of another format, incomplete, or was changed.
        """
        path = Path(path)
        try:
            record = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))
            saved = cls(path, parse_manifest(record, path))
        except StorageError:
            raise
        except FileNotFoundError:
            raise StorageError(f"there is no saved KV in {path}: it has no {MANIFEST_NAME}") from None
        except (OSError, ValueError, RecursionError) as error:  # no JSON, or nested too deeply, or too long
            raise StorageError(f"cannot read {path / MANIFEST_NAME}: {error}") from error
        for file in saved.manifest.files():
            try:
                size = (saved._folder / file.name).stat().st_size
            except OSError as error:
                raise StorageError(f"saved KV in {path} is incomplete: {error}") from error
            if size != file.bytes:
                raise StorageError(f"{saved._folder / file.name} has {size} bytes instead of {file.bytes}")
        return saved

    def prompt(self) -> dict[str, Tensor]:
        """Read ``logits [1, V]`` of the last token and ``position_ids``, ``[3, n]`` or ``[n]``.

        Raises:
            StorageError: the file was changed, or is gone.
        """
        return self._read(self.manifest.prompt)

    def layer(
        self, index: int, tokens: range | Sequence[range] | None = None, kv_heads: range | None = None
    ) -> tuple[Tensor, Tensor]:
        """Read a layer's keys and values, each ``[H_kv, T, D]``; by default of all heads and tokens.

        Args:
            index: the layer, from 0.
            tokens: a run of tokens, or several, which are put one behind the other; by their numbers among the
                tokens that this layer holds (see :class:`.manifest.LayerGroup`).
            kv_heads: a range of KV heads.

        Raises:
            IndexError: there is no such layer.
            ValueError: the layer has no such tokens or KV heads.
            StorageError: a file was changed, or is gone.
        """
        manifest, group = self.manifest, self.manifest.group_of(index)
        tokens = range(group.num_tokens) if tokens is None else tokens
        wanted = [tokens] if isinstance(tokens, range) else tokens
        kv_heads = range(manifest.num_kv_heads) if kv_heads is None else kv_heads
        for run in wanted:
            _require_within(run, group.num_tokens, f"tokens of layer {index}")
        _require_within(kv_heads, manifest.num_kv_heads, "KV heads")
        shape = len(kv_heads), sum(map(len, wanted)), manifest.head_dim
        keys, values = (torch.empty(shape, dtype=manifest.torch_dtype) for _ in range(2))
        for shard in group.shards:
            heads = intersect(kv_heads, range(*shard.kv_heads))
            runs = list(rows_of(shard.tokens, wanted))
            if not heads or not runs:
                continue
            file = shard.files[index - group.layers[0]]
            stored = self._read(file)
            expected = (length(shard.kv_heads), sum(map(length, shard.tokens)), manifest.head_dim)
            of_shard = slice(heads.start - shard.kv_heads[0], heads.stop - shard.kv_heads[0])
            of_result = slice(heads.start - kv_heads.start, heads.stop - kv_heads.start)
            for name, result in (("keys", keys), ("values", values)):
                states = stored.get(name)
                if states is None or states.shape != expected or states.dtype != manifest.torch_dtype:
                    raise StorageError(
                        f"{self._folder / file.name} does not hold the tensors that its manifest describes"
                    )
                for rows, places in runs:
                    result[of_result, places] = states[of_shard, rows]
        return keys, values

    def require_whole_prompt(self) -> None:
        """Refuse KV of a prompt of which tokens were left out, for a reader that makes the whole prompt anew.

        Raises:
            StorageError: visual tokens were left out, before the language model or between its layers.
        """
        if self.manifest.reduction is not None:
            raise StorageError(
                f"the KV in {self.path} is of a prompt that {self.manifest.reduction.method} has shortened, and "
                "cannot be handed over: its consumer reads the whole prompt"
            )

    @property
    def _folder(self) -> Path:
        return self.path / self.manifest.generation

    def _read(self, file: StoredFile) -> dict[str, Tensor]:
        path = self._folder / file.name
        try:
            content = path.read_bytes()
            if len(content) != file.bytes or zlib.crc32(content) != file.crc32:
                raise StorageError(f"{path} was changed since it was saved: its checksum is wrong")
            return safetensors.torch.load(content)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"cannot read {path}: {error}") from error


def _require_within(run: range, count: int, what: str) -> None:
    """Refuse a range that is not one of some things that are numbered from 0.

    Raises:
        ValueError: it has others, or leaves some out.
    """
    if run.step != 1 or not 0 <= run.start <= run.stop <= count:
        raise ValueError(f"{run} is not within the {count} {what}")
