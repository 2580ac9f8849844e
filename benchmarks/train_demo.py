"""Train the demo's target from scratch, or distil its draft, on two CPU cores.

    python benchmarks/train_demo.py target --minutes 75 --out DIR
    python benchmarks/train_demo.py draft --teacher DIR/model --minutes 20 --out DRAFT_DIR

The result in DIR/model is an ordinary Qwen2.5-VL checkpoint, and DIR/curves.png shows how the training went. The
recipe is explained in support/demo_training/trainer.py.
"""

import argparse
import sys

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from transformers.utils.logging import disable_progress_bar

from support.arguments import parser_of
from support.demo_training.data import BatchMaker, ShotPool
from support.demo_training.trainer import Trainer

POOL_SIZES = {2: 8192, 6: 3072}  # shots, by grid


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("train_demo", __doc__)
    parser.add_argument("size", choices=("target", "draft"))
    options = parser.parse_args(arguments)
    if (options.size == "draft") != (options.teacher is not None):
        parser.error("the draft, and only the draft, needs --teacher")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    disable_progress_bar()  # the training shows its own, not that of writing checkpoints
    trainer = Trainer(options.size, options.out, options.minutes, options.seed, options.teacher)
    pools = {grid: ShotPool(options.seed, size, grid) for grid, size in POOL_SIZES.items()}
    trainer.run(BatchMaker(pools, options.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
