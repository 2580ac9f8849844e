"""Measure how often each place of a video is passed on between hosts, after the APB-V paper's Figure 8.

    python benchmarks/passed_tokens.py --clips 20 --json passed.jsonl
    python benchmarks/passed_tokens.py --hosts 8 --shots 256 --passing-len 8 --importance dot

APB-V's blocks pass their l_p most important KV pairs on, in every layer and KV head. The intensity of a visual
token is the share of layers and KV heads in which it is passed on. The question asks for one of the letters; the
table tells intensities apart: of the letter that is asked for, of other letters, and of all else. The anchor,
which every host has, is left out.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from torch import Tensor
from tqdm import tqdm

from apbv import PrefillConfig, prefill
from apbv.speculate.watchers import PassedOn

from support.arguments import COUNT, add_clip_options, add_prefill_settings, add_shared
from support.exams import Candidate, Exam, load_demo, run_on
from support.reading_ways import paper_lengths
from support.records import keep, table


def intensities(candidate: Candidate, file: Path, question: str, config: PrefillConfig) -> Tensor:
    """Return in what share of layers and KV heads each visual token is passed on; collective.

    Returns:
        ``[visual tokens]`` on every host; NaN for those that the anchor holds.
    """
    inputs, watcher = candidate.read(file, question), PassedOn()
    options = {"hosts": candidate.hosts, "config": config, "watcher": watcher, "encoded": candidate.encoded}
    state = prefill(candidate.parts, inputs, **options)
    shares = torch.stack(watcher.result()).float().mean(dim=(0, 1))
    shares[: max(0, state.layout.anchor.stop - inputs.context_start)] = torch.nan
    return shares


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """Yield a record for every clip."""
    engine, exam = load_demo(), Exam.of(options, ("retrieval",))
    anchor, passing = paper_lengths(options.shots * options.grid**2)
    passing = options.passing_len or passing
    config = PrefillConfig(anchor_len=anchor, passing_len=passing, importance=options.importance)
    for seed in tqdm(range(options.clips), unit="clip", disable=None):
        file = exam.file(seed)
        _, question, answer = exam.questions(seed)[0]

        def look(hosts, model, file=file, question=question) -> Tensor:
            return intensities(Candidate(model, engine.processor, hosts), file, question, config)

        shares = run_on(options.hosts, engine.hosts, engine.model, look).view(-1, options.grid, options.grid)
        letters = {number: shot.needle.letter for number, shot in enumerate(exam.clip(seed).shots) if shot.needle}
        asked = [number for number, letter in letters.items() if letter == answer]
        yield {
            "benchmark": "passed_tokens",
            "hosts": options.hosts,
            "grid": options.grid,
            "shots": options.shots,
            "split": options.split,
            "seed": seed,
            "question": question,
            "importance": options.importance,
            "anchor_len": anchor,
            "passing_len": passing,
            "letters": letters,
            "of_asked": _mean(shares[asked]),
            "of_other_letters": _mean(shares[[number for number in letters if number not in asked]]),
            "of_rest": _mean(shares[[number for number in range(len(shares)) if number not in letters]]),
        }


def _mean(shares: Tensor) -> float | None:
    mean = float(shares.nanmean())
    return None if mean != mean else mean


def summarise(records: list[dict]) -> dict:
    """Average the intensities over all clips."""
    row = {**records[0], "clips": len(records)}
    for name in ("of_asked", "of_other_letters", "of_rest"):
        known = [record[name] for record in records if record[name] is not None]
        row[name] = statistics.fmean(known) if known else None
    return row


COLUMNS = {
    "hosts": "{hosts}",
    "l_p": "{passing_len}",
    "importance": "{importance}",
    "clips": "{clips}",
    "the letter asked for": "{of_asked:.3f}",
    "other letters": "{of_other_letters:.3f}",
    "all else": "{of_rest:.3f}",
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=COUNT, default=8, help="simulated, 2 at least (8)")
    parser.add_argument("--passing-len", type=COUNT, help="l_p (default: a 128th of the visual tokens)")
    add_prefill_settings(parser, "importance")
    add_clip_options(parser, 20, 256)
    add_shared(parser, "json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    print(table([summarise(keep(measure(options), options.json))], COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
