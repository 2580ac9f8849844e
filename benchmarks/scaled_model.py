"""Make a slower model that computes the same, so that target and draft differ in cost as real pairs do.

    python benchmarks/scaled_model.py --times 6 --out DIR

Of each decoder layer there are `--times`, of which all but one add nothing (support/scaled_model.py).
"""

import argparse
import sys
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from transformers import AutoModelForImageTextToText, AutoProcessor

from apbv.demo import model_path

from support.scaled_model import scale_model


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=model_path(), help="checkpoint folder (default: the target)")
    parser.add_argument("--times", type=int, required=True, help="decoder layers for each one there is")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype="auto")
    scale_model(model, options.times).save_pretrained(options.out)
    AutoProcessor.from_pretrained(options.model).save_pretrained(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
