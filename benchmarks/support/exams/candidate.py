"""Lets a model take exams, prefilled by any method on any hosts, and counts its right answers."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from tqdm import tqdm
from transformers import PreTrainedModel, ProcessorMixin
from transformers.utils.logging import disable_progress_bar

from apbv import Engine, HostGroup, ModelInputs, PrefillConfig, SamplingParams, prefill
from apbv.input.pixels import KeptPixels
from apbv.input.reading import PromptReader
from apbv.input.request import Question, Request
from apbv.input.video import probe
from apbv.input.visual import VisualInput
from apbv.model.parts import ModelParts, inspect_model
from apbv.prefilling.encode import VisualRows, encode_visual
from apbv.prefilling.forward import PrefillResult
from apbv.prefilling.reuse import StoredRows
from apbv.speculate import Autoregressive
from apbv.stats import StageTimer

from .. import clips
from ..on_hosts import run_on
from .exam import Exam


def load_demo(checkpoint: str | Path = "demo") -> Engine:
    """Load one of the demo's models on one host, in float32 as its accuracy was measured; show no progress."""
    disable_progress_bar()
    return Engine.from_pretrained(checkpoint, hosts=HostGroup.single(), dtype="float32")


def answer_greedily(
    parts: ModelParts,
    inputs: ModelInputs,
    hosts: HostGroup,
    config: PrefillConfig,
    max_new_tokens: int,
    encoded: VisualRows | None = None,
) -> tuple[list[int], PrefillResult]:
    """Answer a prompt greedily; return the tokens, on every host, and the prefill. Collective."""
    state = prefill(parts.model, inputs, hosts=hosts, config=config, encoded=encoded)
    request = Request(Question(), state.timer, sampling=SamplingParams(max_new_tokens=max_new_tokens))
    return Autoregressive(parts, hosts).decode(request, state).tokens, state


class Candidate:
    """A model that takes exams; every method is collective.

    Args:
        model: a model in eval mode, on every host.
        processor: its processor.
        hosts: the hosts that prefill.
    """

    def __init__(self, model: PreTrainedModel, processor: ProcessorMixin, hosts: HostGroup) -> None:
        self.model, self.processor, self.hosts = model, processor, hosts
        self.parts = inspect_model(model)
        self._reader = PromptReader(self.parts, processor, num_frames=1)
        # Several questions are asked about the same video, on which the vision tower runs only once.
        self._video: tuple[Path, VisualInput, StoredRows] | None = None

    def read(self, path: Path, question: str) -> ModelInputs:
        """Read the prompt of a question about all frames of a file, of which each host reads its share."""
        info, timer = probe(path), StageTimer(self.hosts)
        asked = Question(question, path, num_frames=info.num_frames)
        rendered = self._reader.render(asked)
        inputs, pixels = self._reader.read(rendered, self._reader.sample([info], asked), self.hosts, timer)
        if self._video is None or self._video[0] != path:
            visual = inputs.with_pixels(KeptPixels(pixels)).visual
            rows = StoredRows(encode_visual(self.parts, visual), visual, self.parts.device)
            self._video = (path, visual, rows)
        return replace(inputs, visual=self._video[1])

    @property
    def encoded(self) -> VisualRows:
        """This host's embeddings of the video that was read last."""
        return self._video[2]

    def answer(self, inputs: ModelInputs, config: PrefillConfig, max_new_tokens: int) -> tuple[list[int], dict]:
        """Answer greedily; return the tokens, and the method and lengths that really ran."""
        tokens, state = answer_greedily(self.parts, inputs, self.hosts, config, max_new_tokens, self.encoded)
        run = {"method": state.method, "tokens": state.num_tokens, "anchor_len": state.layout.anchor_len}
        return tokens, {**run, "passing_len": state.layout.passing_len if state.method != "full" else None}


def score(
    candidate: Candidate, exam: Exam, configs: Sequence[PrefillConfig], folder: Path
) -> Iterable[dict[str, int | str | None]]:
    """Let a candidate take an exam once with each way to prefill.

    Yields:
        One record per config (its index in ``configs``), task and kind of needle: how many of the total answers
        are right, or for descriptions how many of the tokens.
    """
    tokenizer = candidate.processor.tokenizer
    right: dict[tuple, int] = defaultdict(int)
    total: dict[tuple, int] = defaultdict(int)
    runs: dict[int, dict] = {}
    hosts = candidate.hosts
    title = f"{exam.num_shots} shots of {exam.grid} x {exam.grid} tokens"
    for seed in tqdm(range(exam.num_clips), desc=title, disable=hosts.rank != 0 or None, leave=False):
        file = exam.shared_file(seed, folder, hosts)
        for task, question, answer in exam.questions(seed):
            expected = tokenizer(answer).input_ids[: 2 * clips.MOST_DESCRIBED]
            with hosts.local_stage("reading a clip"):
                inputs = candidate.read(file, question)
            for index, config in enumerate(configs):
                said, runs[index] = candidate.answer(inputs, config, max_new_tokens=len(expected) + 1)
                key = (index, task, exam.needles(seed))
                if task == "describe":
                    right[key] += sum(a == b for a, b in zip(said, expected, strict=False))
                    total[key] += len(expected)
                else:
                    right[key] += tokenizer.decode(said, skip_special_tokens=True) == answer
                    total[key] += 1
    for (index, task, needles), count in total.items():
        asked = {"grid": exam.grid, "shots": exam.num_shots, "clips": exam.num_clips, "split": exam.split}
        chosen = {"config": index, "hosts": hosts.size, "importance": configs[index].importance}
        chosen |= {"passing_len_asked": configs[index].passing_len}
        key = (index, task, needles)
        yield {
            **asked,
            **chosen,
            **runs[index],
            "simulated": False,
            "task": task,
            "needles": needles,
            "right": right[key],
            "total": count,
        }


def score_on(
    num_hosts: int, engine: Engine, exam: Exam, configs: Sequence[PrefillConfig], folder: Path
) -> list[dict]:
    """Run :func:`score` on so many hosts, which :func:`..on_hosts.run_on` chooses."""

    def sit(hosts: HostGroup, model: PreTrainedModel) -> list[dict]:
        return list(score(Candidate(model, engine.processor, hosts), exam, configs, folder))

    simulated = num_hosts != engine.hosts.size
    return [{**record, "simulated": simulated} for record in run_on(num_hosts, engine.hosts, engine.model, sit)]
