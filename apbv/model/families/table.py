"""The table of model families, families.toml: what tells a family apart without code."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TABLE = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
TEXT_FAMILIES = tuple(_TABLE["text"])
IMAGE_FAMILIES = tuple(_TABLE["image"])
VIDEO_FAMILIES = tuple(_TABLE["video"])
VISION_FAMILIES = VIDEO_FAMILIES + IMAGE_FAMILIES
# Why other known families are not supported.
WHY_UNSUPPORTED: dict[str, str] = _TABLE["unsupported"]


@dataclass(frozen=True)
class FamilyRow:
    """A row of the table.

    Attributes:
        name: transformers' ``model_type``.
        reads_images: whether its models read images, and not only text.
        reads_video: whether they read video, too.
        like: the family whose class it has: itself, or another.
        is_hybrid: whether some layers have linear attention.
        has_joint_mlp: whether its decoder's MLP has its gate and its projection up in one matrix.
        has_transposed_experts: whether checkpoints have the weights of experts the other way round
            than the model.
        since: the first release of transformers with the model and the processor that apbv takes
            apart.
        towers: the vision towers, by ``model_type``, that its checkpoints may have; None: its own.
    """

    name: str
    reads_images: bool
    reads_video: bool
    like: str
    is_hybrid: bool
    has_joint_mlp: bool
    has_transposed_experts: bool
    since: tuple[int, ...]
    towers: tuple[str, ...] | None


def _row(name: str, section: str, entry: dict[str, Any]) -> FamilyRow:
    """Make a row of an entry in a section of the table."""
    towers = entry.get("towers")
    return FamilyRow(
        name=name,
        reads_images=section in ("image", "video"),
        reads_video=section == "video",
        like=entry.get("like", name),
        is_hybrid=entry.get("hybrid", False),
        has_joint_mlp=entry.get("joint_mlp", False),
        has_transposed_experts=entry.get("transposed_experts", False),
        since=tuple(entry.get("since", (0, 0))),
        towers=None if towers is None else tuple(towers),
    )


def _rows() -> dict[str, FamilyRow]:
    rows = {}
    for section in ("text", "image", "video"):
        for name, entry in _TABLE[section].items():
            rows[name] = _row(name, section, entry)
    return rows


ROWS = _rows()
