"""Frames decoded chunk by chunk: the same frames, in bounded memory, and nothing left behind."""

import contextlib
import gc
import os
import threading
import tracemalloc

import numpy as np
import pytest

from apbv.input.video import VideoError, decoding, iter_frames, probe, read_frames
from apbv.input.video.file import VideoFile

from pairs import each_choice, pairwise
from video_files import OPEN_GOP, decode_all, encode, overwrite


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A path, what the probe says, and all frames: 120 of them, in groups of 10."""
    path = encode(tmp_path_factory.mktemp("stream") / "a.mp4", n=120, gop=10, x264=OPEN_GOP)
    return path, probe(path), np.stack(decode_all(path))


@pytest.fixture
def fed(monkeypatch):
    """The packets given to decoders, by their byte offsets."""
    seen = []
    original = VideoFile.decode

    def decode(file, packet, *args):
        seen.extend([packet.pos] if packet is not None else [])
        return original(file, packet, *args)

    monkeypatch.setattr(VideoFile, "decode", decode)
    return seen


def open_files(path):
    """How many descriptors of this process are the file."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.path.samefile(f"/proc/self/fd/{number}", path)
    return found


@pairwise(
    indices=[range(120), range(2, 120, 11), [0], [119], [5, 6, 7, 40, 41, 118]],
    chunk_len=[1, 7, 120, 1000],
    threads=[1, 2, 5],
)
def test_chunks_are_the_frames_cut_into_pieces(clip, indices, chunk_len, threads):
    _, info, reference = clip
    chunks = list(iter_frames(info, indices, chunk_len, threads))
    assert [len(chunk) for chunk in chunks[:-1]] == [chunk_len] * (len(chunks) - 1)
    assert 0 < len(chunks[-1]) <= chunk_len
    assert all(chunk.dtype == np.uint8 for chunk in chunks)
    assert np.array_equal(np.concatenate(chunks), reference[list(indices)])


def test_arguments_are_refused_at_once(clip):
    _, info, _ = clip
    for indices, chunk_len, error in (([1], 0, ValueError), ([2, 1], 4, ValueError), ([120], 4, IndexError)):
        with pytest.raises(error):
            iter_frames(info, indices, chunk_len)
    assert list(iter_frames(info, [], 4)) == []


def test_a_group_that_spans_chunks_is_decoded_once(tmp_path, fed):
    path = encode(tmp_path / "a.mp4", n=60, gop=60)
    info = probe(path)
    fed.clear()
    assert sum(len(chunk) for chunk in iter_frames(info, range(60), 8, 3)) == 60
    assert len(fed) == len(set(fed)) == 60


@pytest.mark.parametrize(("gop", "threads"), [(250, 4), (10, 4)])
def test_few_frames_are_in_memory(tmp_path, monkeypatch, gop, threads):
    """Two chunks at most, and in each thread one frame that has no place yet; also while nobody asks for more."""
    chunk_len, height, width = 8, 96, 128
    info = probe(encode(tmp_path / "a.mp4", n=250, gop=gop, size=(height, width)))
    waiting, most, ahead = [], [0], threading.Event()
    place, filled = decoding._Chunks.place, decoding._Chunks.filled

    def counted_place(chunks, row):
        waiting.append(row)
        most[0] = max(most[0], len(waiting))
        return place(chunks, row)

    def counted_filled(chunks, row):
        waiting.remove(row)
        if row == 2 * chunk_len - 1:
            ahead.set()
        return filled(chunks, row)

    monkeypatch.setattr(decoding._Chunks, "place", counted_place)
    monkeypatch.setattr(decoding._Chunks, "filled", counted_filled)
    tracemalloc.start()
    rows = 0
    for chunk in iter_frames(info, range(250), chunk_len, threads):
        rows += len(chunk)
        ahead.wait()
        del chunk
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == 250
    # Beside the chunks each thread has its frame in RGB, and for a moment a copy of it.
    assert 1 <= peak / (chunk_len * height * width * 3) < 2.5 + 2 * threads / chunk_len
    assert most[0] <= threads


# An end before the end.


@each_choice(threads=[1, 4], taken=[0, 1, 3])
def test_closing_or_dropping_ends_the_threads_and_closes_the_file(clip, threads, taken):
    path, info, _ = clip
    before = set(threading.enumerate())
    chunks = iter_frames(info, range(120), 9, threads)
    for _ in range(taken):
        next(chunks)
    assert taken == 0 or set(threading.enumerate()) > before
    chunks.close()
    assert set(threading.enumerate()) <= before and open_files(path) == 0
    with pytest.raises(StopIteration):
        next(chunks)
    chunks = iter_frames(info, range(120), 5, threads)
    next(chunks)
    del chunks
    gc.collect()
    assert set(threading.enumerate()) <= before and open_files(path) == 0


@pytest.mark.parametrize("threads", [1, 4])
def test_damage_is_told_with_the_chunk_that_it_is_in(clip, tmp_path, threads):
    path, info, reference = clip
    at, size = int(info.packets.pos[70]), int(info.packets.size[70])
    broken = probe(overwrite(path, tmp_path / "b.mp4", at, b"\0" * size))
    bad = []
    for i in range(120):
        try:
            read_frames(broken, [i])
        except VideoError:
            bad.append(i)
    assert bad
    for chunk_len in (1, 7, 50):
        before, got = set(threading.enumerate()), []
        with pytest.raises(VideoError, match=rf"b\.mp4: frame {bad[0]} cannot be decoded"):
            got.extend(iter_frames(broken, range(120), chunk_len, threads))
        assert sum(len(chunk) for chunk in got) == bad[0] // chunk_len * chunk_len
        assert np.array_equal(np.concatenate(got), reference[: bad[0] // chunk_len * chunk_len])
        assert set(threading.enumerate()) <= before and open_files(tmp_path / "b.mp4") == 0
    good = [i for i in range(120) if i not in bad]
    assert np.array_equal(np.concatenate(list(iter_frames(broken, good, 7, threads))), reference[good])
