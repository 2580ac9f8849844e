"""Files of many kinds are read as FFmpeg decodes the whole of them, at the times that they say."""

import warnings
from fractions import Fraction

import av
import numpy as np
import pytest
from av.stream import Disposition
from PIL import Image

from apbv.input.media.audio import AudioError, has_audio, read_audio
from apbv.input.media.video import VideoError, VideoInfo, probe, read_frames
from apbv.layout import split_evenly

from apbv_tests.audio_files import RATE, tune, write
from apbv_tests.odd_files import KINDS, animation, constant, joined, renamed_boxes, shifted, streams
from apbv_tests.video_files import CLIPS, VFR, decode_all, encode, picture, remux


def cut_at_the_middle(source: str, target, first: int) -> str:
    """A file without its first video packets, but with all of its sound."""
    seen = [0]

    def change(_, stream, packet):
        seen[0] += stream.type == "video"
        return stream.type != "video" or seen[0] > first

    return streams(target, change, source)


# What makes a video with sound, and which parts of `tune` are heard beside its frames.
def _sound(path, start=0.0, stop=3.0, video=(0.0, 3.0), codec="aac", **more) -> str:
    return write(path, [(start, stop)], codec, video=video, **more)


def _fragments(path, options={"movflags": "frag_keyframe+empty_moov+default_base_moof"}) -> str:  # noqa: B006
    return streams(
        path, lambda *_: True, _sound(path.with_suffix(".b.mp4"), codec="flac"), options=options
    )


SOUNDS = {
    "starts in the middle of a group": (
        lambda d: cut_at_the_middle(_sound(d / "b.ts"), d / "a.ts", 16),
        [(None, 3.0)],
    ),
    "picture first, and a late video": (
        lambda d: streams(
            d / "a.mkv",
            lambda number, stream, packet: bool(number or packet.pts == 0),
            encode(d / "c.mkv", codec="mjpeg", bframes=None, pixels="yuvj420p", n=1, size=(32, 48)),
            _sound(d / "b.mkv", video=(2.0, 3.0)),
        ),
        [(2.0, 3.0)],
    ),
    "two recordings in ts": (
        lambda d: joined(
            d / "a.ts", _sound(d / "b.ts", stop=2.0, video=(0, 2)), _sound(d / "c.ts")
        ),
        [(0.0, 2.0), (0.0, 3.0)],
    ),
    "two recordings in fragments": (
        lambda d: joined(d / "a.mp4", _fragments(d / "b.mp4"), _fragments(d / "c.mp4")),
        [(0.0, 3.0), (0.4, 3.0)],  # FFmpeg leaves out the second recording's first group
    ),
    "negative times": (
        lambda d: streams(
            d / "a.mkv",
            shifted(-1.5),
            _sound(d / "b.mkv"),
            options={"avoid_negative_ts": "disabled"},
        ),
        [(0.0, 3.0)],
    ),
    "negative times and late sound": (
        lambda d: streams(
            d / "a.mkv",
            shifted(-1.5),
            _sound(d / "b.mkv", start=0.4),
            options={"avoid_negative_ts": "disabled"},
        ),
        [(None, 0.4), (0.4, 3.0)],
    ),
    "late sound": (lambda d: _sound(d / "a.mp4", start=0.7), [(None, 0.7), (0.7, 3.0)]),
}


FROM_START = {"mp4 dts for pts", "avi mpeg4", "avi h264", "mpg", "h264"} | {
    "intra refresh",
    "intra refresh, cut",
    "intra refresh in ts",
    "GIF",
    "animated WebP",
    "negative times",
    "two recordings",
    "size grows",
}


FRAMES = {"mp4 edit list": 25, "mp4 edit lists": 45}


def times_of(name: str) -> np.ndarray:
    """When the frames of a clip are shown, in seconds."""
    if "variable" in name:
        return np.array(VFR) / 1000 - VFR[0] / 1000
    return constant(FRAMES.get(name, 50))


FILES = KINDS | {name: (make, times_of(name)) for name, make in CLIPS.items()}


def scaled(frames: list[np.ndarray], path: str) -> list[np.ndarray]:
    """Frames, as FFmpeg scales them to the first one's size."""
    with av.open(f"file:{path}") as container:
        stream = container.streams.best("video")
        size = frames[0].shape[1::-1]
        return [
            frame.reformat(*size, "rgb24", interpolation="BICUBIC").to_ndarray()
            for frame in container.decode(stream)
        ]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.filterwarnings("ignore:.*(have no time of their own|frame size changes)")
def test_frames_are_those_of_the_whole_file(tmp_path, kind):
    """All together, some, one by one in any order, and on three hosts that were told what one has
    found."""
    make, times = FILES[kind]
    path = make(tmp_path)
    info = VideoInfo.from_bytes(probe(path).to_bytes())
    reference = scaled([read_frames(info, [0])[0]], path)
    assert info.num_frames == len(reference) > 0
    assert bool(len(info.pts)) == (kind not in FROM_START), "whether a seek finds them"
    if times is not None:
        assert info.timestamps == pytest.approx(times, abs=1e-6 if kind in CLIPS else 0.0011)
    if kind in CLIPS:
        assert info.fps == pytest.approx((len(times) - 1) / times[-1], abs=1e-4)
        assert info.timestamps[0] == 0
        assert "variable" in kind or info.duration == pytest.approx(len(times) / info.fps)
    assert np.array_equal(read_frames(info, range(info.num_frames)), reference)
    places = np.random.default_rng(0).permutation(info.num_frames)[:25].tolist()
    for some in (*([index] for index in places), sorted(places[:4]), sorted(places[:12])):
        assert np.array_equal(read_frames(info, some), [reference[index] for index in some]), some
    shares = [read_frames(info, share) for share in split_evenly(range(info.num_frames), 3)]
    assert np.array_equal(np.concatenate(shares), reference)


def moments(samples: np.ndarray) -> np.ndarray:
    """How loud every hundredth of a second is."""
    step = RATE // 100
    return np.abs(samples[: len(samples) // step * step].reshape(-1, step)).max(axis=1)


@pytest.mark.parametrize("kind", SOUNDS)
@pytest.mark.filterwarnings("ignore:.*have no time of their own")
def test_the_sound_is_that_of_the_frame_shown(tmp_path, kind):
    """To 20 ms: the loudness changes ten times a second."""
    make, parts = SOUNDS[kind]
    path = make(tmp_path)
    info = probe(path)
    heard = read_audio(path, RATE, 60, info.duration, clock=info.clock)
    expected = []
    for start, stop in parts:
        if start is None and len(parts) > 1:
            expected.append(np.zeros(round(stop * RATE), np.float32))
        else:
            expected.append(tune(stop - info.duration if start is None else start, stop))
    wanted = moments(np.concatenate(expected))
    found = moments(heard)
    assert abs(len(found) - len(wanted)) <= 12
    count = min(len(found), len(wanted))
    # Best where it is not moved at all: sound that is off by 20 ms fits better elsewhere.
    fits = {
        off: np.abs(
            found[max(0, off) : count + min(0, off)] - wanted[max(0, -off) : count - max(0, off)]
        ).mean()
        for off in range(-30, 31)
    }
    assert abs(min(fits, key=fits.get)) <= 2, fits


def test_how_long_the_last_frame_is_shown(tmp_path):
    info = probe(KINDS["last frame stays"][0](tmp_path))
    assert info.duration == pytest.approx(29 / 25 + 16, abs=0.01) and info.fps == pytest.approx(25)
    assert probe(encode(tmp_path / "b.mp4", n=30)).duration == pytest.approx(30 / 25)


def test_a_missing_time_is_estimated_with_a_warning(tmp_path):
    path = KINDS["negative times"][0](tmp_path)
    with pytest.warns(UserWarning, match=r"a\.mkv: \d+ of 60 frames have no time of their own"):
        probe(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe(KINDS["twins"][0](tmp_path))


def test_the_track_that_can_be_decoded_is_heard(tmp_path):
    """As phones write it: a track of a codec that nobody knows comes before the other."""
    both = streams(
        tmp_path / "b.mp4",
        lambda *_: True,
        write(tmp_path / "c.mp4", [(0, 1)], "aac"),
        write(tmp_path / "d.mp4", [(1, 2)], "aac"),
    )
    for last, part in ((False, (1, 2)), (True, (0, 1))):
        path = renamed_boxes(both, tmp_path / "a.mp4", b"mp4a", b"esds", last=last)
        assert has_audio(path)
        found = moments(read_audio(path, RATE, 10))
        wanted = moments(tune(*part))
        assert np.median(np.abs(found[: len(wanted)] - wanted[: len(found)])) < 0.006
    neither = renamed_boxes(path, tmp_path / "e.mp4", b"mp4a", b"esds")
    assert not has_audio(neither)
    with pytest.raises(AudioError, match=r"e\.mp4: has no audio track that can be decoded"):
        read_audio(neither, RATE, 10)


def test_rate_and_channels_may_change_within_a_track(tmp_path):
    parts = [
        write(tmp_path / "a.ts", [(0, 2)], "mp2", 48000, channels=(1.0, 0.5)),
        write(tmp_path / "b.ts", [(2, 4)], "mp2", 44100),
    ]
    heard = read_audio(joined(tmp_path / "c.ts", *parts), RATE, 10)
    assert len(heard) / RATE == pytest.approx(4, abs=0.1)
    found = moments(heard)
    for second, loud in ((1, 0.75), (3, 1.0)):
        wanted = moments(loud * tune(second, second + 0.5))
        assert np.median(np.abs(found[100 * second :][: len(wanted)] - wanted)) < 0.02


def test_what_follows_the_last_frame_of_an_mp3_is_no_damage(tmp_path):
    path = write(tmp_path / "a.mp3", [(0, 1)], "libmp3lame", 44100)
    whole = read_audio(path, RATE, 10)
    with open(path, "ab") as file:
        file.write(b"\xff\xfb\x90\x44" + b"JUNK" * 90)
    assert len(read_audio(path, RATE, 10)) == pytest.approx(len(whole), abs=0.06 * RATE)


@pytest.mark.parametrize(
    ("name", "reason"), [("a.webp", "a WebP picture, or an animation"), ("a.tiff", "Invalid")]
)
def test_what_is_no_video_is_told(tmp_path, name, reason):
    path = animation(tmp_path / name)
    if "webp_anim" in av.formats_available:  # which reads the animation
        Image.fromarray(picture(0)).save(path)
    with pytest.raises(VideoError, match=reason):
        probe(path)
    with pytest.raises(AudioError, match=reason):
        read_audio(str(tmp_path / name), RATE, 10)


def test_a_plain_file_is_decoded_as_before(tmp_path):
    path = encode(tmp_path / "a.mp4", n=20)
    assert np.array_equal(read_frames(probe(path), range(20)), decode_all(path))


@pytest.mark.parametrize(
    ("suffix", "codec"),
    [("mkv", "libvpx"), ("mkv", "libvpx-vp9"), ("ts", "libx264"), ("h264", "libx264")],
)
def test_the_largest_frame_is_known(tmp_path, suffix, codec):
    """Browsers' recordings begin small."""
    options = {"codec": codec, "bframes": 0 if codec == "libx264" else None}
    small = encode(tmp_path / f"b.{suffix}", n=10, **options)
    later = [400 + 40 * i for i in range(30)] if suffix == "ts" else None
    large = encode(tmp_path / f"c.{suffix}", n=30, size=(90, 150), pts=later, **options)
    if suffix == "mkv":  # packets of a larger stream behind those of a smaller one

        def change(number, _, packet):
            packet.pts = packet.dts = packet.pts + 400 * number
            return True

        both = streams(tmp_path / "d.mkv", change, small, large)
        with av.open(both) as source, av.open(str(tmp_path / "a.mkv"), "w") as out:
            only = out.add_stream_from_template(source.streams.video[0])
            for packet in source.demux():
                if packet.size:
                    packet.stream = only
                    out.mux(packet)
        path = str(tmp_path / "a.mkv")
    else:
        path = joined(tmp_path / f"a.{suffix}", small, large)
    info = probe(path)
    assert (info.height, info.width, info.most_pixels, info.num_frames) == (48, 64, 90 * 150, 40)
    assert bool(len(info.pts)) == (suffix != "h264")
    with pytest.warns(UserWarning, match="frame size changes") as told:
        assert read_frames(info, [3, 25, 26]).shape == (3, 48, 64, 3)
    assert len(told) == 1
    assert probe(small).most_pixels == 48 * 64 and probe(large).most_pixels == 90 * 150


def test_a_cover_is_no_video(tmp_path):
    with av.open(str(tmp_path / "a.mp3"), "w") as out:
        sound = out.add_stream("libmp3lame", rate=RATE)
        cover = out.add_stream("mjpeg", rate=25)
        cover.height = 32
        cover.width = 48
        cover.pix_fmt = "yuvj420p"
        cover.disposition = Disposition.attached_pic
        frame = av.VideoFrame.from_ndarray(picture(0, 32, 48), format="rgb24").reformat(
            format="yuvj420p"
        )
        frame.pts = 0
        frame.time_base = Fraction(1, 25)
        for packet in [*cover.encode(frame), *cover.encode()]:
            out.mux(packet)
        samples = av.AudioFrame.from_ndarray(tune(0, 1)[None], format="fltp", layout="mono")
        samples.sample_rate = RATE
        for packet in [*sound.encode(samples), *sound.encode()]:
            out.mux(packet)
    with pytest.raises(VideoError, match="has no video stream"):
        probe(tmp_path / "a.mp3")
    assert len(read_audio(str(tmp_path / "a.mp3"), RATE, 10)) == pytest.approx(RATE, abs=0.1 * RATE)


def test_a_clock_that_jitters_leaves_no_holes(tmp_path):
    """Recorders' clocks do; what is missing for longer is silent all the same."""
    rng = np.random.default_rng(0)

    def change(_, stream, packet):
        off = rng.integers(0, 40) / 1000
        if packet.pts * packet.time_base > 2:
            off += 0.06
        packet.pts = packet.dts = packet.pts + round(off / packet.time_base)
        return True

    path = streams(tmp_path / "a.mkv", change, write(tmp_path / "b.mkv", [(0, 5)], "flac", RATE))
    heard = read_audio(path, RATE, 10)
    assert (heard == 0).mean() < 0.04 and len(heard) / RATE == pytest.approx(5.06, abs=0.05)


def test_a_rate_that_changes_in_a_stream_without_times(tmp_path):
    parts = [write(tmp_path / f"{rate}.aac", [(0, 2)], "aac", rate) for rate in (44100, 22050)]
    assert len(read_audio(joined(tmp_path / "c.aac", *parts), RATE, 10)) / RATE == pytest.approx(
        4.1, abs=0.1
    )


def test_recordings_of_mp3_with_tags_are_joined(tmp_path):
    path = write(tmp_path / "a.mp3", [(0, 2)], "libmp3lame", 44100)
    tag = b"ID3\x04\x00\x00\x00\x00\x00\x0a" + bytes(10)
    (tmp_path / "b.mp3").write_bytes(tag + (tmp_path / "a.mp3").read_bytes())
    both = joined(tmp_path / "c.mp3", path, tmp_path / "b.mp3")
    assert len(read_audio(both, RATE, 10)) / RATE == pytest.approx(4, abs=0.15)


def test_a_wild_first_time_is_no_recording(tmp_path):
    from apbv.input.media.video.clock import settle

    times, clock, num_estimated = settle([2000, *range(40, 2400, 40)])
    assert num_estimated == 1 and clock.tolist() == [[0, 0]]
    assert times == pytest.approx(np.arange(0, 2400, 40))


def test_times_that_are_all_the_same_tell_nothing(tmp_path):
    def change(_, packet):
        packet.pts = packet.dts = 1000
        return packet

    source = encode(tmp_path / "b.mkv", n=30, gop=10, bframes=0)
    info = probe(remux(source, tmp_path / "a.mkv", change))
    assert info.timestamps == pytest.approx(np.arange(30) / 25)
    assert info.duration == pytest.approx(30 / 25)
    assert np.array_equal(
        read_frames(info, [3, 17, 29]), [decode_all(info.path)[i] for i in (3, 17, 29)]
    )
