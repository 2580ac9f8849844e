"""Engine: from a question about a file to an answer, over all hosts."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from . import demo
from .config import PrefillConfig, ReuseConfig, SamplingConfig, SpeculativeConfig
from .decode.decoder import Decoder, GatheredDecoder, ShardedDecoder, Stop, generate_tokens
from .hosts import HostGroup, in_thread
from .input.model_inputs import POSITION_RULES, FramePiece, ModelInputs
from .input.rendering import RenderedPrompt, render_prompt
from .input.video import probe, sample_fps, sample_uniform
from .model.attention import PrefillObserver
from .model.defaults import default_max_new_tokens, default_num_frames
from .model.loading import load_model, read_config
from .model.parts import ModelParts, inspect_model, require_supported
from .prefilling.forward import PrefillResult, prefill
from .prefilling.reuse import KeptPrefix, Reuse, prefill_question
from .speculate import (
    STRATEGIES,
    Draft,
    DraftThread,
    Pair,
    PipelineStats,
    Prompt,
    SpeculationStats,
    draft_request,
    draft_tree,
    drafts_elsewhere,
    generate_beside_draft,
    generate_by_tree,
    generate_speculatively,
    kept_by_frame,
    make_observer,
    reads,
    require_consistent,
    require_fitting_draft,
    require_readable,
    require_same_tokens,
    strategy_of,
)
from .stats import StageTimer, gather_spans, provenance
from .timeline import Span

# Says on host 0 in words what a prompt's video or images show: for drafts that read it.
Captioner = Callable[[RenderedPrompt], str]


_SHOWN_CHARACTERS = 60


class RequestCancelled(RuntimeError):
    """``stop`` ended a request before it was prefilled; the hosts stay ready for the next one."""


@dataclass(frozen=True)
class GenerateResult:
    """An answer; the same on every host.

    Attributes:
        text: the answer, without special tokens.
        token_ids: the generated tokens, the end token included.
        finish_reason: ``"length"`` where ``max_new_tokens`` cut it off, else ``"stop"``.
        stats: what the request took; the fields of ``launch/infer.py --json``.
        frames: of a video, which of its frames were sampled, ascending; else None.
        kept: with a draft that sees some of a video's tokens: bool ``[T, h, w]``, for what the model merges to
            T frames; else None.
        timeline: if asked for, every host's spans by its name, for :func:`apbv.timeline.write_timeline`; a draft
            host's are known to host 0 only.
    """

    text: str
    token_ids: list[int]
    stats: dict[str, Any]
    finish_reason: str
    frames: tuple[int, ...] | None = None
    kept: torch.Tensor | None = None
    timeline: dict[str, list[Span]] | None = None

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN_CHARACTERS else f"{self.text[:_SHOWN_CHARACTERS]}…"
        taken = f"ttft_ms={self.stats['ttft_ms']:.1f}, total_ms={self.stats['total_ms']:.1f}"
        return f"GenerateResult({text!r}, {len(self.token_ids)} tokens, {self.finish_reason!r}, {taken})"


class Engine:
    """A model on every host of a group, and how to prefill with it.

    Every method is collective: it is called on all hosts with the same arguments.

    Args:
        model: an unmodified transformers model in eval mode on ``hosts.device``; the same on every host. None on a
            draft host (``speculate.draft_host``), which needs only ``draft``; the others then need only ``model``.
        processor: its processor; for a text-only model its tokenizer.
        hosts: who takes part.
        prefill: how prompts are prefilled.
        name: what the figures call the model.
        speculate: how answers are decoded speculatively; None: one token at a time.
        draft: the draft model, for strategies that need one; on every host that drafts.
        captioner: says what a prompt's video or images show, for drafts that read a caption; called on host 0, in
            a thread while the target prefills: it must not run the target's model.
        reuse: what is kept for further questions about the same video or text; None: nothing.

    Attributes:
        num_frames, max_new_tokens: what a request gets that does not say: what the checkpoint says (see
            :mod:`apbv.model.defaults`).

    Raises:
        ValueError: the model is not supported, the strategy unknown, or the draft does not fit the model or
            needs to watch a prefill that ``reuse`` would leave out.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processor,
        hosts: HostGroup,
        prefill: PrefillConfig | None = None,
        name: str | None = None,
        speculate: SpeculativeConfig | None = None,
        draft: PreTrainedModel | None = None,
        captioner: Captioner | None = None,
        reuse: ReuseConfig | None = None,
    ):
        self.model = model
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.prefill_config = prefill or PrefillConfig()
        self.speculative_config = speculate
        self.draft_model = draft
        self._captioner = captioner
        self._parts, self._draft = _take_apart(model, draft, self.prefill_config, speculate, hosts, captioner)
        if reuse is not None and reuse.mode == "kv" and speculate and make_observer(speculate, self._parts):
            raise ValueError(
                f"{speculate.strategy} watches how the target reads the whole prompt: with it reuse='exact' only"
            )
        self._reuse = None if reuse is None or model is None else Reuse(reuse)
        vocab_size = min(parts.vocab_size for parts in (self._parts, self._draft) if parts is not None)
        self._tree = None if speculate is None else draft_tree(speculate, vocab_size)
        self._pair, self._draft_thread = None, None
        if drafts_elsewhere(speculate, hosts):
            self._pair = Pair.of(hosts, speculate)
        elif speculate is not None and speculate.draft_host:
            self._draft_thread = DraftThread(self._draft, hosts, speculate)
            self._pair = self._draft_thread.pair
        self.hosts = hosts if self._pair is None else self._pair.hosts
        self.name = name or type(self._parts.model).__name__
        self.num_frames = default_num_frames(processor)
        self.max_new_tokens = default_max_new_tokens(self._parts.model)
        if self._pair is not None:
            (self.max_new_tokens,) = hosts.broadcast_ints([self.max_new_tokens], 1)  # the draft's may differ
            hosts.require_same("the kind of prompts that the model reads", reads(self._parts).encode())

    def __repr__(self) -> str:
        drafting = "" if self.speculative_config is None else f", speculate={self.speculative_config.strategy!r}"
        settings = f"method={self.prefill_config.method!r}, kv={self.prefill_config.kv!r}{drafting}"
        return f"Engine({self.name!r}, {self._parts.family}, {settings}, {self.hosts})"

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
    ) -> "Engine":
        """Load a model and its processor on every host; collective.

        Args:
            name: ``"demo"`` (the small model in this package), a directory, or a hub id.
            speculate: with it the draft model that it names is loaded, too; for ``"demo"`` it needs no name.
            hosts: by default those that torchrun started, or this process alone. Where they are of several
                processes each, every process loads its share of the model, and all of the draft model.
            dtype: of the weights; ``"auto"`` takes the checkpoint's.
            captioner, reuse: see :class:`Engine`.

        Raises:
            ValueError: there is no such model, or it is not supported.
            HostError: another host failed to load it.
        """
        hosts = hosts or HostGroup.from_env()
        path = demo.model_path() if str(name) == "demo" else name
        draft_path = None
        with hosts.local_stage("reading the settings"):  # what can be refused before weights are loaded
            if speculate is not None:
                require_consistent(speculate, prefill or PrefillConfig(), hosts, captioner is not None)
                draft_path = _draft_path(speculate, is_demo=str(name) == "demo")
            for wanted in filter(None, (path, draft_path)):
                require_supported(read_config(wanted))
        # Members of a host exchange data while transformers loads the model's shares.
        stage = hosts.collective_stage if hosts.tensor_parallel_size > 1 else hosts.local_stage
        with stage(f"loading {name}"):
            beside = drafts_elsewhere(speculate, hosts)
            drafts_only = beside and hosts.rank == hosts.size - 1
            model, processor = load_model(path, dtype, hosts, with_model=not drafts_only, sharded=True)
        draft = None
        if draft_path is not None:
            with hosts.local_stage(f"loading the draft model {speculate.draft_model or draft_path}"):
                if drafts_only or not beside:
                    draft, reader = load_model(draft_path, dtype, hosts)
                    if strategy_of(speculate).reads_text_only:
                        require_same_tokens(processor, reader)
        with hosts.local_stage(f"preparing {name}"):
            _take_apart(model, draft, prefill or PrefillConfig(), speculate, hosts, captioner)
        return cls(model, processor, hosts, prefill, str(name), speculate, draft, captioner, reuse)

    def prefill(
        self,
        prompt: str | None = None,
        *,
        video: str | Path | None = None,
        images: Sequence[Any] | None = None,
        context: str | None = None,
        messages: Sequence[dict] | None = None,
        num_frames: int | None = None,
        fps: float | None = None,
        positions: str = "transformers",
    ) -> PrefillResult:
        """Prefill a question about at most one source.

        Args:
            prompt: the question.
            video: a video file; each host decodes and encodes only its share of the sampled frames.
            images: image files or PIL images.
            context: a long text; it is split over the hosts, the question is the query block.
            messages: a chat in transformers' format, instead of all these.
            num_frames: so many frames are sampled, evenly; with ``fps`` at most so many. By default
                :attr:`num_frames`.
            fps: sample at this rate instead.
            positions: ``"vllm"`` where vLLM is to continue (see :meth:`apbv.ModelInputs.at_vllm_positions`).

        Raises:
            ValueError: the prompt, the file or a length cannot be handled; the message says why.
            HostError: another host failed.
        """
        if self.model is None:
            raise ValueError("a draft host does not prefill; call this on the target's hosts")
        timer = StageTimer(self.hosts)
        source = {"video": video, "images": images, "context": context, "messages": messages}
        inputs, kept = self._prepare(prompt, source, num_frames, fps, timer, positions=positions)
        return self._prefill(inputs, kept, timer)

    def _prefill(
        self, inputs: ModelInputs, kept: KeptPrefix | None, timer: StageTimer, observe: Callable | None = None
    ) -> PrefillResult:
        """The prompt's KV: all of it, or the question's behind what was kept."""
        if kept is not None:
            return prefill_question(self._parts, inputs, kept, self.hosts, timer)
        encoded = reused = None
        if self._reuse is not None:
            reused = "embeddings" if self._reuse.has_embeddings(inputs, self.hosts) else None
            with self.hosts.local_stage("encode"), timer.stage("encode"):
                encoded = self._reuse.embeddings(inputs, self._parts)
        config = self.prefill_config
        state = prefill(
            self.model, inputs, hosts=self.hosts, config=config, timer=timer, observe=observe, encoded=encoded
        )
        if self._reuse is not None:
            self._reuse.keep_prefix(state, self.hosts)
        return replace(state, reused=reused)

    def generate(
        self,
        prompt: str | None = None,
        *,
        video: str | Path | None = None,
        images: Sequence[Any] | None = None,
        context: str | None = None,
        messages: Sequence[dict] | None = None,
        num_frames: int | None = None,
        fps: float | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        on_token: Callable[[int], None] | None = None,
        on_stage: Callable[[str], None] | None = None,
        stop: Stop | None = None,
        timeline: bool = False,
    ) -> GenerateResult:
        """Answer a question; the arguments up to ``fps`` are those of :meth:`prefill`.

        Args:
            max_new_tokens: at most so many tokens, the end token included. By default :attr:`max_new_tokens`, or
                as many as the model has positions left.
            temperature: 0 is greedy.
            top_p: nucleus sampling, where temperature > 0.
            seed: the same seed draws the same tokens; where a draft's windows depend on time (a losing draft is
                dropped, ``num_draft_tokens`` is ``"auto"``, or there is a draft host) it draws others of the same
                distribution.
            on_token: called on every host with each token as soon as it is chosen; on a draft host at the end.
            on_stage: called on every host as a stage begins, with its name in :data:`apbv.stats.STAGES`; a stage
                may come again.
            stop: asked on host 0 after each token with all tokens so far; true ends the answer there. Also asked
                before and after the prompt is read, with no tokens; true then cancels the request. Given on every
                host, or on none.
            timeline: collect what happened when on every host.

        Returns:
            The answer, the same on every host; ``stats`` on a draft host are its own.

        Raises:
            RequestCancelled: ``stop`` was true before there was a token.
            ValueError, HostError: as :meth:`prefill`.
        """
        with self.hosts.local_stage("reading the settings"):
            sampling = self._sampling(max_new_tokens, temperature, top_p, seed)
        timer = StageTimer(self.hosts, on_stage)
        source = {"video": video, "images": images, "context": context, "messages": messages}
        if self.model is None:
            stop = None  # a draft host is told where the answer ends
        inputs, kept = self._begin(
            sampling, lambda: self._prepare(prompt, source, num_frames, fps, timer, max_new_tokens or 1, stop)
        )
        sampling = self._within_room(sampling, inputs)
        if self.model is None:
            return self._draft_for_others(inputs, sampling, timer, on_token)
        stats = draft = None
        if self.speculative_config is None:
            state = self._prefill(inputs, kept, timer)
            tokens = self._decode(state, sampling, on_token, stop)
        elif self._pair is not None:
            state, tokens, stats = self._generate_beside_draft(inputs, kept, sampling, timer, on_token, stop)
        else:
            asked = {"prompt": prompt, **source}
            state, tokens, stats, draft = self._generate_speculatively(
                inputs, kept, asked, sampling, timer, on_token, stop
            )
        speculation = None if stats is None else {**asdict(self.speculative_config), **stats.summary(len(tokens))}
        kept = None
        if draft is not None:
            speculation["num_tree_nodes"] = self._tree and self._tree.num_drafted
            speculation["num_visual_tokens_drafted_from"] = draft.num_visual
            kept = kept_by_frame(self._parts, inputs, draft.kept)
        spans = self._collect_timeline(timer, stats) if timeline else None
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        record = self._record(state, sampling, tokens, text, speculation)
        reason, frames = self._finish_reason(tokens, sampling), _sampled_frames(inputs)
        return GenerateResult(text, tokens, record, reason, frames, kept, spans)

    def decode(
        self,
        state: PrefillResult,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        on_token: Callable[[int], None] | None = None,
        stop: Stop | None = None,
    ) -> GenerateResult:
        """Answer from what :meth:`prefill` or :func:`apbv.load` returned, without a draft.

        The arguments are those of :meth:`generate`.
        """
        with self.hosts.local_stage("reading the settings"):
            sampling = self._sampling(max_new_tokens, temperature, top_p, seed)
            state.inputs.require_room(self._parts.max_position_embeddings, max_new_tokens or 1)
            sampling = self._within_room(sampling, state.inputs)
        tokens = self._decode(state, sampling, on_token, stop)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        record = self._record(state, sampling, tokens, text, None)
        return GenerateResult(text, tokens, record, self._finish_reason(tokens, sampling))

    def _decode(self, state: PrefillResult, sampling: SamplingConfig, on_token, stop: Stop | None) -> list[int]:
        """One token after the other."""
        with self.hosts.collective_stage("decode"), state.timer.stage("decode"):
            return generate_tokens(*self._start(state), sampling, self._parts.eos_token_ids, on_token, stop)

    def _sampling(self, max_new_tokens: int | None, temperature: float, top_p: float, seed: int) -> SamplingConfig:
        most = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        return SamplingConfig(max_new_tokens=most, temperature=temperature, top_p=top_p, seed=seed)

    def _within_room(self, sampling: SamplingConfig, inputs: ModelInputs) -> SamplingConfig:
        """An answer no longer than the positions that the prompt leaves; one that was asked for fits."""
        room = self._parts.max_position_embeddings - inputs.next_position
        return replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))

    def _begin(
        self, sampling: SamplingConfig, read: Callable[[], tuple[ModelInputs, KeptPrefix | None]]
    ) -> tuple[ModelInputs, KeptPrefix | None]:
        """Read a request; where somebody drafts beside the target, both sides tell each other."""
        if self._pair is None:
            return read()
        agreed = self.speculative_config, self._parts.vocab_size, sampling.temperature > 0
        if self._draft_thread is None:
            with self._pair.beginning(*agreed):
                return read()
        inputs, kept = read()
        self._draft_thread.start(inputs, sampling)
        self._pair = self._draft_thread.pair
        with self._pair.beginning(*agreed):
            return inputs, kept

    def _collect_timeline(self, timer: StageTimer, stats: SpeculationStats | None) -> dict[str, list[Span]]:
        mine = timer.stages.spans + ([] if stats is None else stats.record.spans)
        hosts = {self.hosts.name_of(place): spans for place, spans in enumerate(gather_spans(mine, self.hosts))}
        of_draft = getattr(stats, "of_draft", None)
        return hosts if of_draft is None else {**hosts, "draft host": of_draft.spans}

    def _prefill_observed(
        self, inputs: ModelInputs, kept: KeptPrefix | None, timer: StageTimer
    ) -> tuple[PrefillResult, PrefillObserver | None]:
        """Prefill; with what watched it, if the strategy asks for that.

        Where somebody drafts beside the target, the scores leave as soon as they are known.
        """
        make, observers = make_observer(self.speculative_config, self._parts), []

        def observe(*args) -> PrefillObserver:
            observers.append(make(*args))
            if self._pair is not None and inputs.visual is not None:
                observers[0].tell_early(self._pair.offer_scores, self._parts.num_layers)
            return observers[0]

        state = self._prefill(inputs, kept, timer, observe if make else None)
        return state, observers[0] if observers else None

    def _generate_speculatively(
        self,
        inputs: ModelInputs,
        kept: KeptPrefix | None,
        asked: dict[str, Any],
        sampling: SamplingConfig,
        timer: StageTimer,
        on_token,
        stop: Stop | None,
    ) -> tuple[PrefillResult, list[int], SpeculationStats, Draft]:
        """Prefill, let the draft read the prompt, and decode."""
        config, hosts = self.speculative_config, self.hosts
        needs_caption = config.needs_caption and inputs.visual is not None
        captioning = in_thread(partial(self._captioned, asked)) if needs_caption and hosts.is_leader else None
        state, observer = self._prefill_observed(inputs, kept, timer)
        caption = self._caption(captioning, timer) if needs_caption else None
        with hosts.collective_stage("draft"), timer.stage("draft"):
            prompt = Prompt(
                target=self._parts,
                draft=self._draft,
                inputs=inputs,
                state=state,
                observer=observer,
                hosts=hosts,
                config=config,
                sampling=sampling,
                vocab_size=self._parts.vocab_size,
                drafts_tree=self._tree is not None,
                tokenize=partial(self.tokenizer.encode, add_special_tokens=False),
                caption=caption,
            )
            draft = STRATEGIES[config.strategy].build(prompt)
        with hosts.collective_stage("decode"), timer.stage("decode"):
            decoder, *start = self._start(state)
            if draft.follows_target and draft.drafter is not None:
                draft.drafter.follow(decoder.newest_kv)
            generate = generate_speculatively
            if self._tree:
                generate = partial(generate_by_tree, adapts_depth=config.num_draft_tokens == "auto")
            tokens, stats = generate(
                decoder,
                draft.drafter,
                *start,
                sampling,
                self._parts.eos_token_ids,
                self._tree or config.num_draft_tokens,
                on_token,
                stop,
                drop_losing_draft=not config.keep_losing_draft,
            )
        return state, tokens, stats, draft

    def _captioned(self, asked: dict[str, Any]) -> str:
        """What the captioner returns; in a thread, whose current GPU torch does not know."""
        device = self.hosts.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return self._captioner(render_prompt(self._parts, self.processor, **asked))

    def _caption(self, captioning: Future | None, timer: StageTimer) -> str | None:
        """What the captioner has said by now, or will say, on host 0; None elsewhere."""
        with self.hosts.local_stage("captioning"), timer.stage("draft"):
            if captioning is None:
                return None
            try:
                caption = captioning.result()
            except Exception as error:
                raise ValueError(f"the captioner failed: {type(error).__name__}: {error}") from error
            if not isinstance(caption, str) or not caption.strip():
                raise ValueError(f"the captioner returned {caption!r} instead of a caption")
            return caption.strip()

    def _generate_beside_draft(
        self,
        inputs: ModelInputs,
        kept: KeptPrefix | None,
        sampling: SamplingConfig,
        timer: StageTimer,
        on_token,
        stop: Stop | None,
    ) -> tuple[PrefillResult, list[int], PipelineStats]:
        """The target hosts' part of drafting on another host."""
        config, pair = self.speculative_config, self._pair
        try:
            state, observer = self._prefill_observed(inputs, kept, timer)
            with self.hosts.collective_stage("decode"), timer.stage("decode"):
                if observer is not None and inputs.visual is not None:
                    pair.send_scores(observer.result())
                decoder, *start = self._start(state)
                tokens, stats = generate_beside_draft(
                    decoder,
                    pair.open_link(),
                    *start,
                    sampling,
                    self._parts.eos_token_ids,
                    config.most_draft_tokens,
                    on_token,
                    stop,
                    drop_losing_draft=not config.keep_losing_draft,
                )
        except BaseException:
            pair.fail()
            raise
        if stats.lost_draft is None and pair.link is None and self.hosts.rank == 0:
            stats.lost_draft = "an earlier request lost it"
        if stats.lost_draft:
            pair.link = None
        if self._draft_thread is not None:
            self._draft_thread.finish()
        return state, tokens, stats

    def _draft_for_others(
        self, inputs: ModelInputs, sampling: SamplingConfig, timer: StageTimer, on_token
    ) -> GenerateResult:
        """The draft host's part."""
        config = self.speculative_config
        with self.hosts.working("draft"):  # should the target go on alone, it meets this host after the request
            tokens, report, draft = draft_request(self._pair, self._draft, inputs, config, sampling, timer)
        for token in tokens:
            if on_token is not None:
                on_token(token)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        figures = {"role": "draft", "num_drafted": report.num_drafted, **timer.summary(len(tokens))}
        kept = kept_by_frame(self._draft, inputs, draft.kept)
        reason = self._finish_reason(tokens, sampling)
        record = {"token_ids": tokens, "text": text, **figures}
        return GenerateResult(text, tokens, record, reason, _sampled_frames(inputs), kept)

    def _finish_reason(self, tokens: list[int], sampling: SamplingConfig) -> str:
        is_cut = len(tokens) == sampling.max_new_tokens and tokens[-1] not in self._parts.eos_token_ids
        return "length" if is_cut else "stop"

    def _start(self, state: PrefillResult) -> tuple[Decoder, torch.Tensor, int, HostGroup]:
        """Where decoding begins: the decoder, the first token's logits, the prompt's length, the hosts."""
        if state.shards is not None:
            state.shards.crop(state.num_tokens - state.shards.get_seq_length())  # an earlier answer's tokens
            decoder = ShardedDecoder(self._parts, state.shards, state.next_position, self.hosts)
        else:
            decoder = GatheredDecoder(self._parts, state.to_dynamic_cache(), state.next_position, self.hosts)
        return decoder, state.logits[0], state.num_tokens, self.hosts

    def _prepare(
        self,
        prompt: str | None,
        source: dict[str, Any],
        num_frames: int | None,
        fps: float | None,
        timer: StageTimer,
        num_new: int = 1,
        stop: Stop | None = None,
        positions: str = "transformers",
    ) -> tuple[ModelInputs, KeptPrefix | None]:
        """A request's prompt, and what is kept of its beginning."""
        self._require_wanted(stop)
        with self.hosts.local_stage("reading the prompt"):
            with timer.stage("preprocess"):
                rendered = render_prompt(self._parts, self.processor, prompt, **source)
            inputs, piece = self._read(rendered, self.num_frames if num_frames is None else num_frames, fps, timer)
            if positions not in POSITION_RULES:
                raise ValueError(f"positions must be one of {', '.join(POSITION_RULES)}, not {positions!r}")
            if positions == "vllm":
                inputs = inputs.at_vllm_positions(self._parts)
            inputs.require_room(self._parts.max_position_embeddings, num_new)
            if self.speculative_config is not None:
                require_readable(self.speculative_config, inputs)
        kept = None if self._reuse is None else self._reuse.find_prefix(inputs, self.hosts)
        is_known = kept is not None or (self._reuse is not None and self._reuse.has_embeddings(inputs, self.hosts))
        if piece is not None and (self._draft is not None or not is_known):  # a draft sees for itself
            with self.hosts.local_stage("reading the video"):
                with timer.stage("decode_video"):
                    pixels = piece.read()
                with timer.stage("preprocess"):
                    inputs = inputs.with_frames(self.processor, piece, pixels)
        self._require_wanted(stop)
        return inputs, kept

    def _require_wanted(self, stop: Stop | None) -> None:
        """Go on only if ``stop`` lets us; collective.

        Raises:
            RequestCancelled: on every host.
        """
        if stop is None:
            return
        with self.hosts.local_stage("asking whether to go on"):
            is_over = self.hosts.is_leader and stop(())
        if self.hosts.broadcast_ints([is_over], 1)[0]:
            raise RequestCancelled("the request was cancelled before it was prefilled")

    def _read(
        self, rendered: RenderedPrompt, num_frames: int, fps: float | None, timer: StageTimer
    ) -> tuple[ModelInputs, FramePiece | None]:
        """The prompt, and of a video, whose pixels are still to be read, this host's piece."""
        frame_parallel = self.prefill_config.frame_parallel
        if rendered.video is not None:
            with timer.stage("decode_video"):
                info = probe(rendered.video)
                frames = (
                    sample_uniform(info, num_frames)
                    if fps is None
                    else sample_fps(info, fps, max_frames=num_frames)
                )
            with timer.stage("preprocess"):
                return ModelInputs.from_video(
                    self._parts, self.processor, rendered.text, info, frames, self.hosts, frame_parallel
                )
        with timer.stage("preprocess"):
            if rendered.images:
                batch = self.processor(text=[rendered.text], images=rendered.images, return_tensors="pt")
                return ModelInputs.from_processor(self._parts, batch, self.hosts), None
            batch = self.tokenizer(
                rendered.text,
                add_special_tokens=not rendered.has_template,
                return_offsets_mapping=True,
                return_tensors="pt",
            )
            query_start, query_len = None, self.prefill_config.query_len
            if rendered.query_char is not None:
                starts = batch["offset_mapping"][0, :, 0]
                query_start = int((starts < rendered.query_char).sum())
                if not rendered.has_context:
                    query_start = max(query_start, len(starts) - query_len)
            return ModelInputs.from_processor(
                self._parts, batch, self.hosts, query_start=query_start, query_len=query_len
            ), None

    def _record(
        self,
        state: PrefillResult,
        sampling: SamplingConfig,
        tokens: list[int],
        text: str,
        speculation: dict[str, Any] | None,
    ) -> dict[str, Any]:
        figures = state.timer.summary(len(tokens))
        return {
            "method": state.method,
            "hosts": self.hosts.size,
            "tensor_parallel_size": self.hosts.tensor_parallel_size,
            "model": self.name,
            "num_input_tokens": state.num_tokens,
            "num_video_tokens": state.inputs.num_visual_tokens,
            "anchor_len": len(state.layout.anchor),
            "passing_len": state.layout.passing_len,
            "kv": self.prefill_config.kv,
            "reused": state.reused,
            "token_ids": tokens,
            "text": text,
            **figures,
            "samples": {"ttft_ms": [figures["ttft_ms"]]},
            "speculation": speculation,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "device": str(self.hosts.device),
            "dtype": str(self._parts.dtype).removeprefix("torch."),
            **provenance(),
        }


def _sampled_frames(inputs: ModelInputs) -> tuple[int, ...] | None:
    source = None if inputs.visual is None else inputs.visual.source
    return None if source is None else source.frames


def _draft_path(config: SpeculativeConfig, is_demo: bool) -> str | Path | None:
    """Where the draft model is; None for strategies without one.

    Raises:
        ValueError: the strategy needs one, and it is not named.
    """
    if not strategy_of(config).needs_draft_model:
        return None
    name = config.draft_model or ("demo" if is_demo else None)
    if name is None:
        raise ValueError(f"speculative decoding by {config.strategy} needs a draft model")
    return demo.draft_path() if name == "demo" else name


def _take_apart(
    model: PreTrainedModel | None,
    draft: PreTrainedModel | None,
    prefill: PrefillConfig,
    speculate: SpeculativeConfig | None,
    hosts: HostGroup,
    captioner: Captioner | None,
) -> tuple[ModelParts, ModelParts | None]:
    """The parts of this host's model and of its draft. A draft host has its draft only: both read alike.

    Raises:
        ValueError: the model is not supported, or settings or models do not go together.
    """
    if speculate is not None:
        require_consistent(speculate, prefill, hosts, captioner is not None)
    if model is None and draft is None:
        raise ValueError("there is neither a model nor a draft model")
    parts = inspect_model(draft if model is None else model, prefill.backend)
    draft_parts = None if draft is None else inspect_model(draft, prefill.backend)
    needs_draft = speculate is not None and strategy_of(speculate).needs_draft_model
    if needs_draft and not drafts_elsewhere(speculate, hosts):
        require_fitting_draft(speculate, parts, draft_parts)
    return parts, draft_parts
