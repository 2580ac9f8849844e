"""Answers questions about clips in every compared way."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from transformers import PreTrainedModel

from apbv import HostGroup, PrefillResult, SamplingParams, prefill
from apbv.input.model_inputs import ModelInputs
from apbv.input.rendering import render_prompt
from apbv.input.request import Question, Request
from apbv.model.parts import inspect_model
from apbv.prefilling.prefiller import ReadRequest
from apbv.speculate import Autoregressive
from apbv.speculate.ways import Answered, TakingTurns
from apbv.stats import StageTimer

from ..exams.candidate import Candidate
from ..exams.exam import Exam
from .ways import System


class Examinee:
    """The demo pair on one of the hosts, which answers in several ways; every method is collective.

    Args:
        candidate: the target.
        draft: the draft model.
    """

    def __init__(self, candidate: Candidate, draft: PreTrainedModel):
        self._candidate, self._draft = candidate, inspect_model(draft)

    def sit(self, exam: Exam, seed: int, folder: Path, asked: list[System]) -> Iterator[dict]:
        """Answer the questions about one clip in each way; yield a record per way, equal on all hosts."""
        hosts, tokenizer = self._candidate.hosts, self._candidate.processor.tokenizer
        file = exam.shared_file(seed, folder, hosts)
        right = {system.label: {task: [0, 0] for task in exam.tasks} for system in asked}
        runs: dict[str, list[dict]] = {system.label: [] for system in asked}
        began = hosts.clock()
        first = self._candidate.read(file, exam.questions(seed)[0][1])
        reading = 1e3 * max(row[0] for row in hosts.gather_floats([hosts.clock() - began]))
        for task, text, answer in exam.questions(seed):
            inputs = self._candidate.read(file, text)
            most = len(tokenizer(answer).input_ids) + 1
            for system in asked:
                answered, figures = self._answer(system, inputs, file, text, most)
                said = tokenizer.decode(answered.tokens, skip_special_tokens=True)
                right[system.label][task][0] += said == answer
                right[system.label][task][1] += 1
                runs[system.label].append(figures)
        for system in asked:
            yield {
                "seed": seed,
                "needles": exam.needles(seed),
                "label": system.label,
                "kind": system.kind,
                "hosts": hosts.size,
                "settings": system.settings,
                "right": right[system.label],
                "reading_ms": reading,
                "ttft_ms": [figures["ttft_ms"] + reading for figures in runs[system.label]],
                "prefill_ms": [figures["ttft_ms"] for figures in runs[system.label]],
                "decode_ms": [figures["stages_ms"]["decode"] for figures in runs[system.label]],
                "num_input_tokens": first.num_tokens,
                "num_visual_tokens": first.num_visual_tokens,
                "num_visual_kept": [figures["num_visual_kept"] for figures in runs[system.label]],
            }

    def _answer(
        self, system: System, inputs: ModelInputs, file: Path, text: str, max_new_tokens: int
    ) -> tuple[Answered, dict]:
        """Answer a question greedily; return the answer, and the figures of its prefill."""
        candidate, hosts = self._candidate, self._candidate.hosts
        way = Autoregressive(candidate.parts, hosts)
        if system.speculate is not None:
            tokenize = partial(candidate.processor.tokenizer.encode, add_special_tokens=False)
            way = TakingTurns(candidate.parts, self._draft, hosts, system.speculate, tokenize)
        hosts.barrier()
        timer = StageTimer(hosts)
        request = Request(Question(text), timer, sampling=SamplingParams(max_new_tokens=max_new_tokens))
        rendered = render_prompt(candidate.parts, candidate.processor, Question(text, file))
        kept = 0.0

        def run(read: ReadRequest, watcher=None) -> PrefillResult:
            nonlocal kept
            options = {"config": system.config, "watcher": watcher, "encoded": candidate.encoded}
            state = prefill(candidate.parts, inputs, hosts=hosts, timer=timer, **options)
            kept = _visual_kv(state, hosts)
            return state

        read = ReadRequest(request, rendered, inputs, None)
        answered = way.answer(request, SimpleNamespace(read=lambda _: read, run=run)).answered
        return answered, {**timer.summary(len(answered.tokens)), "num_visual_kept": kept}


def _visual_kv(state, hosts: HostGroup) -> float:
    """Count the visual tokens in a layer's KV, on average over the layers, which may have different numbers."""
    whole, num_text = state.kv.whole, state.num_tokens - state.inputs.num_visual_tokens
    lengths = [layer.keys.shape[2] for layer in whole.layers] if whole is not None else [0]
    mean = round(1e6 * (sum(lengths) / len(lengths) - num_text))
    return hosts.broadcast_ints([mean], 1)[0] / 1e6
