"""Takes a Hugging Face model apart. Only this file reads a model's config."""

import copy
import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..config import DecodeConfig
from ..errors import InvalidRequestError, UnsupportedModelError
from ..kernels.library_attention import require_usable
from ..layout import split_evenly
from ..reporting import warn_caller
from ..versions import release, untried
from .digest import SAMPLED_PROJECTIONS, sample_digest, weights_digest
from .fused import with_fused_kernels
from .linear_attention import is_linear, with_linear_attention
from .modules import decoder_layers
from .rotary import RotaryByLength, rope_by_length, with_rotary_by_length

_TABLE = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
TEXT_FAMILIES = tuple(_TABLE["text"])
IMAGE_FAMILIES = tuple(_TABLE["image"])
VIDEO_FAMILIES = tuple(_TABLE["video"])
VISION_FAMILIES = VIDEO_FAMILIES + IMAGE_FAMILIES
_FAMILIES = _TABLE["text"] | _TABLE["image"] | _TABLE["video"]
# The families that cut an image into tiles and end each row of patches with a newline.
_NEXT_FAMILIES = ("llava_next", "llava_next_video")
_LLAVA_FAMILIES = ("llava", *_NEXT_FAMILIES)
OMNI_THINKER = "qwen2_5_omni_thinker"  # Qwen2.5-Omni without the talker, which speaks
_LINEAR_PROJECTIONS = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_qkvz")


def prompts_like(family: str) -> str:
    """Return the family whose prompts and vision tower a family has: itself, or another."""
    return _FAMILIES.get(family, {}).get("like", family)


def hybrid_family(config: PreTrainedConfig) -> str | None:
    """Return the family of a hybrid's config; None if all of a model's layers have attention."""
    return config.model_type if "hybrid" in _FAMILIES.get(config.model_type, ()) else None


def _first_of(config: PreTrainedConfig, *names: str) -> Any:
    """Return the first field of these that a config has and that is neither empty nor 0; else 0."""
    for name in names:
        value = getattr(config, name, None)
        if value:
            return value
    return 0


RULE_CHUNK = 64  # tokens for which transformers computes the rule of linear attention at once


@dataclass(frozen=True)
class LinearSizes:
    """The sizes of the linear attention layers of a hybrid's decoder (Gated DeltaNet).

    Attributes:
        layers: the numbers of the decoder's layers that have linear attention.
        key_heads, value_heads: the heads of q and k, and of v and the state.
        key_dim, value_dim: Dk and Dv, the widths of these.
        kernel: K, the inputs of the short convolution.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """C, the channels of the convolution: all of q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> int:
        """Count the numbers in the state of a layer, all heads together."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def block_map(self) -> int:
        """Count the numbers in a layer's map of a block: a bias, and a transition for each head.

        The bias is as large as the state.
        """
        return self.state + self.value_heads * self.key_dim**2

    @property
    def last_inputs(self) -> int:
        """Count the last inputs of a layer's convolution."""
        return self.channels * self.kernel

    @classmethod
    def from_config(cls, text: PreTrainedConfig) -> "LinearSizes | None":
        """Read the sizes from a text model's config; None if all of its layers have attention."""
        layer_types = getattr(text, "layer_types", None) or ()
        layers = []
        for index, layer_type in enumerate(layer_types):
            if layer_type == "linear_attention":
                layers.append(index)
        if not layers:
            return None
        return cls(
            layers=tuple(layers),
            key_heads=text.linear_num_key_heads,
            value_heads=text.linear_num_value_heads,
            key_dim=text.linear_key_head_dim,
            value_dim=text.linear_value_head_dim,
            kernel=text.linear_conv_kernel_dim,
        )


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes of a decoder with grouped-query attention and a gated MLP, or experts.

    Attributes:
        intermediate: the width of the MLP; with experts the sum of the widths of all that compute
            one token.
        experts, chosen_experts: how many experts a layer has, and how many of them compute a token;
            0: none.
        linear: the sizes of the layers that have linear attention; None: all have attention.
        deepstack: L, the number of first layers after which visual features are added to the hidden
            states (Qwen3-VL).
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    deepstack: int = 0
    experts: int = 0
    chosen_experts: int = 0
    linear: LinearSizes | None = None

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **others) -> "DecoderSizes":
        """Read the sizes from the config of a text model, or of a vision-language model around one.

        Args:
            others: a subclass's further fields.
        """
        text = config.get_text_config()

        # The MLP, or the experts.
        width = _first_of(text, "intermediate_size")
        experts = _first_of(text, "num_experts", "n_routed_experts")
        num_active_experts = 0
        if experts:
            num_active_experts = text.num_experts_per_tok + _first_of(text, "n_shared_experts")
            shared_width = _first_of(text, "shared_expert_intermediate_size")
            experts_width = text.moe_intermediate_size * num_active_experts + shared_width
            if shared_width:  # an expert of another width
                num_active_experts += 1
            # Some layers may have an MLP all the same.
            has_dense_layers = (
                bool(_first_of(text, "mlp_only_layers", "first_k_dense_replace"))
                or _first_of(text, "decoder_sparse_step") > 1
            )
            dense_width = width if has_dense_layers else 0
            width = max(experts_width, dense_width)

        # What older configs leave out.
        head_dim = getattr(text, "head_dim", None)
        if not head_dim:
            head_dim = text.hidden_size // text.num_attention_heads
        vision = getattr(config, "vision_config", None)
        deepstack_layers = getattr(vision, "deepstack_visual_indexes", None) or ()
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=width,
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_dim=head_dim,
            vocab=text.vocab_size,
            deepstack=len(deepstack_layers),
            experts=experts,
            chosen_experts=num_active_experts,
            linear=LinearSizes.from_config(text),
            **others,
        )

    @property
    def kv_token(self) -> int:
        """Count the numbers of one token's K and V in all layers."""
        return 2 * self.kv_layers * self.kv_heads * self.head_dim

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """The numbers, among all of the decoder, of the layers that have attention, and thus KV."""
        linear_layers = () if self.linear is None else self.linear.layers
        return tuple(layer for layer in range(self.layers) if layer not in linear_layers)

    @property
    def kv_layers(self) -> int:
        """How many layers have attention, and thus KV."""
        return len(self.attention_layers)


@dataclass(frozen=True)
class ModelParts:
    """Parts of a causal language model.

    Attributes:
        model: the whole model, as the caller passed it.
        family: its ``model_type``.
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
        embed_tokens: the layer that turns token ids into embeddings.
        dtype, device: of the weights.
        sees: whether the model reads images, and not only text.
        sees_video: whether it reads video, too.
        hears: whether the model reads audio, by itself or beside a video's frames.
        uses_mrope: whether positions are (time, height, width) triples.
        num_layers: the number of decoder layers.
        hidden_size: the width d of a hidden state.
        head_dim: the width D of an attention head.
        num_kv_heads: the number of KV heads on this process, and of its cache.
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
    family: str
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
    hidden_size: int = field(init=False, repr=False, compare=False)
    head_dim: int = field(init=False, repr=False, compare=False)
    vocab_size: int = field(init=False, repr=False, compare=False)
    row_width: int = field(init=False, repr=False, compare=False)
    tensor_parallel: tuple[int, int] = field(init=False, repr=False, compare=False)
    num_kv_heads: int = field(init=False, repr=False, compare=False)
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
        self._set("sees", self.family in VISION_FAMILIES)
        self._set("sees_video", self.family in VIDEO_FAMILIES)
        self._set("hears", self.audio_token_id is not None)
        self._set("uses_mrope", "mrope" in _FAMILIES[self.family])
        self._set("_placeholders", torch.tensor(token_ids))

    def _set_sizes(self) -> None:
        """Set the sizes of the whole decoder, and of its head."""
        sizes = DecoderSizes.from_config(self.model.config)
        self._set("sizes", sizes)
        self._set("num_layers", sizes.layers)
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
        projection = attention.get_submodule("self_attn.k_proj")
        weight = getattr(projection, "weight", None)  # None where it is packed
        mesh = getattr(weight, "device_mesh", None)
        member = 0
        num_members = 1
        if mesh is not None:
            member = mesh.get_local_rank()
            num_members = mesh.size()
        kv_heads_of_members = split_evenly(range(self.sizes.kv_heads), num_members)
        self._set("tensor_parallel", (member, num_members))
        self._set("num_kv_heads", len(kv_heads_of_members[member]))

    def _set_vision(self) -> None:
        """Set how the family counts visual tokens."""
        config = self.model.config
        num_rows_ending_video = 1 if self.family == "llava_onevision" else 0
        rows_per_tile = config.image_seq_length if self.family == "internvl" else None
        patches_per_row = None
        if self.uses_mrope:
            patches_per_row = config.vision_config.spatial_merge_size**2
        self._set("num_rows_ending_video", num_rows_ending_video)
        self._set("rows_per_tile", rows_per_tile)
        self._set("patches_per_row", patches_per_row)

    def _set_towers(self) -> None:
        """Set the modules that encode images, video and audio."""
        model = self.model.model
        audio_tower = model.audio_tower if self.hears else None
        projector = model.multi_modal_projector if self.family in _LLAVA_FAMILIES else None
        self._set("packed_vision_tower", _packed_vision_tower(model, self.family))
        self._set("audio_tower", audio_tower)
        self._set("projector", projector)

    @cached_property
    def config_values(self) -> dict[str, Any]:
        """The model's whole configuration, to compare with other hosts'.

        It is made once, as that takes milliseconds.
        """
        config = self.model.config
        return {"class": type(config).__name__, **json.loads(config.to_json_string())}

    @property
    def audio_unit(self) -> int:
        """The spectrogram frames in the smallest piece of audio that can be encoded by itself.

        It is a window of the tower's convolutions and attention; where pairs of rows are pooled
        across the edge of windows, it is two of them.
        """
        # Half of a window's frames, which is its rows after both.
        assert self.audio_tower is not None  # the model hears
        window = self.audio_tower.config.n_window
        return 2 * window if window % 2 == 0 else 4 * window

    @property
    def max_position_embeddings(self) -> int:
        """The number of positions that the model was made for, or was stretched to (YaRN)."""
        config = self.language_model.config
        rope = getattr(config, "rope_parameters", None) or {}
        # The configs of other types state what they were stretched to.
        if rope.get("rope_type") not in ("linear", "dynamic", "yarn"):
            return config.max_position_embeddings
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        return max(config.max_position_embeddings, int(original * rope["factor"]))

    @property
    def rope_by_length(self) -> str | None:
        """The type of rotary embedding if its frequencies depend on the length; else None."""
        return rope_by_length(self.language_model.config)

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
        rope_index = self.model.model.get_rope_index
        grids = _on_cpu(batch, "image_grid_thw", "video_grid_thw")
        if self.family != OMNI_THINKER:
            seconds = _on_cpu(batch, "second_per_grid_ts")
            types = torch.as_tensor(batch["mm_token_type_ids"]).cpu()
            return rope_index(input_ids, mm_token_type_ids=types, **grids, **seconds)[0]
        lengths = None
        if self.is_audio(input_ids).any():
            lengths = torch.as_tensor(batch["feature_attention_mask"]).cpu().sum(-1)
        position_ids, _ = rope_index(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            use_audio_in_video=self._hears_videos(input_ids),
            audio_seqlens=lengths,
            second_per_grids=_on_cpu(batch, "video_second_per_grid").get("video_second_per_grid"),
            **grids,
        )
        return position_ids

    def _hears_videos(self, input_ids: Tensor) -> bool:
        """Return whether a prompt's videos have their sound among their frames.

        Raises:
            InvalidRequestError: some have and some have not, for which there is no rule of
                positions.
        """
        config = self.model.config
        tokens = input_ids[0, :-1]
        next_tokens = input_ids[0, 1:]
        starts_vision = tokens == config.vision_start_token_id
        has_heard = bool((starts_vision & (next_tokens == config.audio_start_token_id)).any())
        has_silent = bool((starts_vision & (next_tokens == self.video_token_id)).any())
        if has_heard and has_silent:
            raise InvalidRequestError(
                "audio must be interleaved with the frames of all videos of a prompt, or of none"
            )
        return has_heard

    def num_image_rows(self, size: Tensor | None = None, is_tiled: bool = True) -> int:
        """Count the visual tokens of an image of a LLaVA model, by the model's own arithmetic.

        Args:
            size: ``[2]``, height and width of the image; LLaVA-1.5, which resizes all images to
                one size, does not ask it.
            is_tiled: whether LLaVA-OneVision cuts the image into tiles; it does not where several
                images are one sample.
        """
        config = self.model.config
        num_patches = _patches_per_side(config) ** 2
        if self.family == "llava":
            num_rows = num_patches + _num_class_tokens(config)
            if config.vision_feature_select_strategy == "default":
                num_rows -= 1  # the first is dropped
            return num_rows
        assert size is not None  # the others ask it
        num_tiles = self._num_tiles(size) if is_tiled else 1
        tiles = torch.empty(num_tiles, num_patches, 1, device="meta")
        return len(self._packed_image(tiles, size, torch.empty(1, device="meta")))

    def image_cells(self, size: Tensor | None) -> Tensor | None:
        """Number the 2 x 2 cells of patches in an image of a LLaVA model.

        Args:
            size: ``[2]``, height and width of the image; None: unknown, and not needed.

        Returns:
            For each of its visual tokens the number of its cell, within its tile; -1 for a class
            token and the newlines, which are in none. None where a patch is missing, or in another
            family than LLaVA-1.5, LLaVA-NeXT and LLaVA-NeXT-Video.
        """
        config = self.model.config
        side = _patches_per_side(config)
        cell_of_side = torch.arange(side) // 2
        cells = (cell_of_side[:, None] * side + cell_of_side).flatten()
        if self.family in _NEXT_FAMILIES:
            assert size is not None, "the processor gives the sizes of images in tiles"
            first_cells = torch.arange(self._num_tiles(size)) * side**2
            # The model's own packing moves and cuts off numbers as it does embeddings.
            tiles = (first_cells[:, None] + cells).double()[..., None]
            newline = torch.full([1], -1.0, dtype=torch.float64)
            return self._packed_image(tiles, size, newline)[:, 0].long()
        num_rows = self.num_image_rows() if self.family == "llava" else 0
        if num_rows == side**2:
            return cells
        if num_rows == side**2 + 1:
            return torch.cat([torch.tensor([-1]), cells])
        return None

    def _num_tiles(self, size: Tensor) -> int:
        """Count the tiles of an image, with the one that shows the whole of it."""
        # LLaVA-OneVision's file has the same function.
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        config = self.model.config
        side = config.vision_config.image_size
        return image_size_to_num_patches(size, config.image_grid_pinpoints, side)

    def _packed_image(self, tiles: Tensor, size: Tensor, newline: Tensor) -> Tensor:
        """Let the model put the tiles ``[t, patches, d]`` of an image together: ``[rows, d]``."""
        config = self.model.config
        if self.family in _NEXT_FAMILIES:
            packed_images, _ = self.model.model.pack_image_features(
                [tiles],
                size[None],
                image_newline=newline,
                vision_feature_select_strategy=config.vision_feature_select_strategy,
            )
        else:
            packed_images, _ = self.model.model.pack_image_features(
                [tiles],
                size[None],
                image_newline=newline,
                vision_aspect_ratio=getattr(config, "vision_aspect_ratio", None),
            )
        return packed_images[0]

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
        video_token_id=_token_id(model.config, "video"),
        image_token_id=_token_id(model.config, "image"),
        audio_token_id=_token_id(model.config, "audio"),
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


def require_supported(config: PreTrainedConfig) -> str:
    """Return the family of a whole model's config, or reject it before its weights are loaded.

    Raises:
        UnsupportedModelError: an unknown family, or a layer type other than full causal attention.
    """
    family = getattr(config, "model_type", type(config).__name__)
    if family not in _FAMILIES:
        why = _TABLE["unsupported"].get(
            family, f"supported are {', '.join(VISION_FAMILIES + TEXT_FAMILIES)}"
        )
        raise UnsupportedModelError(f"{family} models are not supported; {why}")
    needed = tuple(_FAMILIES[family].get("since", (0, 0)))
    installed = release("transformers")
    if installed < needed:
        raise UnsupportedModelError(
            f"{family} models need transformers {_dotted(needed)} or later, not "
            f"{_dotted(installed)}"
        )
    _refuse_other_towers(family, config)
    _refuse_unsupported_layers(family, config.get_text_config())
    return family


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _refuse_other_towers(family: str, config: PreTrainedConfig) -> None:
    """Reject a vision tower whose rows are counted in another way than the family's (Pixtral's)."""
    towers = _FAMILIES[family].get("towers")
    if towers is not None and config.vision_config.model_type not in towers:
        raise UnsupportedModelError(
            f"{family} with a {config.vision_config.model_type} is not supported; supported vision "
            f"towers are {', '.join(towers)}"
        )


def count_as_the_model(processor: Any, config: PreTrainedConfig) -> None:
    """Let a LLaVA processor count an image's tokens as the model's vision tower makes them.

    Older checkpoints' processors lack the size of a patch, how a tower's rows are selected, or that
    CLIP's have a class token: transformers then fails, or counts one token too few.

    Args:
        processor: of the model; it is changed where it is LLaVA-1.5's, LLaVA-NeXT's or
            LLaVA-NeXT-Video's.
        config: of the whole model.
    """
    if config.model_type in _LLAVA_FAMILIES:
        processor.patch_size = config.vision_config.patch_size
        processor.vision_feature_select_strategy = config.vision_feature_select_strategy
        processor.num_additional_image_tokens = _num_class_tokens(config)


def _patches_per_side(config: PreTrainedConfig) -> int:
    """Return the number of patches along a side of what a LLaVA model's vision tower sees."""
    return config.vision_config.image_size // config.vision_config.patch_size


def _num_class_tokens(config: PreTrainedConfig) -> int:
    """Count the rows of a LLaVA model's vision tower that stand for no patch."""
    return int(config.vision_config.model_type == "clip_vision_model")


def _refuse_unsupported_layers(family: str, config: PreTrainedConfig) -> None:
    # VLMs such as InternVL and LLaVA-OneVision take any language model as their text part.
    text_families = (
        tuple(f"{name.removesuffix('_thinker')}_text" for name in VISION_FAMILIES) + TEXT_FAMILIES
    )
    if config.model_type not in text_families:
        raise UnsupportedModelError(
            f"{family} with a {config.model_type} language model is not supported"
        )
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    supported = ["full_attention"]
    if "hybrid" in _FAMILIES[family]:
        supported.append("linear_attention")
    for index, layer_type in enumerate(layer_types):
        if layer_type not in supported:
            raise UnsupportedModelError(
                f"layer {index} of this {family} model is of type {layer_type}; only "
                f"{' and '.join(supported)} is supported"
            )
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise UnsupportedModelError(
            f"this {family} model uses sliding_attention (sliding_window={config.sliding_window}); "
            "only full_attention is supported"
        )


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
        yield mlp.experts.gate_up_proj[0, 0]


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


def _on_cpu(batch: Mapping[str, Any], *names: str) -> dict[str, Tensor]:
    """Return a batch's entries of these names, as tensors in CPU memory."""
    tensors = {}
    for name in names:
        if batch.get(name) is not None:
            tensors[name] = torch.as_tensor(batch[name]).cpu()
    return tensors


def _packed_vision_tower(model: Any, family: str) -> PreTrainedModel | None:
    if family == "video_llama_3":
        return model.vision_model
    if "mrope" in _FAMILIES[family]:
        return model.visual
    return None


def _token_id(config: PreTrainedConfig, modality: str) -> int | None:
    """Find the placeholder's token id, whose field has different names in different families."""
    token_id = getattr(config, f"{modality}_token_id", None)
    if token_id is None:
        token_id = getattr(config, f"{modality}_token_index", None)
    return token_id
