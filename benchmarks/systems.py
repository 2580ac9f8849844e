"""Compare every way to read a long video: right answers against visual tokens kept and time to first token.

    python benchmarks/systems.py --clips 20 --json systems.jsonl --plot systems.png
    python benchmarks/systems.py --clips 150 --json systems.jsonl  # goes on where the file ends
    python benchmarks/systems.py --table systems.jsonl --plot systems.png

The ways are full attention, sparse attention, reductions of the visual tokens at two ratios, Star Attention, APB
and APB-V with the papers' lengths, and speculative decoding, which loses nothing. The demo model is asked about
the same held-out clips in all of them, in turn for every question, so that a drift of the machine's speed affects
all alike. What one host computes runs on one; the rest on --hosts simulated ones (support.simulated). Times are
the slowest host's, on its own clock. They include reading its share of the frames and encoding it, which is done
once for all questions about a clip. With --json every clip is written as soon as it is done, and what the file has
already is not measured again.
"""

import argparse
import json
import sys
from collections.abc import Iterator

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from tqdm import tqdm
from transformers import PreTrainedModel

from apbv import HostGroup
from apbv.demo import draft_path

from support.arguments import add_exam_options, add_json_option, add_plot_option, add_table_option
from support.exams.candidate import Candidate, load_demo
from support.exams.exam import EXACT_TASKS, Exam, clips_folder
from support.on_hosts import run_on
from support.records import keep_records, read_records, show
from support.simulated import share_weights
from support.systems.examinee import Examinee
from support.systems.report import plot, table
from support.systems.ways import systems


def measure(options: argparse.Namespace, known: list[dict]) -> Iterator[dict]:
    """Yield a record for every clip and way that is not known yet."""
    engine, draft = load_demo(), load_demo(draft_path()).model
    exam = Exam(options.grid, options.shots, options.clips, EXACT_TASKS, options.split)
    folder = clips_folder(options.folder)
    asked = [
        s
        for s in systems(options.shots * options.grid**2, options.hosts)
        if not options.labels or s.label in options.labels
    ]
    same = {"benchmark": "systems", "grid": options.grid, "shots": options.shots, "split": options.split}
    done = {_key(record) for record in known}
    missing = {
        seed: [
            s for s in asked if _key({**same, "seed": seed, "hosts": s.hosts, "settings": s.settings}) not in done
        ]
        for seed in range(options.clips)
    }
    with tqdm(total=sum(map(len, missing.values())), unit="way", disable=None) as bar:
        for seed, left in missing.items():
            for number in sorted({system.hosts for system in left}):
                here = [system for system in left if system.hosts == number]
                drafts = [share_weights(draft) for _ in range(number)]

                def sit(
                    hosts: HostGroup, model: PreTrainedModel, here=here, drafts=drafts, seed=seed
                ) -> list[dict]:
                    candidate = Candidate(model, engine.processor, hosts)
                    return list(Examinee(candidate, drafts[hosts.rank]).sit(exam, seed, folder, here))

                for record in run_on(number, engine.hosts, engine.model, sit):
                    yield {**same, **record, "simulated": number > 1}
                bar.update(len(here))


def _key(record: dict) -> str:
    """Return what tells a measurement from others; its label may change."""
    names = ("benchmark", "grid", "shots", "split", "seed", "hosts", "settings")
    return json.dumps([record[name] for name in names], sort_keys=True)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_exam_options(parser, num_clips=20, num_shots=256)
    parser.add_argument("--hosts", type=int, default=8, help="simulated, for what shares a prompt out")
    parser.add_argument("--labels", nargs="+", help="only these ways")
    add_json_option(parser)
    add_plot_option(parser)
    add_table_option(parser)
    options = parser.parse_args(arguments)
    if options.clips < 1 or options.hosts < 2:
        parser.error("--clips must be at least 1, and --hosts at least 2")
    known = [system.label for system in systems(options.shots * options.grid**2, options.hosts)]
    if unknown := [label for label in options.labels or () if label not in known]:
        parser.error(f"there is no way {unknown[0]!r}; there are: {'; '.join(known)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.table:
        records = read_records(options.table)
    else:
        known = read_records([options.json]) if options.json and options.json.exists() else []
        records = known + keep_records(measure(options, known), "systems.py", options.json)
    show(options, records, table, plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
