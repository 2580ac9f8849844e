"""Clips are made here with PyAV; the reference is always PyAV's plain decoding of the whole
file."""

from pathlib import Path

import av
import numpy as np
import pytest

from apbv.input.media.video import VideoError, probe, read_frames
from apbv.input.media.video.file import VideoFile

from apbv_tests.pairs import each_choice
from apbv_tests.video_files import OPEN_GOP, decode_all, encode, overwrite, packets_of, remux


@pytest.fixture
def fed(monkeypatch):
    """List of the sizes of packets given to the decoder: one packet, one frame decoded."""
    sizes = []
    original = VideoFile.decode

    def decode(file, packet, *args):
        sizes.extend([packet.size] if packet is not None else [])
        return original(file, packet, *args)

    monkeypatch.setattr(VideoFile, "decode", decode)
    return sizes


# What is decoded.


def test_little_is_decoded(encoded, fed):
    for name in ("mp4", "mp4 late, variable rate", "mkv late, variable rate", "flv", "webm vp9"):
        path, info, _ = encoded(name)
        fed.clear()
        probe(path)
        assert len(fed) == 1
        read_frames(info, [48, 49])
        assert len(fed) <= 1 + 10  # a group of pictures
    _, info, _ = encoded("mp4")
    fed.clear()
    read_frames(info, [0, 20, 21, 40])
    assert len(fed) <= 1 + 4 + 1  # B-frames take up to two frames after them
    fed.clear()
    read_frames(info, range(50))
    assert len(fed) == 50


def test_frames_are_found_by_seeking(encoded, monkeypatch):
    opened = []
    plain = VideoFile.open
    monkeypatch.setattr(VideoFile, "open", lambda file: (opened.append(0), plain(file)))
    for name in ("mp4", "mp4 open gop", "mp4 edit list", "mkv late, variable rate", "ts", "flv"):
        _, info, reference = encoded(name)
        opened.clear()
        got = read_frames(info, [1, 8, 17, 24], threads=1)
        assert np.array_equal(got, [reference[i] for i in (1, 8, 17, 24)])
        assert len(opened) == 1  # not again, as where seeking fails


def test_frame_displayed_before_its_keyframe(encoded, fed):
    """It is decoded from the keyframe before, at once."""
    path, info, reference = encoded("mp4 open gop")
    packets = packets_of(path)
    second, third = (i for i, packet in enumerate(packets[:15]) if packet[3] and i)
    index = int(np.searchsorted(info.pts, packets[third][2])) - 1
    place = next(i for i, packet in enumerate(packets) if packet[2] == info.pts[index])
    assert place > third
    fed.clear()
    assert np.array_equal(read_frames(info, [index])[0], reference[index])
    assert len(fed) == place + 1 - second


def test_intact_frames_of_a_destroyed_file(encoded, tmp_path):
    path, info, reference = encoded("mp4")
    packets = packets_of(path)
    start = packets[10][0]
    end = packets[40][0]
    broken = overwrite(path, tmp_path / "a.mp4", start, b"\0" * (end - start))
    assert np.array_equal(probe(broken).timestamps, info.timestamps)
    assert np.array_equal(
        read_frames(probe(broken), [5, 42, 49]), [reference[i] for i in (5, 42, 49)]
    )
    with pytest.raises(VideoError, match=r"a\.mp4: .*cannot be decoded"):
        read_frames(probe(broken), [5, 20, 49])


# Orientation.


@each_choice(degrees=[0, 90, 180, 270], mirror=[(False, False), (True, False), (False, True)])
def test_orientation(tmp_path, degrees, mirror):
    path = encode(tmp_path / "a.mp4", n=12, rotate=(degrees, *mirror))
    stored = decode_all(path)
    info = probe(path)
    with av.open(path) as container:
        assert next(container.decode(video=0)).rotation % 360 == degrees or any(mirror)
    expected = np.rot90(stored, degrees // 90, axes=(1, 2))
    expected = expected[:, :: -1 if mirror[1] else 1, :: -1 if mirror[0] else 1]
    size = (64, 48) if degrees % 180 else (48, 64)
    assert (info.height, info.width) == expected.shape[1:3] == size
    assert np.array_equal(read_frames(info, [0, 3, 11]), expected[[0, 3, 11]])


# Unusual streams.


def test_start_cut_off_an_open_group(tmp_path):
    """The first frames displayed refer to frames that are gone: they are no frames of this
    video."""
    path = encode(tmp_path / "b.mkv", bframes=3, gop=7, x264=OPEN_GOP)
    second = [i for i, packet in enumerate(packets_of(path)) if packet[3]][1]
    for first in (second, second - 3):
        cut = remux(path, tmp_path / "a.mkv", lambda i, packet: packet if i >= first else None)  # noqa: B023
        info = probe(cut)
        reference = decode_all(cut)
        assert info.num_frames == len(reference) < len(packets_of(cut))
        assert info.timestamps[0] == 0
        assert np.array_equal(read_frames(info, range(info.num_frames)), reference)
        assert np.array_equal(read_frames(info, [1, 30]), [reference[1], reference[30]])


def test_size_change(tmp_path):
    parts = [encode(tmp_path / f"{h}.h264", n=10, size=(h, 64)) for h in (48, 96)]
    (tmp_path / "a.h264").write_bytes(b"".join(Path(p).read_bytes() for p in parts))
    info = probe(tmp_path / "a.h264")
    assert read_frames(info, [9]).shape == (1, 48, 64, 3)
    with pytest.warns(
        UserWarning, match=r"a\.h264: the frame size changes .* scaled to the first one's, 64x48"
    ):
        got = read_frames(info, [9, 12])
    with av.open(info.path) as container:
        frames = [
            frame.reformat(64, 48, "rgb24", interpolation="BICUBIC")
            for frame in container.decode(video=0)
        ]
    assert np.array_equal(got, [frames[9].to_ndarray(), frames[12].to_ndarray()])
