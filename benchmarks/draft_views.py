"""Show which visual tokens each choice lets a draft see, and how often the draft alone is right on them.

    python benchmarks/draft_views.py --clips 40 --json views.jsonl
    python benchmarks/draft_views.py --keep full attention random --keep-ratio 0.1 0.5

After HIPPO's Figure 3 (the draft's accuracy on all tokens, the most attended and random ones), its Figures 2 and 8
(how many of the kept tokens lie at the frames' borders: those whose centre is within 10 % of the top or bottom
edge) and ParallelVLM's Figure 4 (how many of them lie in the first and last 4 % of the video). The demo model's
needles say besides how many of what is asked about is left to see. Answers are the draft's own: nothing verifies
them. The demo's draft was trained to describe clips as the target does, and answers other questions badly; so the
share of the target's description that it predicts, token by token, tells more.
"""

import argparse
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
from support.exams import EXACT_TASKS, Exam
from support.pair import DemoPair, predict_along
from support.records import keep, table
from support.summaries import percent_cell, sum_counts

BINS = 25  # of 4 % of the video each, as in ParallelVLM's Figure 4
BORDER = 0.1  # HIPPO, Section 4.1


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
            right = {task: [0, 0] for task in EXACT_TASKS}
            inputs = pair.target.read(file, clips.DESCRIBE_QUESTION)
            _, made_of = pair.prefill(inputs, config, seed)
            kept = draft_by_model(made_of).kept
            said = predict_along(pair.draft, inputs, described, kept)
            right["description"] = [sum(a == b for a, b in zip(said, described, strict=True)), len(described)]
            views = []
            for task, question, answer in exam.questions(seed):
                inputs = pair.target.read(file, question)
                _, made_of = pair.prefill(inputs, config, seed)
                most = len(pair.tokenizer(answer).input_ids) + 1
                said, draft = pair.answer_by_draft(made_of, most)
                right[task][0] += said == answer
                right[task][1] += 1
                mask = torch.zeros(made_of.num_visual)
                mask[draft.kept] = 1
                views.append(mask.view(-1, options.grid, options.grid))
            yield {
                "benchmark": "draft_views",
                "keep": config.keep,
                "keep_ratio": config.keep_ratio,
                "grid": options.grid,
                "shots": options.shots,
                "split": options.split,
                "seed": seed,
                "right": right,
                **seen(torch.stack(views).mean(dim=0), shots),
            }


def seen(views: Tensor, needle_shots: list[int]) -> dict:
    """Say where kept tokens lie.

    Args:
        views: ``[frames, h, w]``, how often each token is kept.
        needle_shots: the frames that show a needle.
    """
    num_frames, height, _ = views.shape
    bins = torch.arange(num_frames) * BINS // num_frames
    histogram = torch.zeros(BINS).index_add_(0, bins, views.sum(dim=(1, 2)))
    centres = (torch.arange(height) + 0.5) / height
    at_border = (centres < BORDER) | (centres > 1 - BORDER)
    kept = float(views.sum())
    return {
        "kept": kept,
        "at_ends": float(histogram[[0, -1]].sum() / kept),
        "at_border": float(views[:, at_border].sum() / kept) if at_border.any() else None,
        "border_share": float(at_border.float().mean()),
        "of_needles": float(views[needle_shots].mean()),
    }


def summarise(records: list[dict]) -> Iterator[dict]:
    """Sum the records of every choice and share."""
    ways: dict[tuple, list[dict]] = {}
    for record in records:
        ways.setdefault((record["keep"], record["keep_ratio"]), []).append(record)
    for (name, ratio), of_way in ways.items():
        row = {"label": name if name == "full" else f"{name}, {ratio:g}", "clips": len(of_way)}
        for figure in ("at_ends", "at_border", "of_needles"):
            values = [record[figure] for record in of_way]
            row[figure] = None if None in values else sum(values) / len(values)
        right = sum_counts(record["right"] for record in of_way)
        described = right["description"]  # tokens of one answer are not independent: no interval holds
        yield {**row, "right": right, "described": described[0] / described[1]}


COLUMNS = {
    "the draft sees": "{label}",
    "clips": "{clips}",
    **{task: lambda row, task=task: percent_cell(*row["right"][task]) for task in EXACT_TASKS},
    "description": "{described:.1%}",
    "of needles": "{of_needles:.1%}",
    "first and last 4 %": "{at_ends:.1%}",
    "at the borders": "{at_border:.1%}",
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", nargs="+", choices=KEEP_POLICIES, default=list(KEEP_POLICIES))
    parser.add_argument("--keep-ratio", type=float, nargs="+", default=[0.1], help="of visual tokens (0.1)")
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
