"""How a tower that packs windows and frames attends to all of them at once.

The vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL lay all windows or frames one behind the other, and so does
Qwen2.5-Omni's audio tower with its windows. By default
transformers cuts them apart again in every layer and attends to each by itself: a thousand small calls where one
does. It makes one call where an attention of the name "flash…" is in force, and tells it where the sequences end.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ..kernels import PackedSequences, varlen_attention
from .parts import ModelParts

# The towers pass on boundaries where they find "flash" in the name (transformers' is_flash_attention_requested).
_NAME = "apbv_flash_varlen"
_REPLACED = "sdpa"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    apbv_packing: "_Packing",
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention function contract: returns (``[1, T, H, D]`` contiguous, None)."""
    if attention_mask is not None or dropout:
        raise ValueError("attention of packed sequences has neither a mask nor dropout")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sequences = apbv_packing.sequences(cu_seq_lens_q, max_length_q, query)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, H, D]
    return varlen_attention(q, k, v, sequences, scale, backend=apbv_packing.backend)[None], None


AttentionInterface.register(_NAME, _attention)


class _Packing:
    """The sequences of one call of a tower, worked out once for all layers that have the same ones."""

    def __init__(self, backend: str):
        self.backend = backend
        # By the boundaries' identity; they are kept, so that no other tensor can come to have it.
        self._known: dict[int, tuple[Tensor, PackedSequences]] = {}

    def sequences(self, boundaries: Tensor, longest: int, states: Tensor) -> PackedSequences:
        """Return the sequences that end at these boundaries, int32 ``[N + 1]``, of states on this device."""
        if id(boundaries) not in self._known:
            on_device = boundaries.to(states.device)
            self._known[id(boundaries)] = boundaries, PackedSequences(on_device, longest)
        return self._known[id(boundaries)][1]


@contextmanager
def packed_vision_attention(parts: ModelParts) -> Iterator[None]:
    """Let the vision tower attend to all its windows or frames in one call; restored also on error.

    It replaces transformers' default, sdpa, and the result is the same up to rounding. Another implementation
    that the caller has chosen stays in force. Towers that do not pack (InternVL's, LLaVA-OneVision's) stay as they
    are, and so does the language model. A tower is used by one thread at a time; every model has its own.
    """
    with _packed(parts.packed_vision_tower, parts.backend):
        yield


@contextmanager
def packed_audio_attention(parts: ModelParts) -> Iterator[None]:
    """Let the audio tower attend to all its windows in one call, as :func:`packed_vision_attention` does."""
    with _packed(parts.audio_tower, parts.backend):
        yield


@contextmanager
def _packed(tower: PreTrainedModel | None, backend: str) -> Iterator[None]:
    if tower is None or tower.config._attn_implementation != _REPLACED:
        yield
        return

    def pass_packing(tower: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs | {"apbv_packing": _Packing(backend)}

    hook = tower.register_forward_pre_hook(pass_packing, with_kwargs=True)
    tower.config._attn_implementation = _NAME
    try:
        yield
    finally:
        tower.config._attn_implementation = _REPLACED
        hook.remove()
