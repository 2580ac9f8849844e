"""torchcodec as a back end: the same frames where it can, and PyAV's or an error where it cannot."""

import contextlib
import itertools
import sys

import numpy as np
import pytest
from odd_files import KINDS

from apbv.input.video import VideoError, iter_frames, probe, read_frames, reading
from apbv.input.video.torchcodec_reading import load_decoder, torchcodec_chunks

from pairs import each_choice

SAME = ["mp4 open gop", "mp4 late, variable rate", "mp4 edit lists", "mp4 hevc open gop", "webm vp9"]


@pytest.fixture
def decoder() -> type:
    try:
        return load_decoder()
    except ImportError:
        pytest.skip("torchcodec is not installed")


needs_torchcodec = pytest.mark.usefixtures("decoder")


def read(info, indices, chunk_len=50, **options):
    return np.concatenate(list(iter_frames(info, indices, chunk_len, **{"backend": "torchcodec", **options})))


def test_without_torchcodec(encoded, monkeypatch):
    """Whoever asks for it is told at once; a GPU alone is no reason to."""
    _, info, reference = encoded("mp4")
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    with pytest.raises(ImportError, match="torchcodec"):
        iter_frames(info, [0], 1, backend="torchcodec")
    chunks = list(iter_frames(info, [3, 30, 49], 2, device="cuda"))
    assert np.array_equal(np.concatenate(chunks), [reference[i] for i in (3, 30, 49)])


@needs_torchcodec
@each_choice(name=SAME, threads=[1, 2])
def test_frames_are_those_of_pyav(encoded, name, threads):
    _, info, reference = encoded(name)
    for indices in (range(info.num_frames), [0, 7, 20], [info.num_frames - 1]):
        for chunk_len in (4, 50):
            got = read(info, indices, chunk_len, threads=threads)
            assert got.dtype == np.uint8
            assert np.array_equal(got, [reference[i] for i in indices])


@pytest.mark.parametrize("good", [0, 2, 8])
def test_pyav_goes_on_behind_the_chunks_that_came(encoded, good):
    _, info, reference = encoded("mp4")

    def chunks():
        yield from itertools.islice(iter_frames(info, range(50), 6), good)
        raise VideoError("that is all")

    got = list(reading._with_pyav_behind(chunks(), lambda given: iter_frames(info, range(given, 50), 6)))
    assert np.array_equal(np.concatenate(got), reference)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("fields in mp4", "may be fields"),
        ("twins", "the same time"),
        ("MPEG-4 without a sync table", "every frame is marked"),
        ("intra refresh", "refreshed part by part"),
        ("two recordings", "no frame times"),
    ],
)
def test_what_torchcodec_would_read_wrongly_is_refused_before(tmp_path, kind, reason):
    """So that PyAV reads it, where the choice is open."""
    info = probe(KINDS[kind][0](tmp_path))
    with pytest.raises(VideoError, match=f"torchcodec cannot decode it: .*{reason}"):
        next(torchcodec_chunks(None, info, [0], 1, 1, "cpu", lambda thread: contextlib.nullcontext()))


@needs_torchcodec
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*(have no time of their own|frame size changes)")
def test_files_of_all_kinds_are_the_same_or_refused(tmp_path, kind):
    info = probe(KINDS[kind][0](tmp_path))
    with contextlib.suppress(VideoError):
        difference = np.abs(
            read(info, range(info.num_frames)).astype(int) - read_frames(info, range(info.num_frames))
        )
        assert difference.mean() < 1
