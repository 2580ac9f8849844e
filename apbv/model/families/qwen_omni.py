"""Qwen2.5-Omni's thinker: the model without the talker, which speaks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import InvalidRequestError
from .qwen_vl import QwenVL, on_cpu

WHOLE_MODEL = "qwen2_5_omni"


def thinker_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the thinker's config of the whole model's."""
    thinker = config.thinker_config  # it also has a talker, which would speak the answer
    thinker.dtype = thinker.dtype or config.dtype
    return thinker


class QwenOmni(QwenVL):
    """Qwen2.5-Omni's thinker, which also hears, by itself or beside a video's frames."""

    frames_per_audio_row = 4  # after convolutions and pooling with two strides of two
    tells_frame_rate = True
    whole_limits_videos = True

    def prepare_model(self, model: PreTrainedModel, processor: Any) -> None:
        # A checkpoint of several models may not say at which token the thinker ends its answer.
        settings = model.generation_config
        settings.eos_token_id = settings.eos_token_id or processor.tokenizer.eos_token_id

    def audio_tower(self, model: Any) -> PreTrainedModel | None:
        return model.model.audio_tower

    def rotary_positions(self, model: Any, input_ids: Tensor, batch: Mapping[str, Any]) -> Tensor:
        lengths = None
        if self.token_id("audio") in input_ids:
            lengths = torch.as_tensor(batch["feature_attention_mask"]).cpu().sum(-1)
        position_ids, _ = model.model.get_rope_index(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            use_audio_in_video=self._hears_videos(input_ids),
            audio_seqlens=lengths,
            second_per_grids=on_cpu(batch, "video_second_per_grid").get("video_second_per_grid"),
            **on_cpu(batch, "image_grid_thw", "video_grid_thw"),
        )
        return position_ids

    def _hears_videos(self, input_ids: Tensor) -> bool:
        """Return whether a prompt's videos have their sound among their frames.

        Raises:
            InvalidRequestError: some have and some have not, for which there is no rule of
                positions.
        """
        tokens = input_ids[0, :-1]
        next_tokens = input_ids[0, 1:]
        starts_vision = tokens == self._config.vision_start_token_id
        starts_audio = next_tokens == self._config.audio_start_token_id
        has_heard = bool((starts_vision & starts_audio).any())
        has_silent = bool((starts_vision & (next_tokens == self.token_id("video"))).any())
        if has_heard and has_silent:
            raise InvalidRequestError(
                "audio must be interleaved with the frames of all videos of a prompt, or of none"
            )
        return has_heard

    def num_audio_rows(self, num_frames: int) -> int:
        return max(0, ((num_frames - 1) // 2 + 1) // 2)

    def audio_unit(self, model: Any) -> int:
        # A window of the tower's convolutions and attention; where pairs of rows are pooled across
        # the edge of windows, it is two of them. ``n_window`` is half of a window's frames, which
        # is its rows after both.
        window = model.model.audio_tower.config.n_window
        return 2 * window if window % 2 == 0 else 4 * window

    def encode_audio(self, model: Any, features: Tensor, mask: Tensor) -> Tensor:
        encoded = model.model.get_audio_features(
            features,
            feature_attention_mask=mask,
            return_dict=True,
        )
        return encoded.last_hidden_state
