"""On the way to a wanted frame the decoder leaves out what nobody refers to, and gives out the same
picture."""

import av
import numpy as np
import pytest

from apbv.input.media.video import probe, read_frames
from apbv.input.media.video.file import VideoFile

from apbv_tests.video_files import encode

PYRAMID = "b-pyramid=normal:b-adapt=0:scenecut=0:bframes=5:ref=4"
TEMPORAL_LAYERS = "bframes=4:scenecut=0:open-gop=0:temporal-layers=3"
X265 = {"codec": "libx265", "bframes": None}
# What is encoded how, and whether the decoder may leave anything out.
STREAMS = {
    "h264 b-pyramid": ("mp4", {"x264": PYRAMID}, True),
    "h264 interlaced": ("mp4", {"x264": PYRAMID + ":interlaced=1", "size": (64, 64)}, True),
    "h264 no b-frames": ("mp4", {"bframes": 0}, False),
    "hevc": ("mp4", {**X265, "x264": "bframes=4:scenecut=0"}, True),
    "hevc open gop": (
        "mkv",
        {**X265, "x264": "open-gop=1:bframes=3:b-adapt=0:scenecut=0", "gop": 8},
        True,
    ),
    "hevc in a broadcast": ("ts", {**X265, "x264": "bframes=4:scenecut=0"}, False),
    "hevc temporal layers": ("mp4", {**X265, "x264": TEMPORAL_LAYERS}, False),
    "mpeg2": ("ts", {"codec": "mpeg2video"}, True),
}


@pytest.fixture
def counts(monkeypatch):
    """How many packets were given to decoders, and how many frames came out of them."""
    seen = {"packets": 0, "frames": 0}
    original = VideoFile.decode

    def decode(file, packet, *args):
        frames = original(file, packet, *args)
        seen["packets"] += packet is not None
        seen["frames"] += len(frames)
        return frames

    monkeypatch.setattr(VideoFile, "decode", decode)
    return seen


def decode_everything(path):
    """Every frame, by a single thread, none left out."""
    with av.open(path) as container:
        container.streams.video[0].codec_context.thread_count = 1
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.mark.parametrize("name", STREAMS)
def test_frames_are_those_of_decoding_everything(tmp_path, counts, name):
    suffix, options, leaves_out = STREAMS[name]
    options = {"gop": 20, **options}
    path = encode(tmp_path / f"a.{suffix}", n=42, **options)
    info = probe(path)
    reference = decode_everything(path)
    assert len(info.pts) == info.num_frames == len(reference) == 42
    counts.update(packets=0, frames=0)
    for index in range(0, 42, 2):
        assert np.array_equal(read_frames(info, [index])[0], reference[index]), index
    if leaves_out:
        assert counts["frames"] < 0.8 * counts["packets"]
    else:
        assert counts["frames"] == counts["packets"]

    for indices in ([1, 2, 5, 19], [21, 40, 41], range(7, 42, 8)):
        assert np.array_equal(read_frames(info, indices), [reference[i] for i in indices]), indices
