"""Copies of saved KV that were tampered with."""

import json
import os
import shutil
import zlib
from pathlib import Path

from safetensors.torch import load_file, save_file


def damaged(source: Path, target: Path, change) -> Path:
    """A copy of saved KV, changed."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    change(target)
    return target


def a_layer(folder: Path) -> Path:
    return sorted(folder.glob("*/layer-*.safetensors"))[1]


def truncate(folder: Path) -> None:
    """a truncated file"""
    os.truncate(a_layer(folder), a_layer(folder).stat().st_size - 100)


def flip_bit(folder: Path) -> None:
    """a flipped bit"""
    data = bytearray(a_layer(folder).read_bytes())
    data[-100] ^= 1
    a_layer(folder).write_bytes(data)


def remove(folder: Path) -> None:
    """a missing file"""
    a_layer(folder).unlink()


def reweigh(folder: Path) -> None:
    """KV of a model of the same shape"""
    rewrite(folder, "manifest", {"weights_sha256": "0" * 64})


def poison(folder: Path) -> None:
    """other values, saved as apbv would"""
    path = a_layer(folder)
    tensors = load_file(path)
    save_file(tensors | {"values": -tensors["values"]}, path)
    rewrite(folder, path.name, {"crc32": zlib.crc32(path.read_bytes())})


def rewrite(folder: Path, name: str, change: dict) -> None:
    """Change what a manifest says of a file, or of the model, as another save."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / manifest["generation"]).rename(folder / "kv-changed")
    manifest |= {"generation": "kv-changed"}
    changed = manifest
    for shard in manifest["shards"]:
        for file in shard["files"]:
            if file["name"] == name:
                changed = file
    changed.update(change)
    (folder / "manifest.json").write_text(json.dumps(manifest))
