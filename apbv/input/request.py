"""A request: what is asked, and how it is to be answered, in one object that travels to the first token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from ..config import SamplingConfig
from ..stats import StageTimer
from .model_inputs import ModelInputs


@dataclass(frozen=True)
class Question:
    """What is asked, about videos, images and sounds, or about a text.

    Attributes:
        prompt: the question.
        video: a video file, or several, which come in this order.
        images: behind the videos: an image file, a PIL image or a tensor ``[3, H, W]``, or several.
        context: a long text.
        messages: a chat in transformers' format, instead of all these.
        num_frames: so many frames of each video are sampled, evenly; with ``fps`` at most so many; None: as many
            as the model's default.
        fps: sample at this rate instead.
        token_ids: a text as the model reads it, instead of prompt, sources and messages. No chat template is
            applied, and its last tokens are the question (:attr:`apbv.PrefillConfig.query_len`).
        template: options of the chat template, see :func:`~apbv.input.templates.apply_template`.
        audio: behind the images: an audio file, or several; of a video its sound.
        audio_in_video: whether the videos' own sound is heard among their frames; None: where the model hears and
            they have any.
    """

    prompt: str | None = None
    video: str | Path | Sequence[str | Path] | None = None
    images: Any | Sequence[Any] | None = None
    context: str | None = None
    messages: Sequence[dict] | None = None
    num_frames: int | None = None
    fps: float | None = None
    token_ids: Sequence[int] | None = None
    template: Mapping[str, Any] | None = None
    audio: str | Path | Sequence[str | Path] | None = None
    audio_in_video: bool | None = None

    @property
    def videos(self) -> Sequence[str | Path]:
        """The video files."""
        return _listed(self.video)

    @property
    def pictures(self) -> Sequence[Any]:
        """The images."""
        return [self.images] if isinstance(self.images, Image.Image | Tensor) else _listed(self.images)

    @property
    def sounds(self) -> Sequence[str | Path]:
        """The audio files."""
        return _listed(self.audio)


@dataclass(frozen=True)
class Request:
    """A question on its way to its answer.

    Attributes:
        question: what is asked.
        timer: the request's stage times.
        positions: whose rule gives the rotary positions, one of :data:`~apbv.input.model_inputs.POSITION_RULES`.
        sampling: how the answer's tokens are chosen, and how many at most.
        num_wanted: positions must be left for so many tokens of the answer.
        on_token: called on every host with each token as soon as it is chosen.
        stop: asked on host 0 with the tokens so far; true ends the answer, or cancels the request while there is
            none. None on all hosts, or on none.
    """

    question: Question
    timer: StageTimer
    positions: str = "transformers"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    num_wanted: int = 1
    on_token: Callable[[int], None] | None = None
    stop: Callable[[Sequence[int]], bool] | None = None

    def within(self, max_positions: int, inputs: ModelInputs) -> "Request":
        """The same request with an answer no longer than the positions that its prompt leaves."""
        most = min(self.sampling.max_new_tokens, max_positions - inputs.next_position)
        fewest = min(self.sampling.min_tokens, most)
        return replace(self, sampling=replace(self.sampling, max_new_tokens=most, min_tokens=fewest))


def _listed(files: str | Path | Sequence[str | Path] | None) -> Sequence[str | Path]:
    if files is None:
        return ()
    return [files] if isinstance(files, str | Path) else files
