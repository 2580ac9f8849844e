"""Clips are made here with PyAV; the reference is always PyAV's plain decoding of the whole file."""

import itertools
import pickle
import struct
import tracemalloc
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apbv.input import video
from apbv.input.video import VideoError, VideoInfo, probe, read_frames, sample_fps, sample_uniform

OPEN_GOP = "open-gop=1:b-pyramid=normal:b-adapt=0:scenecut=0:bframes=3"


def picture(i, height=48, width=64):
    """uint8 [height, width, 3], different for every i, without symmetry."""
    y, x = np.mgrid[:height, :width]
    image = np.stack([(3 * x + 5 * i) % 256, (4 * y + 3 * i) % 256, np.full_like(x, 7 * i % 256)], axis=-1)
    image[4:12, 2 * i % (width - 8) :][:, :8] = 255
    return image.astype(np.uint8)


def encode(
    path, n=50, codec="libx264", gop=10, bframes=2, x264=None, pts=None, rotate=None, draw=picture,
    pixels="yuv420p", size=(48, 64), container=None,
):  # fmt: skip
    """Write n frames at 25 fps, or with times `pts` in ms. `rotate`: arguments of set_display_rotation.

    x264 does not write the same bytes every time, so no two encodings of the same frames can be compared.
    """
    if codec not in av.codecs_available:
        pytest.skip(f"PyAV comes without {codec}")
    with av.open(str(path), "w", options=container or {}) as out:
        stream = out.add_stream(codec, rate=25)
        stream.height, stream.width, stream.pix_fmt = *size, pixels
        stream.codec_context.gop_size = gop
        if bframes is not None:
            stream.codec_context.max_b_frames = bframes
        if codec in ("libx264", "libx265"):
            key = f"{codec[3:]}-params"
            stream.options = {key: f"keyint={gop}:min-keyint=1:{x264 or 'scenecut=0'}:log-level=0"}
        if rotate is not None:
            stream.set_display_rotation(*rotate)
        if pts is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for i in range(n):
            frame = av.VideoFrame.from_ndarray(draw(i, *size), format="rgb24").reformat(format=pixels)
            if pts is not None:
                frame.pts, frame.time_base = pts[i], Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return str(path)


def remux(source, target, change):
    """Copy packets for which change(number, packet) is true; it may change them."""
    with av.open(source) as a, av.open(str(target), "w") as b:
        stream = b.add_stream_from_template(a.streams.video[0])
        for i, packet in enumerate(p for p in a.demux(video=0) if p.size):
            packet = change(i, packet)
            if packet:
                packet.stream = stream
                b.mux(packet)
    return str(target)


def packets_of(path):
    with av.open(path) as container:
        return [(p.pos, p.size, p.pts, p.is_keyframe) for p in container.demux(video=0) if p.size]


def decode_all(path):
    with av.open(path) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def overwrite(path, target, position, data):
    content = bytearray(Path(path).read_bytes())
    content[position : position + len(data)] = data
    target.write_bytes(content)
    return str(target)


def edit_list(source, target, segments):
    """Replace the only entry of an mp4's edit list by (ms, frames skipped at the start) for each segment."""
    content = bytearray(Path(source).read_bytes())
    at = content.index(b"elst") + 12
    _, start = struct.unpack_from(">Ii", content, at - 0)
    entries = [struct.pack(">IiI", ms, start + 512 * skip, 0x10000) for ms, skip in segments]
    struct.pack_into(">I", content, at - 4, len(entries))
    content[at : at + 12] = b"".join(entries)
    for box in (b"elst", b"edts", b"trak", b"moov"):
        size_at = content.index(box) - 4
        struct.pack_into(
            ">I", content, size_at, struct.unpack_from(">I", content, size_at)[0] + 12 * len(entries) - 12
        )
    target.write_bytes(content)
    return str(target)


def dts_for_pts(_, packet):
    packet.dts = packet.pts = packet.dts + 1024  # from 0; what VLC writes to mp4
    return packet


VFR = list(itertools.accumulate([5000] + [40, 20, 500, 1, 41, 40, 300] * 7))
CLIPS = {
    "mp4": lambda d: encode(d / "a.mp4"),
    "mp4 open gop": lambda d: encode(d / "a.mp4", gop=7, x264=OPEN_GOP),
    "mp4 gop 2": lambda d: encode(d / "a.mp4", gop=2, x264=OPEN_GOP),
    "mp4 intra": lambda d: encode(d / "a.mp4", gop=1),
    "mp4 fragments": lambda d: encode(d / "a.mp4", container={"movflags": "frag_keyframe+empty_moov"}),
    "mp4 late, variable rate": lambda d: encode(d / "a.mp4", pts=VFR, gop=9, x264=OPEN_GOP),
    "mp4 edit list": lambda d: edit_list(encode(d / "b.mp4"), d / "a.mp4", [(1000, 15)]),
    "mp4 edit lists": lambda d: edit_list(encode(d / "b.mp4"), d / "a.mp4", [(600, 5), (800, 23), (400, 5)]),
    "mp4 intra refresh": lambda d: encode(
        d / "a.mp4", n=100, gop=12, bframes=0, x264="intra-refresh=1:scenecut=0"
    ),
    "mp4 dts for pts": lambda d: remux(encode(d / "b.mp4"), d / "a.mp4", dts_for_pts),
    "mp4 hevc open gop": lambda d: encode(
        d / "a.mp4", codec="libx265", bframes=None, gop=7, x264="open-gop=1:bframes=3:scenecut=0"
    ),
    "mp4 interlaced": lambda d: encode(d / "a.mp4", x264="interlaced=1", size=(64, 64)),
    "mkv late, variable rate": lambda d: encode(d / "a.mkv", pts=VFR, gop=9, x264=OPEN_GOP),
    "mkv unseekable": lambda d: encode(d / "a.mkv", container={"live": "1"}),
    "webm vp9": lambda d: encode(d / "a.webm", codec="libvpx-vp9", bframes=None),
    "ts": lambda d: encode(d / "a.ts", gop=7, x264=OPEN_GOP),
    "flv": lambda d: encode(d / "a.flv"),
    "avi mpeg4": lambda d: encode(d / "a.avi", codec="mpeg4"),
    "avi h264": lambda d: encode(d / "a.avi"),
    "avi mjpeg": lambda d: encode(d / "a.avi", codec="mjpeg", bframes=None, pixels="yuvj420p"),
    "mpg": lambda d: encode(d / "a.mpg", codec="mpeg2video"),
    "h264": lambda d: encode(d / "a.h264"),
}
FROM_START = {"mp4 dts for pts", "avi mpeg4", "avi h264", "mpg", "h264"}
FRAMES = {"mp4 edit list": 25, "mp4 edit lists": 45, "mp4 intra refresh": 100}


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            path = CLIPS[name](tmp_path_factory.mktemp("clip"))
            made[name] = path, probe(path), decode_all(path)
        return made[name]

    return get


@pytest.fixture
def fed(monkeypatch):
    """List of the sizes of packets given to the decoder: one packet, one frame decoded."""
    sizes = []
    original = video._decode

    def decode(stream, packet):
        sizes.extend([packet.size] if packet is not None else [])
        return original(stream, packet)

    monkeypatch.setattr(video, "_decode", decode)
    return sizes


@pytest.mark.parametrize("name", CLIPS)
def test_any_frames_equal_those_of_decoding_everything(clip, name):
    _, info, reference = clip(name)
    assert info.num_frames == len(reference) == FRAMES.get(name, 50)
    assert (info.height, info.width) == reference[0].shape[:2]
    assert bool(info.packets) == (name not in FROM_START)

    @settings(max_examples=12, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.sets(st.integers(0, len(reference) - 1), min_size=1).map(sorted))
    def check(indices):
        got = read_frames(info, indices)
        assert got.dtype == np.uint8
        for index, image in zip(indices, got, strict=True):
            assert np.array_equal(image, reference[index]), index

    check()
    assert np.array_equal(read_frames(info, range(len(reference))), reference)


@pytest.mark.parametrize(
    "name", ["mp4 open gop", "ts", "mkv late, variable rate", "mp4 edit list", "mp4 intra refresh"]
)
def test_every_single_frame(clip, name):
    _, info, reference = clip(name)
    for index, image in enumerate(reference):
        assert np.array_equal(read_frames(info, [index])[0], image), index


def test_threads_make_no_difference(tmp_path):
    """Also for a long run, which they share."""
    path = encode(tmp_path / "a.mp4", n=300, gop=30, x264=OPEN_GOP, size=(16, 32))
    info, reference = probe(path), decode_all(path)
    assert len(video._plan(info, video._keyframes(info.packets), list(range(300)))) > 2
    for indices in (range(300), range(3, 300, 29)):
        expected = [reference[i] for i in indices]
        for threads in (0, 1, 2, 7):
            assert np.array_equal(read_frames(info, indices, threads), expected)
    at, size, *_ = packets_of(path)[150]
    broken = probe(overwrite(path, tmp_path / "b.mp4", at, b"\0" * size))
    for threads in (1, 4):
        with pytest.raises(VideoError, match=r"b\.mp4: a frame among"):
            read_frames(broken, range(300), threads)


@pytest.mark.parametrize("name", ["mp4 late, variable rate", "mkv late, variable rate"])
def test_variable_rate_times(clip, name):
    _, info, _ = clip(name)
    assert info.timestamps == pytest.approx([(t - VFR[0]) / 1000 for t in VFR], abs=1e-9)
    assert info.timestamps[0] == 0
    assert info.fps == pytest.approx(49_000 / (VFR[-1] - VFR[0]))
    assert info.duration == pytest.approx(50 / info.fps)


@pytest.mark.parametrize("name", sorted(CLIPS.keys() - {"mp4 late, variable rate", "mkv late, variable rate"}))
def test_constant_rate_times(clip, name):
    _, info, reference = clip(name)
    assert info.timestamps == pytest.approx([i / 25 for i in range(len(reference))], abs=1e-6)
    assert info.fps == pytest.approx(25, abs=1e-4)
    assert info.duration == pytest.approx(len(reference) / 25, abs=1e-4)


def test_info_travels_between_hosts(clip):
    _, info, reference = clip("mp4")
    assert pickle.loads(pickle.dumps(info)) == info
    assert np.array_equal(read_frames(pickle.loads(pickle.dumps(info)), [7])[0], reference[7])


def test_single_frame(tmp_path):
    info = probe(encode(tmp_path / "a.mp4", n=1))
    assert (info.timestamps, info.fps, info.duration) == ((0.0,), 25, 0.04)
    assert read_frames(info, [0]).shape == (1, 48, 64, 3)
    assert sample_fps(info, 2) == sample_uniform(info, 8) == [0]


def test_colours(tmp_path):
    red = probe(encode(tmp_path / "a.mp4", n=3, draw=lambda i, h, w: np.full((h, w, 3), (220, 30, 90), np.uint8)))
    assert np.abs(read_frames(red, [1]).astype(int) - (220, 30, 90)).max() <= 6


# What is decoded.


def test_probe_decodes_one_frame(clip, fed):
    for name in ("mp4", "mkv late, variable rate", "ts", "avi mjpeg"):
        path, *_ = clip(name)
        fed.clear()
        probe(path)
        assert len(fed) == 1, name


@pytest.mark.parametrize("name", ["mp4", "mp4 late, variable rate", "mkv late, variable rate", "flv", "webm vp9"])
def test_last_frames_decode_little(clip, fed, name):
    _, info, _ = clip(name)
    fed.clear()
    read_frames(info, [48, 49])
    assert len(fed) <= 10  # a group of pictures


def test_frames_are_found_by_seeking(clip, monkeypatch):
    for name in (
        "mp4",
        "mp4 gop 2",
        "mp4 open gop",
        "mp4 edit lists",
        "mkv late, variable rate",
        "ts",
        "flv",
    ):
        _, info, reference = clip(name)
        with monkeypatch.context() as patch:
            patch.delattr(video._Reader, "reopen")  # what it does where seeking fails
            got = read_frames(info, [1, 17, 30, 44])
        assert np.array_equal(got, [reference[i] for i in (1, 17, 30, 44)])


def test_seek_to_other_packets_than_probed(clip, monkeypatch):
    _, info, reference = clip("ts")
    original = video._Reader.packets_between

    def packets_between(reader, start, stop):
        for i, packet in enumerate(original(reader, start, stop)):
            if i == 3 and reader.can_seek:
                raise video._SeekFailed
            yield packet

    monkeypatch.setattr(video._Reader, "packets_between", packets_between)
    for index in (2, 24, 49):
        assert np.array_equal(read_frames(info, [index])[0], reference[index])


def test_frame_displayed_before_its_keyframe(clip, fed):
    """It is decoded from the keyframe before, at once."""
    path, info, reference = clip("mp4 open gop")
    packets = packets_of(path)
    second, third = (i for i, packet in enumerate(packets[:15]) if packet[3] and i)
    index = info.frame_packets.index(third) - 1
    assert info.frame_packets[index] > third
    fed.clear()
    assert np.array_equal(read_frames(info, [index])[0], reference[index])
    assert len(fed) == info.frame_packets[index] + 1 - second


def test_group_of_pictures_is_decoded_only_as_far_as_needed(clip, fed):
    _, info, _ = clip("mp4")
    fed.clear()
    read_frames(info, [0, 20, 21, 40])
    assert len(fed) <= 1 + 4 + 1  # B-frames take up to two frames after them
    fed.clear()
    read_frames(info, range(50))
    assert len(fed) == 50


def test_intact_frames_of_a_destroyed_file(clip, tmp_path):
    path, info, reference = clip("mp4")
    packets = packets_of(path)
    start, end = packets[10][0], packets[40][0]
    broken = overwrite(path, tmp_path / "a.mp4", start, b"\0" * (end - start))
    assert probe(broken).timestamps == info.timestamps
    assert np.array_equal(read_frames(probe(broken), [5, 42, 49]), [reference[i] for i in (5, 42, 49)])
    with pytest.raises(VideoError, match=r"a\.mp4: a frame among 5\.\.20 cannot be decoded"):
        read_frames(probe(broken), [5, 20, 49])


def test_holds_no_other_frames(tmp_path):
    info = probe(encode(tmp_path / "a.mp4", n=60, gop=60, size=(240, 320)))
    frame = 240 * 320 * 3
    read_frames(info, [0])
    tracemalloc.start()
    read_frames(info, [57, 59])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 2 * frame <= peak < 5 * frame


# Orientation.


@pytest.mark.parametrize("mirror", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_orientation(tmp_path, degrees, mirror):
    path = encode(tmp_path / "a.mp4", n=12, rotate=(degrees, *mirror))
    stored = decode_all(path)
    info = probe(path)
    with av.open(path) as container:
        assert next(container.decode(video=0)).rotation % 360 == degrees or any(mirror)
    expected = np.rot90(stored, degrees // 90, axes=(1, 2))
    expected = expected[:, :: -1 if mirror[1] else 1, :: -1 if mirror[0] else 1]
    assert (info.height, info.width) == expected.shape[1:3] == ((64, 48) if degrees % 180 else (48, 64))
    assert np.array_equal(read_frames(info, [0, 3, 11]), expected[[0, 3, 11]])


def test_phone_held_upright(tmp_path):
    """The matrix that phones write for "rotate by 90 degrees clockwise to display", as bytes of the file."""
    path = encode(tmp_path / "b.mp4", n=3)
    content = Path(path).read_bytes()
    matrix = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 48 << 16, 0, 1 << 30)
    info = probe(overwrite(path, tmp_path / "a.mp4", content.index(b"tkhd") + 4 + 40, matrix))
    assert np.array_equal(read_frames(info, [2])[0], np.rot90(decode_all(path)[2], -1))


def test_slanted(tmp_path):
    with pytest.raises(VideoError, match="no multiple of 90 degrees"):
        probe(encode(tmp_path / "a.mp4", n=3, rotate=(45,)))


# Unusual streams.


@pytest.mark.parametrize("codec", ["libx264", "libx265", "mpeg2video"])
def test_start_cut_off_an_open_group(tmp_path, codec):
    """The first frames displayed refer to frames that are gone: they are no frames of this video."""
    path = encode(tmp_path / "b.mkv", codec=codec, bframes=None if codec == "libx265" else 3, gop=7, x264=OPEN_GOP)
    second = [i for i, packet in enumerate(packets_of(path)) if packet[3]][1]
    for first in (second, second - 3):
        cut = remux(path, tmp_path / "a.mkv", lambda i, packet: packet if i >= first else None)  # noqa: B023
        info, reference = probe(cut), decode_all(cut)
        assert info.num_frames == len(reference) < len(packets_of(cut))
        assert info.timestamps[0] == 0
        assert np.array_equal(read_frames(info, range(info.num_frames)), reference)
        assert np.array_equal(read_frames(info, [1, 30]), [reference[1], reference[30]])


def test_predicted_frames_marked_as_keyframes(tmp_path):
    """A decoder that starts there gives out pictures, but wrong ones."""

    def mark(i, packet):
        packet.is_keyframe = packet.is_keyframe or i % 10 == 5
        return packet

    path = remux(encode(tmp_path / "b.flv", codec="flv", bframes=0), tmp_path / "a.flv", mark)
    assert [packet[3] for packet in packets_of(path)[:16]].count(True) == 4
    info, reference = probe(path), decode_all(path)
    for i in (5, 16, 28, 49):
        assert np.array_equal(read_frames(info, [i])[0], reference[i])


def test_hidden_vp8_packets(tmp_path):
    path = encode(tmp_path / "b.webm", codec="libvpx", bframes=None, n=30)
    content = bytearray(Path(path).read_bytes())
    for i in (4, 17):
        at = packets_of(path)[i][0]
        with av.open(path) as container:
            data = bytes([p for p in container.demux(video=0)][i])
        at = content.index(data, at)
        content[at] &= ~0x10  # the bit "show this frame"
    (tmp_path / "a.webm").write_bytes(content)
    path = str(tmp_path / "a.webm")
    info, reference = probe(path), decode_all(path)
    assert info.num_frames == len(reference) == 28
    assert info.timestamps[3:5] == pytest.approx((0.12, 0.2))
    assert np.array_equal(read_frames(info, range(28)), reference)


def test_times_in_another_order_than_the_pictures(tmp_path):
    """Neither order can be trusted, so neither is used."""

    def swap(i, packet):
        packet.pts = 80 + {14: pts[15], 15: pts[14]}.get(i, packet.pts)  # none before its decoding time
        return packet

    path = encode(tmp_path / "b.mkv", bframes=0)
    pts = [packet[2] for packet in packets_of(path)]
    info = probe(remux(path, tmp_path / "a.mkv", swap))
    with pytest.raises(VideoError, match=r"a\.mkv: "):
        read_frames(info, range(50))
    assert len(read_frames(info, range(20, 30))) == 10


def test_jump_back_in_time_is_not_taken_for_reordering():
    assert video._nearly_sorted([0, 4, 2, 1, 3, 8, 6, 5, 7])
    assert not video._nearly_sorted([*range(50, 100), *range(50)])
    assert not video._nearly_sorted([0, 1, 1, 2])


def test_size_change(tmp_path):
    parts = [encode(tmp_path / f"{h}.h264", n=10, size=(h, 64)) for h in (48, 96)]
    (tmp_path / "a.h264").write_bytes(b"".join(Path(p).read_bytes() for p in parts))
    info = probe(tmp_path / "a.h264")
    assert read_frames(info, [9]).shape == (1, 48, 64, 3)
    with pytest.raises(VideoError, match=r"a\.h264: the frame size changes"):
        read_frames(info, [9, 12])


# Files that are no good.


def audio(path):
    with av.open(str(path), "w") as out:
        stream = out.add_stream("aac" if path.suffix in (".mp4", ".mkv") else "pcm_s16le", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.int16), format="s16", layout="mono")
        frame.sample_rate = 16000
        out.mux(stream.encode(frame))
        out.mux(stream.encode())


def playlist(path):
    encode(path.parent / "real.mp4", n=3)
    path.write_text("ffconcat version 1.0\nfile real.mp4\n")


def no_frames(path):
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=25)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        out.start_encoding()


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
        ("folder.mp4", lambda path: path.mkdir(), "not a regular file"),
        ("empty.mp4", lambda path: path.touch(), "cannot be read as a video"),
        ("text.mp4", lambda path: path.write_text("no video\n" * 99), "cannot be read as a video"),
        ("text.txt", lambda path: path.write_text("no video\n" * 99), "cannot be read as a video"),
        ("noise.mkv", lambda path: path.write_bytes(bytes(range(256)) * 99), "cannot be read as a video"),
        ("list.ffconcat", playlist, "cannot be read as a video"),
        ("audio.mp4", audio, "has no video stream"),
        ("audio.mkv", audio, "has no video stream"),
        ("audio.wav", audio, "cannot be read as a video"),
        ("noframes.mkv", no_frames, "has no video|cannot be"),
        ("noframes.mp4", no_frames, "has no video|cannot be"),
        ("noindex.mp4", part(0.5), "cannot be read as a video"),
        ("head.mp4", part(0.6, {"movflags": "faststart"}), "is cut short"),
        ("fragments.mp4", part(0.6, {"movflags": "frag_keyframe+empty_moov"}), "is cut short"),
        ("half.mkv", part(0.6), "is cut short"),
        ("half.avi", part(0.6), "is cut short"),
        ("half.flv", part(0.6), "is cut short"),
    ],
)  # fmt: skip
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
    with pytest.raises(VideoError, match=r"a\.mp4: .*cannot be decoded"):
        probe(overwrite(path, tmp_path / "a.mp4", at, b"\0" * size))


def test_stream_without_its_header(tmp_path):
    """mpegts repeats the h264 header at some keyframes only, so what is cut out may lack it."""
    path = encode(tmp_path / "b.mkv", gop=30, n=40, x264=OPEN_GOP)
    second = [i for i, packet in enumerate(packets_of(path)) if packet[3]][1]
    cut = remux(path, tmp_path / "a.ts", lambda i, packet: packet if i >= second else None)
    with pytest.raises(VideoError, match=r"a\.ts: its first frame cannot be decoded"):
        probe(cut)


def test_cut_between_frames(tmp_path):
    """No packet is incomplete, so only the file's index tells."""
    path = encode(tmp_path / "b.mp4", container={"movflags": "faststart"})
    (tmp_path / "a.mp4").write_bytes(Path(path).read_bytes()[: packets_of(path)[30][0]])
    with pytest.raises(VideoError, match="is cut short"):
        probe(tmp_path / "a.mp4")


@pytest.mark.parametrize("length", [1, 60])
@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi"])
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


def test_no_frame_is_made_up_for_a_lost_one(tmp_path):
    """A packet without a picture: its frame is an error, the others come."""
    path = encode(tmp_path / "b.mkv", bframes=0)
    at, size, *_ = packets_of(path)[9]
    with av.open(path) as container:
        data = bytes([p for p in container.demux(video=0)][9])
    at = Path(path).read_bytes().index(data, at)
    # A filler NAL unit of the same length
    filler = struct.pack(">I", size - 4) + b"\x0c" + b"\xff" * (size - 6) + b"\x80"
    info = probe(overwrite(path, tmp_path / "a.mkv", at, filler))
    reference = decode_all(path)
    with pytest.raises(VideoError, match=r"frame among 9\.\.9 cannot be decoded"):
        read_frames(info, [9])
    assert np.array_equal(read_frames(info, [8, 10]), [reference[8], reference[10]])


def test_file_replaced_after_probe(tmp_path):
    info = probe(encode(tmp_path / "a.mp4"))
    encode(tmp_path / "a.mp4", draw=lambda i, h, w: picture(3 * i, h, w))
    with pytest.raises(VideoError, match="changed since it was probed"):
        read_frames(info, [20])
    (tmp_path / "a.mp4").unlink()
    with pytest.raises(VideoError, match="no such file"):
        read_frames(info, [20])


def test_indices(clip):
    for name in ("mp4", "avi h264"):
        _, info, _ = clip(name)
        assert read_frames(info, []).shape == (0, 48, 64, 3)
        assert read_frames(info, np.array([2, 5])).shape == (2, 48, 64, 3)
        for indices in ([3, 2], [2, 2]):
            with pytest.raises(ValueError, match="ascending"):
                read_frames(info, indices)
        for indices in ([-1, 2], [3, 50]):
            with pytest.raises(IndexError):
                read_frames(info, indices)


# Sampling.


def info_at(times):
    fps = (len(times) - 1) / times[-1] if len(times) > 1 else 25
    return VideoInfo("a", tuple(times), 2, 2, fps, False, False, False, (), ())


@given(st.integers(0, 2000), st.integers(1, 300))
def test_uniform(n, k):
    got = sample_uniform(n, k)
    assert len(got) == min(n, k)
    assert got == sorted(set(got))
    if len(got) > 1:
        assert (got[0], got[-1]) == (0, n - 1)
        steps = np.diff(got)
        assert steps.max() - steps.min() <= 1
        exact = [Fraction(i * (n - 1), len(got) - 1) for i in range(len(got))]
        assert all(abs(g - e) <= Fraction(1, 2) for g, e in zip(got, exact, strict=True))
    if n:
        assert sample_uniform(info_at([i / 25 for i in range(n)]), k) == got


def test_uniform_examples():
    assert sample_uniform(10, 4) == [0, 3, 6, 9]
    assert sample_uniform(4, 3) == [0, 2, 3]
    assert sample_uniform(7, 1) == [0]
    for n, k in ((5, 0), (-1, 2)):
        with pytest.raises(ValueError, match="cannot sample"):
            sample_uniform(n, k)


@given(
    st.lists(st.integers(1, 400), max_size=60).map(lambda steps: list(itertools.accumulate([0, *steps]))),
    st.fractions(Fraction(1, 5), 60, max_denominator=7),
)
def test_fps_takes_the_nearest_frames(ms, fps):
    grid = [i / fps for i in range(int(Fraction(ms[-1], 1000) * fps) + 1)]
    expected = {min(range(len(ms)), key=lambda i: abs(Fraction(ms[i], 1000) - t)) for t in grid}
    assert sample_fps(info_at([t / 1000 for t in ms]), float(fps)) == sorted(expected)


def test_fps_examples():
    info = info_at([i / 25 for i in range(250)])
    assert sample_fps(info, 1) == list(range(0, 250, 25))
    assert sample_fps(info, 2) == sorted([*range(0, 250, 25), *range(12, 250, 25)])  # ties to the earlier
    assert sample_fps(info, 25) == sample_fps(info, 1e9) == list(range(250))
    ties = [min(range(250), key=lambda i: abs(Fraction(i, 25) - Fraction(k, 10))) for k in range(100)]
    assert sample_fps(info, 10) == ties
    assert sample_fps(info, 1, max_frames=4) == sample_uniform(250, 4)
    assert sample_fps(info, 1, max_frames=10) == list(range(0, 250, 25))
    assert sample_fps(info, 0.01, min_frames=4) == sample_uniform(250, 4)
    assert sample_fps(info_at([0, 0.04]), 1, min_frames=4) == [0, 1]


def test_fps_of_a_variable_rate_clip(clip):
    _, info, _ = clip("mp4 late, variable rate")
    times = np.array(info.timestamps)
    chosen = times[sample_fps(info, 2)]
    assert len(chosen) <= 2 * info.timestamps[-1] + 1 < info.num_frames / 2
    for t in np.arange(0, info.timestamps[-1], 0.5):
        assert np.abs(times - t).min() == np.abs(chosen - t).min()


@pytest.mark.parametrize(
    "args", [(0,), (-1,), (float("nan"),), (float("inf"),), (1e308,), (10**400,), (1, 0), (1, 5, 4)]
)
@pytest.mark.filterwarnings("error")
def test_fps_arguments(args):
    with pytest.raises(ValueError, match=r"fps must lie in|need 1 <="):
        sample_fps(info_at([0, 1]), *args)
