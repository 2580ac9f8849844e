"""Write a clip of the demo's kind, and print what can be asked about it; or clips with a file of questions.

    python benchmarks/render.py --seed 7
    python launch/infer.py --model demo --video clip-7.mp4 --prompt "name the letters in order"

    python benchmarks/render.py --questions 20
    python benchmarks/questions.py --questions clips/questions.jsonl --model demo

The same seed always draws the same clip.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

from support import clips


def asked_about(clip: clips.ClipSpec, seed: int) -> list[tuple[str, str, str]]:
    """Return (task, question, answer) of a retrieval, which the seed chooses, of ordering and of counting."""
    asked = clips.questions(clip)
    retrievals = [item for item in asked if item[0] == "retrieval"]
    others = [item for item in asked if item[0] in ("ordering", "counting")]
    return [retrievals[seed % len(retrievals)], *others]


def write_questions(options: argparse.Namespace, folder: Path) -> Path:
    """Write so many questions as JSON Lines, and the clips that they are about, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)

    def records() -> Iterator[dict]:
        for seed in count(options.seed):
            # The kinds of needle take turns, so that each of them can be scored by itself.
            needles = options.needles[seed % len(options.needles)]
            clip = clips.make_clip(seed, options.shots, options.split, options.grid, [needles])
            path = folder / f"clip-{seed}.mp4"
            clips.write_mp4(clips.render(clip), path)
            for task, question, answer in asked_about(clip, seed):
                groups = {"task": task, "needles": needles}
                name = f"clip-{seed} {task}"
                yield {"id": name, "video": path.name, "question": question, "answer": answer, "groups": groups}

    file = folder / "questions.jsonl"
    lines = [json.dumps(record) for record in islice(records(), options.questions)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read and check the options, which ends the process where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="number of the clip, or of the first")
    parser.add_argument("--shots", type=int, default=64, help="length; two shots are a second")
    parser.add_argument(
        "--grid", type=int, default=2, choices=clips.GRIDS, help="visual tokens per side of a frame"
    )
    parser.add_argument(
        "--needles", nargs="+", choices=clips.NEEDLES, default=clips.NEEDLES, help="kinds of needle"
    )
    parser.add_argument("--split", choices=clips.SPLITS, default="test")
    parser.add_argument("--questions", type=int, metavar="N", help="write clips, and N questions about them")
    parser.add_argument(
        "--out", type=Path, help="file to write (default clip-SEED.mp4), or with --questions the folder (clips)"
    )
    options = parser.parse_args(arguments)
    if options.seed < 0 or options.shots < clips.MIN_LETTERS:
        parser.error(f"--seed must not be negative, --shots at least {clips.MIN_LETTERS}")
    if options.questions is not None and options.questions < 1:
        parser.error("--questions must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if options.questions is not None:
        file = write_questions(options, options.out or Path("clips"))
        print(f"{file}: {options.questions} questions")
        return
    path = options.out or Path(f"clip-{options.seed}.mp4")
    clip = clips.make_clip(options.seed, options.shots, options.split, options.grid, options.needles)
    clips.write_mp4(clips.render(clip), path)
    print(f"{path}: {options.shots} shots of {options.grid} x {options.grid} visual tokens")
    for _, question, answer in clips.questions(clip):
        print(f"  {question}\n    {answer}")


if __name__ == "__main__":
    main()
