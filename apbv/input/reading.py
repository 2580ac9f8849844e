"""How questions are read for one model: rendered and tokenised, while the pixels are still to come.

The library, the script and the server all read by this.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from ..config import PrefillConfig
from ..hosts import HostGroup
from ..layout import intersect
from ..model.parts import ModelParts
from ..stats import StageTimer
from .audio import FRAMES_PER_TOKEN, AudioSource, Sound
from .audio_file import AudioClip, AudioError, has_audio, read_audio
from .files import FileIdentity
from .images import Picture
from .known_videos import KnownVideos
from .model_inputs import ModelInputs
from .pixels import PixelReader, SourcePixels
from .readers import ImageReader, Progress, VideoReader
from .rendering import RenderedPrompt, render_prompt
from .request import Question
from .skeleton import SampledVideo, Skeleton, Sources, lay_out
from .video import VideoInfo, require_backend, sample_fps, sample_uniform
from .visual import PromptError, VisualInput


class PromptReader:
    """Reads questions as one model's processor means them.

    Args:
        processor: the model's; for a text-only model its tokenizer. It is used by one thread at a time.
        num_frames: of each video, where a question does not say.
        config: where a text's query begins, and whether hosts share out frames and images.
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
            videos=question.videos,
            images=question.pictures,
            sounds=question.sounds,
            context=question.context,
            messages=question.messages,
            template=question.template,
        )

    def sample(self, infos: Sequence[VideoInfo], question: Question) -> tuple[SampledVideo, ...]:
        """Choose frames of a prompt's videos, of each as if it were the only one, ascending, and hear them.

        Raises:
            VideoError: one cannot be sampled like this.
            AudioError: its sound cannot be heard, or all together have more than the model can take.
            PromptError: the model does not hear, and is asked to.
        """
        num_frames = self._num_frames if question.num_frames is None else question.num_frames
        videos, heard = [], []
        for info in infos:
            if question.fps is None:
                frames = sample_uniform(info, num_frames)
            else:
                frames = sample_fps(info, question.fps, max_frames=num_frames)
            sound = self._sound_of(info, question.audio_in_video, heard)
            heard += [] if sound is None else [sound]
            videos.append(SampledVideo(info, tuple(frames), sound))
        return tuple(videos)

    def _sound_of(self, info: VideoInfo, is_wanted: bool | None, heard: Sequence[Sound]) -> Sound | None:
        """Decode what is heard with a video's frames; None where there is nothing, or nothing is wanted."""
        if is_wanted and not self.parts.hears:
            raise PromptError(f"{self.parts.family} models do not hear: audio_in_video does not apply")
        if is_wanted is False or not self.parts.hears or (is_wanted is None and not has_audio(info.path)):
            return None
        return self._hear(AudioClip(info.path, seconds=info.duration, beside_video=True), heard)

    def _hear(self, clip: AudioClip, heard: Sequence[Sound]) -> Sound:
        """Decode audio at the model's rate, where the model can take it beside what is heard already.

        No prompt has all of its sound in memory to be told that it is too long.
        """
        extractor = self.processor.feature_extractor
        rate, per_token = extractor.sampling_rate, extractor.hop_length * FRAMES_PER_TOKEN
        left = self.parts.max_position_embeddings * per_token - sum(len(sound.samples) for sound in heard)
        samples = read_audio(clip, rate, max(0, left) / rate)
        if len(samples) < per_token:
            raise AudioError(
                f"{clip.path}: its audio of {len(samples) / rate:.3f} seconds is too short to be heard"
            )
        return Sound(samples, AudioSource(FileIdentity.of(clip.path), len(samples)))

    def lay_out(self, rendered: RenderedPrompt, videos: Sequence[SampledVideo]) -> Skeleton:
        """Lay out a prompt of videos, images and sounds, all pixels left out.

        Args:
            videos: the prompt's, as :meth:`sample` returned them.

        Raises:
            PromptError: as :func:`~apbv.input.skeleton.lay_out`.
            AudioError: a sound cannot be heard.
        """
        heard, sounds = [video.sound for video in videos if video.sound is not None], []
        for path in rendered.sounds:
            sounds.append(self._hear(AudioClip(path), [*heard, *sounds]))
        sources = Sources(videos, rendered.pictures, sounds)
        return lay_out(self.parts, self.processor, rendered.text, sources, self._needs_pixels)

    def tokenize(self, rendered: RenderedPrompt) -> Mapping[str, Any]:
        """Return what the tokenizer makes of a prompt of text."""
        if rendered.token_ids is not None:
            return {"input_ids": torch.tensor([rendered.token_ids])}
        return self.tokenizer(
            rendered.text,
            add_special_tokens=not rendered.has_template,
            return_offsets_mapping=True,
            return_tensors="pt",
        )

    def read(
        self,
        rendered: RenderedPrompt,
        videos: Sequence[SampledVideo],
        hosts: HostGroup,
        timer: StageTimer,
    ) -> tuple[ModelInputs, SourcePixels | None]:
        """Read a rendered question, but for its frames and images; every host does.

        Args:
            videos: its videos, as :meth:`sample` returned them.

        Returns:
            What the model reads, without pixels, and whence this host's share of these comes; None where the
            prompt shows nothing.

        Raises:
            ValueError: the prompt cannot be read; the message says why.
        """
        with timer.stage("preprocess"):
            if rendered.pictures or rendered.sounds or videos:
                skeleton = self.lay_out(rendered, videos)
                inputs = ModelInputs.from_skeleton(self.parts, skeleton, hosts, self._config.frame_parallel)
                shown = inputs.visual and self._pixels_of(skeleton, inputs.visual, hosts, timer)
                return inputs, shown
            batch = self.tokenize(rendered)
            inputs = ModelInputs.from_processor(
                self.parts,
                batch,
                hosts,
                query_start=self._query_start(rendered, batch),
                query_len=self._config.query_len,
            )
            return inputs, None

    def _pixels_of(
        self, skeleton: Skeleton, visual: VisualInput, hosts: HostGroup, timer: StageTimer
    ) -> SourcePixels:
        """Return the pixels of a prompt's items, of which this host's share is read when it is asked for."""
        mine, progress = visual.patches[hosts.rank], Progress(timer)
        readers = []
        for run in visual.runs:
            read = intersect(run, mine)
            if read:
                reader, per_patch = self._reader_of(skeleton, visual, run, hosts, progress)
                readers.append((run, reader))
                progress.total += len(read) * per_patch
        return SourcePixels(tuple(readers), hosts.has_own_process)

    def _reader_of(
        self, skeleton: Skeleton, visual: VisualInput, run: range, hosts: HostGroup, progress: Progress
    ) -> tuple[PixelReader, int]:
        """Return the reader of a run of temporal patches, and how many frames or images one of these has."""
        numbers = visual.items_of(run)
        source = skeleton.sources[numbers[0]]
        if isinstance(source, Picture):
            pictures = tuple(skeleton.sources[number] for number in numbers)
            is_untiled = self.parts.family == "llava_onevision" and skeleton.num_pictures > 1
            return ImageReader(pictures, self.processor, progress, is_untiled), 1
        num_merged = -(-len(source.frames) // len(run))
        reader = VideoReader(
            video=source.info,
            frames=source.frames,
            num_merged=num_merged,
            grid=skeleton.grids[numbers[0]],
            processor=self.processor,
            device=self.parts.device,
            dtype=self.parts.dtype,
            config=self._config.video,
            runs_ahead=hosts.has_own_process,
            progress=progress,
        )
        return reader, num_merged

    @cached_property
    def _needs_pixels(self) -> bool:
        """Whether the processor needs real images, as those that work on arrays do."""
        try:
            empty = torch.empty(3, 64, 64, dtype=torch.uint8, device="meta")
            self.processor.image_processor(images=[empty], return_tensors="pt")
            return False
        except Exception:  # of whatever kind: then it is given images
            return True

    def _take_token_ids(self, question: Question) -> RenderedPrompt:
        """Check token ids that come instead of a prompt."""
        given = (question.prompt, question.videos, question.pictures, question.sounds, question.context)
        if any(given) or question.messages:
            raise PromptError("token ids come instead of a prompt and its sources, not beside them")
        token_ids, vocab_size = tuple(question.token_ids), self.parts.vocab_size
        if not token_ids:
            raise PromptError("the prompt is empty")
        unknown = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise PromptError(f"there is no token {unknown}: the model's token ids go from 0 to {vocab_size - 1}")
        if self.parts.is_placeholder(torch.tensor(token_ids)).any():
            raise PromptError(
                "the prompt has placeholders of images or video, which only a chat that holds them may have"
            )
        return RenderedPrompt("", [], [], None, has_context=False, has_template=False, token_ids=token_ids)

    def _query_start(self, rendered: RenderedPrompt, batch: Mapping[str, Any]) -> int | None:
        """Where a text's question begins; None where nobody knows."""
        if rendered.query_char is None:
            return None
        starts = batch["offset_mapping"][0, :, 0]
        start = int((starts < rendered.query_char).sum())
        return start if rendered.has_context else max(start, len(starts) - self._config.query_len)
