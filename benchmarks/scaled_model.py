"""Make a slower model with the same outputs, so that target and draft differ in cost as real pairs do.

    python benchmarks/scaled_model.py --times 6 --out DIR

Each decoder layer is repeated `--times` times; all copies except one add nothing (support/scaled_model.py).
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
    parser.add_argument("--model", type=Path, default=model_path(), help="checkpoint (default: the target)")
    parser.add_argument("--times", type=int, required=True, help="decoder layers per original layer")
    parser.add_argument("--out", type=Path, required=True, help="output directory")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype="auto")
    scale_model(model, options.times).save_pretrained(options.out)
    AutoProcessor.from_pretrained(options.model).save_pretrained(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
