"""Which tiles the attention kernels take, by GPU, use and size."""

import json

import pytest
import torch

from apbv.kernels import tiles

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")


def test_a_gpus_own_tiles_come_first(monkeypatch):
    """Of a use the first that fits; what a GPU has no tiles for, such as wider heads, is as of its
    kind."""
    own = {
        "few": [[32, 16, 16, 64, 4, 2], [32, None, 64, 32, 4, 2]],
        "many": [[32, None, 128, 64, 8, 3]],
    }
    table = json.loads(tiles.TABLE.read_text())
    monkeypatch.setattr(tiles, "tile_table", lambda: {**table, "none": own})

    def sizes(use: str, rows: int) -> list[int]:
        tile = tiles.tile_of(use, rows, 32, 2, CPU)
        return [tile.rows, tile.keys, tile.num_warps, tile.num_stages]

    assert (
        sizes("few", 2) == own["few"][0][2:]
        and sizes("few", 64) == sizes("many", 64) == own["few"][1][2:]
    )
    assert sizes("masked", 40) == own["few"][1][2:] and sizes("many", 300) == own["many"][0][2:]
    assert tiles.tile_of("many", 300, 256, 2, CPU) == tiles.Tile(128, 32, 256, 8, 2)
    assert tiles.tile_of("few", 5, 128, 4, CPU) == tiles.Tile(16, 32, 128, 4, 2)
    assert tiles.tile_of("many", 500, 200, 4, CPU) == tiles.Tile(16, 16, 256, 8, 2)
