"""Takes a Hugging Face model apart."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..compat.versions import untried
from ..config import DecodeConfig
from ..errors import UnsupportedModelError
from ..kernels.library_attention import require_usable
from ..layout import kv_heads_of_member
from ..reporting import warn_caller
from .digest import SAMPLED_PROJECTIONS, sample_digest, weights_digest
from .families import DecoderSizes, ModelFamily, hybrid_family, require_supported
from .fused import with_fused_kernels
from .linear_attention import is_linear, with_linear_attention
from .modules import decoder_layers
from .rotary import RotaryByLength, with_rotary_by_length

_LINEAR_PROJECTIONS = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_qkvz")


@dataclass(frozen=True)
class ModelParts:
    """Parts of a causal language model.

    Attributes:
        model: the whole model, as the caller passed it.
        family: what differs between model families; its name is the model's ``model_type``.
        language_model: the decoder without its head; what runs sequence-parallel. It shares weights
            and hooks with the model's own where fused kernels can be used
            (:mod:`apbv.model.fused`); else it is the model's own.
        lm_head: hidden states ``[1, S, d]`` to logits ``[1, S, V]``.
        video_token_id, image_token_id: the placeholders in ``input_ids``; None for text-only
            models.
        audio_token_id: the placeholder for audio; None for models that take no audio.
        backend: what computes its attention, one of the backends of :class:`apbv.PrefillConfig`.
        decode: how it is run over new tokens.
        capture_failures: why its decoding steps could not be captured as CUDA graphs, where that
            was tried. It is tried once: PyTorch does not give back the memory of a recording that
            failed.
        sizes: the sizes of the whole decoder.
        tensor_parallel: the share of attention and MLP that is here, as (t, T): number t of T; (0,
            1) where they are whole.
        is_expert_parallel: whether each of T processes has whole experts, and not columns of all.
        embed_tokens: the layer that turns token ids into embeddings.
        dtype, device: of the weights.
        sees: whether the model reads images, and not only text.
        sees_video: whether it reads video, too.
        hears: whether the model reads audio, by itself or beside a video's frames.
        uses_mrope: whether positions are (time, height, width) triples.
        num_layers: the number of decoder layers.
        num_kv_layers: how many of them have attention, and thus KV.
        hidden_size: the width d of a hidden state.
        head_dim: the width D of an attention head.
        num_kv_heads: the number of KV heads on this process, and of its cache.
        kv_copies: how many of a host's processes have the same KV head; 1 where it has at least as
            many KV heads as processes.
        vocab_size: the number of logits, which may be more than the tokenizer has tokens.
        row_width: the number of values that the vision tower makes for one visual token.
        num_rows_ending_video: visual tokens after a video's last frame: LLaVA-OneVision has a
            newline there.
        rows_per_tile: visual tokens of each tile of an image, where these follow one another
            (InternVL).
        patches_per_row: patches of pixels that a tower of Qwen's merges into one visual token.
        packed_vision_tower: the vision tower that packs windows and frames into one sequence (Qwen,
            GLM, VideoLLaMA 3), if any.
        audio_tower: the tower that encodes audio, with its windows packed into one sequence, if
            any.
        projector: what maps each patch's features to an embedding by itself (LLaVA-1.5, LLaVA-NeXT,
            LLaVA-NeXT-Video), if any.
    """

    model: PreTrainedModel
    family: ModelFamily
    language_model: PreTrainedModel
    lm_head: nn.Module
    video_token_id: int | None
    image_token_id: int | None
    audio_token_id: int | None = None
    backend: str = "auto"
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    capture_failures: list[str] = field(default_factory=list, repr=False, compare=False)

    # What is read from the model when the parts are made.
    sees: bool = field(init=False, repr=False, compare=False)
    sees_video: bool = field(init=False, repr=False, compare=False)
    hears: bool = field(init=False, repr=False, compare=False)
    uses_mrope: bool = field(init=False, repr=False, compare=False)
    sizes: DecoderSizes = field(init=False, repr=False, compare=False)
    num_layers: int = field(init=False, repr=False, compare=False)
    num_kv_layers: int = field(init=False, repr=False, compare=False)
    hidden_size: int = field(init=False, repr=False, compare=False)
    head_dim: int = field(init=False, repr=False, compare=False)
    vocab_size: int = field(init=False, repr=False, compare=False)
    row_width: int = field(init=False, repr=False, compare=False)
    tensor_parallel: tuple[int, int] = field(init=False, repr=False, compare=False)
    is_expert_parallel: bool = field(init=False, repr=False, compare=False)
    num_kv_heads: int = field(init=False, repr=False, compare=False)
    kv_copies: int = field(init=False, repr=False, compare=False)
    embed_tokens: nn.Module = field(init=False, repr=False, compare=False)
    dtype: torch.dtype = field(init=False, repr=False, compare=False)
    device: torch.device = field(init=False, repr=False, compare=False)
    num_rows_ending_video: int = field(init=False, repr=False, compare=False)
    rows_per_tile: int | None = field(init=False, repr=False, compare=False)
    patches_per_row: int | None = field(init=False, repr=False, compare=False)
    packed_vision_tower: PreTrainedModel | None = field(init=False, repr=False, compare=False)
    audio_tower: PreTrainedModel | None = field(init=False, repr=False, compare=False)
    projector: nn.Module | None = field(init=False, repr=False, compare=False)
    # The placeholders of video, images and audio; -1 for what the model does not take.
    _placeholders: Tensor = field(init=False, repr=False, compare=False)
    # Models of the first layers, by their number (with_first_layers).
    _shallow: "dict[int, ModelParts]" = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self):
        self._set_inputs()
        self._set_sizes()
        self._set_weights()
        self._set_vision()
        self._set_towers()

    def _set(self, name: str, value: Any) -> None:
        """Set a field while the parts, which are frozen, are made."""
        object.__setattr__(self, name, value)

    def _set_inputs(self) -> None:
        """Set what the model takes beside text, and how its tokens are numbered."""
        token_ids = []
        for token_id in (self.video_token_id, self.image_token_id, self.audio_token_id):
            token_ids.append(-1 if token_id is None else token_id)
        self._set("sees", self.family.reads_images)
        self._set("sees_video", self.family.reads_video)
        self._set("hears", self.audio_token_id is not None)
        self._set("uses_mrope", self.family.uses_mrope)
        self._set("_placeholders", torch.tensor(token_ids))

    def _set_sizes(self) -> None:
        """Set the sizes of the whole decoder, and of its head."""
        sizes = self.family.sizes
        self._set("sizes", sizes)
        self._set("num_layers", sizes.layers)
        self._set("num_kv_layers", sizes.kv_layers)
        self._set("hidden_size", sizes.hidden)
        self._set("head_dim", sizes.head_dim)
        self._set("vocab_size", self.lm_head.out_features)
        self._set("row_width", (1 + sizes.deepstack) * sizes.hidden)

    def _set_weights(self) -> None:
        """Set where the decoder's weights are, and which share of them is on this process."""
        embed_tokens = self.language_model.get_input_embeddings()
        self._set("embed_tokens", embed_tokens)
        self._set("dtype", embed_tokens.weight.dtype)
        self._set("device", embed_tokens.weight.device)

        attention = next(
            layer for layer in decoder_layers(self.language_model) if not is_linear(layer)
        )
        # Not of keys, which may be fewer than processes, and are replicated then.
        projection = attention.get_submodule("self_attn.q_proj")
        weight = getattr(projection, "weight", None)  # None where it is packed
        mesh = getattr(weight, "device_mesh", None)
        member = 0
        num_members = 1
        if mesh is not None:
            member = mesh.get_local_rank()
            num_members = mesh.size()
        kv_heads = kv_heads_of_member(self.sizes.kv_heads, member, num_members)
        self._set("tensor_parallel", (member, num_members))
        self._set("num_kv_heads", len(kv_heads))
        self._set("kv_copies", max(1, num_members // self.sizes.kv_heads))
        # transformers' name for experts of which a process has some.
        self._set(
            "is_expert_parallel",
            any(
                getattr(module, "_is_expert_parallel", False)
                for module in self.language_model.modules()
            ),
        )

    def _set_vision(self) -> None:
        """Set how the family counts visual tokens."""
        self._set("num_rows_ending_video", self.family.num_rows_ending_video)
        self._set("rows_per_tile", self.family.rows_per_tile)
        self._set("patches_per_row", self.family.patches_per_row)

    def _set_towers(self) -> None:
        """Set the modules that encode images, video and audio."""
        self._set("packed_vision_tower", self.family.packed_vision_tower(self.model))
        self._set("audio_tower", self.family.audio_tower(self.model))
        self._set("projector", self.family.projector(self.model))

    @property
    def config_values(self) -> dict[str, Any]:
        """The model's whole configuration, to compare with other hosts'."""
        return self.family.config_values

    @property
    def audio_unit(self) -> int:
        """The spectrogram frames in the smallest piece of audio that can be encoded by itself."""
        return self.family.audio_unit(self.model)

    @property
    def max_position_embeddings(self) -> int:
        """The number of positions that the model was made for, or was stretched to (YaRN)."""
        return self.family.max_position_embeddings

    @property
    def rope_by_length(self) -> str | None:
        """The type of rotary embedding if its frequencies depend on the length; else None."""
        return self.family.rope_by_length

    def rotary_of_prompt(self, length: int) -> AbstractContextManager[None]:
        """Return a context in which this thread runs the language model on tokens of one prompt.

        Args:
            length: one past the largest rotary position in the whole prompt, of which it may run a
                part.
        """
        rotary = self.language_model.rotary_emb
        if not isinstance(rotary, RotaryByLength):
            return nullcontext()
        return rotary.of_prompt(length)

    def is_visual(self, input_ids: Tensor) -> Tensor:
        """Find the placeholders of images or video: bool, shaped like ``input_ids``."""
        return torch.isin(input_ids, self._placeholders[:2])

    def is_audio(self, input_ids: Tensor) -> Tensor:
        """Find the placeholders of audio: bool, shaped like ``input_ids``."""
        return torch.isin(input_ids, self._placeholders[2:])

    def is_placeholder(self, input_ids: Tensor) -> Tensor:
        """Find the placeholders of images, video or audio: bool, shaped like ``input_ids``."""
        return torch.isin(input_ids, self._placeholders)

    def rotary_positions(self, input_ids: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Compute a prompt's M-RoPE positions by the model's own rule.

        Args:
            input_ids: ``[1, n]``, with placeholders.
            batch: the other outputs of the model's processor.

        Returns:
            ``[3, 1, n]``: time, height, width.

        Raises:
            KeyError: the batch lacks something that the positions depend on.
            InvalidRequestError: the model has no rule for this prompt.
        """
        return self.family.rotary_positions(self.model, input_ids, batch)

    def num_image_rows(self, size: Tensor | None = None, is_tiled: bool = True) -> int:
        """Count the visual tokens of an image of a LLaVA model, by the model's own arithmetic.

        Args:
            size: ``[2]``, height and width of the image; LLaVA-1.5, which resizes all images to
                one size, does not ask it.
            is_tiled: whether LLaVA-OneVision cuts the image into tiles; it does not where several
                images are one sample.
        """
        return self.family.num_image_rows(self.model, size, is_tiled)

    def image_cells(self, size: Tensor | None) -> Tensor | None:
        """Number the 2 x 2 cells of patches in an image of a LLaVA model.

        Args:
            size: ``[2]``, height and width of the image; None: unknown, and not needed.

        Returns:
            For each of its visual tokens the number of its cell, within its tile; -1 for a class
            token and the newlines, which are in none. None where a patch is missing, or in another
            family than LLaVA-1.5, LLaVA-NeXT and LLaVA-NeXT-Video.
        """
        return self.family.image_cells(self.model, size)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, from the generation config."""
        eos = self.model.generation_config.eos_token_id
        return (eos,) if isinstance(eos, int) else tuple(eos or ())

    @cached_property
    def weights_sample(self) -> bytes:
        """A digest of a few numbers of every weight on this process, to compare with other hosts'.

        It is made once.
        """
        return sample_digest(
            weight for weight in self.model.state_dict().values() if torch.is_tensor(weight)
        )

    def with_first_layers(self, count: int) -> "ModelParts":
        """Return a model of the first layers of this one, its last norm and its head.

        They share all weights. It is made once for each number of layers.
        """
        if count not in self._shallow:
            decoder = copy.copy(self.language_model)
            first_layers = nn.ModuleList(list(decoder_layers(self.language_model))[:count])
            decoder._modules = {**self.language_model._modules, "layers": first_layers}
            shallow = replace(self, language_model=decoder)
            shallow._set("num_layers", count)
            num_kv_layers = sum(layer < count for layer in self.sizes.attention_layers)
            shallow._set("num_kv_layers", num_kv_layers)
            self._shallow[count] = shallow
        return self._shallow[count]

    def weights_digest(self) -> str:
        """Compute :func:`apbv.model.digest.weights_digest` of the weights on this process."""
        return weights_digest(
            first
            for layer in decoder_layers(self.language_model)
            for first in _sampled_weights(layer)
        )


def inspect_model(
    model: PreTrainedModel, backend: str = "auto", decode: DecodeConfig | None = None
) -> ModelParts:
    """Take a model apart; reject models that apbv cannot compute exactly.

    Raises:
        UnsupportedModelError: an unknown family, or a layer type other than full causal attention.
        BackendUnavailableError: the backend cannot be used for this model on its device.
    """
    family = require_supported(model.config)
    newer_versions = untried()
    if newer_versions:
        warn_caller(f"apbv was not tried yet with {newer_versions}")
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head to generate with"
        )
    language_model = model.get_decoder()
    if hybrid_family(model.config):
        language_model = with_linear_attention(language_model)
    language_model = with_rotary_by_length(language_model)
    parts = ModelParts(
        model=model,
        family=family,
        language_model=language_model,
        lm_head=lm_head,
        video_token_id=family.token_id("video"),
        image_token_id=family.token_id("image"),
        audio_token_id=family.token_id("audio"),
        backend=backend,
        decode=decode or DecodeConfig(),
    )
    groups = parts.sizes.heads // parts.sizes.kv_heads
    require_usable(backend, parts.device, parts.dtype, parts.head_dim, groups)
    if parts.tensor_parallel[1] > 1:
        # To try an MLP that is shared out would be collective.
        backend = "torch"
    like = torch.empty(0, dtype=parts.dtype, device=parts.device)
    language_model = with_fused_kernels(language_model, backend, like)
    return replace(parts, language_model=language_model)


def _sampled_weights(layer: nn.Module) -> Iterator[Tensor]:
    """Yield a decoder layer's numbers that tell models apart."""
    for name in (*SAMPLED_PROJECTIONS, *_LINEAR_PROJECTIONS):
        parent, _, projection = name.rpartition(".")
        if hasattr(getattr(layer, parent, None), projection):
            yield _first_weights(layer.get_submodule(name))
    mlp: Any = layer.get_submodule("mlp")  # of many classes
    if hasattr(mlp, "gate_up_proj"):  # both in one
        yield _first_weights(mlp.gate_up_proj)
    if hasattr(mlp, "experts"):
        yield mlp.gate.weight[0]
        experts = mlp.experts.gate_up_proj
        if hasattr(experts, "to_local"):
            experts = experts.to_local()  # this process's shard
        yield experts[0, 0]


def _first_weights(linear: Any) -> Tensor:
    """Return a linear module's first row of weights.

    Of packed weights, the rows as they are stored that together have as many numbers.
    """
    state = linear.state_dict()  # not what bitsandbytes makes of it when it is first run
    weight = state["qweight" if "qweight" in state else "weight"]
    if hasattr(weight, "to_local"):
        weight = weight.to_local()  # this process's shard
    num_rows = max(1, linear.in_features // weight.shape[1])
    first_rows = weight[:num_rows]
    if hasattr(first_rows, "__tensor_flatten__"):
        return first_rows.dequantize()
    return first_rows
