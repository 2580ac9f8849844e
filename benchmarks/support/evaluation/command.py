"""The command line of the benchmarks that ask a user's own questions."""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)
from apbv.errors import ApbvError, InvalidRequestError

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
from apbv.testing.simulated import share_weights

from .. import records
from ..arguments import add_options
from ..exams import run_on
from ..records import read_records
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
from .scoring import Run, Score, markdown, no_rule, runs_of

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
    "reduction",
    "attention_density",
)
# Keeps a record.
Keep = Callable[[dict], None]
Request = Callable[[Sample, str, argparse.Namespace, Engine], Mapping[str, Any]]


def _request_of_template(
    sample: Sample, template: str, options: argparse.Namespace, engine: Engine
) -> Mapping[str, Any]:
    return request_of(sample, fill(template, sample))


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
    request: Request = _request_of_template
    guess: Callable[[Sample], int] | None = None
    overall: Callable[[Score], float | None] = no_rule

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

        def show_files(hosts: HostGroup) -> None:
            self.show(runs_of(read_records(options.table)))

        def run(hosts: HostGroup) -> None:
            self.run(options, hosts)

        if options.table is not None:
            return run_on_hosts(show_files)
        return run_on_hosts(run, options.timeout, options.tensor_parallel, options.device)

    def show(self, runs: Sequence[Run]) -> None:
        """Print runs' scores."""
        if not runs:
            raise InvalidRequestError("the files hold no results")
        print(markdown(runs, self.overall), flush=True)

    def run(self, options: argparse.Namespace, hosts: HostGroup) -> None:
        """Ask what has not been answered yet, and show the score; collective.

        Raises:
            InvalidRequestError: a file is wrong or missing, settings do not go together, or
                questions failed.
            HostError: another host failed.
        """
        prepare_process(options, hosts)

        # Read the questions, of which those about the same files stay together, and known answers.
        with hosts.local_stage("reading the questions"):
            samples = self._samples(options)
            settings = self._settings(options, samples, hosts)
            shard, num_shards = options.shard or (1, 1)
            part = []
            for samples_of_files in by_files(samples)[shard - 1 :: num_shards]:
                part += samples_of_files
            path = options.json
            if path is None:
                suffix = f"-{shard}-of-{num_shards}" if num_shards > 1 else ""
                path = Path("results", f"{self.name}{suffix}.jsonl")
            run = self._known(path, settings, part) if hosts.is_leader else Run(settings)
        known_keys = set(hosts.gather_json(list(run.records))[0])
        todo = [sample for sample in part if sample.key not in known_keys]

        # Ask the others.
        def keep(record: dict) -> None:
            record = {"benchmark": self.name, "settings": settings, **record}
            (complete,) = records.keep([record], path)
            run.records[record["key"]] = complete

        if todo:
            self._ask(options, hosts, todo, len(part) - len(todo), keep)

        # Show the score.
        failed = []
        with hosts.local_stage("writing the score"):
            if hosts.is_leader:
                self.show([run])
                failed = [record for record in run.records.values() if "error" in record]
        (num_failed,) = hosts.broadcast_ints([len(failed)], 1)
        if num_failed:
            message = (
                f"{num_failed} of {len(part)} questions failed; the same command tries them again"
            )
            if failed:
                message += f"; the first: {failed[0]['key']}: {failed[0]['error']}"
            raise InvalidRequestError(message)

    def _samples(self, options: argparse.Namespace) -> list[Sample]:
        """Read the samples, and check their names and files.

        Raises:
            InvalidRequestError: there are none, two have the same name, or files are missing.
        """
        samples = self.read(options)[: options.limit]
        if not samples:
            raise InvalidRequestError("there are no questions to ask")
        num_of_key = Counter(sample.key for sample in samples)
        key, number = num_of_key.most_common(1)[0]
        if number > 1:
            raise InvalidRequestError(f"{number} questions are called {key!r}")
        if options.allow_missing:
            return samples
        # By path, because questions share files.
        missing: dict[Path, None] = {}
        for sample in samples:
            for path in sample.files:
                if path not in missing and not path.is_file():
                    missing[path] = None
        if missing:
            named = ", ".join(str(path) for path in list(missing)[:_MOST_NAMED])
            if len(missing) > _MOST_NAMED:
                named += ", …"
            raise InvalidRequestError(
                f"{len(missing)} files are missing: {named}; --allow-missing asks the other "
                "questions"
            )
        return samples

    def _settings(
        self, options: argparse.Namespace, samples: Sequence[Sample], hosts: HostGroup
    ) -> dict[str, Any]:
        """Return all on which answers depend, without options that were not given."""
        # The names of an engine's options.
        parser = argparse.ArgumentParser(add_help=False)
        add_prefill_options(parser)
        add_draft_options(parser)
        names = set(vars(parser.parse_args([]))) - _WITHOUT_EFFECT
        names.add("max_new_tokens")

        num_hosts = options.hosts or hosts.size
        settings = {"model": options.model, "questions": digest_of(samples)}
        for name in sorted(names):
            value = getattr(options, name)
            if value is not None:
                settings[name] = value
        settings["template"] = options.template or self.template
        settings["parse"] = options.parse
        settings["reuse"] = options.reuse
        settings["hosts"] = num_hosts
        settings["simulated"] = num_hosts != hosts.size
        return settings

    def _known(self, path: Path, settings: Mapping[str, Any], part: Sequence[Sample]) -> Run:
        """Return the answers of a file that count.

        They have equal settings, and are about files that are still of the same size.

        Raises:
            InvalidRequestError: the file holds something else.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        known = records.read_known(path)
        if any(record.get("benchmark") != self.name for record in known):
            raise InvalidRequestError(f"{path} holds other records; take another file")
        of_settings = [record for record in known if record["settings"] == settings]
        sizes = {sample.key: file_sizes(sample) for sample in part}
        answered = {}
        for run in runs_of(of_settings):
            for key, record in run.records.items():
                if "error" not in record and record["file_sizes"] == sizes.get(key):
                    answered[key] = record
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
        """Load the engine, on simulated hosts one for each, and answer.

        Args:
            todo: the samples to answer.
            num_done: how many others are answered already.
        """
        reuse = None if options.reuse == "off" else ReuseConfig(mode=options.reuse)
        engine = load_engine(options, hosts, reuse)

        def answer_on_simulated(host: HostGroup, model: PreTrainedModel) -> None:
            draft = None
            if engine.draft_model is not None:
                draft = share_weights(engine.draft_model)
            captioner = load_function(options.captioner) if options.captioner else None
            engine_of_host = Engine(
                model,
                engine.processor,
                host,
                engine.prefill_config,
                engine.name,
                engine.speculative_config,
                draft,
                captioner,
                reuse,
                DecodeConfig(cuda_graphs=options.cuda_graphs),
            )
            self._answer(engine_of_host, host, todo, options, bar, keep)

        total = num_done + len(todo)
        # None: shown only in a terminal.
        hides_progress = None if hosts.is_leader else True
        with tqdm(total=total, initial=num_done, unit="question", disable=hides_progress) as bar:
            if options.hosts in (None, hosts.size):
                self._answer(engine, hosts, todo, options, bar, keep)
            else:
                run_on(options.hosts, hosts, engine.model, answer_on_simulated)

    def _answer(
        self,
        engine: Engine,
        hosts: HostGroup,
        samples: Sequence[Sample],
        options: argparse.Namespace,
        bar: tqdm,
        keep: Keep,
    ) -> None:
        """Answer samples, and keep a record of each on the leader; collective.

        A record is kept as soon as its answer is there. A question that fails leaves a record with
        its error, and the next one follows.

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
                record.update(judged(sample, answer.text, parse, self.guess))
                record["figures"] = figures_of(answer)
            if hosts.is_leader:
                bar.update()
                keep(record)

        def questions() -> Iterator[Mapping[str, Any]]:
            for sample in samples:
                # A question without options needs no word about them, unless the user says so.
                is_open = not sample.options and not options.template
                try:
                    with hosts.local_stage("reading the question"):
                        template_of_sample = OPEN if is_open else template
                        request = self.request(sample, template_of_sample, options, engine)
                except ApbvError as error:
                    add(sample, error)
                    continue
                asked.append(sample)
                yield {**request, "num_frames": options.frames, "fps": options.fps}

        sampling = None
        if options.max_new_tokens is not None:
            sampling = SamplingParams(max_new_tokens=options.max_new_tokens)
        answers = engine.generate_all(questions(), sampling=sampling, max_together=options.together)
        for number, answer in answers:
            add(asked[number], answer)


def figures_of(answer: GenerateResult) -> dict:
    """Return the recorded metrics of an answer."""
    figures = {}
    for name in _FIGURES:
        if answer.stats.get(name) is not None:
            figures[name] = answer.stats[name]
    figures["num_tokens"] = len(answer.token_ids)
    speculation = answer.stats.get("speculation")
    if speculation:
        figures["tokens_per_target_forward"] = speculation.get("tokens_per_target_forward")
    return figures
