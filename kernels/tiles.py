"""Chooses the tiles of attention kernels from tiles.json.

It has, by GPU (its name, its kind as :func:`kind_of` names it, or any) and by use, lists of
``[largest head_dim, most rows or null, rows, keys, warps, stages]``, of which the first that fits
is taken. Uses are ``few`` rows of queries, where reading the keys takes the time; ``masked``, the
same with a mask that is read, too; ``many``, which a prefill has; and the ``importance`` of keys.
"""

import json
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch

from .strides import next_power_of_2

TABLE = Path(__file__).with_name("tiles.json")
_FEW_ROWS = 64  # with more, arithmetic takes the time
_NARROWEST_TILE = 16  # of tensor cores


@dataclass(frozen=True)
class Tile:
    """Sizes that a kernel is compiled for.

    Attributes:
        rows, keys: how many a program computes at a time.
        dim: head_dim, padded to a power of 2.
        num_warps: of a program.
        num_stages: of the pipeline that loads keys.
    """

    rows: int
    keys: int
    dim: int
    num_warps: int
    num_stages: int


def tile_of(use: str, rows: int, dim: int, element_size: int, device: torch.device) -> Tile:
    """Choose a tile.

    Args:
        use: ``few``, ``masked``, ``many`` or ``importance``; few rows count as ``few`` even if
            ``many`` are given.
        rows: query rows of one head of K and V.
        dim: head_dim.
        element_size: bytes of a number of Q, K and V.
        device: where the kernel runs.

    Raises:
        ValueError: the table has no tile for this.
    """
    dim = max(_NARROWEST_TILE, next_power_of_2(dim))
    rows = max(_NARROWEST_TILE, next_power_of_2(rows))
    if use == "many" and rows <= _FEW_ROWS:
        use = "few"
    uses = (use,) if use in ("few", "importance") else (use, "few")
    gpus = ("float32",) if element_size == 4 else gpu_of(device)
    for gpu, use_or_few in product(gpus, uses):
        entries = tile_table().get(gpu, {}).get(use_or_few, ())
        for most_dim, most_rows, most_tile_rows, keys, num_warps, num_stages in entries:
            if dim <= most_dim and (most_rows is None or rows <= most_rows):
                return Tile(min(rows, most_tile_rows), keys, dim, num_warps, num_stages)
    raise ValueError(f"{TABLE} has no tile for {rows} rows of {dim} numbers on {' or '.join(gpus)}")


@cache
def tile_table() -> dict[str, dict[str, list[list]]]:
    """Return the measured tiles in :data:`TABLE`, by GPU and use."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


@cache
def gpu_of(device: torch.device) -> tuple[str, str, str]:
    """List what a GPU is called in the table; a CPU counts as Hopper, whose tiles tests use."""
    if device.type != "cuda":
        return "none", kind_of(9, 227 * 1024), "any"
    properties = torch.cuda.get_device_properties(device)
    # torch's stub lacks this field.
    shared_memory: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    kind = kind_of(properties.major, shared_memory)
    return properties.name, kind, "any"


def kind_of(major: int, shared_memory: int) -> str:
    """Name a GPU's kind: its compute capability, or ``"small"`` if it has less shared memory.

    Small are Ada, and Blackwell's GeForce and RTX PRO, whose operands come from registers, as
    Ampere's do.

    Args:
        major: of the compute capability.
        shared_memory: bytes that a program can have.
    """
    if major == 8:
        return "sm_80" if shared_memory > 150 * 1024 else "small"
    return "small" if shared_memory < 200 * 1024 else f"sm_{10 * min(major, 10)}"
