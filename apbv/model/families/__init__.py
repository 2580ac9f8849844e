"""The model families: a table, and a class for each that differs in more than the table says.

Nothing outside this folder compares a family's name or reads a model's config, except to load it.
"""

from .base import ModelFamily
from .registry import family_of, hybrid_family, require_supported, runnable_config
from .sizes import RULE_CHUNK, DecoderSizes, LinearSizes
from .table import IMAGE_FAMILIES, TEXT_FAMILIES, VIDEO_FAMILIES, VISION_FAMILIES

__all__ = [
    "IMAGE_FAMILIES",
    "RULE_CHUNK",
    "TEXT_FAMILIES",
    "VIDEO_FAMILIES",
    "VISION_FAMILIES",
    "DecoderSizes",
    "LinearSizes",
    "ModelFamily",
    "family_of",
    "hybrid_family",
    "require_supported",
    "runnable_config",
]
