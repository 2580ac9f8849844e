"""Score a demo model on held-out clips by exact match per task, prefilled by any method on any hosts.

    python benchmarks/exam.py --method full --grids 2 6 --shots 64 256 --clips 100 --json scores.jsonl
    python benchmarks/exam.py --hosts 2 4 8 --shots 256 --passing-len 0 16 default --json scores.jsonl
    torchrun --nproc-per-node 4 benchmarks/exam.py --shots 256 --passing-len 0 16 default
    python benchmarks/exam.py --table scores.jsonl

Every clip is rendered, written as an H.264 file, decoded from it, prefilled and answered greedily. Clips with an
even number have edited needles, the others inserted ones. With `--hosts` the hosts are simulated in one process
(apbv.hosts.simulated), under torchrun they are real; the answers are the same.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from summaries import share_cell
from tqdm import tqdm

from apbv import Engine, HostGroup, ModelInputs, PrefillConfig, SamplingConfig, prefill
from apbv.config import IMPORTANCE_NAMES, METHOD_NAMES
from apbv.demo import clips, model_path
from apbv.hosts.simulated import share_weights, simulate
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
from apbv.stats import StageTimer, append_json_lines, markdown_table

from transformers import PreTrainedModel, ProcessorMixin  # isort: skip
from transformers.utils.logging import disable_progress_bar  # isort: skip

RETRIEVALS_PER_CLIP = 2
T = TypeVar("T")


@dataclass(frozen=True)
class Exam:
    """An exam is a set of clips and the tasks that are asked about each of them.

    Args:
        grid: visual tokens per side of a frame.
        num_shots: length of the clips.
        num_clips: number of clips; their seeds are 0 to num_clips - 1.
        tasks: names of :data:`apbv.demo.clips.TASKS`.
        split: the split from which the clips come.
    """

    grid: int
    num_shots: int
    num_clips: int
    tasks: tuple[str, ...] = clips.TASKS
    split: str = "test"

    def clip(self, seed: int) -> clips.ClipSpec:
        """Return the clip of a seed, with one kind of needle."""
        return clips.make_clip(seed, self.num_shots, self.split, self.grid, [self.needles(seed)])

    def needles(self, seed: int) -> str:
        """Return the kind of needle in a seed's clip; the kinds alternate."""
        return clips.NEEDLES[seed % 2]

    def file(self, seed: int, folder: Path) -> Path:
        """Return the path of a clip's file in a folder, which is written first if it is missing."""
        path = folder / f"{self.split}-{self.grid}x{self.grid}-{self.num_shots}-{seed}.mp4"
        if not path.exists():
            unfinished = path.with_suffix(".part")
            clips.write_mp4(clips.render(self.clip(seed)), unfinished)
            unfinished.replace(path)
        return path

    def shared_file(self, seed: int, folder: Path, hosts: HostGroup) -> Path:
        """Let host 0 write a clip's file if it is missing, and return its path on every host; collective."""
        with hosts.local_stage("rendering a clip"):
            if hosts.rank == 0:
                self.file(seed, folder)
        return self.file(seed, folder)

    def questions(self, seed: int) -> list[tuple[str, str, str]]:
        """Return (task, question, answer) of the first and last needle's retrieval and of all other questions."""
        asked = [item for item in clips.questions(self.clip(seed)) if item[0] in self.tasks]
        retrievals = [item for item in asked if item[0] == "retrieval"]
        others = [item for item in asked if item[0] != "retrieval"]
        return retrievals[:: max(1, len(retrievals) - 1)][:RETRIEVALS_PER_CLIP] + others


def clips_folder(chosen: Path | None = None) -> Path:
    """Return the folder for the clips' files, created if it is missing; by default a temporary one."""
    folder = chosen or Path(tempfile.gettempdir()) / "apbv-demo-clips"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
    request = Request(Question(), state.timer, sampling=SamplingConfig(max_new_tokens=max_new_tokens))
    return Autoregressive(parts, hosts).answer(request, state).tokens, state


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


def run_on(num_hosts: int, engine: Engine, job: Callable[[HostGroup, PreTrainedModel], T]) -> T:
    """Run a job on so many hosts: the engine's own, or simulated ones where it has only one.

    Args:
        num_hosts: the number of hosts.
        engine: the engine, whose model every host gets as an object of its own with shared weights.
        job: function of a host and its model.

    Returns:
        What the job returned, on simulated hosts that of host 0.

    Raises:
        ValueError: the engine runs on another number of several hosts.
    """
    hosts = engine.hosts
    if num_hosts == hosts.size:
        return job(hosts, share_weights(engine.model))
    if hosts.size > 1:
        raise ValueError(f"{num_hosts} hosts were asked for, but {hosts.size} were started")
    # Copied before the threads start, so that each of them works on its own model.
    models = [share_weights(engine.model) for _ in range(num_hosts)]
    return simulate(num_hosts, lambda host: job(host, models[host.rank]), device=hosts.device)[0]


def score_on(
    num_hosts: int, engine: Engine, exam: Exam, configs: Sequence[PrefillConfig], folder: Path
) -> list[dict]:
    """Run :func:`score` on so many hosts, which :func:`run_on` chooses."""

    def sit(hosts: HostGroup, model: PreTrainedModel) -> list[dict]:
        return list(score(Candidate(model, engine.processor, hosts), exam, configs, folder))

    simulated = num_hosts != engine.hosts.size
    return [{**record, "simulated": simulated} for record in run_on(num_hosts, engine, sit)]


def markdown(records: Sequence[dict]) -> str:
    """Format records as a table: a row per clip size and prefill, a column per task, intervals in brackets."""
    rows: dict[tuple, dict[str, list[int]]] = {}
    for record in records:
        asked = record["passing_len_asked"]
        passing = (
            "–"
            if record["method"] == "full"
            else str(record["passing_len"]) + (" (default)" if asked is None else "")
        )
        size = (f"{record['grid']} x {record['grid']}", record["shots"], record["tokens"])
        cells = rows.setdefault((*size, record["method"], record["hosts"], passing), {})
        cell = cells.setdefault(record["task"], [0, 0])
        cell[0] += record["right"]
        cell[1] += record["total"]
    columns = [task for task in clips.TASKS if any(task in cells for cells in rows.values())]
    header = ["grid", "shots", "tokens", "method", "hosts", "l_p", *columns]
    return markdown_table(
        header, [[*key, *(_cell(task, cells) for task in columns)] for key, cells in rows.items()]
    )


def _cell(task: str, cells: dict[str, list[int]]) -> str:
    if task not in cells:
        return ""
    right, total = cells[task]
    if task == "describe":  # tokens of one answer are not independent, so that no interval holds
        return f"{right / total:.3f}"
    return share_cell(right, total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=model_path(), help="checkpoint folder")
    parser.add_argument("--method", choices=METHOD_NAMES, default="apbv")
    parser.add_argument("--importance", choices=IMPORTANCE_NAMES, default=PrefillConfig().importance)
    parser.add_argument("--hosts", type=int, nargs="+", help="numbers of simulated hosts (default: the real ones)")
    parser.add_argument("--passing-len", nargs="+", default=["default"], help='numbers, or "default"')
    parser.add_argument("--grids", type=int, nargs="+", default=[2], choices=clips.GRIDS)
    parser.add_argument("--shots", type=int, nargs="+", default=[64], help="lengths of the clips")
    parser.add_argument("--tasks", nargs="+", default=list(clips.TASKS), choices=clips.TASKS)
    parser.add_argument("--clips", type=int, default=40)
    parser.add_argument("--split", choices=clips.SPLITS, default="test")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--folder", type=Path, help="where the clips' files are kept (default: a temporary folder)"
    )
    parser.add_argument("--json", type=Path, help="append the figures as JSON lines")
    parser.add_argument("--table", type=Path, nargs="+", help="only print a table of such files")
    options = parser.parse_args()
    if options.table:
        print(markdown([json.loads(line) for path in options.table for line in path.read_text().splitlines()]))
        return
    disable_progress_bar()
    hosts = HostGroup.from_env()
    engine = Engine.from_pretrained(options.model, hosts=hosts, dtype=options.dtype)
    configs = [
        PrefillConfig(
            method=options.method,
            passing_len=None if length == "default" else int(length),
            importance=options.importance,
        )
        for length in options.passing_len
    ]
    folder = clips_folder(options.folder)
    sizes = [(grid, num_shots) for grid in options.grids for num_shots in options.shots]
    for (grid, num_shots), num_hosts in itertools.product(sizes, options.hosts or [hosts.size]):
        exam = Exam(grid, num_shots, options.clips, tuple(options.tasks), options.split)
        began = time.monotonic()
        records = score_on(num_hosts, engine, exam, configs, folder)
        if hosts.rank == 0:
            print(f"{time.monotonic() - began:.0f} s\n{markdown(records)}", flush=True)
            if options.json:
                append_json_lines(options.json, records)
    hosts.close()


if __name__ == "__main__":
    main()
