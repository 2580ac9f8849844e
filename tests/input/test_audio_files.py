"""Audio is what sounds in the file, in one channel, at the model's rate, and beside the video's
frames."""

import av
import numpy as np
import pytest

from apbv.input.media.audio import AudioError, has_audio, read_audio
from apbv.input.media.video import probe

from apbv_tests.audio_files import RATE, tune, write
from apbv_tests.video_files import encode, overwrite

_WINDOW = RATE // 50


def loudness(samples: np.ndarray, count: int) -> np.ndarray:
    """Of each of the first windows the loudest sample."""
    return np.abs(samples[: count * _WINDOW].reshape(count, _WINDOW)).max(axis=1)


def assert_sounds_like(samples, expected):
    """As loud as expected in every fiftieth of a second, but for those in which the loudness
    changes.

    It changes ten times a second. Codecs move sound by a few milliseconds.
    """
    assert samples.dtype == np.float32
    assert abs(len(samples) - len(expected)) < 0.1 * RATE  # of the last packet
    count = min(len(samples), len(expected)) // _WINDOW
    difference = loudness(samples, count) - loudness(expected, count)
    assert np.quantile(np.abs(difference), 0.75) < 0.006


@pytest.mark.parametrize(
    ("name", "codec", "rate"),
    [("a.wav", "pcm_s16le", 44100), ("a.mp3", "libmp3lame", 48000), ("a.m4a", "aac", 44100)],
)
def test_a_file_is_read_in_one_channel_at_the_rate_that_is_wanted(tmp_path, name, codec, rate):
    path = write(tmp_path / name, [(0, 2)], codec, rate, channels=(1.0, 0.5))
    assert has_audio(path)
    assert_sounds_like(read_audio(path, RATE, 10), 0.75 * tune(0, 2))


@pytest.mark.parametrize("name", ["12:30.wav", "12:30.mp4"])
def test_names_may_look_like_addresses_and_tags_have_any_encoding(tmp_path, monkeypatch, name):
    video = (0, 1) if name.endswith("mp4") else None
    path = write(tmp_path / name, [(0, 1)], "aac" if video else "pcm_s16le", video=video)
    with av.open(f"file:{path}") as source:  # an encoder's name, as FFmpeg itself writes it
        content = (tmp_path / name).read_bytes()
        position = content.index(
            next(iter({**source.metadata, **source.streams[0].metadata}.values())).encode()
        )
    overwrite(path, tmp_path / name, position, b"\xe9")
    monkeypatch.chdir(tmp_path)
    assert has_audio(name)
    assert_sounds_like(read_audio(name, RATE, 10), tune(0, 1))
    if video:
        assert probe(name).num_frames == 25


@pytest.mark.parametrize(
    ("start", "name", "codec"),
    [(0.0, "a.mp4", "aac"), (0.0, "a.ts", "aac"), (0.4, "a.mkv", "flac")],
)
def test_sound_begins_with_the_first_frame(tmp_path, start, name, codec):
    """Also where the track begins before the frames, or after them."""
    path = write(tmp_path / name, [(0, 2)], codec, video=(start, 2))
    assert_sounds_like(read_audio(path, RATE, 10, clock=probe(path).clock), tune(start, 2))
    assert_sounds_like(read_audio(path, RATE, 10), tune(0, 2))
    late = write(tmp_path / f"late-{name}", [(0.7, 2)], codec, video=(0, 2))
    expected = np.concatenate([np.zeros(round(0.7 * RATE), np.float32), tune(0.7, 2)])
    assert_sounds_like(read_audio(late, RATE, 10, clock=probe(late).clock), expected)


def test_a_gap_in_the_track_is_silent(tmp_path):
    path = write(tmp_path / "a.mkv", [(0, 1), (1.5, 2)], video=(0, 2))
    expected = tune(0, 2)
    expected[RATE : round(1.5 * RATE)] = 0
    assert_sounds_like(read_audio(path, RATE, 10, clock=probe(path).clock), expected)


def test_no_more_is_read_than_is_wanted(tmp_path):
    path = write(tmp_path / "a.wav", [(0, 2)])
    assert len(read_audio(path, RATE, 10, seconds=0.75)) == round(0.75 * RATE)
    whole = read_audio(path, RATE, 10, seconds=5)
    np.testing.assert_array_equal(whole, read_audio(path, RATE, 10))
    assert len(read_audio(path, RATE, 2)) == 2 * RATE


def test_what_cannot_be_heard_is_refused(tmp_path):
    sound = write(tmp_path / "a.wav", [(0, 2)])
    with pytest.raises(AudioError, match=r"a\.wav: has more audio than the 1 seconds"):
        read_audio(sound, RATE, 1)
    with pytest.raises(AudioError, match="more audio than the 1 seconds"):
        read_audio(sound, RATE, 1, seconds=1.5)
    silent = encode(tmp_path / "silent.mp4", n=10)
    assert not has_audio(silent)
    with pytest.raises(AudioError, match=r"silent\.mp4: has no audio track"):
        read_audio(silent, RATE, 10)
    empty = write(tmp_path / "empty.wav", [])
    with pytest.raises(AudioError, match=r"empty\.wav: its audio track is empty"):
        read_audio(empty, RATE, 10)
    for path, reason in (
        (tmp_path / "none.mp3", "no such file"),
        (tmp_path, "cannot be decoded .it is not a regular file"),
    ):
        for read in (has_audio, lambda path: read_audio(str(path), RATE, 10)):
            with pytest.raises(AudioError, match=reason):
                read(path)


def test_a_damaged_track_is_refused(tmp_path):
    path = write(tmp_path / "a.m4a", [(0, 2)], "aac")
    with av.open(path) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux() if packet.size]
    position, size = packets[len(packets) // 2]
    broken = overwrite(path, tmp_path / "broken.m4a", position, b"\x00" * size)
    with pytest.raises(AudioError, match=r"broken\.m4a: the audio cannot be decoded"):
        read_audio(broken, RATE, 10)
