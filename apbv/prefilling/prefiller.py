"""Turns a request into a prefilled prompt: reads it, encodes new frames, and prefills."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..config import PrefillConfig
from ..hosts import HostGroup
from ..input.media.files import probe_once
from ..input.prompts.model_inputs import ModelInputs
from ..input.prompts.pixels import KeptPixels
from ..input.prompts.prompt_reader import PromptReader
from ..input.prompts.rendering import RenderedPrompt
from ..input.prompts.tokenized_prompt import SampledVideo
from ..request.request import Request
from .cancelling import require_going_on
from .encoding.vision import agree_on_chunks
from .forward import prefill
from .prefill_observer import PrefillObserver
from .reduction.pruning import require_reducible
from .result import PrefillResult
from .reuse import Reuse, prefill_question


@dataclass(frozen=True)
class ReadRequest:
    """Request whose prompt has been read.

    Attributes:
        request: the request; the model has enough positions for prompt and answer.
        rendered: the prompt's text and its files.
        inputs: the model's inputs; this host's pixels, where they are needed, are still to be read.
        prefix: cached prefill with the KV of the tokens before the question; None if there is none.
        videos: the prompt's videos.
        kept: the pixels, if they are kept for a draft.
        is_encoded: whether all hosts have cached the embeddings of their frames.
    """

    request: Request
    rendered: RenderedPrompt
    inputs: ModelInputs
    prefix: PrefillResult | None
    videos: tuple[SampledVideo, ...] = ()
    kept: KeptPixels | None = None
    is_encoded: bool = False

    def close(self) -> None:
        """Stop reading pixels; must be called when the request has ended, even on failure."""
        if self.kept is not None:
            self.kept.close()


@dataclass(frozen=True)
class Prefiller:
    """Reads requests and prefills them with one model; every method is collective.

    Attributes:
        reader: reads prompts for the model that prefills; on a draft host, which prefills nothing,
            for the draft.
        hosts: the hosts that answer together.
        config: how prompts are prefilled.
        reuse: stores embeddings or KV for later requests; None: nothing is stored.
        reads_all_frames: read pixels even if the target's embeddings are cached, for a draft's
            vision tower.
        require_readable: rejects prompts that cannot be drafted for; raises ValueError.
    """

    reader: PromptReader
    hosts: HostGroup
    config: PrefillConfig
    reuse: Reuse | None = None
    reads_all_frames: bool = False
    require_readable: Callable[[ModelInputs], None] | None = None

    def read(self, request: Request) -> ReadRequest:
        """Read a request's prompt and files.

        Raises:
            RequestCancelled: ``stop`` was true.
            ApbvError: the prompt or a file cannot be read, or the model has too few positions for
                the answer.
            HostError: another host failed.
        """
        reader = self.reader
        timer = request.timer
        max_positions = reader.parts.max_position_embeddings
        require_going_on(self.hosts, request.cancels)

        # Render the text; the hosts agree on the files and options.
        with self.hosts.local_stage("reading the prompt") as agreement:
            with timer.stage("preprocess"):
                known_prompt = request.prompt
                if known_prompt is None:
                    rendered = reader.render(request.question)
                else:
                    rendered = known_prompt.rendered
            image_sizes = [
                picture.source.file.size
                for picture in rendered.pictures
                if picture.source is not None
            ]
            files = f"{len(rendered.videos)} {image_sizes}"
            agreement.content("the number of videos, or an image file,", files.encode())
            picture_limits = [picture.limits for picture in rendered.pictures]
            options = repr((rendered.sampling, picture_limits))
            agreement.content("the options beside videos and images", options.encode())

        # Sample the videos' frames.
        infos = probe_once(reader.videos, rendered.videos, self.hosts, timer)
        with self.hosts.local_stage("reading the prompt"), timer.stage("preprocess"):
            if known_prompt is not None:
                known_infos = [video.info for video in known_prompt.videos]
                if known_infos != list(infos):  # a file has been replaced since
                    known_prompt = None
            if known_prompt is None:
                videos = reader.sample(infos, request.question, rendered.sampling)
            else:
                videos = known_prompt.videos
        videos = reader.without_repeats(videos, self.hosts, timer)

        # Tokenize the prompt.
        with self.hosts.local_stage("reading the prompt") as agreement:
            inputs, pixels = reader.read(rendered, videos, self.hosts, timer, known_prompt)
            if request.settings.positions == "vllm":
                inputs = inputs.at_vllm_positions(reader.parts)
            inputs.require_room(max_positions, request.settings.num_wanted)
            if self.config.reduce is not None:  # before a draft host begins
                require_reducible(self.config.reduce, inputs)
            if self.require_readable is not None:
                self.require_readable(inputs)
            audio_sizes = []
            if inputs.audio is not None:
                audio_sizes = [source.file.size for source in inputs.audio.sources or ()]
            agreement.content("the files that are heard", repr(audio_sizes).encode())

        # Look for cached results; pixels are needed where neither KV nor embeddings are cached.
        prefix = None
        is_encoded = False
        if self.reuse is not None:
            prefix = self.reuse.find_prefix(inputs, self.hosts)
            if prefix is None:
                is_encoded = self.reuse.has_embeddings(inputs, self.hosts)
        target_needs_pixels = prefix is None and not is_encoded
        kept = None
        if pixels is not None and (self.reads_all_frames or target_needs_pixels):
            if self.reads_all_frames:
                kept = KeptPixels(pixels)
            chunk_bytes = agree_on_chunks(
                self.hosts, reader.parts.device, self.config.video.chunk_bytes
            )
            inputs = inputs.with_pixels(kept or pixels, chunk_bytes)
        require_going_on(self.hosts, request.cancels)
        return ReadRequest(
            request=request.within(max_positions, inputs),
            rendered=rendered,
            inputs=inputs,
            prefix=prefix,
            videos=videos,
            kept=kept,
            is_encoded=is_encoded,
        )

    def run(self, read: ReadRequest, observer: PrefillObserver | None = None) -> PrefillResult:
        """Prefill the prompt, or only its question if the KV before it is cached.

        Args:
            observer: observes the prefill of a whole prompt.

        Raises:
            ValueError, HostError: as :func:`apbv.prefill`.
        """
        parts = self.reader.parts
        request = read.request
        if read.prefix is not None:
            return prefill_question(parts, read.inputs, read.prefix, request.timer)
        source = None
        if self.reuse is not None:
            source = self.reuse.embeddings(read.inputs, parts, request.timer)
        state = prefill(
            parts,
            read.inputs,
            hosts=self.hosts,
            config=self.config,
            timer=request.timer,
            observer=observer,
            encoded=source,
            stop=request.cancels,
            decode_host=request.decode_host,
        )
        if self.reuse is not None:
            self.reuse.store_prefix(state)
        return replace(state, reused="embeddings" if read.is_encoded else None)
