"""Show which visual tokens each choice lets a draft see, and how often the draft alone is right on them.

    python benchmarks/draft_views.py --clips 40 --json views.jsonl --plot views.png
    python benchmarks/draft_views.py --keep full attention random --keep-ratio 0.1 0.5
    python benchmarks/draft_views.py --table views.jsonl --plot views.png

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
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from torch import Tensor
from tqdm import tqdm

from apbv import PrefillConfig, SpeculativeConfig
from apbv.config import KEEP_POLICIES
from apbv.speculate.builders import draft_by_model

from support import clips
from support.arguments import add_exam_options, add_json_option, add_plot_option, add_table_option
from support.exams.exam import EXACT_TASKS, Exam, clips_folder
from support.exams.pair import DemoPair, predict_along
from support.plots import import_pyplot, legend_beside, save
from support.records import keep_records, read_records, show
from support.summaries import percent_cell, sum_counts
from support.tables import markdown_table

BINS = 25  # of 4 % of the video each, as in ParallelVLM's Figure 4
BORDER = 0.1  # HIPPO, Section 4.1


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """Yield a record for every clip, choice and share of tokens."""
    pair, folder = DemoPair.load(), clips_folder(options.folder)
    exam = Exam(options.grid, options.shots, options.clips, EXACT_TASKS, options.split)
    ways = [
        SpeculativeConfig(strategy="specvlm", keep=keep, keep_ratio=ratio)
        for keep in options.keep
        for ratio in (options.keep_ratio if keep != "full" else [1.0])
    ]
    for seed in tqdm(range(options.clips), unit="clip", disable=None):
        file, clip = exam.file(seed, folder), exam.clip(seed)
        shots = [number for number, shot in enumerate(clip.shots) if shot.needle]
        inputs = pair.read(file, clips.DESCRIBE_QUESTION)
        described, _ = pair.target.answer(inputs, PrefillConfig(method="full"), 2 * clips.MOST_DESCRIBED)
        for config in ways:
            right = {task: [0, 0] for task in EXACT_TASKS}
            inputs = pair.read(file, clips.DESCRIBE_QUESTION)
            _, made_of = pair.prefill(inputs, config, seed)
            kept = draft_by_model(made_of).kept
            said = predict_along(pair.draft, inputs, described, kept)
            right["description"] = [sum(a == b for a, b in zip(said, described, strict=True)), len(described)]
            views = []
            for task, question, answer in exam.questions(seed):
                inputs = pair.read(file, question)
                _, made_of = pair.prefill(inputs, config, seed)
                most = len(pair.target.processor.tokenizer(answer).input_ids) + 1
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
    of_frame = views.sum(dim=(1, 2))
    bins = torch.arange(num_frames) * BINS // num_frames
    histogram = torch.zeros(BINS).index_add_(0, bins, of_frame)
    centres = (torch.arange(height) + 0.5) / height
    at_border = (centres < BORDER) | (centres > 1 - BORDER)
    kept = float(views.sum())
    return {
        "kept": kept,
        "histogram": (histogram / kept).tolist(),
        "at_ends": float(histogram[[0, -1]].sum() / kept),
        "at_border": float(views[:, at_border].sum() / kept) if at_border.any() else None,
        "border_share": float(at_border.float().mean()),
        "of_needles": float(views[needle_shots].mean()),
    }


def summarise(records: list[dict]) -> list[dict]:
    """Sum the records of every choice and share."""
    ways: dict[tuple, list[dict]] = {}
    for record in records:
        ways.setdefault((record["keep"], record["keep_ratio"]), []).append(record)
    rows = []
    for (keep, ratio), of_way in ways.items():
        counts = sum_counts(record["right"] for record in of_way)
        row = {"label": keep if keep == "full" else f"{keep}, {ratio:g}", "clips": len(of_way), "right": counts}
        row["histogram"] = torch.tensor([record["histogram"] for record in of_way]).mean(dim=0).tolist()
        for name in ("at_ends", "at_border", "of_needles"):
            values = [record[name] for record in of_way]
            row[name] = None if None in values else sum(values) / len(values)
        rows.append(row)
    return rows


def table(rows: list[dict]) -> str:
    """Format the sums as a Markdown table, with 95 % intervals in brackets."""
    header = ["the draft sees", "clips", *EXACT_TASKS, "description", "of needles"]
    header += ["first and last 4 %", "at the borders"]
    lines = []
    for row in rows:
        shares = [
            "–" if row[n] is None else f"{100 * row[n]:.1f} %" for n in ("of_needles", "at_ends", "at_border")
        ]
        right, total = row["right"]["description"]  # tokens of one answer are not independent: no interval holds
        cells = [*(percent_cell(*row["right"][task]) for task in EXACT_TASKS), f"{100 * right / total:.1f}"]
        lines.append([row["label"], row["clips"], *cells, *shares])
    return markdown_table(header, lines)


def plot(rows: list[dict], path: Path) -> None:
    """Plot the draft's accuracy by task, and where in the video kept tokens lie."""
    pyplot = import_pyplot()
    figure, (bars, places) = pyplot.subplots(1, 2, figsize=(13, 4.5))
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        shares = [100 * right / total for right, total in row["right"].values()]
        left = [place - 0.4 + width * (number + 0.5) for place in range(len(shares))]
        colour = pyplot.get_cmap("tab20")(number % 20)
        bars.bar(left, shares, width, color=colour, label=row["label"])
        middles = [100 * (place + 0.5) / BINS for place in range(BINS)]
        places.plot(middles, [100 * s for s in row["histogram"]], color=colour, label=row["label"])
    tasks = list(rows[0]["right"])
    bars.set_xticks(range(len(tasks)), tasks)
    bars.set_ylabel("right answers, or tokens, of the draft alone, %")
    places.set(xlabel="place in the video, %", ylabel="kept tokens in 4 % of the video, %")
    legend_beside(places)
    save(figure, path)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", nargs="+", choices=KEEP_POLICIES, default=list(KEEP_POLICIES))
    parser.add_argument("--keep-ratio", type=float, nargs="+", default=[0.1], help="of visual tokens (0.1)")
    add_exam_options(parser, num_clips=20, num_shots=64)
    add_json_option(parser)
    add_plot_option(parser)
    add_table_option(parser)
    options = parser.parse_args(arguments)
    if options.clips < 1 or not all(0 < ratio <= 1 for ratio in options.keep_ratio):
        parser.error("--clips must be at least 1, and --keep-ratio lie in (0, 1]")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.table:
        records = read_records(options.table)
    else:
        records = keep_records(measure(options), "draft_views.py", options.json)
    show(options, summarise(records), table, plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
