"""Show which visual tokens each keep policy gives the draft, and the draft's accuracy on them.

    python benchmarks/draft_views.py --clips 40 --json views.jsonl
    python benchmarks/draft_views.py --keep full attention random --keep-ratio 0.1 0.5

After HIPPO's Figure 3 (the draft's accuracy on all tokens, the most attended and random ones) and ParallelVLM's
Figure 4 (how many of the kept tokens are in the first and last 4 % of the video). The demo model's needles also
show how much of the question's subject is retained. The demo's draft was trained to describe clips as the target
does; its accuracy is therefore the share of the target's description that it predicts, token by token.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from torch import Tensor
from tqdm import tqdm

from apbv import PrefillConfig, SpeculativeConfig
from apbv.config import KEEP_POLICIES
from apbv.speculate.builders import draft_by_model

from support import clips
from support.arguments import add_clip_options, add_shared
from support.exams import Exam
from support.pair import DemoPair, predict_along
from support.records import keep, table

BINS = 25  # of 4 % of the video each, as in ParallelVLM's Figure 4


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """Yield a record for every clip, choice and share of tokens."""
    pair, exam = DemoPair(), Exam.of(options)
    ways = [
        SpeculativeConfig(strategy="specvlm", keep=name, keep_ratio=ratio)
        for name in options.keep
        for ratio in (options.keep_ratio if name != "full" else [1.0])
    ]
    for seed in tqdm(range(options.clips), unit="clip", disable=None):
        file = exam.file(seed)
        shots = [number for number, shot in enumerate(exam.clip(seed).shots) if shot.needle]
        inputs = pair.target.read(file, clips.DESCRIBE_QUESTION)
        described, _ = pair.target.answer(inputs, PrefillConfig(method="full"), 2 * clips.MOST_DESCRIBED)
        for config in ways:
            inputs = pair.target.read(file, clips.DESCRIBE_QUESTION)
            _, made_of = pair.prefill(inputs, config, seed)
            kept = draft_by_model(made_of).kept
            said = predict_along(pair.draft, inputs, described, kept)
            views = []
            for _, question, _ in exam.questions(seed):
                _, made_of = pair.prefill(pair.target.read(file, question), config, seed)
                mask = torch.zeros(made_of.num_visual)
                mask[draft_by_model(made_of).kept] = 1
                views.append(mask.view(-1, options.grid, options.grid))
            yield {
                "benchmark": "draft_views",
                "keep": config.keep,
                "keep_ratio": config.keep_ratio,
                "grid": options.grid,
                "shots": options.shots,
                "split": options.split,
                "seed": seed,
                "predicted": sum(a == b for a, b in zip(said, described, strict=True)),
                "described": len(described),
                **seen(torch.stack(views).mean(dim=0), shots),
            }


def seen(views: Tensor, needle_shots: list[int]) -> dict:
    """Say where kept tokens lie.

    Args:
        views: ``[frames, h, w]``, how often each token is kept.
        needle_shots: the frames that show a needle.
    """
    bins, kept = torch.arange(len(views)) * BINS // len(views), float(views.sum())
    return {
        "kept": kept,
        "at_ends": float(views[(bins == 0) | (bins == BINS - 1)].sum() / kept),
        "of_needles": float(views[needle_shots].mean()),
    }


def summarise(records: list[dict]) -> Iterator[dict]:
    """Sum the records of every choice and share."""
    ways: dict[tuple, list[dict]] = {}
    for record in records:
        ways.setdefault((record["keep"], record["keep_ratio"]), []).append(record)
    for (name, ratio), of_way in ways.items():
        row = {"label": name if name == "full" else f"{name}, {ratio:g}", "clips": len(of_way)}
        row |= {name: statistics.fmean(record[name] for record in of_way) for name in ("at_ends", "of_needles")}
        predicted, described = (sum(record[name] for record in of_way) for name in ("predicted", "described"))
        yield {**row, "share": predicted / described}


COLUMNS = {
    "the draft sees": "{label}",
    "clips": "{clips}",
    "tokens of the description": "{share:.1%}",
    "of needles": "{of_needles:.1%}",
    "first and last 4 %": "{at_ends:.1%}",
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", nargs="+", choices=KEEP_POLICIES, default=list(KEEP_POLICIES))
    parser.add_argument("--keep-ratio", type=float, nargs="+", default=[0.1], help="share of visual tokens (0.1)")
    add_clip_options(parser, 20, 64)
    add_shared(parser, "json")
    options = parser.parse_args(arguments)
    if not all(0 < ratio <= 1 for ratio in options.keep_ratio):
        parser.error("--keep-ratio must lie in (0, 1]")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    print(table(summarise(keep(measure(options), options.json)), COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
