"""Reads questions for one model: renders and tokenises them, without pixels.

The library, the script and the server all use it.
"""

import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...config import PrefillConfig
from ...errors import PromptError
from ...hosts import HostGroup
from ...layout import intersect, split_evenly
from ...model.parts import ModelParts
from ...stats import StageTimer
from ..media.audio import AudioError, Sound, read_audio
from ..media.files import FileIdentity, KnownVideos, Source
from ..media.images import Picture
from ..media.video import VideoInfo, frames_within, length_of, sample_fps, sample_uniform
from .audio_input import audio_from_batch
from .model_inputs import ModelInputs
from .pixels import ImageReader, SourcePixels, VideoReader
from .rendering import Question, RenderedPrompt, VideoSampling, render_prompt
from .repeats import kept_tokens, may_leave_out
from .tokenized_prompt import SampledVideo, TokenizedPrompt, lay_out
from .visual import encoding_hosts, share_out

_MOST_KEPT = 16  # videos whose tokens are remembered


class PromptReader:
    """Reads questions with one model's processor; thread-safe.

    Args:
        processor: the model's; for a text-only model its tokenizer. It must not be used elsewhere.
        num_frames: frames per video, if a question does not specify it.
        config: where a text's query begins, and whether hosts share out frames and images.
        videos: cache of probed video files; None: a new one.

    Raises:
        ApbvError: the backend for videos cannot be used.
    """

    def __init__(
        self,
        parts: ModelParts,
        processor,
        num_frames: int,
        config: PrefillConfig | None = None,
        videos: KnownVideos | None = None,
    ):
        self.parts = parts
        self.processor = processor
        self.videos = videos or KnownVideos()
        self.tokenizer = getattr(processor, "tokenizer", processor)
        # transformers warns of too long texts before they are rejected here.
        self.tokenizer.deprecation_warnings[
            "sequence-length-is-longer-than-the-specified-maximum"
        ] = True
        self._tokenizing = threading.Lock()  # which two threads must not do at once
        self._num_frames = num_frames
        self._config = config or PrefillConfig()
        self._kept: dict[Source, Tensor] = {}  # the tokens that prompts have of the latest videos

    def for_another_thread(self) -> "PromptReader":
        """Return a reader with a processor of its own."""
        return PromptReader(
            parts=self.parts,
            processor=deepcopy(self.processor),
            num_frames=self._num_frames,
            config=self._config,
            videos=self.videos,
        )

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return a text's tokens."""
        with self._tokenizing:
            return self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]

    def render(self, question: Question) -> RenderedPrompt:
        """Apply the chat template.

        Raises:
            PromptError: the question cannot be rendered
                (:func:`~apbv.input.prompts.rendering.render_prompt`), or the model cannot read its
                token ids.
        """
        if question.token_ids is not None:
            return self._take_token_ids(question)
        return render_prompt(self.parts, self.processor, question)

    def sample(
        self, infos: Sequence[VideoInfo], question: Question, sampling: Sequence[VideoSampling] = ()
    ) -> tuple[SampledVideo, ...]:
        """Sample frames of each of a prompt's videos, ascending, and read their audio.

        Args:
            sampling: how the frames of each video are sampled and how large they are, where its
                part of a message says so; empty: all as the question says.

        Raises:
            VideoError: one cannot be sampled like this.
            AudioError: its audio cannot be heard, or all together have more than the model can
                take.
            PromptError: the model takes no audio, and is asked to.
        """
        asks_for_audio = question.audio_in_video
        if asks_for_audio and infos and not self.parts.hears:
            raise PromptError(
                f"{self.parts.family} models take no audio: audio_in_video does not apply"
            )
        uses_audio = self.parts.hears and asks_for_audio is not False
        sampling = sampling or [VideoSampling()] * len(infos)
        videos = []
        sounds: list[Sound] = []
        for info, options in zip(infos, sampling, strict=True):
            # Between its start and its end, where these are given, the video is as if the file had
            # only the frames there.
            part = None
            if options.start is not None or options.end is not None:
                part = frames_within(info, options.start, options.end)
            frames = self._sample_frames(info, question, options, part)
            sound = None
            if uses_audio:
                try:
                    sound = self._hear_video(info, part, sounds)
                    sounds.append(sound)
                except AudioError as error:
                    if asks_for_audio or not error.is_missing:
                        raise
            videos.append(
                SampledVideo(info, tuple(frames), sound, limits=options.limits, shown=part)
            )
        return tuple(videos)

    def _sample_frames(
        self, info: VideoInfo, question: Question, options: VideoSampling, part: range | None
    ) -> list[int]:
        """Sample a video as its options say, else as the question says, else by default.

        Args:
            options: of the video's part of a message.
            part: the frames among which to sample; None: all.
        """
        default = self._num_frames if question.num_frames is None else question.num_frames
        min_frames = options.min_frames or 1
        max_frames = options.max_frames
        part = range(info.num_frames) if part is None else part

        # At a rate.
        fps = question.fps if options.fps is None else options.fps
        if options.num_frames is None and fps is not None:
            if max_frames is None:
                max_frames = max(default, min_frames)
            return sample_fps(info, fps, max_frames, min_frames, part)

        # Evenly.
        num_frames = max(options.num_frames or default, min_frames)
        if max_frames is not None:
            num_frames = min(num_frames, max_frames)
        return [part[index] for index in sample_uniform(len(part), num_frames)]

    def _hear_video(self, info: VideoInfo, part: range | None, earlier: Sequence[Sound]) -> Sound:
        """Decode the audio of a video.

        Args:
            part: the frames with which it is heard; None: all.
            earlier: the prompt's audio before it.
        """
        start = 0.0
        seconds = info.duration
        if part is not None:
            start = float(info.timestamps[part.start])
            seconds = length_of(info, part)
        return self._hear(info.path, earlier, seconds=seconds, clock=info.clock, start=start)

    def _hear(
        self,
        path: str,
        earlier: Sequence[Sound],
        *,
        seconds: float | None = None,
        clock: np.ndarray | None = None,
        start: float = 0.0,
    ) -> Sound:
        """Decode audio at the model's rate, if the model has room for it after the earlier audio.

        A prompt that is too long is thus rejected before all of its audio is in memory.

        Args:
            earlier: the prompt's audio before it.
            seconds: how long it is heard; None: to its end.
            clock: the clock of the video that it belongs to
                (:attr:`~apbv.input.media.video.VideoInfo.clock`), if any.
            start: the second from which it is heard.
        """
        extractor = self.processor.feature_extractor
        rate = extractor.sampling_rate
        samples_per_token = extractor.hop_length * self.parts.family.frames_per_audio_row
        max_samples = self.parts.max_position_embeddings * samples_per_token
        num_earlier = sum(len(sound.samples) for sound in earlier)
        max_seconds = max(0, max_samples - num_earlier) / rate
        samples = read_audio(path, rate, max_seconds, seconds=seconds, clock=clock, start=start)
        if len(samples) < samples_per_token:
            raise AudioError(f"{path}: its audio of {len(samples) / rate:.3f} seconds is too short")
        first = round(start * rate)
        return Sound(samples, Source(FileIdentity.of(path), (first, len(samples))))

    def lay_out(
        self, rendered: RenderedPrompt, videos: Sequence[SampledVideo] = ()
    ) -> TokenizedPrompt:
        """Compute a prompt's tokens and their items, without pixels.

        Args:
            videos: the prompt's videos, from :meth:`sample`.

        Raises:
            PromptError: the prompt cannot be laid out
                (:func:`~apbv.input.prompts.tokenized_prompt.lay_out`).
            AudioError: an audio clip cannot be heard.
        """
        if rendered.token_ids is not None:
            return TokenizedPrompt(rendered, (), {"input_ids": torch.tensor([rendered.token_ids])})
        if not (rendered.pictures or rendered.sounds or videos):
            with self._tokenizing:
                batch = self.tokenizer(
                    rendered.text,
                    add_special_tokens=not rendered.has_template,
                    return_offsets_mapping=True,
                    return_tensors="pt",
                )
            return TokenizedPrompt(rendered, (), batch)
        videos = self.without_repeats(videos)
        sounds_of_videos = [video.sound for video in videos if video.sound is not None]
        sounds: list[Any] = []
        for path in rendered.sounds:
            sounds.append(self._hear(path, [*sounds_of_videos, *sounds]))
        return lay_out(self.parts, self.processor, rendered, videos, sounds, self._tokenizing)

    def without_repeats(
        self,
        videos: Sequence[SampledVideo],
        hosts: HostGroup | None = None,
        timer: StageTimer | None = None,
    ) -> tuple[SampledVideo, ...]:
        """Find which tokens of videos a prompt has, if the processor leaves some out; collective.

        Every host compares its share of the frames, or without frame parallelism all of them. What
        host 0 knows from an earlier prompt, it sends.

        Args:
            videos: from :meth:`sample`, the same on every host.
            hosts: None: this process alone.

        Raises:
            VideoError: a frame cannot be decoded.
            HostError: another host failed.
        """
        if not may_leave_out(self.processor):
            return tuple(videos)
        hosts = hosts or HostGroup.single(self.parts.device)
        timer = timer or StageTimer(hosts)
        compared = []
        for video in videos:
            with hosts.local_stage("comparing frames"):
                source = Source(FileIdentity.of(video.info.path), video.frames)
                tokens = self._kept.get(source) if video.kept is None else video.kept
            if self._config.ablation.frame_parallel:
                tokens = self._compare_together(video, tokens, hosts, timer)
            else:
                with hosts.local_stage("comparing frames"):
                    if tokens is None:
                        frames = range(len(video.frames))
                        tokens = self._compare(video, frames, hosts, timer)
            self._remember(source, tokens)
            compared.append(replace(video, kept=tokens))
        return tuple(compared)

    def _compare_together(
        self, video: SampledVideo, tokens: Tensor | None, hosts: HostGroup, timer: StageTimer
    ) -> Tensor:
        """Find which tokens of a video a prompt has, each host in its share of the frames.

        Args:
            tokens: the result, if this host knows it from an earlier prompt.

        Returns:
            Bool ``[frames, h, w]``.
        """
        frames = range(len(video.frames))
        shares = split_evenly(frames, hosts.size)
        host_0_knows = hosts.broadcast_ints([tokens is not None], 1)[0]
        if host_0_knows:
            # It sends all, and the others nothing.
            shares = [frames]
            shares += [range(0)] * (hosts.size - 1)
        share = shares[hosts.rank]
        with hosts.local_stage("comparing frames"):
            if tokens is None or len(share) < len(frames):
                tokens = self._compare(video, share, hosts, timer)
        rows = tokens.to(hosts.device, torch.uint8)
        gathered = hosts.gather_rows(rows, [len(share) for share in shares]).wait()
        return torch.cat(gathered).bool().cpu()

    def _compare(
        self, video: SampledVideo, frames: range, hosts: HostGroup, timer: StageTimer
    ) -> Tensor:
        """Return which tokens of some of a video's frames are left: bool ``[frames, h, w]``."""
        return kept_tokens(self.processor, video, frames, hosts, timer, self._config.video)

    def _remember(self, source: Source, tokens: Tensor) -> None:
        """Cache which tokens a prompt has of a video."""
        self._kept[source] = tokens
        if len(self._kept) > _MOST_KEPT:
            oldest = next(iter(self._kept))
            self._kept.pop(oldest, None)

    def read(
        self,
        rendered: RenderedPrompt,
        videos: Sequence[SampledVideo],
        hosts: HostGroup,
        timer: StageTimer,
        prompt: TokenizedPrompt | None = None,
    ) -> tuple[ModelInputs, SourcePixels | None]:
        """Read a rendered question, except its frames and images; on every host.

        Args:
            videos: its videos, from :meth:`sample`.
            prompt: from :meth:`lay_out`, where that was called already.

        Returns:
            The model inputs without pixels, and the source of this host's share of the pixels; None
            if the prompt has none.

        Raises:
            ApbvError: the prompt cannot be read; the message says why.
        """
        with timer.stage("preprocess"):
            tokenized = prompt or self.lay_out(rendered, videos)
            if not (tokenized.items or tokenized.sounds):
                inputs = ModelInputs.from_processor(
                    self.parts,
                    tokenized.batch,
                    hosts,
                    query_start=self._query_start(rendered, tokenized.batch),
                    query_len=self._config.query_len,
                )
                return inputs, None
            input_ids = tokenized.batch["input_ids"]
            visual = None
            audio = None
            encoders = encoding_hosts(hosts, self._config.ablation.frame_parallel)
            if tokenized.items:
                visual = share_out(tokenized.items, encoders)
            if tokenized.sounds:
                audio = audio_from_batch(self.parts, tokenized.batch, input_ids[0], encoders)
                audio = replace(audio, sources=tokenized.sounds)
            inputs = ModelInputs.of_sources(self.parts, tokenized.batch, input_ids, visual, audio)
        if visual is None:
            return inputs, None
        readers = []
        for run, items in visual.runs:
            if intersect(run, visual.patches[visual.host]):
                readers.append((run, self._reader(tokenized, run, items, hosts, timer)))
        return inputs, SourcePixels(tuple(readers), timer, hosts.has_own_process)

    def _reader(
        self,
        tokenized: TokenizedPrompt,
        run: range,
        items: range,
        hosts: HostGroup,
        timer: StageTimer,
    ) -> VideoReader | ImageReader:
        """Make the reader of a video, or of adjacent images.

        Args:
            run: the temporal patches of these.
            items: their numbers among the prompt's items.
        """
        sources = tokenized.sources[items.start : items.stop]
        source = sources[0]
        if isinstance(source, Picture):
            return ImageReader(
                pictures=tuple(picture for picture in sources if isinstance(picture, Picture)),
                processor=self.processor,
                timer=timer,
                is_untiled=self.parts.family.leaves_images_whole(len(tokenized.rendered.pictures)),
            )
        return VideoReader(
            video=source,
            num_merged=-(-len(source.frames) // len(run)),
            processor=self.processor,
            timer=timer,
            device=self.parts.device,
            dtype=self.parts.dtype,
            config=self._config.video,
            runs_ahead=hosts.has_own_process,
        )

    def _take_token_ids(self, question: Question) -> RenderedPrompt:
        """Check token ids that are given instead of a prompt."""
        sources = (question.video, question.images, question.audio)
        texts = (question.prompt, question.context, question.messages)
        if any(sources) or any(texts):
            raise PromptError("pass either token ids or a prompt with its sources, not both")
        token_ids = tuple(question.token_ids or ())
        vocab_size = self.parts.vocab_size
        if not token_ids:
            raise PromptError("the prompt is empty")
        unknown = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise PromptError(
                f"unknown token id {unknown}: the model's token ids go from 0 to {vocab_size - 1}"
            )
        if self.parts.is_placeholder(torch.tensor(token_ids)).any():
            raise PromptError(
                "the prompt's token ids have placeholders of images or video: pass these in a chat "
                "instead"
            )
        return RenderedPrompt(
            text="",
            videos=[],
            pictures=[],
            query_char=None,
            has_context=False,
            has_template=False,
            token_ids=token_ids,
        )

    def _query_start(self, rendered: RenderedPrompt, batch: Mapping[str, Any]) -> int | None:
        """Return the token with which a text's question begins; None if unknown."""
        if rendered.query_char is None:
            return None
        chars = batch["offset_mapping"][0, :, 0]
        start = int((chars < rendered.query_char).sum())
        if rendered.has_context:
            return start
        return max(start, len(chars) - self._config.query_len)
