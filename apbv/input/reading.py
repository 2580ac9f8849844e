"""How questions are read for one model: rendered and tokenised, while a video's pixels are still to come.

The library, the script and the server all read by this.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..config import PrefillConfig
from ..hosts import HostGroup
from ..model.parts import ModelParts
from ..stats import StageTimer
from .frames import FramePiece, VideoPixels, video_skeleton
from .known_videos import KnownVideos
from .model_inputs import ModelInputs
from .placeholders import process
from .rendering import RenderedPrompt, render_prompt
from .request import Question
from .video import VideoInfo, require_backend, sample_fps, sample_uniform
from .visual import PromptError


class PromptReader:
    """Reads questions as one model's processor means them.

    Args:
        processor: the model's; for a text-only model its tokenizer. It is used by one thread at a time.
        num_frames: of a video, where a question does not say.
        config: where a text's query begins, and whether hosts share out a video's frames.
        videos: remembers what was found in video files; None: nobody else shares it.

    Raises:
        ValueError: the back end for videos cannot be used.
    """

    def __init__(
        self,
        parts: ModelParts,
        processor,
        num_frames: int,
        config: PrefillConfig | None = None,
        videos: KnownVideos | None = None,
    ):
        self.parts, self.processor = parts, processor
        self.videos = videos or KnownVideos()
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self._num_frames, self._config = num_frames, config or PrefillConfig()
        require_backend(self._config.video.backend)

    def render(self, question: Question) -> RenderedPrompt:
        """Apply the chat template; see :func:`~apbv.input.rendering.render_prompt` for errors.

        Raises:
            PromptError: also where token ids cannot be read by this model.
        """
        if question.token_ids is not None:
            return self._take_token_ids(question)
        return render_prompt(
            self.parts,
            self.processor,
            question.prompt,
            video=question.video,
            images=question.images,
            context=question.context,
            messages=question.messages,
            template=question.template,
        )

    def sample(self, info: VideoInfo | None, question: Question) -> tuple[VideoInfo, list[int]] | None:
        """Choose frames of a video, ascending; None where there is no video.

        Raises:
            VideoError: it cannot be sampled like this.
        """
        if info is None:
            return None
        num_frames = self._num_frames if question.num_frames is None else question.num_frames
        if question.fps is None:
            return info, sample_uniform(info, num_frames)
        return info, sample_fps(info, question.fps, max_frames=num_frames)

    def tokenize(self, rendered: RenderedPrompt, sampled: tuple[VideoInfo, list[int]] | None) -> Mapping[str, Any]:
        """What the processor or the tokenizer makes of the whole prompt, a video's pixels left out.

        Args:
            sampled: what :meth:`sample` returned.
        """
        if rendered.token_ids is not None:
            return {"input_ids": torch.tensor([rendered.token_ids])}
        if sampled is not None:
            return video_skeleton(self.processor, rendered.text, *sampled)
        if rendered.images:
            return process(self.processor, rendered.text, images=rendered.images)
        return self.tokenizer(
            rendered.text,
            add_special_tokens=not rendered.has_template,
            return_offsets_mapping=True,
            return_tensors="pt",
        )

    def read(
        self,
        question: Question,
        rendered: RenderedPrompt,
        info: VideoInfo | None,
        hosts: HostGroup,
        timer: StageTimer,
    ) -> tuple[ModelInputs, FramePiece | None]:
        """Read a rendered question, but for its video's frames; every host does.

        Args:
            info: its video.

        Returns:
            What the model reads, of a video without its pixels, and the piece of the video that this host has to
            read; None where there is no video.

        Raises:
            ValueError: the prompt cannot be read; the message says why.
        """
        with timer.stage("preprocess"):
            sampled = self.sample(info, question)
            batch = self.tokenize(rendered, sampled)
            if sampled is not None:
                frame_parallel = self._config.frame_parallel
                return ModelInputs.from_skeleton(self.parts, batch, *sampled, hosts, frame_parallel)
            inputs = ModelInputs.from_processor(
                self.parts,
                batch,
                hosts,
                query_start=self._query_start(rendered, batch),
                query_len=self._config.query_len,
            )
            return inputs, None

    def pixels_of(self, piece: FramePiece, hosts: HostGroup, timer: StageTimer) -> VideoPixels:
        """Return the pixels of a host's frames, which are read as they are asked for."""
        return VideoPixels(
            piece=piece,
            processor=self.processor,
            device=self.parts.device,
            dtype=self.parts.dtype,
            config=self._config.video,
            runs_ahead=hosts.has_own_process,
            timer=timer,
        )

    def _take_token_ids(self, question: Question) -> RenderedPrompt:
        """Check token ids that come instead of a prompt."""
        if any((question.prompt, question.video, question.images, question.context, question.messages)):
            raise PromptError("token ids come instead of a prompt and its sources, not beside them")
        token_ids, vocab_size = tuple(question.token_ids), self.parts.vocab_size
        if not token_ids:
            raise PromptError("the prompt is empty")
        unknown = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise PromptError(f"there is no token {unknown}: the model's token ids go from 0 to {vocab_size - 1}")
        if self.parts.is_visual(torch.tensor(token_ids)).any():
            raise PromptError(
                "the prompt has placeholders of images or video, which only a chat that holds them may have"
            )
        return RenderedPrompt("", None, [], None, has_context=False, has_template=False, token_ids=token_ids)

    def _query_start(self, rendered: RenderedPrompt, batch: Mapping[str, Any]) -> int | None:
        """Where a text's question begins; None where nobody knows."""
        if rendered.query_char is None:
            return None
        starts = batch["offset_mapping"][0, :, 0]
        start = int((starts < rendered.query_char).sum())
        return start if rendered.has_context else max(start, len(starts) - self._config.query_len)
