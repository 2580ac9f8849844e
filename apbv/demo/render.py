"""Write a clip of the demo's kind, and print what can be asked about it.

python -m apbv.demo.render --seed 7
torchrun --nproc-per-node 2 launch/infer.py --model demo --video clip-7.mp4 --prompt "name the letters in order"
"""

import argparse
from pathlib import Path

from apbv.demo import clips


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="number of the clip")
    parser.add_argument("--shots", type=int, default=64, help="length; two shots are a second")
    parser.add_argument(
        "--grid", type=int, default=2, choices=clips.GRIDS, help="visual tokens per side of a frame"
    )
    parser.add_argument(
        "--needles", nargs="+", choices=clips.NEEDLES, default=clips.NEEDLES, help="kinds of needle"
    )
    parser.add_argument("--split", choices=clips.SPLITS, default="test")
    parser.add_argument("--out", type=Path, help="file to write (default clip-SEED.mp4)")
    options = parser.parse_args()
    if options.seed < 0 or options.shots < clips.MIN_LETTERS:
        parser.error(f"--seed must not be negative, --shots at least {clips.MIN_LETTERS}")
    path = options.out or Path(f"clip-{options.seed}.mp4")
    clip = clips.make_clip(options.seed, options.shots, options.split, options.grid, options.needles)
    clips.write_mp4(clips.render(clip), path)
    print(f"{path}: {options.shots} shots of {options.grid} x {options.grid} visual tokens")
    for _, question, answer in clips.questions(clip):
        print(f"  {question}\n    {answer}")


if __name__ == "__main__":
    main()
