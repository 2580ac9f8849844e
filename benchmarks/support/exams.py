"""Asks the demo model about held-out clips in several ways, on real or simulated hosts, and counts
right ones."""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, ProcessorMixin
from transformers.utils.logging import disable_progress_bar

from apbv import (
    Engine,
    HostGroup,
    ModelInputs,
    PrefillConfig,
    PrefillResult,
    ReduceConfig,
    SamplingParams,
    SparseConfig,
    SpeculativeConfig,
    prefill,
)
from apbv.decode.runner import Decoder
from apbv.input.pixels import KeptPixels
from apbv.input.prompt_reader import PromptReader
from apbv.input.request import Question, Request
from apbv.input.video import probe
from apbv.input.visual import VisualInput
from apbv.model.parts import ModelParts, inspect_model
from apbv.prefilling.encode import VisualRows, encode_visual
from apbv.prefilling.methods import METHODS
from apbv.prefilling.prefiller import ReadRequest
from apbv.prefilling.reduction import REDUCERS
from apbv.prefilling.reduction.choosing import keep_best
from apbv.prefilling.reuse import stored_rows
from apbv.speculate import Autoregressive
from apbv.speculate.decode_loops import SequentialSpeculation
from apbv.stats import StageTimer

from . import clips
from .simulated import share_weights, simulate

T = TypeVar("T")
# Answers to them are right or wrong as a whole; of a description the right tokens count.
EXACT_TASKS = ("retrieval", "ordering", "counting")


@dataclass(frozen=True)
class Exam:
    """Clips, and what is asked about each of them.

    Attributes:
        grid: visual tokens per side of a frame.
        num_shots: length of the clips.
        folder: where the clips' files are kept.
        tasks: names of :data:`support.clips.TASKS`.
        split: the split from which the clips come.
    """

    grid: int
    num_shots: int
    folder: Path
    tasks: tuple[str, ...] = EXACT_TASKS
    split: str = "test"
    kind = "letters"

    @classmethod
    def of(cls, options: argparse.Namespace, tasks: tuple[str, ...] = EXACT_TASKS) -> "Exam":
        """Return the exam that the options of the table [exam] define."""
        return cls(options.grid, options.shots, options.folder, tasks, options.split)

    def needles(self, seed: int) -> str:
        """Return the kind of needle in a seed's clip; the kinds alternate."""
        return clips.NEEDLES[seed % 2]

    def clip(self, seed: int) -> clips.ClipSpec:
        return clips.make_clip(seed, self.num_shots, self.split, self.grid, [self.needles(seed)])

    def render(self, seed: int) -> np.ndarray:
        """Render a clip's frames, uint8 RGB ``[T, H, W, 3]``."""
        return clips.render(self.clip(seed))

    def needle_tokens(self, seed: int, task: str) -> np.ndarray:
        """Return which of a clip's visual tokens show what a question is about, bool
        ``[visual tokens]``."""
        return np.concatenate(
            [clips.needle_tokens(shot, self.grid).flatten() for shot in self.clip(seed).shots]
        )

    def file(self, seed: int, hosts: HostGroup | None = None) -> Path:
        """Return the path of a clip's file, written first, by host 0, if it is missing."""
        path = (
            self.folder
            / f"{self.kind}-{self.split}-{self.grid}x{self.grid}-{self.num_shots}-{seed}.mp4"
        )
        hosts = hosts or HostGroup.single()
        with hosts.local_stage("rendering a clip"):
            if hosts.rank == 0 and not path.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                unfinished = path.with_suffix(".part")
                clips.write_mp4(self.render(seed), unfinished)
                unfinished.replace(path)
        return path

    def questions(self, seed: int) -> list[tuple[str, str, str]]:
        """Return (task, question, answer) of the first and last needle's retrieval and of all other
        questions."""
        retrievals, others = clips.asked_apart(self.clip(seed))
        asked = [retrievals[0], retrievals[-1], *others]
        return [item for item in asked if item[0] in self.tasks]

    def start(self, seed: int, task: str) -> str:
        """Return the beginning of an answer that is given with a task's question."""
        return ""

    def score(self, task: str, said: str, answer: str) -> float:
        """Return how right an answer is, 0 to 1."""
        return float(said == answer)


def load_demo(
    checkpoint: str | Path = "demo", hosts: HostGroup | None = None, dtype: str | None = None
) -> Engine:
    """Load a model, by default in float32, as the demo's accuracy was measured; show no
    progress."""
    disable_progress_bar()
    return Engine.from_pretrained(
        checkpoint, hosts=hosts or HostGroup.single(), dtype=dtype or "float32"
    )


def numbers_of_hosts(method: str, options: argparse.Namespace, hosts: HostGroup) -> list[int]:
    """Return on how many hosts a method is compared: those that were started, else one, or the
    simulated ones."""
    if hosts.size > 1:
        return [hosts.size]
    return sorted({*options.hosts} - {1}) if METHODS[method].splits else [1]


def with_reference(
    left: Mapping[int, Mapping[str, T]], reference: Mapping[str, T]
) -> Iterator[tuple[int, dict[str, T], set[str]]]:
    """Yield the ways that are left on each number of hosts, and the labels of those that count.

    Args:
        left: the ways by label, by number of hosts.
        reference: the one with which all others are compared, which runs first, and once.
    """
    for number in sorted(left):
        first = reference if number == min(left) else {}
        yield number, {**first, **left[number]}, set(left[number])


def run_on(
    num_hosts: int,
    hosts: HostGroup,
    model: PreTrainedModel,
    job: Callable[[HostGroup, PreTrainedModel], T],
    **options,
) -> T:
    """Run a job on a number of hosts: the real ones, or simulated ones if there is only one.

    Args:
        model: every host gets an object of its own with shared weights.
        options: of :func:`.simulated.simulate`.

    Returns:
        What the job returned, on simulated hosts that of host 0.

    Raises:
        ValueError: several hosts were started, but another number is asked for.
    """
    if num_hosts == hosts.size:
        return job(hosts, share_weights(model))
    if hosts.size > 1:
        raise ValueError(f"{num_hosts} hosts were asked for, but {hosts.size} were started")
    return simulate(
        num_hosts, lambda host: job(host, share_weights(model)), device=hosts.device, **options
    )[0]


def answer_greedily(
    parts: ModelParts,
    inputs: ModelInputs,
    hosts: HostGroup,
    config: PrefillConfig,
    max_new_tokens: int,
    encoded: VisualRows | None = None,
    way: SequentialSpeculation | None = None,
) -> tuple[list[int], PrefillResult]:
    """Answer a prompt greedily; return the tokens, on every host, and the prefill. Collective.

    Args:
        encoded: this host's embeddings of the video.
        way: how a draft is used; None: there is none.
    """
    hosts.barrier()
    timer = StageTimer(hosts)
    request = Request(Question(), timer, sampling=SamplingParams(max_new_tokens=max_new_tokens))
    read = ReadRequest(request, None, inputs, None)

    def run(_: ReadRequest, observer=None) -> PrefillResult:
        return prefill(
            parts,
            inputs,
            hosts=hosts,
            config=config,
            timer=timer,
            observer=observer,
            encoded=encoded,
        )

    prefiller = SimpleNamespace(read=lambda _: read, run=run)
    _, state, answered = (way or Autoregressive(parts, hosts)).answer(request, prefiller)
    return answered.tokens, state


class Candidate:
    """A model that takes exams; every method is collective.

    Args:
        model: a model in eval mode, on every host.
        hosts: the hosts that prefill.
        draft: a draft model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin,
        hosts: HostGroup,
        draft: PreTrainedModel | None = None,
    ):
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.hosts = hosts
        self.parts, self.draft = inspect_model(model), draft and inspect_model(draft)
        self._reader = PromptReader(self.parts, processor, num_frames=1)
        # Several questions are asked about the same video, on which the vision tower runs only
        # once.
        self._video: tuple[Path, VisualInput, VisualRows] | None = None

    def read(self, path: Path, question: str, start: str = "") -> ModelInputs:
        """Read the prompt of a question about all frames of a file, of which each host reads its
        share.

        Args:
            start: the beginning of the answer, which is given.
        """
        info = probe(path)
        timer = StageTimer(self.hosts)
        asked = Question(question, path, num_frames=info.num_frames)
        rendered = self._reader.render(asked)
        rendered = replace(rendered, text=rendered.text + start)
        inputs, pixels = self._reader.read(
            rendered, self._reader.sample([info], asked), self.hosts, timer
        )
        if self._video is None or self._video[0] != path:
            visual = inputs.with_pixels(KeptPixels(pixels)).visual
            rows = partial(
                stored_rows, encode_visual(self.parts, visual), visual, self.parts.device
            )
            self._video = (path, visual, rows)
        return replace(inputs, visual=self._video[1])

    @property
    def encoded(self) -> VisualRows:
        """This host's embeddings of the video that was read last."""
        return self._video[2]

    def answer(
        self,
        inputs: ModelInputs,
        config: PrefillConfig,
        max_new_tokens: int,
        speculate: SpeculativeConfig | None = None,
    ) -> tuple[list[int], PrefillResult]:
        """Answer greedily about the video that was read last; return the tokens and the prefill."""
        way = None
        if speculate is not None:
            tokenize = partial(self.tokenizer.encode, add_special_tokens=False)
            way = SequentialSpeculation(self.parts, self.draft, self.hosts, speculate, tokenize)
        return answer_greedily(
            self.parts, inputs, self.hosts, config, max_new_tokens, self.encoded, way
        )


class Reference:
    """The first row's distributions of an answer's tokens, with which those of other rows are
    compared."""

    def __init__(self):
        self._exact: Tensor | None = (
            None  # log-probabilities at the places of the answer's E tokens, [E, V]
        )

    def compare(
        self, parts: ModelParts, state: PrefillResult, answer: list[int], hosts: HostGroup
    ) -> dict:
        """Compare the distributions given a row's KV, teacher-forced; collective, and empty except
        on host 0.

        Returns:
            ``kl``: the mean divergence from the first row's, in nats per token; ``agrees``: the
                share of tokens at
            which the most probable one is the same.
        """
        logits = state.logits
        if len(answer) > 1:
            behind = Decoder(parts, state.kv, state.next_position).advance(answer[:-1])
            logits = torch.cat([logits, behind]) if hosts.is_leader else logits
        if not hosts.is_leader:
            return {}
        logs = logits.float().log_softmax(dim=-1)
        if self._exact is None:
            self._exact = logs
        return {
            "kl": (self._exact.exp() * (self._exact - logs)).sum(dim=-1).mean().item(),
            "agrees": (self._exact.argmax(dim=-1) == logs.argmax(dim=-1)).float().mean().item(),
        }


@dataclass(frozen=True)
class Way:
    """One way to answer.

    Attributes:
        prefill: how prompts are prefilled.
        speculate: how a draft proposes tokens, if there is one.
        keeps: what chooses the tokens that a reducer keeps: "random", "needles kept"; None: its
            ranking.
    """

    prefill: PrefillConfig
    speculate: SpeculativeConfig | None = None
    keeps: str | None = None

    @property
    def settings(self) -> dict:
        """All settings, for a record."""
        return json.loads(json.dumps(asdict(self)))


def ways_of(preset: Mapping[str, Mapping[str, Any]], num_tokens: int) -> dict[str, Way]:
    """Return a preset's ways by label (presets.toml); ``num_tokens`` is that of which lengths are
    parts."""
    kinds = {"sparse": SparseConfig, "reduce": ReduceConfig, "speculate": SpeculativeConfig}

    def value_of(name: str, value: Any) -> Any:
        if name in kinds:
            return kinds[name](**value)
        return value[0] * -(-num_tokens // value[1]) if isinstance(value, list) else value

    found = {}
    for label, settings in preset.items():
        values = {name: value_of(name, value) for name, value in settings.items()}
        own = {name: values.pop(name) for name in ("speculate", "keeps") if name in values}
        found[label] = Way(PrefillConfig(**values), **own)
    return found


def ranked_by(scores: Tensor, reduce: ReduceConfig) -> AbstractContextManager:
    """Let a reducer keep, of a prompt of one video on one host, the tokens with the highest of
    these scores.

    What its ranking is worth shows beside them: they keep as many tokens. A ranking below random
    scores throws away what is asked about; scores that know the needles show what so few tokens
    allow.

    Args:
        scores: ``[visual tokens]`` of the prompt.
    """
    ranking = REDUCERS[reduce.method]

    def keep(video, count):
        return video.kept(keep_best(scores, len(ranking(video, count).places)))

    return patch.dict(REDUCERS, {reduce.method: keep})


def sit(
    candidate: Candidate,
    exam: Exam,
    seed: int,
    ways: Mapping[str, Way],
    references: dict[str, Reference] | None = None,
) -> list[dict]:
    """Answer the questions about one clip in each way, in turn for every question.

    Args:
        ways: by label.
        references: what the answers are compared with, by question; those that are missing are
            added, and are of the first way. None: they are not compared.

    Returns:
        a record per way, equal on all hosts. Times are the slowest host's, in milliseconds; those
        to the first token include reading and encoding the frames, which is done once.
    """
    hosts = candidate.hosts
    tokenizer = candidate.tokenizer
    file = exam.file(seed, hosts)
    asked = exam.questions(seed)
    began = hosts.clock()
    with hosts.local_stage("reading a clip"):
        candidate.read(file, asked[0][1])
    reading = 1e3 * max(row[0] for row in hosts.gather_floats([hosts.clock() - began]))
    right = {label: {task: [0, 0] for task in exam.tasks} for label in ways}
    states: dict[str, PrefillResult] = {}  # of the last question
    figures: dict[str, list[dict]] = {label: [] for label in ways}
    for task, question, answer in asked:
        inputs = candidate.read(file, question, exam.start(seed, task))
        expected = tokenizer(answer).input_ids[: 2 * clips.MOST_DESCRIBED]
        needles = torch.from_numpy(exam.needle_tokens(seed, task))
        drawn = torch.from_numpy(np.random.default_rng(seed).random(len(needles)))
        scores = {"random": drawn, "needles kept": drawn + needles}
        for label, way in ways.items():
            with ranked_by(scores[way.keeps], way.prefill.reduce) if way.keeps else nullcontext():
                said, state = candidate.answer(
                    inputs, way.prefill, len(expected) + 1, way.speculate
                )
            count = right[label][task]
            states[label] = state
            if task == "describe":
                count[0] += sum(a == b for a, b in zip(said, expected, strict=False))
                count[1] += len(expected)
            else:
                count[0] += exam.score(
                    task, tokenizer.decode(said, skip_special_tokens=True), answer
                )
                count[1] += 1
            reduction = state.reduction
            left = needles if reduction is None else needles[reduction.kept]
            times = state.timer.summary(len(said))
            shown = {
                "num_visual_kept": state.inputs.num_visual_tokens,
                "ttft_ms": times["ttft_ms"] + reading,
                "prefill_ms": times["ttft_ms"],
                "decode_ms": times["stages_ms"]["decode"],
                "needles_kept": float(left.sum() / needles.sum()),
            }
            if references is not None:
                reference = references.setdefault(question, Reference())
                shown |= reference.compare(candidate.parts, state, expected, hosts)
            figures[label].append(shown)
    return [
        {
            "label": label,
            "seed": seed,
            "needles": exam.needles(seed),
            "hosts": hosts.size,
            "settings": way.settings,
            "method": states[label].method,
            "anchor_len": states[label].layout.anchor_len,
            "passing_len": states[label].layout.passing_len,
            "num_input_tokens": inputs.num_tokens,
            "num_visual_tokens": inputs.num_visual_tokens,
            "right": right[label],
            "reading_ms": reading,
            **{name: [shown[name] for shown in figures[label]] for name in figures[label][0]},
        }
        for label, way in ways.items()
    ]
