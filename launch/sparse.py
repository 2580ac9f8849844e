"""The command-line options of sparse attention."""

import argparse

from apbv.config import SPARSE_NAMES, SparseConfig

# By option: the setting, and whose it is where it is not everyone's.
_SETTINGS = {
    "sparse_threshold": ("threshold", None),
    "sparse_block": ("block_size", None),
    "sparse_stride": ("stride", "xattention"),
    "sparse_similarity": ("similarity", "spargeattn"),
    "sparse_skip_margin": ("skip_margin", "spargeattn"),
    "sparse_divergence": ("divergence", "flexprefill"),
    "sparse_min_blocks": ("min_blocks", "flexprefill"),
}


def add_sparse_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of sparse attention; those that are not given are None."""
    group = parser.add_argument_group("sparse attention")
    group.add_argument(
        "--sparse",
        choices=SPARSE_NAMES,
        help="compute chosen blocks only, of a host's own blocks with apbv, apb and star (default: all)",
    )
    group.add_argument(
        "--sparse-threshold",
        type=float,
        metavar="T",
        help="the share of attention that the chosen blocks shall hold "
        "(default: xattention 0.9, spargeattn 0.96, flexprefill 0.95)",
    )
    group.add_argument(
        "--sparse-block",
        type=int,
        metavar="N",
        help=f"tokens of a block of queries (default {SparseConfig.block_size})",
    )
    group.add_argument(
        "--sparse-stride",
        type=int,
        metavar="N",
        help=f"xattention: tokens that get one score (default {SparseConfig.stride})",
    )
    group.add_argument(
        "--sparse-similarity",
        type=float,
        metavar="S",
        help=f"spargeattn: how alike a block's rows must be to be left out (default {SparseConfig.similarity})",
    )
    group.add_argument(
        "--sparse-skip-margin",
        type=float,
        metavar="M",
        help="spargeattn: skip a block's values where no score is within M of its query's highest (default: none)",
    )
    group.add_argument(
        "--sparse-divergence",
        type=float,
        metavar="D",
        help="flexprefill: how near a head's attention must be to its estimate for that to choose the blocks "
        f"(default {SparseConfig.divergence})",
    )
    group.add_argument(
        "--sparse-min-blocks",
        type=int,
        metavar="N",
        help="flexprefill: columns and diagonals of blocks that every head computes at least "
        f"(default {SparseConfig.min_blocks})",
    )


def sparse_config(options: argparse.Namespace) -> SparseConfig | None:
    """Make the settings of sparse attention, if any; they may be those of a method of that name.

    Raises:
        ValueError: a value is out of range, or has no effect.
    """
    method = options.sparse or (options.method if options.method in SPARSE_NAMES else None)
    given = {}
    for option, (setting, owner) in _SETTINGS.items():
        value = getattr(options, option)
        if value is None:
            continue
        if method is None or owner not in (None, method):
            wanted = "--sparse, or a sparse --method" if owner is None else f"--sparse or --method {owner}"
            raise ValueError(f"--{option.replace('_', '-')} needs {wanted}")
        given[setting] = value
    return None if options.sparse is None and not given else SparseConfig(method=method, **given)
