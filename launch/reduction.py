"""The command-line options of leaving visual tokens out."""

import argparse

from apbv.config import REDUCER_NAMES, ReduceConfig

_SETTINGS = {"reduce_ratio": "ratio", "reduce_layer": "layer"}


def add_reduce_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a reduction; those that are not given are None."""
    group = parser.add_argument_group("fewer visual tokens")
    group.add_argument("--reduce", choices=REDUCER_NAMES, help="leave visual tokens out (default: none)")
    group.add_argument(
        "--reduce-ratio",
        type=float,
        metavar="R",
        help=f"the share of a video's visual tokens that is left (default {ReduceConfig.ratio})",
    )
    group.add_argument(
        "--reduce-layer",
        type=int,
        metavar="K",
        help="leave them out after so many layers of the language model (default: the method's own)",
    )


def reduce_config(options: argparse.Namespace) -> ReduceConfig | None:
    """Make the settings of a reduction, if any.

    Raises:
        ValueError: a value is out of range, or has no effect.
    """
    given = {setting: getattr(options, option) for option, setting in _SETTINGS.items()}
    given = {setting: value for setting, value in given.items() if value is not None}
    if options.reduce is None:
        if given:
            raise ValueError(f"--reduce-{next(iter(given))} needs --reduce")
        return None
    return ReduceConfig(method=options.reduce, **given)
