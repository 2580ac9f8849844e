"""The command line of the benchmarks that ask a user's own questions."""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)
from apbv.errors import HostError

# isort: split
from tqdm import tqdm
from transformers import PreTrainedModel

from apbv import Engine, GenerateResult, HostGroup, ReuseConfig, SamplingParams
from apbv.config import DecodeConfig
from apbv.hosts import run_on_hosts
from apbv.launch.options import (
    OptionParser,
    add_draft_options,
    add_host_options,
    add_prefill_options,
    check,
    load_engine,
    load_function,
    prepare_process,
)

from .. import records
from ..arguments import add_options
from ..exams import run_on
from ..records import read_records
from ..simulated import share_weights
from .answers import choose_option, judged
from .samples import (
    LETTERED,
    OPEN,
    Parse,
    Sample,
    by_files,
    digest_of,
    file_sizes,
    fill,
    request_of,
)
from .scoring import Run, Score, markdown, runs_of

# Options of an engine on which no answer depends.
_WITHOUT_EFFECT = {"threads", "video_chunk_mib", "cuda_graphs", "backend"}
_MOST_NAMED = 5
# What is kept of an answer's figures.
_FIGURES = (
    "method",
    "hosts",
    "num_input_tokens",
    "num_video_tokens",
    "ttft_ms",
    "total_ms",
    "reused",
)
_FIGURES += ("reduction", "attention_density")
Keep = Callable[[dict], None]
Request = Callable[[Sample, str, argparse.Namespace, Engine], Mapping[str, Any]]


@dataclass(frozen=True)
class Benchmark:
    """Definition of a benchmark: source of its questions, prompts, and scoring of answers.

    Attributes:
        name: its name, in the results.
        description: what it is, in its first line.
        read: returns its samples, by its options (options.toml); raises ValueError if a file is
            wrong.
        needs: the one of these options that must be given.
        template: the prompt of a question with options; see :func:`.samples.fill`.
        parse: the benchmark's own rule of which option an answer names.
        request: returns a sample's prompt and files as arguments of :meth:`apbv.Engine.generate`,
            from the sample, the template, the options and the engine.
        guess: see :func:`.answers.judged`.
        overall: the benchmark's own figure of a score, where that is not the share of all right
            answers.
    """

    name: str
    description: str
    read: Callable[[argparse.Namespace], list[Sample]]
    needs: str = "questions"
    template: str = LETTERED
    parse: Parse = choose_option
    request: Request = lambda sample, template, options, engine: request_of(
        sample, fill(template, sample)
    )
    guess: Callable[[Sample], int] | None = None
    overall: Callable[[Score], float | None] = lambda score: None

    def parse_arguments(self, arguments: list[str] | None = None) -> argparse.Namespace:
        """Read and check the options, which ends the process where one is wrong."""
        parser = OptionParser(description=self.description.splitlines()[0])
        add_options(parser, self.name)
        add_prefill_options(parser)
        add_draft_options(parser)
        add_host_options(parser)
        parser.set_defaults(temperature=0.0, top_p=1.0)
        options = parser.parse_args(arguments)
        if options.table is None:
            for name in ("model", self.needs):
                if getattr(options, name) is None:
                    parser.error(f"--{name} is required")
            if (options.hosts or 1) > 1 and (options.draft_host or options.tensor_parallel > 1):
                parser.error(
                    "--draft-host and --tensor-parallel need real hosts: start them with torchrun"
                )
        check(parser, options)
        return options

    def main(self, arguments: list[str] | None = None) -> int:
        """Run the benchmark on this host, and return the exit status."""
        options = self.parse_arguments(arguments)
        if options.table is not None:
            return run_on_hosts(lambda _: self.show(runs_of(read_records(options.table))))
        return run_on_hosts(
            lambda hosts: self.run(options, hosts),
            options.timeout,
            options.tensor_parallel,
            options.device,
        )

    def show(self, runs: Sequence[Run]) -> None:
        """Print runs' scores."""
        if not runs:
            raise ValueError("the files hold no results")
        print(markdown(runs, self.overall), flush=True)

    def run(self, options: argparse.Namespace, hosts: HostGroup) -> None:
        """Ask what has not been answered yet, and show the score; collective.

        Raises:
            ValueError: a file is wrong or missing, settings do not go together, or questions
                failed.
            HostError: another host failed.
        """
        prepare_process(options, hosts)
        with hosts.local_stage("reading the questions"):
            samples = self._samples(options)
            settings = self._settings(options, samples, hosts)
            number, of = options.shard or (1, 1)
            part = [sample for group in by_files(samples)[number - 1 :: of] for sample in group]
            path = options.json or Path(
                "results", f"{self.name}{f'-{number}-of-{of}' if of > 1 else ''}.jsonl"
            )
            run = self._known(path, settings, part) if hosts.is_leader else Run(settings)
        known = {*hosts.gather_json(list(run.records))[0]}
        todo = [sample for sample in part if sample.key not in known]

        def keep(record: dict) -> None:
            (run.records[record["key"]],) = records.keep(
                [{"benchmark": self.name, "settings": settings, **record}], path
            )

        if todo:
            self._ask(options, hosts, todo, len(part) - len(todo), keep)
        failed = []
        with hosts.local_stage("writing the score"):
            if hosts.is_leader:
                self.show([run])
                failed = [record for record in run.records.values() if "error" in record]
        if count := hosts.broadcast_ints([len(failed)], 1)[0]:
            first = f"; the first: {failed[0]['key']}: {failed[0]['error']}" if failed else ""
            raise ValueError(
                f"{count} of {len(part)} questions failed; the same command tries them again{first}"
            )

    def _samples(self, options: argparse.Namespace) -> list[Sample]:
        samples = self.read(options)[: options.limit]
        if not samples:
            raise ValueError("there are no questions to ask")
        (key, number), *_ = Counter(sample.key for sample in samples).most_common(1)
        if number > 1:
            raise ValueError(f"{number} questions are called {key!r}")
        files = dict.fromkeys(path for sample in samples for path in sample.files)
        missing = [] if options.allow_missing else [path for path in files if not path.is_file()]
        if missing:
            named = ", ".join(map(str, missing[:_MOST_NAMED])) + (
                ", …" if len(missing) > _MOST_NAMED else ""
            )
            raise ValueError(
                f"{len(missing)} files are missing: {named}; --allow-missing asks the other "
                "questions"
            )
        return samples

    def _settings(
        self, options: argparse.Namespace, samples: Sequence[Sample], hosts: HostGroup
    ) -> dict[str, Any]:
        """Return all on which answers depend, without what was not given."""
        parser = argparse.ArgumentParser(add_help=False)
        add_prefill_options(parser)
        add_draft_options(parser)
        engine = vars(parser.parse_args([])).keys() - _WITHOUT_EFFECT
        given = {name: getattr(options, name) for name in sorted({*engine, "max_new_tokens"})}
        return {
            "model": options.model,
            "questions": digest_of(samples),
            **{name: value for name, value in given.items() if value is not None},
            "template": options.template or self.template,
            "parse": options.parse,
            "reuse": options.reuse,
            "hosts": options.hosts or hosts.size,
            "simulated": (options.hosts or hosts.size) != hosts.size,
        }

    def _known(self, path: Path, settings: Mapping[str, Any], part: Sequence[Sample]) -> Run:
        """Return the answers of a file that count: they are about files as large as those that are
        there now.

        Raises:
            ValueError: the file holds something else.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        found = records.read_known(path)
        if any(record.get("benchmark") != self.name for record in found):
            raise ValueError(f"{path} holds other records; take another file")
        (run,) = runs_of([r for r in found if r["settings"] == settings]) or [Run(settings)]
        sizes = {sample.key: file_sizes(sample) for sample in part}
        answered = {
            key: record
            for key, record in run.records.items()
            if record["file_sizes"] == sizes.get(key)
        }
        answered = {key: record for key, record in answered.items() if "error" not in record}
        sys.stderr.write(f"results: {path}, with {len(answered)} answers so far\n")
        return Run(settings, answered)

    def _ask(
        self,
        options: argparse.Namespace,
        hosts: HostGroup,
        todo: list[Sample],
        num_done: int,
        keep: Keep,
    ) -> None:
        """Load the engine, on simulated hosts one for each, and answer."""
        reuse = None if options.reuse == "off" else ReuseConfig(mode=options.reuse)
        engine = load_engine(options, hosts, reuse)

        def simulated(host: HostGroup, model: PreTrainedModel) -> None:
            config, draft = (
                engine.prefill_config,
                engine.draft_model and share_weights(engine.draft_model),
            )
            captioner = load_function(options.captioner) if options.captioner else None
            drafting = (engine.speculative_config, draft, captioner)
            decode = DecodeConfig(cuda_graphs=options.cuda_graphs)
            own = Engine(
                model, engine.processor, host, config, engine.name, *drafting, reuse, decode
            )
            self._answer(own, host, todo, options, bar, keep)

        total = num_done + len(todo)
        with tqdm(
            total=total, initial=num_done, unit="question", disable=not hosts.is_leader or None
        ) as bar:
            if options.hosts in (None, hosts.size):
                self._answer(engine, hosts, todo, options, bar, keep)
            else:
                run_on(options.hosts, hosts, engine.model, simulated)

    def _answer(
        self,
        engine: Engine,
        hosts: HostGroup,
        samples: Sequence[Sample],
        options: argparse.Namespace,
        bar: tqdm,
        keep: Keep,
    ) -> None:
        """Answer samples, and keep a record of each on the leader as soon as it is there;
        collective.

        A question that fails leaves a record with its error, and the next one follows.

        Args:
            hosts: all hosts, a draft host included.

        Raises:
            HostError: the hosts can no longer work together.
        """
        template = options.template or self.template
        parse = None
        if "{options}" in template:
            parse = self.parse if options.parse == "own" else choose_option
        asked: list[Sample] = []

        def add(sample: Sample, answer: GenerateResult | Exception) -> None:
            record = {
                "key": sample.key,
                "unit": sample.unit or sample.key,
                "unit_size": sample.unit_size,
                "groups": dict(sample.groups),
                "is_choice": bool(sample.options),
                "expected": sample.expected,
                "file_sizes": file_sizes(sample),
            }
            if isinstance(answer, Exception):
                if hosts.is_broken or engine.hosts.is_broken:
                    raise answer
                record["error"] = str(answer)
            else:
                record |= judged(sample, answer.text, parse, self.guess) | {
                    "figures": figures_of(answer)
                }
            if hosts.is_leader:
                bar.update()
                keep(record)

        def questions() -> Iterator[Mapping[str, Any]]:
            for sample in samples:
                try:
                    with hosts.local_stage("reading the question"):
                        own = template if sample.options or options.template else OPEN
                        request = self.request(sample, own, options, engine)
                except (ValueError, HostError) as error:
                    add(sample, error)
                    continue
                asked.append(sample)
                yield {**request, "num_frames": options.frames, "fps": options.fps}

        sampling = options.max_new_tokens and SamplingParams(max_new_tokens=options.max_new_tokens)
        for number, answer in engine.generate_all(
            questions(), sampling=sampling, max_together=options.together
        ):
            add(asked[number], answer)


def figures_of(answer: GenerateResult) -> dict:
    """Return the recorded metrics of an answer."""
    found = {name: answer.stats[name] for name in _FIGURES if answer.stats.get(name) is not None}
    found["num_tokens"] = len(answer.token_ids)
    if answer.stats.get("speculation"):
        found["tokens_per_target_forward"] = answer.stats["speculation"].get(
            "tokens_per_target_forward"
        )
    return found
