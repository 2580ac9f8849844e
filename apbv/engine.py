"""Defines Engine, which answers questions about videos, images, audio and texts.

All hosts answer a question together.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, Unpack

import torch
from transformers import PreTrainedModel

from . import demo
from .config import DecodeConfig, PrefillConfig, ReuseConfig, SamplingParams, SpeculativeConfig
from .config.checks import require_type
from .config.refusals import refuse
from .decode.answer import begin_answer, finish_reason
from .decode.batch import Batch, Member, model_batching_obstacle
from .decode.text import AnswerText
from .decode.thoughts import separate
from .errors import (
    ErrorReport,
    InvalidConfigError,
    InvalidRequestError,
    NotEnoughMemoryError,
    RequestCancelled,
)
from .grammar.grammars import Grammars
from .hosts import HostGroup
from .input.media.files import KnownVideos
from .input.prompts.prompt_reader import PromptReader
from .input.prompts.rendering import QuestionArguments
from .input.prompts.tokenized_prompt import SampledVideo
from .model.attention import apbv_attention
from .model.families import hybrid_family
from .model.loading.load import default_num_frames, default_sampling, load_model, require_loadable
from .model.parts import ModelParts
from .prefilling.forward import ready_for_prefills
from .prefilling.methods import resolve_method
from .prefilling.prefiller import Prefiller, ReadRequest
from .prefilling.reduction.pruning import require_usable
from .prefilling.result import PrefillResult
from .prefilling.reuse import Reuse
from .reporting import warn_caller, warn_renamed
from .request.logprobs import TokenLogprobs
from .request.request import Callbacks, Question, Request, RequestSettings
from .request.result import GenerateResult
from .request.sink import AnswerSink, StopFunction
from .speculate import Autoregressive, Captioner, Drafting
from .speculate.loops.decode_loop import DecodedAnswer, DecodeLoop, PrefilledRequest
from .speculate.loops.speculative_batch import join_batch
from .speculate.strategies.table import draft_batching_obstacle, require_drafts_of
from .stats import StageTimer, provenance

# The warm-up request's.
_WARM_UP_FRAMES = 16
_WARM_UP_WORDS = 60
_WARM_UP_TOKENS = 8
# Tokens at a prompt's end in which a chat template may have opened a thought.
_TEMPLATE_END = 16
# Steps of a batch between two looks at whether an answer has ended on another host.
_STEPS_PER_ROUND = 8


@dataclass(frozen=True)
class _GuardedSink(AnswerSink):
    """A sink whose errors do not leave it: the first one ends the answer.

    Attributes:
        sink: the caller's; None: there is none, and only errors of other callbacks end the answer.
        call: calls a function, notes its error, and returns its value, or whether there was an
            error.
    """

    sink: AnswerSink | None
    call: Callable[..., Any]

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> bool:
        take = None if self.sink is None else self.sink.take
        return self.call(take, tokens, logprobs)

    def is_cancelled(self) -> bool:
        return self.call(None if self.sink is None else self.sink.is_cancelled)


@dataclass(frozen=True)
class _RunningAnswer:
    """An answer that is decoded in a batch.

    Attributes:
        begun: its prefilled request.
        member: its sequence in this host's batch; None on the other hosts.
        decode_stage: the request's stage, which lasts until the answer has ended.
    """

    begun: PrefilledRequest
    member: Member | None
    decode_stage: ExitStack


@dataclass(frozen=True)
class _EndedAnswer:
    """The end of an answer that was decoded in a batch, as its decode host tells the other hosts.

    Attributes:
        number: the question's.
        tokens: the answer.
        summary: metrics of its draft; None: there was none.
        failure: the error that it ended with; None: it did not fail.
    """

    number: int
    tokens: list[int]
    summary: dict[str, Any] | None
    failure: ErrorReport | None

    def to_json(self) -> dict[str, Any]:
        """Return the end JSON-ready, for :meth:`from_json` on another host."""
        failure = None if self.failure is None else self.failure.to_json()
        return {
            "number": self.number,
            "tokens": self.tokens,
            "summary": self.summary,
            "failure": failure,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "_EndedAnswer":
        """Return the end that :meth:`to_json` made."""
        failure = record["failure"]
        if failure is not None:
            failure = ErrorReport.from_json(failure)
        return cls(**{**record, "failure": failure})


@dataclass(frozen=True, kw_only=True)
class _EngineState:
    """All that an engine consists of; see the attributes of :class:`Engine`.

    Attributes:
        decode_loop: decodes the answers, on the hosts that answer together.
        prefiller: reads requests and prefills them, on the same hosts.
    """

    model: PreTrainedModel | None
    draft_model: PreTrainedModel | None
    processor: Any
    name: str
    parts: ModelParts
    prefill_config: PrefillConfig
    speculative_config: SpeculativeConfig | None
    reuse_config: ReuseConfig | None
    sampling: SamplingParams
    num_frames: int
    tokenizer: Any
    videos: KnownVideos
    prefills: bool
    decode_loop: DecodeLoop
    prefiller: Prefiller


class Engine:
    """Answers questions with a model that every host of a group has loaded.

    Every method is collective: it is called on all hosts with the same arguments.

    Args:
        model: an unmodified transformers model in eval mode on ``hosts.device``; the same on every
            host. None on a draft host (``speculate.draft_host``), which needs only ``draft``; the
            others then need only ``model``.
        processor: the model's processor; for a text-only model its tokenizer.
        hosts: the hosts that take part.
        prefill: how prompts are prefilled.
        name: the model's name in the figures.
        speculate: how answers are decoded speculatively; None: one token at a time.
        draft: the draft model, for strategies that need one; on every host that drafts.
        captioner: returns a caption of a prompt's video or images, for drafts that read one; called
            on host 0 when the target has prefilled.
        reuse: embedding or prefix cache for further questions about the same video or text; None:
            no cache.
        decode: decoding settings.

    Attributes:
        parts: the model that reads prompts on this host, taken apart.
        hosts: the hosts that answer together: all but a draft host, or a draft host alone.
        prefills: whether this host runs the target.
        num_frames, sampling, max_new_tokens: the defaults of requests, taken from the checkpoint
            (see :mod:`apbv.model.loading.load`); the last is one of the sampling parameters.
        videos: remembers what was found in the video files that were asked about.

    Raises:
        UnsupportedModelError: the model is not supported.
        InvalidConfigError: the strategy is unknown, or the draft does not fit the model or needs to
            observe a prefill that ``reuse`` would skip.
    """

    def __init__(
        self,
        model: PreTrainedModel | None,
        processor,
        hosts: HostGroup,
        prefill: PrefillConfig | None = None,
        name: str | None = None,
        speculate: SpeculativeConfig | None = None,
        draft: PreTrainedModel | None = None,
        captioner: Captioner | None = None,
        reuse: ReuseConfig | None = None,
        decode: DecodeConfig | None = None,
    ):
        _require_types(hosts, prefill, speculate, reuse, decode)
        config = prefill or PrefillConfig()
        drafting = Drafting(speculate, hosts, captioner)
        with hosts.local_stage("inspecting the models") as agreement:
            agreement.settings("the engine's settings", _settings(config, speculate, reuse, decode))
            models = drafting.inspect_models(model, draft, config, decode)
        require_usable(
            config.reduce,
            models.reading.model.config,
            reuse,
            drafting=None if speculate is None else speculate.strategy,
            num_processes=hosts.num_processes,
            tensor_parallel=hosts.tensor_parallel_size,
        )
        refuse(
            kv_reuse=reuse is not None and reuse.mode == "kv",
            watching_draft=drafting.strategy if drafting.observes_prefill(models) else None,
        )
        runs_as = resolve_method(config, hosts.size).name
        was_asked_for = config.method != PrefillConfig.method
        if was_asked_for and runs_as != config.method:
            warn_caller(f"on one host {config.method} is the same as full: that runs")

        # Read prompts.
        parts = models.reading
        num_frames = default_num_frames(processor)
        reader = PromptReader(parts, processor, num_frames, config)

        # Decode.
        decode_loop = drafting.decode_loop(models, reader.tokenizer)
        prefills = not drafting.drafts_only
        if prefills and decode_loop.hosts.num_processes > 1:
            # For which a prompt would wait, when the hosts compare it.
            _ = parts.weights_sample
        with hosts.local_stage("reading the generation config"):
            sampling = default_sampling(parts.model, parts.decode.generation_config)

        # Prefill.
        prefiller = Prefiller(
            reader,
            decode_loop.hosts,
            config,
            None if reuse is None or model is None else Reuse(reuse),
            reads_all_frames=draft is not None,
            require_readable=None if speculate is None else drafting.require_readable,
        )
        self._take(
            _EngineState(
                model=model,
                draft_model=draft,
                processor=processor,
                name=name or type(parts.model).__name__,
                parts=parts,
                prefill_config=config,
                speculative_config=speculate,
                reuse_config=reuse,
                sampling=drafting.agree(sampling),
                num_frames=num_frames,
                tokenizer=reader.tokenizer,
                videos=reader.videos,
                prefills=prefills,
                decode_loop=decode_loop,
                prefiller=prefiller,
            )
        )

    def _take(self, state: "_EngineState") -> None:
        """Set all attributes."""
        self._state = state
        self.model = state.model
        self.draft_model = state.draft_model
        self.processor = state.processor
        self.name = state.name
        self.parts = state.parts
        self.prefill_config = state.prefill_config
        self.speculative_config = state.speculative_config
        self.reuse_config = state.reuse_config
        self.sampling = state.sampling
        self.max_new_tokens = state.sampling.max_new_tokens
        self.num_frames = state.num_frames
        self.tokenizer = state.tokenizer
        self.videos = state.videos
        self.prefills = state.prefills
        self.hosts = state.decode_loop.hosts
        self._decode_loop = state.decode_loop
        self._prefiller = state.prefiller

    def _variant(self, **changes: Any) -> "Engine":
        """Return an engine with the same model that differs in some of :class:`_EngineState`."""
        engine = Engine.__new__(Engine)
        engine._take(replace(self._state, **changes))
        return engine

    def __repr__(self) -> str:
        prefill = self.prefill_config
        settings = f"method={prefill.method!r}, kv={prefill.kv!r}"
        if self.speculative_config is not None:
            settings += f", speculate={self.speculative_config.strategy!r}"
        return f"Engine({self.name!r}, {self.parts.family}, {settings}, {self.hosts})"

    @cached_property
    def grammars(self) -> Grammars:
        """Compiler of JSON schemas for this model; ValueError without llguidance."""
        return Grammars(self.tokenizer, self.parts.vocab_size, self.parts.eos_token_ids)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        prefill: PrefillConfig | None = None,
        speculate: SpeculativeConfig | None = None,
        hosts: HostGroup | None = None,
        dtype: str | torch.dtype = "auto",
        captioner: Captioner | None = None,
        reuse: ReuseConfig | None = None,
        decode: DecodeConfig | None = None,
        adapter: str | Path | None = None,
        expert_parallel: bool = False,
    ) -> "Engine":
        """Load a model and its processor on every host; collective.

        Args:
            name: ``"demo"`` (the small model in this package), a directory, or a hub id; of a
                model, or of a PEFT adapter, which is merged into the model that its config names.
            speculate: with it the draft model that it names is loaded, too; for ``"demo"`` it needs
                no name.
            hosts: by default those that torchrun started, or this process alone. With several
                processes per host, every process loads its share of the model, and all of the draft
                model.
            dtype: the weights' dtype; ``"auto"`` takes the checkpoint's.
            captioner, reuse, decode: see :class:`Engine`.
            adapter: a directory or hub id of a PEFT adapter to merge into the model ``name``.
            expert_parallel: whether each of a host's processes gets some of a model's experts
                whole, and not some columns of each.

        Raises:
            UnsupportedModelError: the model does not exist or is not supported, its adapter cannot
                be merged, or its sizes cannot be shared out evenly over a host's processes.
            InvalidConfigError: settings contradict one another.
            HostError: another host failed to load it.
        """
        _require_types(hosts, prefill, speculate, reuse, decode)
        if not isinstance(name, str | Path):
            raise InvalidConfigError(f"a model must be a name or a path, not {name!r:.80}")
        hosts = hosts or HostGroup.from_env()
        is_demo = str(name) == "demo"
        config = prefill or PrefillConfig()
        path = demo.model_path() if is_demo else name
        drafting = Drafting(speculate, hosts, captioner)
        # Reject what can be rejected before loading weights.
        with hosts.local_stage("reading the settings") as agreement:
            # Not the model's path: it may lie elsewhere on another machine, and its weights are
            # compared.
            settings = {
                "dtype": str(dtype),
                "expert_parallel": expert_parallel,
                **_settings(config, speculate, reuse, decode),
            }
            agreement.settings("the engine's settings", settings)
            draft_model = drafting.find_model(config, is_demo)
            described = require_loadable(
                path, hosts.device, adapter, hosts.tensor_parallel_size, expert_parallel
            )
            drafting.require_target(str(described.name_or_path), described)
            require_usable(
                config.reduce,
                described,
                reuse,
                drafting=None if speculate is None else speculate.strategy,
                num_processes=hosts.num_processes,
                tensor_parallel=hosts.tensor_parallel_size,
            )
            if speculate is not None:
                require_drafts_of(speculate, described)
        # TP ranks exchange data while transformers loads the model's shards.
        stage = hosts.collective_stage if hosts.tensor_parallel_size > 1 else hosts.local_stage
        with stage(f"loading {name}"):
            has_model = not drafting.drafts_only
            model, processor = load_model(
                path,
                dtype,
                hosts,
                with_model=has_model,
                sharded=True,
                adapter=adapter,
                expert_parallel=expert_parallel,
            )
        draft = drafting.load_model(draft_model, dtype, processor)
        name = str(name) if adapter is None else f"{name}+{adapter}"
        return cls(
            model, processor, hosts, config, name, speculate, draft, captioner, reuse, decode
        )

    def warm_up(self, in_batch: bool = False) -> None:
        """Run a warm-up request about the bundled clip, or about a text for text-only models.

        Collective.

        On a GPU this compiles kernels and loads libraries, for which the first request would
        otherwise wait.

        Args:
            in_batch: decode the answer on each of the :attr:`num_decode_hosts` hosts as a batch of
                one.

        Raises:
            InvalidRequestError, HostError: as :meth:`generate`.
        """
        question: dict[str, Any] = {
            "prompt": demo.DEMO_QUESTION,
            "sampling": SamplingParams(max_new_tokens=_WARM_UP_TOKENS),
        }
        if self.parts.video_token_id is None:
            question["context"] = "one two three " * _WARM_UP_WORDS
        else:
            question["video"] = demo.video_path()
            question["num_frames"] = _WARM_UP_FRAMES
        engine = self
        # An anchor for long prompts would leave nothing to split.
        if self.prefill_config.anchor_len:
            config = replace(self.prefill_config, anchor_len=None)
            engine = self._variant(prefiller=replace(self._prefiller, config=config))
        if not in_batch:
            engine.generate(**question)
            return
        if self.can_work_alone and self.hosts.size > 1:
            engine.alone().generate(**question)
        for _, answer in engine.generate_all([question] * max(self.num_decode_hosts, 1)):
            if isinstance(answer, Exception):
                raise answer

    def prefill(
        self,
        prompt: str | None = None,
        *,
        positions: str = "transformers",
        **question: Unpack[QuestionArguments],
    ) -> PrefillResult:
        """Prefill a question.

        Args:
            prompt, question: as the arguments of :meth:`generate` up to ``audio_in_video``.
            positions: ``"vllm"`` where vLLM is to continue (see
                :meth:`apbv.ModelInputs.at_vllm_positions`).

        Raises:
            InvalidRequestError, HostError: as :meth:`generate`.
        """
        if self.model is None:
            raise InvalidConfigError(
                "a draft host does not prefill; call this on the target's hosts"
            )
        make_question = partial(Question, prompt=prompt, **question)
        request = self._prepared(make_question, SamplingParams, positions=positions)
        with closing(self._prefiller.read(request)) as read:
            return self._prefiller.run(read)

    def generate(
        self,
        prompt: str | None = None,
        *,
        video: str | Path | Sequence[str | Path] | None = None,
        images: Any | Sequence[Any] | None = None,
        context: str | None = None,
        messages: Sequence[dict] | None = None,
        tools: Sequence[Any] | None = None,
        num_frames: int | None = None,
        fps: float | None = None,
        audio: str | Path | Sequence[str | Path] | None = None,
        audio_in_video: bool | None = None,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int = 0,
        sampling: SamplingParams | None = None,
        on_token: Callable[[int], None] | None = None,
        on_stage: Callable[[str], None] | None = None,
        on_progress: Callable[[str, int, int], None] | None = None,
        stop: Callable[[Sequence[int]], bool] | None = None,
    ) -> GenerateResult:
        """Answer a question about videos, images and sounds, or about a text.

        Args:
            prompt: the question.
            video: a video file, or several, in the prompt in this order; each host decodes and
                encodes only its share of the sampled frames and images.
            images: an image file or a PIL image, or several; after the videos.
            context: a long text; it is split over the hosts, the question is the query block.
            messages: a chat in transformers' format, instead of all these; with videos and images
                in any order, ``tool_calls`` and the role ``tool``.
            tools: functions that the model may call, as transformers' chat templates take them:
                schemas, or Python functions with type hints and docstrings. Calls are in the
                answer's text, as the model writes them.
            num_frames: how many frames of each video are sampled, evenly; with ``fps`` the largest
                number. By default :attr:`num_frames`.
            fps: sample at this rate instead.
            audio: an audio file, or several, for models that take audio; after the images.
            audio_in_video: whether videos are heard, too, their audio among their frames; None:
                where the model hears and they have any.
            max_new_tokens: the largest number of tokens, the end token included. By default
                :attr:`max_new_tokens`, or as many as the model has positions left.
            temperature: None, as 0, is greedy.
            top_p: nucleus sampling, where temperature > 0; by default the checkpoint's, as all
                parameters that are left open (:class:`apbv.SamplingParams`).
            seed: the same seed draws the same tokens; where a draft's windows depend on time (a
                losing draft is dropped, ``num_draft_tokens`` is ``"auto"``, or there is a draft
                host) it draws others of the same distribution.
            sampling: instead of these four.
            on_token: called on every host with each token as soon as it is decoded; on a draft host
                at the end.
            on_stage: called on every host as a stage begins, with its name in
                :data:`apbv.stats.STAGES`; a stage may be repeated.
            on_progress: called on every host with a stage, how much of it is done there, and of how
                much: ``"decode_video"`` counts frames and images, ``"encode"`` temporal patches.
                Neither this nor ``on_stage`` is always called in the caller's thread, but never
                while the other is.
            stop: called on host 0 after each token with all tokens so far; true ends the answer
                there. Also called while the prompt is read and prefilled, between chunks and
                layers, with no tokens; true then cancels the request. Give it on every host, or on
                none.

        Returns:
            The answer, the same on every host; on a draft host ``stats`` are the draft host's own.

        Raises:
            RequestCancelled: ``stop`` returned true before the first token.
            InvalidRequestError: the prompt, the file or a length cannot be handled; the message
                says why.
            HostError: another host failed.
            Exception: what a callback raised, which ends the answer; on the other hosts a
                HostError.
        """
        make_question = partial(
            Question,
            prompt=prompt,
            video=video,
            images=images,
            context=context,
            messages=messages,
            tools=tools,
            num_frames=num_frames,
            fps=fps,
            audio=audio,
            audio_in_video=audio_in_video,
        )
        callbacks = {
            "on_token": on_token,
            "on_stage": on_stage,
            "on_progress": on_progress,
            "stop": stop,
        }
        make_sampling = partial(
            _chosen_sampling,
            sampling,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        request = self._prepared(make_question, make_sampling, callbacks, wants_whole_answer=True)
        return self.answer(request)

    def _prepared(
        self,
        make_question: Callable[[], Question],
        make_sampling: Callable[[], SamplingParams],
        callbacks: Mapping[str, Any] | None = None,
        *,
        positions: str = "transformers",
        decode_host: int = 0,
        wants_whole_answer: bool = False,
        shared: Mapping[str, Any] | None = None,
        timer: StageTimer | None = None,
    ) -> Request:
        """Check what a caller asks and make it a request; collective: all hosts reject it, or none.

        Every entry of the library makes its requests here.

        Args:
            make_question, make_sampling: return the question and the sampling parameters, or reject
                the caller's.
            callbacks: fields of :class:`~apbv.request.request.Callbacks`.
            positions, decode_host: of the request.
            wants_whole_answer: reject a prompt that leaves too few positions for the largest number
                of tokens, where one is given; otherwise the answer is shortened.
            shared: further settings that must be the same on every host.
            timer: the request's, where it has begun; None: a new one.

        Raises:
            InvalidRequestError: an argument is wrong.
            HostError: another host was asked something else.
        """
        with self.hosts.local_stage("reading the settings") as agreement:
            checked = Callbacks(**(callbacks or {}))
            question = make_question()
            sampling = make_sampling()
            request = Request(
                question,
                timer or StageTimer(self.hosts, checked.on_stage, checked.on_progress),
                RequestSettings(
                    sampling=sampling,
                    positions=positions,
                    num_wanted=(sampling.max_new_tokens or 1) if wants_whole_answer else 1,
                    decode_host=decode_host,
                ),
                on_token=checked.on_token,
                sink=None if checked.stop is None else StopFunction(checked.stop),
            )
            agreement.settings("the request", {**(shared or {}), **request.agreed_settings})
        return request

    def stream(
        self, prompt: str | None = None, **given: Any
    ) -> Generator[str, None, GenerateResult]:
        """Answer a question as :meth:`generate` does, and yield the text in pieces; collective.

        Pieces come as they are decoded.

        The arguments are those of :meth:`generate` but ``on_token`` and ``stop``. Iterate on every
        host, even if only one uses the text. Closing host 0's iterator ends the answer; closing
        another's waits for its end.

        Returns:
            The answer, as the value of ``yield from``.
        """
        text = AnswerText(partial(self.tokenizer.decode, skip_special_tokens=True))
        tokens, pieces, is_closed = [], SimpleQueue[str | None](), Event()

        def tell(token: int) -> None:
            tokens.append(token)
            pieces.put(text.update(tokens))

        def run() -> GenerateResult:
            try:
                with self.hosts.on_device():  # a new thread has another
                    return self.generate(
                        prompt, **given, on_token=tell, stop=lambda _: is_closed.is_set()
                    )
            finally:
                pieces.put(text.finish(tokens))
                pieces.put(None)

        with ThreadPoolExecutor(1) as pool:
            answering = pool.submit(run)
            try:
                while (piece := pieces.get()) is not None:
                    if piece:
                        yield piece
                return answering.result()
            finally:
                is_closed.set()

    def generate_all(
        self,
        questions: Iterable[Mapping[str, Any]],
        *,
        sampling: SamplingParams | None = None,
        max_together: int = 8,
    ) -> Iterator[tuple[int, GenerateResult | Exception]]:
        """Answer questions in batches, one on each host; collective.

        The next prompt is prefilled, by all hosts, as soon as one of them decodes fewer than
        ``max_together`` answers. If there is no memory for it, it waits until an answer has ended.
        Answers that cannot be batched (:attr:`batching_obstacle`) follow one another.

        Args:
            questions: a dict for each, of the arguments of :meth:`generate` up to
                ``audio_in_video``, and its own ``sampling`` if it has one; the same on every host.
            sampling: sampling parameters; by default greedy, with :attr:`max_new_tokens`.
            max_together: largest number of answers that a host decodes at a time.

        Yields:
            The index of a question and its answer, as soon as that ends; if this question or answer
            failed alone, the error instead.

        Raises:
            InvalidConfigError: ``max_together`` is less than 1.
            InvalidRequestError: a question of a list is not such a dict, before any is answered.
                One that an iterator yields is answered by the error.
            HostError: the hosts can no longer work together.
        """
        if max_together < 1:
            raise InvalidConfigError(f"max_together must be at least 1, not {max_together}")
        hosts = self.hosts
        # A list is checked at once, before any is answered.
        if isinstance(questions, Sequence):
            with hosts.local_stage("reading the questions"):
                for number, question in enumerate(questions):
                    _require_question(number, question)
        batch = self.batch() if hosts.rank < self.num_decode_hosts else None
        waiting = enumerate(questions)
        following = next(waiting, None)
        running: dict[int, _RunningAnswer] = {}
        try:
            while following is not None or running:
                # Prefill until every host decodes as many answers as it may.
                while following is not None:
                    decode_host = self._emptiest_decode_host(running, max_together)
                    if decode_host is None:
                        break
                    number, question = following
                    ended: GenerateResult | Exception | None = None
                    try:
                        request = self._prepared(
                            partial(_question_of, number, question),
                            partial(_sampling_of, question, sampling),
                            decode_host=decode_host,
                            shared={"max_together": max_together},
                        )
                        if self.num_decode_hosts == 0:
                            ended = self.answer(request)
                        else:
                            running[number] = self._join(batch, request)
                    except Exception as error:
                        if hosts.is_broken:
                            raise
                        # For want of memory it waits until an answer has ended.
                        lacks_memory = isinstance(error, NotEnoughMemoryError)
                        if running and any(hosts.gather_json(lacks_memory)):
                            break
                        ended = error
                    if ended is not None:
                        yield number, ended
                    following = next(waiting, None)
                # Decode.
                for answer in self._decode_until_one_ends(batch, running):
                    yield answer.number, self._ended(running.pop(answer.number), answer)
        finally:
            for each in running.values():
                each.decode_stage.close()

    def _join(self, batch: Batch | None, request: Request) -> "_RunningAnswer":
        """Prefill a request, and add its answer to the batch of its decode host; collective."""
        begun = self.begin(request)
        member = None
        with self.hosts.local_stage("joining the batch"):
            if self.hosts.rank == request.decode_host:
                assert batch is not None, "decode hosts have a batch"
                answer = begin_answer(self.parts, begun.state, begun.read.request)
                member = join_batch(batch, answer, begun.draft)
        decode_stage = ExitStack()
        decode_stage.enter_context(request.timer.stage("decode"))
        return _RunningAnswer(begun, member, decode_stage)

    def _ended(
        self, running: "_RunningAnswer", answer: "_EndedAnswer"
    ) -> GenerateResult | Exception:
        """Return the result of an answer that has ended, or why it failed; collective."""
        running.decode_stage.close()
        begun = running.begun
        if running.member is not None and running.member.error is not None:
            return running.member.error
        if answer.failure is not None:
            decode_host = self.hosts.name_of(begun.read.request.decode_host)
            return answer.failure.error(decode_host, "decode")
        logprobs = [] if running.member is None else running.member.logprobs
        decoded = DecodedAnswer(answer.tokens, logprobs, answer.summary)
        decoded = self._decode_loop.answered(begun, decoded)
        return self._result(begun.read.request, begun.state, decoded, videos=begun.read.videos)

    def _emptiest_decode_host(
        self, running: Mapping[int, "_RunningAnswer"], max_together: int
    ) -> int | None:
        """Return the host whose answers have the least KV.

        None if each decodes ``max_together``.
        """
        num_decode_hosts = max(self.num_decode_hosts, 1)
        num_answers = [0] * num_decode_hosts
        num_tokens = [0] * num_decode_hosts
        for answer in running.values():
            decode_host = answer.begun.read.request.decode_host
            num_answers[decode_host] += 1
            num_tokens[decode_host] += answer.begun.state.num_tokens
        fitting = [
            decode_host
            for decode_host in range(num_decode_hosts)
            if num_answers[decode_host] < max_together
        ]
        return min(fitting, key=lambda decode_host: num_tokens[decode_host], default=None)

    def _decode_until_one_ends(
        self, batch: Batch | None, running: Mapping[int, "_RunningAnswer"]
    ) -> "list[_EndedAnswer]":
        """Decode on every decode host until answers end; return these answers on all hosts."""
        members = {
            number: answer.member for number, answer in running.items() if answer.member is not None
        }
        ended: list[_EndedAnswer] = []
        with self.hosts.collective_stage("decode"):
            while running and not ended:
                for _ in range(_STEPS_PER_ROUND):
                    has_ended = any(member.has_ended for member in members.values())
                    if batch is not None and members and not has_ended:
                        batch.step_or_drop()
                ended_here = []
                for number, member in members.items():
                    if member.has_ended:
                        failure = None
                        if member.error is not None:
                            failure = ErrorReport.of(member.error)
                        answer = _EndedAnswer(number, member.tokens, member.summary(), failure)
                        ended_here.append(answer.to_json())
                for of_host in self.hosts.gather_json(ended_here):
                    ended += [_EndedAnswer.from_json(record) for record in of_host]
        return ended

    @property
    def num_homes(self) -> int:
        """The former name of :attr:`num_decode_hosts`, until the next release."""
        warn_renamed("Engine.num_homes", "Engine.num_decode_hosts")
        return self.num_decode_hosts

    @property
    def num_decode_hosts(self) -> int:
        """The number of hosts, from host 0 on, that decode batches of answers.

        0 if all decode one answer together.
        """
        if self.batching_obstacle is not None:
            return 0
        # On the host that decodes.
        caches_kv = self.reuse_config is not None and self.reuse_config.mode == "kv"
        return 1 if caches_kv else self.hosts.size

    @property
    def why_one_by_one(self) -> str | None:
        """The former name of :attr:`batching_obstacle`, until the next release."""
        warn_renamed("Engine.why_one_by_one", "Engine.batching_obstacle")
        return self.batching_obstacle

    @property
    def batching_obstacle(self) -> str | None:
        """Why answers cannot be decoded in batches; None if they can."""
        if self.prefill_config.kv == "sharded":
            return "all hosts take part in every token where the KV is sharded"
        reduce = self.prefill_config.reduce
        if reduce is not None and reduce.prunes_decoding:
            return "each answer chooses in every step what it attends to (decode_ratio)"
        if self.speculative_config is not None:
            obstacle = draft_batching_obstacle(self.speculative_config)
            if obstacle is not None:
                return obstacle
        return model_batching_obstacle(self.parts)

    def answer(self, request: Request) -> GenerateResult:
        """Answer a request that was packed by the caller; otherwise as :meth:`generate`."""
        with self._guarded(self._completed(request)) as guarded:
            answered = self._decode_loop.answer(guarded, self._prefiller)
        read = answered.read
        self._note_what_the_demo_cannot(read)
        return self._result(read.request, answered.state, answered.answer, read.videos)

    def _result(
        self,
        request: Request,
        state: PrefillResult | None,
        answered: DecodedAnswer,
        videos: tuple[SampledVideo, ...] = (),
    ) -> GenerateResult:
        """Return the result of a request; collective.

        A draft host has prefilled nothing, and returns its own figures.
        """
        tokens = answered.tokens
        sampling = request.sampling
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        reason = finish_reason(tokens, sampling, self.parts.eos_token_ids)
        timed = request.timer.summary(len(tokens))
        if state is None:
            figures = {"token_ids": tokens, "text": text, **(answered.figures or {}), **timed}
        else:
            hosts = state.kv.hosts
            figures = {
                "model": self.name,
                "kv": self.prefill_config.kv,
                "method": state.method,
                "hosts": hosts.size,
                "tensor_parallel_size": hosts.tensor_parallel_size,
                "num_input_tokens": state.num_tokens,
                "num_video_tokens": state.inputs.num_visual_tokens,
                "num_audio_tokens": int(self.parts.is_audio(state.inputs.input_ids).sum()),
                "anchor_len": state.layout.anchor_len,
                "passing_len": state.layout.passing_len,
                "early_passing_len": state.layout.early.passing_len,
                "warning": state.warning,
                "reused": state.reused,
                "reduction": None if state.reduction is None else state.reduction.figures,
                "attention_density": state.density,
                "token_ids": tokens,
                "text": text,
                **timed,
                "samples": {"ttft_ms": [timed["ttft_ms"]]},
                "speculation": answered.figures,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "seed": sampling.seed,
                "device": str(hosts.device),
                "dtype": str(self.parts.dtype).removeprefix("torch."),
                **provenance(),
            }
        reasoning = None
        content = text
        if state is not None:
            prompt_end = state.inputs.input_ids[0, -_TEMPLATE_END:].tolist()
            parts_of_answer = separate(tokens, self.tokenizer, prompt_end)
            reasoning = parts_of_answer.thought or None
            content = parts_of_answer.text
        return GenerateResult(
            text,
            tokens,
            figures,
            reason,
            videos,
            answered.logprobs,
            reasoning=reasoning,
            content=content,
        )

    def decode(
        self,
        state: PrefillResult,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int = 0,
        on_token: Callable[[int], None] | None = None,
        stop: Callable[[Sequence[int]], bool] | None = None,
    ) -> GenerateResult:
        """Answer from a prefill, without a draft.

        The prefill is one that :meth:`prefill` or :func:`apbv.load` returned.

        The arguments are those of :meth:`generate`. The figures are those of this answer alone;
        those of the prefill, or of loading, are ``state.timer``'s.
        """
        state = replace(state, timer=StageTimer(self.hosts))
        max_positions = self.parts.max_position_embeddings
        make_sampling = partial(
            SamplingParams,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        callbacks = {"on_token": on_token, "stop": stop}
        request = self._prepared(Question, make_sampling, callbacks, timer=state.timer)
        with self.hosts.local_stage("reading the settings"):
            state.inputs.require_room(max_positions, max_new_tokens or 1)
        request = self._completed(request).within(max_positions, state.inputs)
        with self._guarded(request) as guarded:
            answered = Autoregressive(self.parts, self.hosts).decode(guarded, state)
        return self._result(request, state, answered)

    @contextmanager
    def _guarded(self, request: Request) -> Iterator[Request]:
        """Keep errors of the caller's functions out of collectives; collective.

        The first one on this host ends the answer, and is raised once all hosts have it.
        """
        errors: list[Exception] = []

        def call(function: Callable | None, *arguments: Any) -> Any:
            if function is not None and not errors:
                try:
                    return function(*arguments)
                except Exception as error:
                    errors.append(error)
            return bool(errors)

        guarded = replace(
            request,
            on_token=partial(call, request.on_token),
            sink=_GuardedSink(request.sink, call),
            may_cancel=request.sink is not None and request.may_cancel,
        )
        try:
            yield guarded
        except RequestCancelled:
            if errors:
                raise errors[0] from None
            raise RequestCancelled from None
        with self.hosts.local_stage("telling the caller"):
            if errors:
                raise errors[0]

    def begin(self, request: Request) -> PrefilledRequest:
        """Prefill a request's prompt, and build its draft if drafts are used.

        Its answer is then decoded in a batch of its decode host.

        Call it on the hosts of :attr:`hosts` alone, with the same request. :meth:`batch` returns a
        batch.

        Returns:
            The request, whose answer is no longer than the model has positions for, the prompt and
            the draft.

        Raises:
            RequestCancelled, ValueError, HostError: as :meth:`generate`.
        """
        begun = self._decode_loop.begin(self._completed(request), self._prefiller)
        self._note_what_the_demo_cannot(begun.read)
        return begun

    def batch(self) -> Batch:
        """Return an empty batch for answers that have begun.

        Run its steps within :meth:`attention`.
        """
        return self._decode_loop.batch()

    def attention(self) -> ExitStack:
        """Put apbv's attention in force in the models that decode, until the context ends."""
        return self._in_force(lambda parts: apbv_attention(parts.language_model))

    def prefilling_in_threads(self) -> ExitStack:
        """Keep in force what a prefill changes in the models, for several threads."""
        return self._in_force(ready_for_prefills)

    def _in_force(self, change: Callable[[ModelParts], AbstractContextManager]) -> ExitStack:
        with ExitStack() as stack:
            for parts in self._decode_loop.models:
                stack.enter_context(change(parts))
            return stack.pop_all()

    def _completed(self, request: Request) -> Request:
        """Return a request with all sampling parameters, and its grammar compiled, if it has one.

        Raises:
            InvalidRequestError: the grammar cannot be compiled; on all hosts.
        """
        sampling = request.sampling.filled(self.sampling)
        request = request.with_sampling(sampling)
        if not sampling.is_constrained:
            return request
        hosts = self.hosts
        with hosts.local_stage("reading the grammar"):
            grammar = None
            if hosts.rank == request.decode_host and hosts.tensor_parallel_rank == 0:
                if request.has_checked_grammar:
                    grammar = self.grammars.compile(sampling.json_schema, sampling.grammar)
                else:
                    grammar = self.grammars.begin(sampling.json_schema, sampling.grammar)
        return replace(request, grammar=grammar)

    def _note_what_the_demo_cannot(self, read: ReadRequest) -> None:
        """Warn on the leader if the demo model is asked something it was not trained for."""
        if self.name != "demo" or not self.hosts.is_leader:
            return
        sizes = {(video.info.height, video.info.width) for video in read.videos}
        if not demo.understands(read.rendered.text, sizes):
            examples = ", ".join(map(repr, demo.EXAMPLE_QUESTIONS))
            warn_caller(
                f"the demo model understands questions such as {examples}, about clips like the "
                "packaged one, and makes up an answer to all others"
            )

    @property
    def can_work_alone(self) -> bool:
        """Whether each host can answer :meth:`alone`, without caches or shards of the others."""
        shares = self.reuse_config is not None or self.hosts.tensor_parallel_size > 1
        return self.num_decode_hosts == self.hosts.size and not shares

    def alone(self) -> "Engine":
        """Return an engine with the same model in which this host answers without the others.

        Not collective. The returned engine may be used in another thread, inside
        :meth:`prefilling_in_threads`.
        """
        # Not a subgroup: the heartbeats are those of this host's work for the others.
        this_host = HostGroup.single(self.hosts.device)
        reader = self._prefiller.reader.for_another_thread()
        return self._variant(
            decode_loop=self._decode_loop.on_one_host(this_host),
            prefiller=replace(self._prefiller, reader=reader, hosts=this_host, reuse=None),
        )

    def handing_over(self) -> "Engine":
        """The former name of :meth:`for_kv_export`, until the next release."""
        warn_renamed("Engine.handing_over", "Engine.for_kv_export")
        return self.for_kv_export()

    def for_kv_export(self) -> "Engine":
        """Return an engine with the same model that leaves KV on the hosts that computed it.

        It is for KV that goes elsewhere: it has no draft, and does not reuse KV, which a former
        question may have shaped, but embeddings it does.

        Raises:
            InvalidRequestError: visual tokens are pruned from prompts, which a consumer would read
                whole.
        """
        refuse(handing_over="for_kv_export()", **self.prefill_config.features)
        refuse(
            offering="for_kv_export()",
            rope_by_length=self.parts.rope_by_length,
            hybrid=hybrid_family(self.parts.model.config),
        )
        config = replace(self.prefill_config, kv="sharded")
        reuse = self._prefiller.reuse
        if self.reuse_config is not None and self.reuse_config.mode == "kv":
            reuse = None
        return self._variant(
            prefill_config=config,
            decode_loop=Autoregressive(self.parts, self.hosts),
            prefiller=Prefiller(self._prefiller.reader, self.hosts, config, reuse),
        )


def _chosen_sampling(sampling: SamplingParams | None, **loose_parameters: Any) -> SamplingParams:
    """Return sampling parameters that a caller gives as an object, or one by one.

    Raises:
        InvalidRequestError: both are given, or a value is wrong.
    """
    named_params = SamplingParams(**loose_parameters)
    if sampling is None:
        return named_params
    require_type(SamplingParams, sampling=sampling)
    if named_params != SamplingParams():
        raise InvalidRequestError(
            "pass sampling or max_new_tokens, temperature, top_p and seed, not both"
        )
    return sampling


def _settings(
    prefill: PrefillConfig,
    speculate: SpeculativeConfig | None,
    reuse: ReuseConfig | None,
    decode: DecodeConfig | None,
) -> dict[str, Any]:
    """Return an engine's settings JSON-ready: they must be the same on every host."""
    return {
        "prefill": prefill.shared,
        "speculate": None if speculate is None else speculate.shared,
        # The limit fits the machine.
        "reuse": None if reuse is None else reuse.mode,
        "decode": asdict(decode or DecodeConfig()),
    }


def _require_question(number: int, question: Any) -> None:
    """Raise InvalidRequestError unless a question is a dict that :meth:`Engine.generate_all`
    takes."""
    known = [*(each.name for each in fields(Question)), "sampling"]
    example = "such as {'prompt': 'What happens?', 'video': 'clip.mp4'}"
    if not isinstance(question, Mapping):
        raise InvalidRequestError(
            f"question {number} must be a dict of generate's arguments, {example}, not "
            f"{question!r:.80}"
        )
    unknown = [name for name in question if name not in known]
    if unknown:
        raise InvalidRequestError(
            f"question {number} has unknown arguments: {', '.join(map(str, unknown))}; a question "
            f"takes {', '.join(known)}"
        )


def _question_of(number: int, question: Any) -> Question:
    """Return one of the questions of :meth:`Engine.generate_all`.

    Raises:
        InvalidRequestError: it is not a dict that :meth:`Engine.generate_all` takes, or a value is
            wrong.
    """
    _require_question(number, question)
    return Question(**{name: value for name, value in question.items() if name != "sampling"})


def _sampling_of(question: Mapping[str, Any], sampling: SamplingParams | None) -> SamplingParams:
    """Return the sampling parameters of such a question; its own come before those of all."""
    return _chosen_sampling(question.get("sampling", sampling))


def _require_types(hosts: Any, prefill: Any, speculate: Any, reuse: Any, decode: Any) -> None:
    """Raise InvalidRequestError if a settings object has the wrong type."""
    require_type(HostGroup, hosts=hosts)
    require_type(PrefillConfig, prefill=prefill)
    require_type(SpeculativeConfig, speculate=speculate)
    require_type(ReuseConfig, reuse=reuse)
    require_type(DecodeConfig, decode=decode)
