"""The measurement of a vision tower: its calls, and that it refuses wrong results."""

from contextlib import contextmanager

import pytest
import torch
import video_tower

SIZES = {"num_frames": 4, "size": (150, 260), "dtype": "float32", "device": "cpu", "rounds": 1}


def test_calls_are_counted_and_both_ways_timed():
    """Two temporal patches of 2 x 3 windows each, of 8 x 8 patches, 8 x 2, 2 x 8 and 2 x 2."""
    figures = video_tower.measure(video_tower.Tower(depth=2, hidden=16, heads=2), **SIZES)
    assert figures["grid"] == [2, 10, 18]
    sdpa, packed = figures["ways"]["sdpa"], figures["ways"]["packed"]
    assert sdpa["attention_calls"] == 2 * 6 + 2  # one layer of windows, one of frames
    assert packed["attention_calls"] == 3 + 1  # 8 x 2 and 2 x 8 have one length
    assert all(len(way["raw"]) == 1 and way["seconds"] > 0 and way["cpu_seconds"] > 0 for way in (sdpa, packed))


def test_wrong_embeddings_have_no_speed(monkeypatch):
    @contextmanager
    def wrong(parts):
        with torch.no_grad():
            parts.model.model.visual.blocks[0].attn.proj.weight.neg_()
        yield

    monkeypatch.setitem(video_tower.WAYS, "packed", wrong)
    with pytest.raises(AssertionError, match="differ by"):
        video_tower.measure(video_tower.Tower(depth=2, hidden=16, heads=2), **SIZES)
