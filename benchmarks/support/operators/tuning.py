"""Finds the fastest tiles of the attention kernels on a GPU, for kernels/tiles.json."""

import json
import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
import triton
from tqdm import tqdm

from apbv.kernels import tiles, triton_attention

from .attention import block, verify
from .case import Case, Draw, Sizes
from .selection import importance
from .timing import Contender, Timer, check, measure

# Keys, warps and stages: of few rows of queries, and of many, with rows.
_FEW = [(32, 8, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 8, 2)]
_MANY = [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 4, 2), (128, 64, 4, 3)]
_IMPORTANCE = [
    (64, 128, 4, 2),
    (64, 128, 4, 3),
    (128, 128, 8, 2),
    (64, 64, 4, 3),
    (32, 128, 4, 3),
    (128, 64, 4, 2),
]
_QUERIES = (1, 4, 8, 16)


@dataclass(frozen=True)
class Use:
    """What tiles are chosen for.

    Attributes:
        name: of a list in the table.
        most_rows: up to which it is; None: any.
        case: what is timed.
        candidates: tiles as in the table: rows, keys, warps and stages.
    """

    name: str
    most_rows: int | None
    case: Case
    candidates: list[tuple[int, ...]]


def uses(sizes: Sizes) -> Iterator[Use]:
    """Yield every use: windows of tokens in a row and in a tree, a prefill's block, and the rank of its keys."""
    for name, queries in product(("few", "masked"), _QUERIES):
        if name == "masked" and queries == 1:
            continue
        rows = max(16, triton.next_power_of_2(queries * sizes.heads // sizes.kv_heads))
        tiled, most_rows = ([rows], rows) if rows <= 64 else ([64, 128], None)
        candidates = [(each, *rest) for each, rest in product(tiled, _FEW)]
        yield Use(name, most_rows, verify(sizes, queries, tree=name == "masked"), candidates)
    yield Use("many", None, block(sizes), _MANY)
    yield Use("importance", None, importance(sizes, "peak"), _IMPORTANCE)


def tune(timer: Timer, sizes: Sizes, dtype: torch.dtype, rounds: int, warmup: int, path: Path) -> Iterator[dict]:
    """Yield a row for every tile of every use, and write the table with the fastest ones of this GPU."""
    gpu, table = tiles.gpu_of(timer.device)[0], json.loads(tiles.TABLE.read_text(encoding="utf-8"))
    dim = triton.next_power_of_2(sizes.head_dim)
    table[gpu] = {}
    for use in tqdm(list(uses(sizes)), unit="use", disable=None):
        num_sets = timer.num_sets(use.case.bytes(dtype))
        sets = [use.case.make(Draw(seed, timer.device, dtype)) for seed in range(num_sets)]
        entries = [Contender("triton", with_tile(gpu, use, dim, tile)) for tile in use.candidates]
        check(use.case, sets[0], dtype, entries)
        measure(timer, sets, entries, rounds, warmup)
        times = {
            tile: statistics.median(each.ms) for tile, each in zip(use.candidates, entries, strict=True) if each.ms
        }
        fastest = min(times, key=times.get, default=None)
        if fastest is not None:
            table[gpu].setdefault(use.name, []).append([dim, use.most_rows, *fastest])
            path.write_text(formatted(table), encoding="utf-8")
        floor = max(use.case.flops / timer.flops, use.case.bytes(dtype) / timer.bandwidth) * 1e3
        now = tiles.tile_of(use.name, use.candidates[-1][0], dim, dtype.itemsize, timer.device)
        for tile, entry in zip(use.candidates, entries, strict=True):
            yield {
                "use": use.name,
                "case": f"{use.case.op}, {use.case.label}",
                "tile": tile,
                "ms": times.get(tile),
                "share_of_ceiling": floor / times[tile] if tile in times else None,
                "is_fastest": tile == fastest,
                "is_default": tile == (now.rows, now.keys, now.num_warps, now.num_stages),
                "wrong": entry.wrong,
            }


def with_tile(gpu: str, use: Use, dim: int, tile: tuple[int, ...]) -> Callable:
    """Return a function that computes a use's case with a tile."""

    def run(operands: tuple):
        with chosen(gpu, {use.name: [[dim, None, *tile]]}):
            return use.case.run(operands, "triton")

    return run


@contextmanager
def chosen(gpu: str, lists: dict[str, list[list]]) -> Iterator[None]:
    """Let a GPU's tiles be these."""
    plans = triton_attention._plan_verification, triton_attention._plan_segments
    with patch.dict(tiles._table(), {gpu: lists}):
        for plan in plans:
            plan.cache_clear()  # which remembers tiles
        yield
    for plan in plans:
        plan.cache_clear()


def formatted(table: dict) -> str:
    """Format a table of tiles, a tile a line."""
    text = json.dumps(table, indent=2)
    return re.sub(r"\[\s+([^\[\]]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


COLUMNS = {
    "use": "{use}",
    "case": "{case}",
    "rows, keys, warps, stages": lambda row: ", ".join(map(str, row["tile"])) + " (now)" * row["is_default"],
    "ms": lambda row: f"{row['ms']:.3g}" + " (fastest)" * row["is_fastest"] if row["ms"] else row["wrong"][:60],
    "of ceiling": "{share_of_ceiling:.0%}",
}
