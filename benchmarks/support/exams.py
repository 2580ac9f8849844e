"""Asks a model about the demo's clips in several ways, and counts right answers."""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)
from apbv.errors import InvalidRequestError

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
from apbv.config import AblationConfig
from apbv.decode.answer import decoder_behind
from apbv.input.media.video import probe
from apbv.input.prompts.pixels import KeptPixels
from apbv.input.prompts.prompt_reader import PromptReader
from apbv.input.prompts.visual import VisualInput
from apbv.model.parts import ModelParts, inspect_model
from apbv.prefilling.encoding.vision import VisualRows, encode_visual, stored_rows
from apbv.prefilling.methods import METHODS
from apbv.prefilling.prefill_observer import PrefillObserver
from apbv.prefilling.prefiller import ReadRequest
from apbv.prefilling.reduction import REDUCERS
from apbv.prefilling.reduction.choosing import keep_best
from apbv.request.request import Question, Request, RequestSettings
from apbv.speculate import Autoregressive
from apbv.speculate.loops.decode_loops import SequentialSpeculation
from apbv.stats import StageTimer
from apbv.testing import clips
from apbv.testing.simulated import share_weights, simulate

from .drafting import speculative_config

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
        tasks: names of :data:`apbv.testing.clips.TASKS`.
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
        """Return which visual tokens show what a question is about, bool ``[visual tokens]``."""
        shots = self.clip(seed).shots
        tokens = [clips.needle_tokens(shot, self.grid).flatten() for shot in shots]
        return np.concatenate(tokens)

    def file(self, seed: int, hosts: HostGroup | None = None) -> Path:
        """Return the path of a clip's file, written first, by host 0, if it is missing."""
        size = f"{self.grid}x{self.grid}"
        path = self.folder / f"{self.kind}-{self.split}-{size}-{self.num_shots}-{seed}.mp4"
        hosts = hosts or HostGroup.single()
        with hosts.local_stage("rendering a clip"):
            if hosts.rank == 0 and not path.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                # Other processes may write the same clip at the same time.
                with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                    unfinished = Path(folder, path.name)
                    clips.write_mp4(self.render(seed), unfinished)
                    unfinished.replace(path)
        return path

    def questions(self, seed: int) -> list[tuple[str, str, str]]:
        """Return the questions about a clip, as (task, question, answer).

        These are the retrieval of the first and the last needle, and all other questions.
        """
        retrievals, others = clips.asked_apart(self.clip(seed))
        asked = [retrievals[0], retrievals[-1], *others]
        return [(task, question, answer) for task, question, answer in asked if task in self.tasks]

    def start(self, seed: int, task: str) -> str:
        """Return the beginning of an answer that is given with a task's question."""
        return ""

    def score(self, task: str, said: str, answer: str) -> float:
        """Return how right an answer is, 0 to 1."""
        return float(said == answer)


def load_demo(
    checkpoint: str | Path = "demo", hosts: HostGroup | None = None, dtype: str | None = None
) -> Engine:
    """Load a model, by default in float32, with which the demo's accuracy was measured.

    No progress is shown.
    """
    disable_progress_bar()
    return Engine.from_pretrained(
        checkpoint, hosts=hosts or HostGroup.single(), dtype=dtype or "float32"
    )


def numbers_of_hosts(method: str, options: argparse.Namespace, hosts: HostGroup) -> list[int]:
    """Return on how many hosts a method is compared, ascending.

    Where one host was started, others are simulated for the methods that split prompts.
    """
    if hosts.size > 1:
        return [hosts.size]
    if METHODS[method].facts.splits:
        return sorted(set(options.hosts) - {1})
    return [1]


def with_reference(
    left: Mapping[int, Mapping[str, T]], reference: Mapping[str, T]
) -> Iterator[tuple[int, dict[str, T], set[str]]]:
    """Yield the ways that are left on each number of hosts, and the labels of those that count.

    Args:
        left: the ways by label, by number of hosts.
        reference: the one with which all others are compared, which runs first, and once.
    """
    is_first = True
    for num_hosts in sorted(left):
        ways = dict(left[num_hosts])
        if is_first:
            ways = {**reference, **ways}
            is_first = False
        yield num_hosts, ways, set(left[num_hosts])


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
        InvalidRequestError: several hosts were started, but another number is asked for.
    """
    if num_hosts == hosts.size:
        return job(hosts, share_weights(model))
    if hosts.size > 1:
        raise InvalidRequestError(
            f"{num_hosts} hosts were asked for, but {hosts.size} were started"
        )

    def simulated_job(host: HostGroup) -> T:
        return job(host, share_weights(model))

    results = simulate(num_hosts, simulated_job, device=hosts.device, **options)
    return results[0]


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
    request = Request(
        Question(),
        timer,
        RequestSettings(sampling=SamplingParams(max_new_tokens=max_new_tokens)),
    )

    class PrefillOfInputs:
        """Stands for an engine's prefiller: the inputs are read already."""

        def read(self, _: Request) -> ReadRequest:
            return ReadRequest(request, None, inputs, None)

        def run(self, _: ReadRequest, observer: PrefillObserver | None = None) -> PrefillResult:
            return prefill(
                parts,
                inputs,
                hosts=hosts,
                config=config,
                timer=timer,
                observer=observer,
                encoded=encoded,
            )

    if way is None:
        way = Autoregressive(parts, hosts)
    _, state, answer = way.answer(request, PrefillOfInputs())
    return answer.tokens, state


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
        self.parts = inspect_model(model)
        self.draft = None if draft is None else inspect_model(draft)
        self._reader = PromptReader(self.parts, processor, num_frames=1)
        # Several questions are asked about the same video, on which the vision tower runs only
        # once.
        self._video: tuple[Path, VisualInput, VisualRows] | None = None

    def read(self, path: Path, question: str, start: str = "") -> ModelInputs:
        """Read the prompt of a question about all frames of a file.

        Each host reads its share of the frames.

        Args:
            start: the beginning of the answer, which is given.
        """
        # The prompt.
        info = probe(path)
        timer = StageTimer(self.hosts)
        asked = Question(question, path, num_frames=info.num_frames)
        rendered = self._reader.render(asked)
        rendered = replace(rendered, text=rendered.text + start)
        sampled = self._reader.sample([info], asked)
        inputs, pixels = self._reader.read(rendered, sampled, self.hosts, timer)

        # The embeddings, where they are not known from another question.
        if self._video is None or self._video[0] != path:
            visual = inputs.with_pixels(KeptPixels(pixels)).visual
            embeddings = encode_visual(self.parts, visual)
            rows = partial(stored_rows, embeddings, visual, self.parts.device)
            self._video = (path, visual, rows)
        _, visual, _ = self._video
        return replace(inputs, visual=visual)

    @property
    def encoded(self) -> VisualRows:
        """This host's embeddings of the video that was read last."""
        _, _, rows = self._video
        return rows

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
    """The first row's distributions of an answer's tokens, to compare other rows with."""

    def __init__(self):
        # Log-probabilities at the places of the answer's E tokens, [E, V].
        self._first: Tensor | None = None

    def compare(
        self, parts: ModelParts, state: PrefillResult, answer: list[int], hosts: HostGroup
    ) -> dict:
        """Compare the distributions given a row's KV, teacher-forced; collective.

        Args:
            state: the row's prefill.
            answer: the answer's tokens.

        Returns:
            on host 0 ``kl``: the mean divergence from the first row's, in nats per token; and
            ``agrees``: the share of tokens at which the most probable one is the same. On other
            hosts nothing.
        """
        logits = state.logits
        if len(answer) > 1:
            decoder = decoder_behind(parts, state)
            tokens = answer[:-1]
            # One by one where every step chooses what it attends to.
            steps = [[token] for token in tokens] if decoder.prunes else [tokens]
            later_logits = [decoder.advance(step) for step in steps]
            if hosts.is_leader:
                logits = torch.cat([logits, *later_logits])
        if not hosts.is_leader:
            return {}
        logs = logits.float().log_softmax(dim=-1)
        if self._first is None:
            self._first = logs
        divergence = (self._first.exp() * (self._first - logs)).sum(dim=-1)
        is_equal = self._first.argmax(dim=-1) == logs.argmax(dim=-1)
        return {"kl": divergence.mean().item(), "agrees": is_equal.float().mean().item()}


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
    """Return a preset's ways by label (presets.toml).

    Args:
        num_tokens: the length of which a preset's lengths may be parts.
    """
    ways = {}
    for label, settings in preset.items():
        speculate = None
        keeps = None
        fields = {}
        for name, value in settings.items():
            if name == "speculate":
                speculate = speculative_config(value)
            elif name == "keeps":
                keeps = value
            elif name == "ablation":
                fields[name] = AblationConfig(**value)
            elif name == "sparse":
                fields[name] = SparseConfig(**value)
            elif name == "reduce":
                fields[name] = ReduceConfig(**value)
            elif name == "passing_weights":
                fields[name] = tuple(value)
            elif isinstance(value, list):
                # A length: this many times a part of the tokens, rounded up.
                times, part = value
                fields[name] = times * -(-num_tokens // part)
            else:
                fields[name] = value
        ways[label] = Way(PrefillConfig(**fields), speculate, keeps)
    return ways


def ranked_by(scores: Tensor, reduce: ReduceConfig) -> AbstractContextManager:
    """Let a reducer keep the tokens with the highest of these scores.

    It is for a prompt of one video on one host. They keep as many tokens as the reducer's own
    ranking, and so show what this is worth: a ranking below random scores throws away what is asked
    about, and scores that know the needles show what so few tokens allow.

    Args:
        scores: ``[visual tokens]`` of the prompt.
    """
    ranking = REDUCERS[reduce.method]

    def keep(video, count):
        num_kept = len(ranking(video, count).places)
        return video.kept(keep_best(scores, num_kept))

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
        references: what the answers are compared with, by question; missing ones are added, with
            the first way's answers. None: answers are not compared.

    Returns:
        a record per way, equal on all hosts. Times are the slowest host's, in milliseconds; those
        to the first token include reading and encoding the frames, which is done once.
    """
    hosts = candidate.hosts
    file = exam.file(seed, hosts)
    asked = exam.questions(seed)

    # Read the file once: further questions reuse its embeddings.
    began = hosts.clock()
    with hosts.local_stage("reading a clip"):
        candidate.read(file, asked[0][1])
    seconds_of_hosts = hosts.gather_floats([hosts.clock() - began])
    reading_ms = 1e3 * max(seconds for (seconds,) in seconds_of_hosts)

    # Answer every question in each way. States are of the last question.
    right: dict[str, dict[str, list]] = {}
    states: dict[str, PrefillResult] = {}
    figures: dict[str, list[dict]] = {}
    for label in ways:
        right[label] = {task: [0, 0] for task in exam.tasks}
        figures[label] = []
    for task, question, answer in asked:
        inputs = candidate.read(file, question, exam.start(seed, task))
        expected = candidate.tokenizer(answer).input_ids[: 2 * clips.MOST_DESCRIBED]
        needles = torch.from_numpy(exam.needle_tokens(seed, task))
        for label, way in ways.items():
            with _choosing_tokens(way, needles, seed):
                said, state = candidate.answer(
                    inputs, way.prefill, len(expected) + 1, way.speculate
                )
            states[label] = state

            # Score the answer.
            num_right, total = _count_right(candidate, exam, task, said, expected, answer)
            right[label][task][0] += num_right
            right[label][task][1] += total

            # Collect figures.
            needles_kept = needles
            if state.reduction is not None:
                needles_kept = needles[state.reduction.kept]
            times = state.timer.summary(len(said))
            figures_of_answer = {
                "num_visual_kept": state.inputs.num_visual_tokens,
                "ttft_ms": times["ttft_ms"] + reading_ms,
                "prefill_ms": times["ttft_ms"],
                "decode_ms": times["stages_ms"]["decode"],
                "needles_kept": float(needles_kept.sum() / needles.sum()),
            }
            if references is not None:
                reference = references.setdefault(question, Reference())
                figures_of_answer |= reference.compare(candidate.parts, state, expected, hosts)
            figures[label].append(figures_of_answer)

    # Make a record of each way, with its figures by question.
    records = []
    for label, way in ways.items():
        layout = states[label].layout
        record = {
            "label": label,
            "seed": seed,
            "needles": exam.needles(seed),
            "hosts": hosts.size,
            "settings": way.settings,
            "method": states[label].method,
            "anchor_len": layout.anchor_len,
            "passing_len": layout.passing_len,
            "num_input_tokens": inputs.num_tokens,
            "num_visual_tokens": inputs.num_visual_tokens,
            "right": right[label],
            "reading_ms": reading_ms,
        }
        for name in figures[label][0]:
            record[name] = [figures_of_answer[name] for figures_of_answer in figures[label]]
        records.append(record)
    return records


def _choosing_tokens(way: Way, needles: Tensor, seed: int) -> AbstractContextManager:
    """Let a reducer keep the tokens that a way's ``keeps`` names, in place of its own.

    Args:
        needles: which visual tokens show what is asked about, bool ``[visual tokens]``.
        seed: the clip's, with which random scores are drawn.
    """
    if not way.keeps:
        return nullcontext()
    scores = torch.from_numpy(np.random.default_rng(seed).random(len(needles)))
    if way.keeps == "needles kept":
        # Random scores are less than 1, so that all needles come first.
        scores = scores + needles
    elif way.keeps != "random":
        raise InvalidRequestError(f"there is no rule {way.keeps!r} of which tokens are kept")
    return ranked_by(scores, way.prefill.reduce)


def _count_right(
    candidate: Candidate, exam: Exam, task: str, said: list[int], expected: list[int], answer: str
) -> tuple[float, int]:
    """Count how much of an answer is right, and of how much; of a description each token counts.

    Args:
        said, expected: the answer's tokens, and the right answer's.
        answer: the right answer.
    """
    if task == "describe":
        num_right = 0
        for token, expected_token in zip(said, expected, strict=False):
            if token == expected_token:
                num_right += 1
        return num_right, len(expected)
    text = candidate.tokenizer.decode(said, skip_special_tokens=True)
    return exam.score(task, text, answer), 1
