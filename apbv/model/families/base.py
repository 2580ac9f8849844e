"""What apbv asks about a model's family. The defaults are those of a model that reads text only."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from ...compat.versions import release
from ...errors import UnsupportedModelError
from ..digest import config_digest
from ..rotary import rope_by_length
from .sizes import DecoderSizes
from .table import ROWS, TEXT_FAMILIES, VISION_FAMILIES, FamilyRow


class ModelFamily:
    """All that tells one model family from another, for one model's config.

    A family that reads images or video is a subclass, and overrides what differs. Where a method
    takes ``model``, it is the whole model; its config is that of this object.

    Attributes:
        row: the family's row in ``families.toml``.
        uses_mrope: whether positions are (time, height, width) triples.
        video_pixels: the name of a video's pixels in the batch of the whole processor.
        image_pixels: the name of images' pixels there; None: they are not told apart from a video's
            frames.
        num_rows_ending_video: visual tokens after a video's last frame.
        text_tokens_per_patch: about how many text tokens stand before each temporal patch of a
            video but the first, such as its time.
        frames_per_audio_row: the spectrogram frames of an audio token; 0: there are none.
        tells_frame_rate: whether the processor takes a video's frame rate from its argument
            ``fps``, and not from the video's metadata.
        whole_limits_videos: whether the whole processor gives its part for videos other limits on
            their size than that part has of its own.
    """

    uses_mrope = False
    video_pixels = "pixel_values_videos"
    image_pixels: str | None = "pixel_values"
    num_rows_ending_video = 0
    text_tokens_per_patch = 0
    frames_per_audio_row = 0
    tells_frame_rate = False
    whole_limits_videos = False

    def __init__(self, row: FamilyRow, config: PreTrainedConfig):
        self.row = row
        self._config = config

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    # The model's config.

    @property
    def name(self) -> str:
        """The family's name, transformers' ``model_type``."""
        return self.row.name

    @property
    def reads_images(self) -> bool:
        """Whether its models read images, and not only text."""
        return self.row.reads_images

    @property
    def reads_video(self) -> bool:
        """Whether its models read video, too."""
        return self.row.reads_video

    @property
    def checkpoint(self) -> str:
        """The directory or hub id that the config was read from; empty if it was not read."""
        return str(self._config.name_or_path)

    @property
    def revision(self) -> str | None:
        """The commit on the hub that the config was read from; None: it was read elsewhere."""
        return getattr(self._config, "_commit_hash", None)

    @cached_property
    def config_values(self) -> dict[str, Any]:
        """The model's whole configuration, to compare with other hosts'.

        It is made once, as that takes milliseconds.
        """
        config = self._config
        return {"class": type(config).__name__, **json.loads(config.to_json_string())}

    def config_digest(self) -> str:
        """Compute :func:`apbv.model.digest.config_digest` of the model's config."""
        return config_digest(self._config)

    @property
    def dtype(self) -> str | torch.dtype:
        """The type of the weights, as the config says."""
        text = self._config.get_text_config()
        return getattr(self._config, "dtype", None) or getattr(text, "dtype", None) or "float32"

    @property
    def sizes(self) -> DecoderSizes:
        """The sizes of the whole decoder."""
        return DecoderSizes.from_config(self._config)

    @property
    def text_type(self) -> str:
        """The ``model_type`` of the text model, which may be another family's."""
        return self._config.get_text_config().model_type

    @property
    def has_joint_mlp(self) -> bool:
        """Whether the decoder's MLP has its gate and its projection up in one matrix."""
        row = ROWS.get(self.text_type.removesuffix("_text"))
        return row is not None and row.has_joint_mlp

    @property
    def rope_by_length(self) -> str | None:
        """The type of rotary embedding if its frequencies depend on the length; else None."""
        return rope_by_length(self._config.get_text_config())

    @property
    def max_position_embeddings(self) -> int:
        """The number of positions that the model was made for, or was stretched to (YaRN)."""
        config = self._config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        # The configs of other types state what they were stretched to.
        if rope.get("rope_type") not in ("linear", "dynamic", "yarn"):
            return config.max_position_embeddings
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        return max(config.max_position_embeddings, int(original * rope["factor"]))

    def token_id(self, modality: str) -> int | None:
        """Return the id of a placeholder in ``input_ids``; None: the model has no such.

        The config's field has different names in different families.

        Args:
            modality: ``"image"``, ``"video"`` or ``"audio"``.
        """
        token_id = getattr(self._config, f"{modality}_token_id", None)
        if token_id is None:
            token_id = getattr(self._config, f"{modality}_token_index", None)
        return token_id

    # Loading.

    def require_runnable(self) -> None:
        """Reject a model that apbv cannot compute exactly, before its weights are loaded.

        Raises:
            UnsupportedModelError: too old a release of transformers, another vision tower than the
                family's, or a layer type other than full causal attention.
        """
        installed = release("transformers")
        if installed < self.row.since:
            raise UnsupportedModelError(
                f"{self.name} models need transformers {_dotted(self.row.since)} or later, not "
                f"{_dotted(installed)}"
            )
        self._require_own_tower()
        self._require_supported_layers()

    def _require_own_tower(self) -> None:
        """Reject a vision tower whose rows are counted in another way than the family's."""
        towers = self.row.towers
        if towers is None:
            return
        tower = self._config.vision_config.model_type  # Pixtral's, for one
        if tower not in towers:
            raise UnsupportedModelError(
                f"{self.name} with a {tower} is not supported; supported vision towers are "
                f"{', '.join(towers)}"
            )

    def _require_supported_layers(self) -> None:
        """Reject a text model of an unknown family, or with layers of another type."""
        # VLMs such as InternVL and LLaVA-OneVision take any language model as their text part.
        text_families = (
            tuple(f"{name.removesuffix('_thinker')}_text" for name in VISION_FAMILIES)
            + TEXT_FAMILIES
        )
        config = self._config.get_text_config()
        if self.text_type not in text_families:
            raise UnsupportedModelError(
                f"{self.name} with a {self.text_type} language model is not supported"
            )
        layer_types = getattr(config, "layer_types", None) or ["full_attention"]
        supported = ["full_attention"]
        if self.row.is_hybrid:
            supported.append("linear_attention")
        for index, layer_type in enumerate(layer_types):
            if layer_type not in supported:
                raise UnsupportedModelError(
                    f"layer {index} of this {self.name} model is of type {layer_type}; only "
                    f"{' and '.join(supported)} is supported"
                )
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            raise UnsupportedModelError(
                f"this {self.name} model uses sliding_attention "
                f"(sliding_window={config.sliding_window}); only full_attention is supported"
            )

    @property
    def auto_class(self) -> type[Any]:
        """The class of :mod:`transformers.models.auto` that loads such models."""
        if self.reads_images:
            return AutoModelForImageTextToText
        return AutoModelForCausalLM

    def prepare_processor(self, processor: Any) -> None:
        """Change a processor that was loaded, where a checkpoint's does not fit its model."""

    def prepare_model(self, model: PreTrainedModel, processor: Any) -> None:
        """Change a model that was loaded, where a checkpoint leaves something to its processor."""

    # Modules.

    def packed_vision_tower(self, model: Any) -> PreTrainedModel | None:
        """Return the vision tower if it packs windows and frames into one sequence; else None."""
        return None

    def audio_tower(self, model: Any) -> PreTrainedModel | None:
        """Return the tower that encodes audio, with its windows packed into one sequence; or None
        for models that take no audio."""
        return None

    def projector(self, model: Any) -> nn.Module | None:
        """Return the module that maps each patch's features to an embedding by itself, if any."""
        return None

    # What processors want.

    def num_frames_told(self, num_frames: int, num_merged: int) -> int:
        """Return the number of frames to pass to a processor for a video's layout in the prompt.

        Where a video's last frames do not fill a temporal patch, Qwen's processors repeat the last
        one themselves.

        Args:
            num_merged: the frames of a temporal patch.
        """
        return num_frames

    def num_times_counted(self, image_processor: Any) -> int:
        """Return how many times the processor counts a pixel in limits on an image's size."""
        return 1

    def images_argument(self, images: list[Any]) -> list[Any]:
        """Return the processor's argument ``images`` for adjacent images of a prompt."""
        return images

    def leaves_images_whole(self, num_images: int) -> bool:
        """Return whether images are one sample of several, which are not cut into tiles.

        Args:
            num_images: of the whole prompt.
        """
        return False

    # Placeholders, rows and patches.

    @property
    def patches_per_row(self) -> int | None:
        """The patches of pixels that the vision tower merges into one visual token; None where the
        processor, or the model's code, tells."""
        return None

    @property
    def rows_per_tile(self) -> int | None:
        """The visual tokens of each tile of an image, where these follow one another; else None."""
        return None

    def is_image(self, input_ids: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Find the placeholders of images, not of video.

        Args:
            input_ids: ``[n]``, a prompt.
            batch: the other outputs of the model's processor.

        Returns:
            bool ``[n]``; it counts at placeholders of images and video only.
        """
        token_id = self.token_id("image")
        assert token_id is not None  # the model reads images
        return torch.eq(input_ids, token_id)

    def video_size(self, batch: Mapping[str, Any]) -> tuple[int, int]:
        """Count the temporal patches and the visual tokens of a video.

        Args:
            batch: the output of the video processor for the video.

        Returns:
            The patches, and the visual tokens of all of them, with those that end the video.
        """
        raise NotImplementedError(f"{self.name} models read no video")

    def num_image_rows(self, model: Any, size: Tensor | None, is_tiled: bool) -> int:
        """Count the visual tokens of an image, where the processor gives no grid for each.

        Args:
            size: ``[2]``, height and width of the image; None: all have one size.
            is_tiled: whether the image is cut into tiles, in families that leave some whole.
        """
        raise NotImplementedError(f"{self.name} models have no such images")

    def image_cells(self, model: Any, size: Tensor | None) -> Tensor | None:
        """Number the 2 x 2 cells of patches in an image, where the projector pools them.

        Args:
            size: ``[2]``, height and width of the image; None: unknown, and not needed.

        Returns:
            For each of its visual tokens the number of its cell, within its tile; -1 for a class
            token and the newlines, which are in none. None where a patch is missing, or the family
            has no projector for patches.
        """
        return None

    # Positions.

    def rotary_positions(self, model: Any, input_ids: Tensor, batch: Mapping[str, Any]) -> Tensor:
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
        raise NotImplementedError(f"{self.name} models have no M-RoPE")

    # Encoding.

    def encode_images(self, model: Any, pixels: Mapping[str, Any]) -> Any:
        """Run the vision tower on images.

        Args:
            pixels: their part of a processor's batch, the pixels first.

        Returns:
            transformers' output: ``pooler_output`` has the embeddings, of all images or of each;
            ``deepstack_features``, if any, those for the first layers.
        """
        first = next(iter(pixels.values()))
        options = {name: value for name, value in pixels.items() if name != "pixel_values"}
        return model.model.get_image_features(first, **options, return_dict=True)

    def encode_video(self, model: Any, pixels: Mapping[str, Any]) -> Any:
        """Run the vision tower on temporal patches of videos; see :meth:`encode_images`."""
        first, *rest = pixels.values()
        return model.model.get_video_features(first, *rest, return_dict=True)

    def end_video(self, model: Any, rows: Tensor, num_rows: int, num_ending: int) -> Tensor:
        """End the embeddings of some temporal patches of videos as the prompt ends them.

        Args:
            rows: ``[.., d]``, as :meth:`encode_video` returns them.
            num_rows: the visual tokens of the temporal patches, with those that end a video.
            num_ending: how many of them end a video; 0 where the patches are not its last.
        """
        return rows

    def num_audio_rows(self, num_frames: int) -> int:
        """Count the audio tokens of a number of spectrogram frames."""
        raise NotImplementedError(f"{self.name} models take no audio")

    def audio_unit(self, model: Any) -> int:
        """Return the spectrogram frames in the smallest piece of audio that can be encoded by
        itself."""
        raise NotImplementedError(f"{self.name} models take no audio")

    def encode_audio(self, model: Any, features: Tensor, mask: Tensor) -> Tensor:
        """Run the audio tower on pieces of audio.

        Args:
            features: ``[pieces, mel bins, frames]``.
            mask: bool ``[pieces, frames]``, which frames each piece has.

        Returns:
            The embeddings, ``[rows, d]``.
        """
        raise NotImplementedError(f"{self.name} models take no audio")


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
