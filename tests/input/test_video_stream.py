"""Frames decoded chunk by chunk: the same frames, in bounded memory, and nothing left behind."""

import contextlib
import gc
import os
import threading
import tracemalloc

import numpy as np
import pytest

from apbv.input.media.video import VideoError, frames, iter_frames, probe, read_frames
from apbv.input.media.video.file import VideoFile

from apbv_tests.pairs import each_choice, pairwise
from apbv_tests.video_files import OPEN_GOP, decode_all, encode, overwrite, packets_of


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
    for indices, chunk_len, error in (
        ([1], 0, ValueError),
        ([2, 1], 4, ValueError),
        ([120], 4, IndexError),
    ):
        with pytest.raises(error):
            iter_frames(info, indices, chunk_len)
    assert list(iter_frames(info, [], 4)) == []


def test_a_group_that_spans_chunks_is_decoded_once(tmp_path, fed):
    path = encode(tmp_path / "a.mp4", n=60, gop=60)
    info = probe(path)
    fed.clear()
    assert sum(len(chunk) for chunk in iter_frames(info, range(60), 8, 3)) == 60
    assert len(fed) == len(set(fed)) == 60


@pytest.mark.parametrize("gop", [250, 10])
def test_few_frames_are_in_memory(tmp_path, monkeypatch, gop):
    """Two chunks at most, and in each thread one frame that has no place yet; also while nobody
    asks for more."""
    chunk_len = 8
    height = 96
    width = 128
    threads = 4
    info = probe(encode(tmp_path / "a.mp4", n=250, gop=gop, size=(height, width)))
    ahead = threading.Event()
    put = frames.FrameChunks.put

    def noted(chunks, row, image):
        if row == 2 * chunk_len:
            ahead.set()
        return put(chunks, row, image)

    monkeypatch.setattr(frames.FrameChunks, "put", noted)
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
def test_damage_ends_all(clip, tmp_path, threads):
    path, _, reference = clip
    at, size, *_ = packets_of(path)[70]
    broken = probe(overwrite(path, tmp_path / "b.mp4", at, b"\0" * size))
    for chunk_len in (1, 7, 50):
        before = set(threading.enumerate())
        got = []
        with pytest.raises(VideoError, match=r"b\.mp4: .*cannot be decoded"):
            got.extend(iter_frames(broken, range(120), chunk_len, threads))
        done = np.concatenate(got) if got else reference[:0]
        assert np.array_equal(done[:68], reference[: len(done)][:68])  # before the damage
        assert set(threading.enumerate()) <= before and open_files(tmp_path / "b.mp4") == 0
    assert np.array_equal(read_frames(broken, [5, 40, 119]), reference[[5, 40, 119]])
