"""Measure how often the draft predicts the target's next token from all or a random part of the visual tokens.

    python benchmarks/agreement.py --shots 24 64 128 --keep 1.0 0.1 --clips 40

The target describes held-out clips greedily; the draft reads along, and its most likely token is compared at every
step. Kept tokens keep their positions.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from transformers import PreTrainedModel

from apbv import PrefillConfig
from apbv.demo import draft_path, model_path
from apbv.stats import append_json_lines

from support import clips
from support.arguments import add_json_option
from support.exams.candidate import Candidate, load_demo
from support.exams.exam import Exam, clips_folder
from support.exams.pair import predict_along


def count_agreements(
    candidate: Candidate, draft: PreTrainedModel, exam: Exam, shares: Sequence[float], folder: Path
) -> tuple[dict[float, int], int]:
    """Count how many tokens of the target's descriptions the draft predicts from shares of the visual tokens.

    Args:
        candidate: the target, on one host.
        draft: the draft.
        exam: the clips.
        shares: shares of the visual tokens that the draft sees, chosen at random, at least one token.
        folder: the folder of the clips' files.

    Returns:
        The number of agreeing tokens by share, and the number of all tokens.
    """
    right, total = dict.fromkeys(shares, 0), 0
    for seed in range(exam.num_clips):
        inputs = candidate.read(exam.file(seed, folder), clips.DESCRIBE_QUESTION)
        tokens, _ = candidate.answer(inputs, PrefillConfig(method="full"), 2 * clips.MOST_DESCRIBED)
        total += len(tokens)
        num_visual = inputs.num_visual_tokens
        order = torch.randperm(num_visual, generator=torch.Generator().manual_seed(seed))
        for share in shares:
            kept = order[: max(1, round(share * num_visual))].sort().values
            said = predict_along(draft, inputs, tokens, kept)
            right[share] += sum(a == b for a, b in zip(said, tokens, strict=True))
    return right, total


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=model_path(), help="the target's checkpoint folder")
    parser.add_argument("--draft", type=Path, default=draft_path(), help="the draft's checkpoint folder")
    parser.add_argument("--grids", type=int, nargs="+", default=list(clips.GRIDS), choices=clips.GRIDS)
    parser.add_argument("--shots", type=int, nargs="+", default=[24, 64, 128], help="lengths of the clips")
    parser.add_argument("--keep", type=float, nargs="+", default=[1.0, 0.1], help="shares of the visual tokens")
    parser.add_argument("--clips", type=int, default=40)
    parser.add_argument("--split", choices=clips.SPLITS, default="test")
    add_json_option(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    target, draft = load_demo(options.model), load_demo(options.draft).model
    candidate = Candidate(target.model, target.processor, target.hosts)
    folder = clips_folder()
    for grid in options.grids:
        for num_shots in options.shots:
            exam = Exam(grid, num_shots, options.clips, ("describe",), options.split)
            right, total = count_agreements(candidate, draft, exam, options.keep, folder)
            for share in options.keep:
                record = {"grid": grid, "shots": num_shots, "clips": exam.num_clips, "split": exam.split}
                record |= {"kept": share, "right": right[share], "total": total}
                print(
                    f"{grid} x {grid}, {num_shots} shots, {share:.0%} of the visual tokens: "
                    f"{right[share] / total:.3f} of {total} tokens agree",
                    flush=True,
                )
                if options.json:
                    append_json_lines(options.json, [record])
    return 0


if __name__ == "__main__":
    sys.exit(main())
