"""Reads questions for one model: renders and tokenises them, without pixels.

The library, the script and the server all use it.
"""

import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import PrefillConfig
from ..hosts import HostGroup
from ..layout import intersect, split_evenly
from ..model.parts import ModelParts
from ..stats import StageTimer
from .audio import FRAMES_PER_TOKEN, AudioError, Sound, audio_from_batch, read_audio
from .files import FileIdentity, KnownVideos, Source
from .images import Picture
from .model_inputs import ModelInputs
from .pixels import ImageReader, SourcePixels, VideoReader
from .rendering import Question, RenderedPrompt, VideoSampling, render_prompt
from .repeats import kept_tokens, may_leave_out
from .skeleton import SampledVideo, Skeleton, lay_out
from .video import VideoInfo, frames_within, length_of, sample_fps, sample_uniform
from .visual import PromptError, encoding_hosts, share_out

_MOST_KEPT = 16


class PromptReader:
    """Reads questions with one model's processor; thread-safe.

    Args:
        processor: the model's; for a text-only model its tokenizer. It must not be used elsewhere.
        num_frames: frames per video, if a question does not specify it.
        config: where a text's query begins, and whether hosts share out frames and images.
        videos: cache of probed video files; None: a new one.

    Raises:
        ValueError: the backend for videos cannot be used.
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
        self._num_frames, self._config = num_frames, config or PrefillConfig()
        self._kept: dict[Source, Tensor] = {}  # of the latest videos

    def for_another_thread(self) -> "PromptReader":
        """Return a reader with a processor of its own."""
        return PromptReader(
            self.parts, deepcopy(self.processor), self._num_frames, self._config, self.videos
        )

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return a text's tokens."""
        with self._tokenizing:
            return self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]

    def render(self, question: Question) -> RenderedPrompt:
        """Apply the chat template; see :func:`~apbv.input.rendering.render_prompt` for errors.

        Raises:
            PromptError: also where token ids cannot be read by this model.
        """
        if question.token_ids is not None:
            return self._take_token_ids(question)
        return render_prompt(self.parts, self.processor, question)

    def sample(
        self, infos: Sequence[VideoInfo], question: Question, sampling: Sequence[VideoSampling] = ()
    ) -> tuple[SampledVideo, ...]:
        """Sample frames of a prompt's videos, each as if it were the only one, ascending, and read
        their audio.

        Args:
            sampling: how the frames of each video are sampled and how large they are, where it says
                so; empty: all as the question says.

        Raises:
            VideoError: one cannot be sampled like this.
            AudioError: its audio cannot be heard, or all together have more than the model can
                take.
            PromptError: the model takes no audio, and is asked to.
        """
        is_wanted = question.audio_in_video
        hears = self.parts.hears
        videos = []
        heard = []
        if is_wanted and infos and not hears:
            raise PromptError(
                f"{self.parts.family} models take no audio: audio_in_video does not apply"
            )
        for info, own in zip(infos, sampling or [VideoSampling()] * len(infos), strict=True):
            # As if the file had only the frames between its start and its end, where these are
            # given.
            shown = (
                None if own.start is own.end is None else frames_within(info, own.start, own.end)
            )
            frames = self._sample_frames(info, question, own, shown)
            sound = None
            if hears and is_wanted is not False:
                try:
                    clip = {"seconds": info.duration}
                    if shown is not None:
                        clip = {
                            "seconds": length_of(info, shown),
                            "start": float(info.timestamps[shown.start]),
                        }
                    sound = self._hear(info.path, heard, clock=info.clock, **clip)
                    heard.append(sound)
                except AudioError as error:
                    if is_wanted or not error.is_missing:
                        raise
            videos.append(SampledVideo(info, tuple(frames), sound, limits=own.limits, shown=shown))
        return tuple(videos)

    def _sample_frames(
        self, info: VideoInfo, question: Question, own: VideoSampling, shown: range | None
    ) -> list[int]:
        """Sample one video as its part of a message says, else as the question says, else by
        default.

        Args:
            shown: the frames among which to sample; None: all.
        """
        default = self._num_frames if question.num_frames is None else question.num_frames
        least = own.min_frames or 1
        most = own.max_frames
        shown = range(info.num_frames) if shown is None else shown
        fps = question.fps if own.fps is None else own.fps
        if own.num_frames is None and fps is not None:
            most = max(default, least) if most is None else most
            return sample_fps(info, fps, most, least, shown)
        wanted = own.num_frames or default
        wanted = max(wanted, least) if most is None else min(max(wanted, least), most)
        return [shown[index] for index in sample_uniform(len(shown), wanted)]

    def _hear(self, path: str, heard: Sequence[Sound], **clip) -> Sound:
        """Decode audio at the model's rate, if the model has room for it after the earlier audio.

        A prompt that is too long is thus rejected before all of its audio is in memory.

        Args:
            clip: what of the file is heard, as of :func:`~apbv.input.audio.read_audio`.
        """
        extractor = self.processor.feature_extractor
        rate = extractor.sampling_rate
        per_token = extractor.hop_length * FRAMES_PER_TOKEN
        left = self.parts.max_position_embeddings * per_token - sum(
            len(sound.samples) for sound in heard
        )
        samples = read_audio(path, rate, max(0, left) / rate, **clip)
        if len(samples) < per_token:
            raise AudioError(f"{path}: its audio of {len(samples) / rate:.3f} seconds is too short")
        first = round(clip.get("start", 0) * rate)
        return Sound(samples, Source(FileIdentity.of(path), (first, len(samples))))

    def lay_out(self, rendered: RenderedPrompt, videos: Sequence[SampledVideo] = ()) -> Skeleton:
        """Compute a prompt's tokens and their items, without pixels.

        Args:
            videos: the prompt's, as :meth:`sample` returned them.

        Raises:
            PromptError: as :func:`~apbv.input.skeleton.lay_out`.
            AudioError: an audio clip cannot be heard.
        """
        if rendered.token_ids is not None:
            return Skeleton(rendered, (), {"input_ids": torch.tensor([rendered.token_ids])})
        if not (rendered.pictures or rendered.sounds or videos):
            add = not rendered.has_template
            text = rendered.text
            options = {
                "add_special_tokens": add,
                "return_offsets_mapping": True,
                "return_tensors": "pt",
            }
            with self._tokenizing:
                batch = self.tokenizer(text, **options)
            return Skeleton(rendered, (), batch)
        videos = self.without_repeats(videos)
        heard = [video.sound for video in videos if video.sound is not None]
        sounds = []
        for path in rendered.sounds:
            sounds.append(self._hear(path, [*heard, *sounds]))
        return lay_out(self.parts, self.processor, rendered, videos, sounds, self._tokenizing)

    def without_repeats(
        self,
        videos: Sequence[SampledVideo],
        hosts: HostGroup | None = None,
        timer: StageTimer | None = None,
    ) -> tuple[SampledVideo, ...]:
        """Find which tokens of videos a prompt has, where the processor leaves some out;
        collective.

        Every host compares its share of the frames, or without frame parallelism all of them. What
        host 0 knows, of an earlier prompt, it sends.

        Args:
            videos: as :meth:`sample` returned them, the same on every host.
            hosts: None: this process alone.

        Raises:
            VideoError: a frame cannot be decoded.
            HostError: another host failed.
        """
        if not may_leave_out(self.processor):
            return tuple(videos)
        hosts = hosts or HostGroup.single(self.parts.device)
        timer = timer or StageTimer(hosts)
        found = []
        for video in videos:
            with hosts.local_stage("comparing frames"):
                source = Source(FileIdentity.of(video.info.path), video.frames)
                frames = range(len(video.frames))
                known = self._kept.get(source) if video.kept is None else video.kept
            if not self._config.frame_parallel:
                with hosts.local_stage("comparing frames"):
                    if known is None:
                        known = kept_tokens(
                            self.processor, video, frames, hosts, timer, self._config.video
                        )
                found.append(replace(video, kept=self._remember(source, known)))
                continue
            shares = split_evenly(frames, hosts.size)
            if hosts.broadcast_ints([known is not None], 1)[0]:
                shares = [frames, *[range(0)] * (hosts.size - 1)]
            mine = shares[hosts.rank]
            with hosts.local_stage("comparing frames"):
                if len(mine) < len(frames) or known is None:
                    known = kept_tokens(
                        self.processor, video, mine, hosts, timer, self._config.video
                    )
            rows = known.to(hosts.device, torch.uint8)
            kept = torch.cat(hosts.gather_rows(rows, [*map(len, shares)]).wait()).bool().cpu()
            found.append(replace(video, kept=self._remember(source, kept)))
        return tuple(found)

    def _remember(self, source: Source, kept: Tensor) -> Tensor:
        """Cache which tokens a prompt has of a video, and return them."""
        self._kept[source] = kept
        if len(self._kept) > _MOST_KEPT:
            self._kept.pop(next(iter(self._kept)), None)
        return kept

    def read(
        self,
        rendered: RenderedPrompt,
        videos: Sequence[SampledVideo],
        hosts: HostGroup,
        timer: StageTimer,
        prompt: Skeleton | None = None,
    ) -> tuple[ModelInputs, SourcePixels | None]:
        """Read a rendered question, except its frames and images; on every host.

        Args:
            videos: its videos, as :meth:`sample` returned them.
            prompt: what :meth:`lay_out` returned, where that was done already.

        Returns:
            The model inputs without pixels, and the source of this host's share of these; None if
            the prompt has
                none.

        Raises:
            ValueError: the prompt cannot be read; the message says why.
        """
        with timer.stage("preprocess"):
            skeleton = prompt or self.lay_out(rendered, videos)
            config = self._config
            if not (skeleton.items or skeleton.sounds):
                asked = {
                    "query_start": self._query_start(rendered, skeleton.batch),
                    "query_len": config.query_len,
                }
                return ModelInputs.from_processor(self.parts, skeleton.batch, hosts, **asked), None
            input_ids = skeleton.batch["input_ids"]
            visual = None
            audio = None
            encoding = encoding_hosts(hosts, config.frame_parallel)
            if skeleton.items:
                visual = share_out(skeleton.items, encoding)
            if skeleton.sounds:
                audio = audio_from_batch(self.parts, skeleton.batch, input_ids[0], encoding)
                audio = replace(audio, sources=skeleton.sounds)
            inputs = ModelInputs.of_sources(self.parts, skeleton.batch, input_ids, visual, audio)
        if visual is None:
            return inputs, None
        readers = []
        device = self.parts.device
        for run, numbers in visual.runs:
            if not intersect(run, visual.patches[visual.host]):
                continue
            source = skeleton.sources[numbers[0]]
            if isinstance(source, Picture):
                pictures = tuple(skeleton.sources[number] for number in numbers)
                is_untiled = (
                    self.parts.family == "llava_onevision" and len(skeleton.rendered.pictures) > 1
                )
                reader = ImageReader(pictures, self.processor, timer, is_untiled)
            else:
                reader = VideoReader(
                    video=source,
                    num_merged=-(-len(source.frames) // len(run)),
                    processor=self.processor,
                    timer=timer,
                    device=device,
                    dtype=self.parts.dtype,
                    config=self._config.video,
                    runs_ahead=hosts.has_own_process,
                )
            readers.append((run, reader))
        return inputs, SourcePixels(tuple(readers), timer, hosts.has_own_process)

    def _take_token_ids(self, question: Question) -> RenderedPrompt:
        """Check token ids that are given instead of a prompt."""
        given = (question.prompt, question.video, question.images, question.audio, question.context)
        if any(given) or question.messages:
            raise PromptError("pass either token ids or a prompt with its sources, not both")
        token_ids = tuple(question.token_ids)
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
            "", [], [], None, has_context=False, has_template=False, token_ids=token_ids
        )

    def _query_start(self, rendered: RenderedPrompt, batch: Mapping[str, Any]) -> int | None:
        """Start of a text's question; None if unknown."""
        if rendered.query_char is None:
            return None
        starts = batch["offset_mapping"][0, :, 0]
        start = int((starts < rendered.query_char).sum())
        return start if rendered.has_context else max(start, len(starts) - self._config.query_len)
