"""Render a clip like the demo's and print its questions; or render clips with a file of questions.

    python benchmarks/render.py --seed 7
    python launch/infer.py --model demo --video clip-7.mp4 --prompt "name the letters in order"

    python benchmarks/render.py --questions 20
    python benchmarks/questions.py --questions clips/questions.jsonl --model demo

The same seed always draws the same clip.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path

from apbv.testing import clips

from support.arguments import parser_of


def write_clip(
    options: argparse.Namespace, seed: int, needles: Sequence[str], path: Path
) -> clips.ClipSpec:
    """Write a clip, whose needles are of these kinds."""
    clip = clips.make_clip(seed, options.shots, options.split, options.grid, needles)
    clips.write_mp4(clips.render(clip), path)
    return clip


def records(options: argparse.Namespace, folder: Path) -> Iterator[dict]:
    """Write clips, and yield questions about each: a retrieval, ordering and counting.

    The seed chooses the retrieval.
    """
    for seed in count(options.seed):
        # The kinds of needle take turns, so that each of them can be scored by itself.
        needles = options.needles[seed % len(options.needles)]
        path = folder / f"clip-{seed}.mp4"
        clip = write_clip(options, seed, [needles], path)
        retrievals, others = clips.asked_apart(clip)
        retrieval = retrievals[seed % len(retrievals)]
        for task, question, answer in [retrieval, *others]:
            if task == "describe":
                continue
            yield {
                "id": f"clip-{seed} {task}",
                "video": path.name,
                "question": question,
                "answer": answer,
                "groups": {"task": task, "needles": needles},
            }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read and check the options, which ends the process where one is wrong."""
    parser = parser_of("render", __doc__)
    options = parser.parse_args(arguments)
    if options.seed < 0 or options.shots < clips.MIN_LETTERS:
        parser.error(f"--seed must not be negative, --shots at least {clips.MIN_LETTERS}")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if options.questions is not None:
        folder = options.out or Path("clips")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "questions.jsonl"
        lines = []
        for record in islice(records(options, folder), options.questions):
            lines.append(json.dumps(record) + "\n")
        path.write_text("".join(lines), encoding="utf-8")
        print(f"{path}: {options.questions} questions")
        return
    path = options.out or Path(f"clip-{options.seed}.mp4")
    clip = write_clip(options, options.seed, options.needles, path)
    print(f"{path}: {options.shots} shots of {options.grid} x {options.grid} visual tokens")
    for _, question, answer in clips.questions(clip):
        print(f"  {question}\n    {answer}")


if __name__ == "__main__":
    main()
