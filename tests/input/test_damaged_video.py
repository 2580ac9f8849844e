"""Files that are damaged, or no videos at all: an error that says so, and never a made-up frame."""

import av
import numpy as np
import pytest

from apbv.input.media.video import VideoError, probe, read_frames

from apbv_tests.pairs import each_choice
from apbv_tests.video_files import decode_all, encode, overwrite, packets_of, picture


def audio(path):
    with av.open(str(path), "w") as out:
        stream = out.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 4096), np.int16), format="s16", layout="mono"
        )
        frame.sample_rate = 16000
        out.mux(stream.encode(frame))
        out.mux(stream.encode())


def playlist(path):
    encode(path.parent / "real.mp4", n=3)
    path.write_text("ffconcat version 1.0\nfile real.mp4\n")


def part(n, container=None):
    def make(path):
        encode(path, container=container)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * n)])

    return make


@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        ("missing.mp4", lambda path: None, "no such file"),
        ("slanted.mp4", lambda path: encode(path, n=3, rotate=(45,)), "90 degrees"),
        ("text.mp4", lambda path: path.write_text("no video\n" * 99), "cannot be read as a video"),
        ("list.ffconcat", playlist, "cannot be read as a video"),
        ("audio.mp4", audio, "has no video stream"),
        ("head.mp4", part(0.6, {"movflags": "faststart"}), "is cut short"),
        ("fragments.mp4", part(0.6, {"movflags": "frag_keyframe+empty_moov"}), "is cut short"),
        ("half.avi", part(0.6), "is cut short"),
        ("half.flv", part(0.6), "is cut short"),
    ],
)
def test_unusable(tmp_path, name, make, reason):
    path = tmp_path / name
    make(path)
    with pytest.raises(VideoError, match=reason) as caught:
        probe(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_first_frame_destroyed(tmp_path):
    path = encode(tmp_path / "b.mp4")
    at, size, *_ = packets_of(path)[0]
    info = probe(overwrite(path, tmp_path / "a.mp4", at, b"\0" * size))
    # The groups that begin.
    assert np.array_equal(read_frames(info, range(info.num_frames)), decode_all(path)[10:])


@each_choice(suffix=["mp4", "mkv", "avi"], length=[1, 60])
def test_damage_is_not_concealed(tmp_path, suffix, length):
    """All lengths stay right, so the decoder goes on and makes up the picture. It must tell."""
    path = encode(tmp_path / f"b.{suffix}", n=30, size=(144, 192))
    reference = decode_all(path)
    at, size, *_ = packets_of(path)[13]
    noise = np.random.default_rng(0).integers(1, 256, length, np.uint8).tobytes()
    for offset in range(30, size - length, 5):
        path = overwrite(tmp_path / f"b.{suffix}", tmp_path / f"a.{suffix}", at + offset, noise)
        with av.open(path) as container:
            container.streams.video[0].codec_context.thread_count = 1
            if any(frame.is_corrupt for frame in container.decode(video=0)):
                break  # not all damage can be told from other data
    else:
        pytest.fail("no damage that the decoder notices")
    broken = probe(path)
    with pytest.raises(VideoError, match=r"damaged|decoded"):
        read_frames(broken, range(30))
    good = 0
    for i in range(30):
        try:
            assert np.array_equal(read_frames(broken, [i])[0], reference[i])
            good += 1
        except VideoError as error:
            assert f"a.{suffix}: " in str(error)
    assert good >= 10  # the group before, at least


def test_a_frame_is_no_better_than_one_that_it_refers_to(tmp_path):
    """A B-frame comes out of the decoder before the damaged frame that it was predicted from."""
    path = encode(
        tmp_path / "b.mp4", n=20, gop=20, bframes=1, x264="b-adapt=0:scenecut=0", size=(144, 192)
    )
    info = probe(path)
    reference = decode_all(path)
    packets = packets_of(path)
    forward = next(i for i in range(9, 20) if packets[i][2] > packets[i + 1][2])
    between = info.pts.tolist().index(packets[forward + 1][2])
    at, size, *_ = packets[forward]
    noise = np.random.default_rng(0).integers(1, 256, 60, np.uint8).tobytes()
    for offset in range(30, size - 60, 5):
        broken = overwrite(path, tmp_path / "a.mp4", at + offset, noise)
        with av.open(broken) as container:
            container.streams.video[0].codec_context.thread_count = 1
            frames = [
                frame
                for _, frame in zip(range(between + 2), container.decode(video=0), strict=False)
            ]
        if frames[-1].is_corrupt and not np.array_equal(
            frames[-2].to_ndarray(format="rgb24"), reference[between]
        ):
            break
    else:
        pytest.fail("no damage that the decoder notices and conceals")
    assert not frames[-2].is_corrupt
    for indices in ([between], range(between + 1), range(20)):
        with pytest.raises(
            VideoError, match=r"a\.mp4: a frame cannot be decoded: the data is damaged"
        ):
            read_frames(probe(broken), indices)
    assert np.array_equal(read_frames(probe(broken), range(between)), reference[:between])


def test_file_replaced_after_probe(tmp_path):
    info = probe(encode(tmp_path / "a.mp4"))
    encode(tmp_path / "a.mp4", n=49, draw=lambda i, h, w: picture(3 * i, h, w))
    with pytest.raises(VideoError, match="changed since it was probed"):
        read_frames(info, [20])
    (tmp_path / "a.mp4").unlink()
    with pytest.raises(VideoError, match="no such file"):
        read_frames(info, [20])
