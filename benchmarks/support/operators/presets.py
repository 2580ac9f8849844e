"""The sizes at which operators are measured."""

from dataclasses import dataclass

from .case import Sizes


@dataclass(frozen=True)
class Preset:
    """The sizes of the cases, and of the copy and the square matrix product that show the ceilings."""

    sizes: Sizes
    tokens: list[int]
    copy_bytes: int
    matrix_side: int


PRESETS = {
    "quick": Preset(Sizes(600, 2, 4, 2, 32, 9, 3, 7, 11, 48), [600], 2**24, 256),
    "cpu": Preset(Sizes(8192, 2, 8, 2, 64, 32, 16, 12, 21, 512), [8192], 2**28, 2048),
    # The heads and the width of Qwen2.5-VL-7B, and 64 frames of 720p.
    "h200": Preset(Sizes(131072, 8, 28, 4, 128, 64, 64, 26, 46, 3584), [8192, 32768, 131072], 2**30, 8192),
}
