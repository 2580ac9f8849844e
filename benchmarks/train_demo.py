"""Train the demo's target from scratch, or distil its draft, on two CPU cores.

    python benchmarks/train_demo.py target --minutes 75 --out DIR
    python benchmarks/train_demo.py draft --teacher DIR/model --minutes 20 --out DRAFT_DIR
    (either with --resume: go on from the state in --out)

The result in DIR/model is an ordinary Qwen2.5-VL checkpoint, and DIR/curves.png shows how the training went. The
recipe is explained in demo_training/trainer.py.
"""

import argparse
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from demo_training.architecture import SIZES
from demo_training.data import BatchMaker, ShotPool
from demo_training.trainer import Trainer
from transformers.utils.logging import disable_progress_bar

POOL_SIZES = {2: 8192, 6: 3072}  # shots, by grid


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the demo's target, or distils its draft.")
    parser.add_argument("size", choices=list(SIZES))
    parser.add_argument("--minutes", type=float, default=75, help="length of the whole training")
    parser.add_argument("--out", type=Path, required=True, help="folder for state and checkpoint")
    parser.add_argument("--teacher", type=Path, help="checkpoint that the draft is distilled from")
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if (arguments.size == "draft") != (arguments.teacher is not None):
        parser.error("the draft, and only the draft, needs --teacher")
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    disable_progress_bar()  # the training shows its own, not that of writing checkpoints
    trainer = Trainer(arguments.size, arguments.out, arguments.minutes, arguments.seed, arguments.teacher)
    if arguments.resume:
        trainer.resume()
    # A resumed run must not see the first run's data again.
    seed = arguments.seed + trainer.step
    trainer.run(BatchMaker({grid: ShotPool(seed, size, grid) for grid, size in POOL_SIZES.items()}, seed))


if __name__ == "__main__":
    main()
