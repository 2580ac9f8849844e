"""The command line of the benchmarks that ask a user's own questions."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apbv import Engine, HostGroup, ReuseConfig
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

from ..arguments import COUNT
from .answers import choose_option
from .prompting import LETTERED, OPEN, fill, request_of, require_template, shows_options
from .results import ResultsFile, Run, digest_of, read_runs
from .running import Asking, answer_all, units_of
from .samples import Parse, Sample, file_sizes, in_order_of_files, missing_files, require_distinct, shard
from .samples import digest_of as digest_of_samples
from .scoring import Score, markdown, score, summary
from support.simulated import share_weights, simulate

# Options of an engine on which no answer depends.
_WITHOUT_EFFECT = {"threads", "video_chunk_mib", "video_backend", "save_kept", "cuda_graphs", "backend"}
_MOST_NAMED = 5


@dataclass(frozen=True)
class Benchmark:
    """Says where its questions come from, how they are asked, and how answers are scored.

    Attributes:
        name: its name, in the results.
        description: one line for ``--help``.
        add_options: adds options of its own, by which :attr:`read` finds the files.
        read: returns its samples; raises ValueError where a file is wrong.
        template: the prompt of a question with options; see :func:`evaluation.prompting.fill`.
        parse: the benchmark's own rule of which option an answer names.
        max_new_tokens: the default; None: the model's.
        request: returns a sample's prompt and files as arguments of :meth:`apbv.Engine.generate`, from the sample,
            the template, the options and the engine.
        guess: see :class:`evaluation.running.Asking`.
        overall: the benchmark's own figure of a score, where that is not the share of all right answers.
    """

    name: str
    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    read: Callable[[argparse.Namespace], list[Sample]]
    template: str = LETTERED
    parse: Parse = choose_option
    max_new_tokens: int | None = None
    request: Callable[[Sample, str, argparse.Namespace, Engine], Mapping[str, Any]] = (
        lambda sample, template, options, engine: request_of(sample, fill(template, sample))
    )
    guess: Callable[[Sample], int] | None = None
    overall: Callable[[Score], float | None] = lambda score: None

    def parse_arguments(self, arguments: list[str] | None = None) -> argparse.Namespace:
        """Read and check the options, which ends the process where one is wrong."""
        parser = OptionParser(description=self.description)
        parser.add_argument("--model", help='"demo", a directory, or a hub id')
        self.add_options(parser)
        parser.add_argument("--template", type=_template, help="the prompt, with {question} and {options} in it")
        rule = "any usual form" if self.parse is choose_option else "the benchmark's official rule"
        parser.add_argument(
            "--parse",
            choices=("own", "any"),
            default="own",
            help=f"how a letter is found in an answer: own, {rule} (default); any, every usual form",
        )
        parser.add_argument(
            "--max-new-tokens", type=int, default=self.max_new_tokens, help="of an answer, at most"
        )
        parser.add_argument(
            "--reuse",
            choices=("off", *REUSE_MODES),
            default="exact",
            help="what further questions about the same video reuse (default %(default)s, the embeddings)",
        )
        parser.add_argument("--hosts", type=COUNT, help="simulate so many hosts; not under torchrun")
        run = parser.add_argument_group("the run")
        run.add_argument("--limit", type=COUNT, help="ask only so many of the questions, the first")
        run.add_argument("--shard", type=_shard, metavar="I/N", help="ask the I-th of N parts of the questions")
        run.add_argument(
            "--results",
            type=Path,
            metavar="FILE",
            help="keep the answers here (default: in results/, by settings)",
        )
        run.add_argument(
            "--allow-missing", action="store_true", help="questions whose files are missing just fail"
        )
        run.add_argument("--json", type=Path, metavar="FILE", help="append the score as one JSON line")
        run.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="only score files of results")
        add_prefill_options(parser)
        add_draft_options(parser)
        add_host_options(parser)
        parser.set_defaults(temperature=0.0, top_p=1.0)
        options = parser.parse_args(arguments)
        if options.table is None:
            if options.model is None:
                parser.error("--model is required")
            if (options.hosts or 1) > 1 and (options.draft_host or options.tensor_parallel > 1):
                parser.error("--draft-host and --tensor-parallel need real hosts: start them with torchrun")
        check(parser, options)
        return options

    def main(self, arguments: list[str] | None = None) -> int:
        """Run the benchmark on this host, and return the exit status."""
        options = self.parse_arguments(arguments)
        if options.table is None:
            return run_on_hosts(
                lambda hosts: self.run(options, hosts), options.timeout, options.tensor_parallel, options.device
            )
        try:
            runs = read_runs(options.table)
            if not runs:
                raise ValueError("the files hold no results")
            self.report(runs, options)
        except ValueError as error:
            sys.stderr.write(f"error: {error}\n")
            return 1
        return 0

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
        file = None
        try:
            with hosts.local_stage("opening the results"):
                if hosts.is_leader:
                    file = ResultsFile(options.results or _default_file(self.name, settings, options), settings)
                    sys.stderr.write(f"results: {file.path}, with {len(file.answered)} answers so far\n")
            known = None if file is None else json.dumps(_known(part, file.answered)).encode()
            known = set(json.loads(hosts.broadcast_bytes(known)))
            todo = [sample for sample in part if sample.key not in known]
            run = Run(
                settings, {} if file is None else {s.key: file.answered[s.key] for s in part if s.key in known}
            )

            def keep(record: dict) -> None:
                run.records[record["key"]] = record
                file.add(record)

            if todo:
                self._ask(options, hosts, num_hosts, todo, keep, units_of(samples), len(part) - len(todo))
        finally:
            if file is not None:
                file.close()
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
        self,
        options: argparse.Namespace,
        hosts: HostGroup,
        num_hosts: int,
        todo: Sequence[Sample],
        keep: Callable[[dict], None],
        units: Mapping[str, int],
        num_done: int,
    ) -> None:
        """Load the engine, on simulated hosts one for each, and answer."""
        reuse = None if options.reuse == "off" else ReuseConfig(mode=options.reuse)
        engine = load_engine(options, hosts, reuse)
        template = options.template or self.template
        limits = {"max_new_tokens": options.max_new_tokens, "num_frames": options.frames, "fps": options.fps}

        def request(sample: Sample, engine: Engine) -> Mapping[str, Any]:
            own = template if sample.options or options.template else OPEN
            return self.request(sample, own, options, engine)

        parse = self.parse if options.parse == "own" else choose_option
        asking = Asking(request, parse if shows_options(template) else None, limits, self.guess)

        def job(engine: Engine, hosts: HostGroup) -> None:
            answer_all(engine, hosts, asking, todo, keep, units, num_done)

        if num_hosts == hosts.size:
            job(engine, hosts)
            return
        # Copied before the threads start, so that each of them works on its own models.
        drafts = [engine.draft_model and share_weights(engine.draft_model) for _ in range(num_hosts)]
        models = [share_weights(engine.model) for _ in range(num_hosts)]

        def on_host(host: HostGroup) -> None:
            own = Engine(
                models[host.rank],
                engine.processor,
                host,
                engine.prefill_config,
                engine.name,
                engine.speculative_config,
                drafts[host.rank],
                load_function(options.captioner) if options.captioner else None,
                reuse,
                DecodeConfig(cuda_graphs=options.cuda_graphs),
            )
            job(own, host)

        simulate(num_hosts, on_host, device=hosts.device)


def _known(samples: Sequence[Sample], answered: Mapping[str, dict]) -> list[str]:
    """Return the keys of samples that are answered, about files as large as those that are there now."""
    return [
        sample.key
        for sample in samples
        if sample.key in answered and answered[sample.key].get("file_sizes") == file_sizes(sample)
    ]


def _default_file(name: str, settings: Mapping[str, Any], options: argparse.Namespace) -> Path:
    """Return where answers with these settings are kept, of every shard by itself."""
    number = "" if options.shard is None else "-{}-of-{}".format(*options.shard)
    return Path("results") / f"{name}-{digest_of(settings)}{number}.jsonl"


def _template(text: str) -> str:
    try:
        return require_template(text.replace("\\n", "\n"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--template ")) from None


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"expected I/N with 1 ≤ I ≤ N, such as 1/4, not {text!r}")
    return int(found[1]), int(found[2])
