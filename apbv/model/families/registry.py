"""Which class each model family has, and which family a config is of."""

from transformers import PreTrainedConfig

from ...errors import UnsupportedModelError
from .base import ModelFamily
from .glm4v import Glm4v, GlmOcr
from .internvl import InternVL
from .llava import Llava, LlavaNext, LlavaNextVideo
from .llava_onevision import LlavaOnevision
from .qwen_omni import WHOLE_MODEL, QwenOmni, thinker_config
from .qwen_vl import Qwen3VL, QwenVL
from .table import ROWS, TEXT_FAMILIES, VISION_FAMILIES, WHY_UNSUPPORTED
from .video_llama3 import VideoLlama3

# The classes of vision-language families, but of those that are like another.
CLASSES: dict[str, type[ModelFamily]] = {
    "qwen2_vl": QwenVL,
    "qwen2_5_vl": QwenVL,
    "qwen2_5_omni_thinker": QwenOmni,
    "qwen3_vl": Qwen3VL,
    "glm4v": Glm4v,
    "glm_ocr": GlmOcr,
    "internvl": InternVL,
    "llava": Llava,
    "llava_next": LlavaNext,
    "llava_next_video": LlavaNextVideo,
    "llava_onevision": LlavaOnevision,
    "video_llama_3": VideoLlama3,
}


def family_of(config: PreTrainedConfig) -> ModelFamily:
    """Return the family of a whole model's config.

    Raises:
        UnsupportedModelError: an unknown family.
    """
    name = getattr(config, "model_type", type(config).__name__)
    row = ROWS.get(name)
    if row is None:
        supported = f"supported are {', '.join(VISION_FAMILIES + TEXT_FAMILIES)}"
        why = WHY_UNSUPPORTED.get(name, supported)
        raise UnsupportedModelError(f"{name} models are not supported; {why}")
    return CLASSES.get(row.like, ModelFamily)(row, config)


def require_supported(config: PreTrainedConfig) -> ModelFamily:
    """Return the family of a whole model's config, or reject it before its weights are loaded.

    Raises:
        UnsupportedModelError: an unknown family, or a model that apbv cannot compute exactly; see
            :meth:`ModelFamily.require_runnable`.
    """
    family = family_of(config)
    family.require_runnable()
    return family


def hybrid_family(config: PreTrainedConfig) -> str | None:
    """Return the name of a hybrid's family; None if all of a model's layers have attention."""
    row = ROWS.get(config.model_type)
    return row.name if row is not None and row.is_hybrid else None


def runnable_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the part of a checkpoint's model that apbv runs, or its own."""
    if config.model_type == WHOLE_MODEL:
        return thinker_config(config)
    return config
