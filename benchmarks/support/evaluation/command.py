"""The command line of the benchmarks that ask a user's own questions."""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from transformers import PreTrainedModel

from apbv import Engine, GenerateResult, HostGroup, ReuseConfig, SamplingParams
from apbv.config import REUSE_MODES, DecodeConfig
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
from apbv.stats import append_json_lines, provenance

from ..arguments import COUNT, add_shared
from ..exams import run_on
from .answers import choose_option
from .prompting import LETTERED, OPEN, fill, request_of
from .results import ResultsFile, Run, digest_of, read_runs
from .running import Keep, answer_all, figures_of, judged
from .samples import Parse, Sample, file_sizes, in_order_of_files, missing_files, require_distinct, shard
from .samples import digest_of as digest_of_samples
from .scoring import Score, markdown, score, summary
from support.simulated import share_weights

# Options of an engine on which no answer depends.
_WITHOUT_EFFECT = {"threads", "video_chunk_mib", "cuda_graphs", "backend"}
_MOST_NAMED = 5
Request = Callable[[Sample, str, argparse.Namespace, Engine], Mapping[str, Any]]


@dataclass(frozen=True)
class Benchmark:
    """Definition of a benchmark: source of its questions, prompts, and scoring of answers.

    Attributes:
        name: its name, in the results.
        description: one line for ``--help``.
        files: what the options of its own name, by which :attr:`read` finds the files; of those in ``needs`` each
            must be given.
        read: returns its samples; raises ValueError if a file is wrong.
        template: the prompt of a question with options; see :func:`evaluation.prompting.fill`.
        parse: the benchmark's own rule of which option an answer names.
        max_new_tokens: the default; None: the model's.
        request: returns a sample's prompt and files as arguments of :meth:`apbv.Engine.generate`, from the sample,
            the template, the options and the engine.
        guess: see :class:`evaluation.running.Asking`.
        overall: the benchmark's own figure of a score, where that is not the share of all right answers.
        subtitles: the choices of ``--subtitles``, the first being the default, if it is not a path.
    """

    name: str
    description: str
    files: Mapping[str, str]
    needs: str
    read: Callable[[argparse.Namespace], list[Sample]]
    template: str = LETTERED
    parse: Parse = choose_option
    max_new_tokens: int | None = None
    request: Request = lambda sample, template, options, engine: request_of(sample, fill(template, sample))
    guess: Callable[[Sample], int] | None = None
    overall: Callable[[Score], float | None] = lambda score: None
    subtitles: tuple[str, ...] = ()

    def parse_arguments(self, arguments: list[str] | None = None) -> argparse.Namespace:
        """Read and check the options, which ends the process where one is wrong."""
        parser = OptionParser(description=self.description)
        parser.add_argument("--model", help='"demo", a directory, or a hub id')
        for name, told in self.files.items():
            parser.add_argument(f"--{name}", type=Path, metavar="PATH", help=told)
        if self.subtitles:
            told = "subtitle placement (default: interleaved with frames, as images)"
            parser.add_argument("--subtitles", choices=self.subtitles, default=self.subtitles[0], help=told)
        parser.add_argument("--template", type=_template, help="prompt template with {question} and {options}")
        rule = "any usual form" if self.parse is choose_option else "the benchmark's official rule"
        found = f"how to parse the answer's letter: own, {rule} (default); any, every usual form"
        parser.add_argument("--parse", choices=("own", "any"), default="own", help=found)
        parser.add_argument("--max-new-tokens", type=COUNT, default=self.max_new_tokens, help="per answer")
        reused = "cache for further questions about a video (default exact: embeddings)"
        parser.add_argument("--reuse", choices=("off", *REUSE_MODES), default="exact", help=reused)
        parser.add_argument("--hosts", type=COUNT, help="number of simulated hosts; not under torchrun")
        run = parser.add_argument_group("the run")
        run.add_argument("--limit", type=COUNT, help="ask only the first N questions")
        run.add_argument(
            "--together", type=COUNT, default=8, help="answers that a host decodes at a time (default 8)"
        )
        run.add_argument("--shard", type=_shard, metavar="I/N", help="ask part I of N of the questions")
        kept = "file for the answers (default: in results/, by settings)"
        run.add_argument("--results", type=Path, metavar="FILE", help=kept)
        run.add_argument("--allow-missing", action="store_true", help="count questions without files as failed")
        add_shared(run, "json", "table")
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
                parser.error("--draft-host and --tensor-parallel need real hosts: start them with torchrun")
        check(parser, options)
        return options

    def main(self, arguments: list[str] | None = None) -> int:
        """Run the benchmark on this host, and return the exit status."""
        options = self.parse_arguments(arguments)
        if options.table is not None:
            return run_on_hosts(lambda _: self.report(read_runs(options.table), options))
        return run_on_hosts(
            lambda hosts: self.run(options, hosts), options.timeout, options.tensor_parallel, options.device
        )

    def run(self, options: argparse.Namespace, hosts: HostGroup) -> None:
        """Ask what has not been answered yet, and show the score; collective.

        Raises:
            ValueError: a file is wrong or missing, settings do not go together, or questions failed.
            HostError: another host failed.
        """
        prepare_process(options, hosts)
        with hosts.local_stage("reading the questions"):
            num_hosts = options.hosts or hosts.size
            if num_hosts != hosts.size and hosts.size > 1:
                raise ValueError(f"{num_hosts} hosts were asked for, but {hosts.size} were started")
            samples = self._samples(options)
        settings = self._settings(options, samples, num_hosts, simulated=num_hosts != hosts.size)
        part = samples if options.shard is None else shard(samples, *options.shard)
        answered = {}
        with ExitStack() as stack:
            with hosts.local_stage("opening the results"):
                if hosts.is_leader:
                    number = "" if options.shard is None else "-{}-of-{}".format(*options.shard)
                    name = Path("results") / f"{self.name}-{digest_of(settings)}{number}.jsonl"
                    file = stack.enter_context(closing(ResultsFile(options.results or name, settings)))
                    answered = file.answered
                    sys.stderr.write(f"results: {file.path}, with {len(answered)} answers so far\n")
            # Answers count that are about files as large as those that are there now.
            sizes = {key: record.get("file_sizes") for key, record in answered.items()}
            known = [sample.key for sample in part if sizes.get(sample.key, ()) == file_sizes(sample)]
            known = set(hosts.gather_json(known)[0])
            todo = [sample for sample in part if sample.key not in known]
            run = Run(settings, {key: record for key, record in answered.items() if key in known})

            def keep(record: dict) -> None:
                run.records[record["key"]] = record
                file.add(record)

            if todo:
                self._ask(options, hosts, todo, len(part) - len(todo), keep)
        failed = []
        with hosts.local_stage("writing the score"):
            if hosts.is_leader:
                self.report([run], options)
                failed = [record for record in run.records.values() if "error" in record]
        if count := hosts.broadcast_ints([len(failed)], 1)[0]:
            first = f"; the first: {failed[0]['key']}: {failed[0]['error']}" if failed else ""
            raise ValueError(f"{count} of {len(part)} questions failed; the same command tries them again{first}")

    def report(self, runs: Sequence[Run], options: argparse.Namespace) -> None:
        """Print runs' scores, and write them where the options say."""
        if not runs:
            raise ValueError("the files hold no results")
        scores = [score(run, self.overall) for run in runs]
        print(markdown(runs, scores), flush=True)
        if options.json:
            stamp = {"benchmark": self.name}
            lines = [{**stamp, **summary(*each), **provenance()} for each in zip(runs, scores, strict=True)]
            append_json_lines(options.json, lines)

    def _samples(self, options: argparse.Namespace) -> list[Sample]:
        samples = self.read(options)[: options.limit]
        require_distinct(samples)
        missing = [] if options.allow_missing else missing_files(samples)
        if missing:
            named = ", ".join(map(str, missing[:_MOST_NAMED])) + (", …" if len(missing) > _MOST_NAMED else "")
            raise ValueError(
                f"{len(missing)} files are missing: {named}; --allow-missing asks the other questions"
            )
        return in_order_of_files(samples)

    def _settings(
        self, options: argparse.Namespace, samples: Sequence[Sample], num_hosts: int, simulated: bool
    ) -> dict[str, Any]:
        """Return all on which answers depend, without what was not given."""
        parser = argparse.ArgumentParser(add_help=False)
        add_prefill_options(parser)
        add_draft_options(parser)
        engine = vars(parser.parse_args([])).keys() - _WITHOUT_EFFECT
        given = {name: getattr(options, name) for name in sorted({*engine, "max_new_tokens"})}
        return {
            "benchmark": self.name,
            "model": options.model,
            "questions": digest_of_samples(samples),
            **{name: value for name, value in given.items() if value is not None},
            "template": options.template or self.template,
            "parse": options.parse,
            "reuse": options.reuse,
            "hosts": num_hosts,
            "simulated": simulated,
        }

    def _ask(
        self, options: argparse.Namespace, hosts: HostGroup, todo: list[Sample], num_done: int, keep: Keep
    ) -> None:
        """Load the engine, on simulated hosts one for each, and answer."""
        reuse = None if options.reuse == "off" else ReuseConfig(mode=options.reuse)
        engine = load_engine(options, hosts, reuse)
        template = options.template or self.template
        parse = self.parse if options.parse == "own" else choose_option
        sampling = options.max_new_tokens and SamplingParams(max_new_tokens=options.max_new_tokens)

        def job(engine: Engine, hosts: HostGroup) -> None:
            def ask(sample: Sample) -> Mapping[str, Any]:
                with hosts.local_stage("reading the question"):
                    own = template if sample.options or options.template else OPEN
                    request = self.request(sample, own, options, engine)
                return {**request, "num_frames": options.frames, "fps": options.fps}

            def read(sample: Sample, answer: GenerateResult) -> dict:
                said = judged(sample, answer.text, parse if "{options}" in template else None, self.guess)
                return said | {"figures": figures_of(answer)}

            together = {"sampling": sampling, "max_together": options.together}
            answer_all(engine, hosts, todo, ask, read, keep, num_done, **together)

        def simulated(host: HostGroup, model: PreTrainedModel) -> None:
            config, draft = engine.prefill_config, engine.draft_model and share_weights(engine.draft_model)
            captioner = load_function(options.captioner) if options.captioner else None
            drafting = (engine.speculative_config, draft, captioner)
            decode = DecodeConfig(cuda_graphs=options.cuda_graphs)
            job(Engine(model, engine.processor, host, config, engine.name, *drafting, reuse, decode), host)

        if options.hosts in (None, hosts.size):
            job(engine, hosts)
        else:
            run_on(options.hosts, hosts, engine.model, simulated)


def _template(text: str) -> str:
    if "{question}" not in text:
        raise argparse.ArgumentTypeError("must contain {question}, and may contain {options}")
    return text.replace("\\n", "\n")


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"expected I/N with 1 ≤ I ≤ N, such as 1/4, not {text!r}")
    return int(found[1]), int(found[2])
