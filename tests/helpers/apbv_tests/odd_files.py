"""Video files of kinds that people have and encoders seldom write, made here; each as FFmpeg itself
reads it."""

import re
from fractions import Fraction
from operator import itemgetter
from pathlib import Path

import av
import numpy as np
from av.stream import Disposition

from apbv_tests import field_stream
from apbv_tests.video_files import encode, picture, remux

X265 = {"codec": "libx265", "bframes": None, "x264": "bframes=3:scenecut=0", "gop": 20}


def constant(n: int, fps: int = 25) -> np.ndarray:
    return np.arange(n) / fps


def joined(target, *paths) -> str:
    target.write_bytes(b"".join(Path(path).read_bytes() for path in paths))
    return str(target)


def renamed_boxes(path: str, target, *names: bytes, last: bool = False) -> str:
    """Rename the first boxes of these names in an mp4, or the last: what nobody knows, nobody
    reads."""
    content = Path(path).read_bytes()
    for name in names:
        at = content.rindex(name) if last else content.index(name)
        content = content[:at] + b"skip" + content[at + 4 :]
    target.write_bytes(content)
    return str(target)


def streams(target, change, *paths, options=None) -> str:
    """Copy all streams of files into one, in order of time; change(number, stream, packet) may drop
    some."""
    sources = [av.open(str(path)) for path in paths]
    packets = []
    with av.open(str(target), "w", options=options or {}) as out:
        for number, source in enumerate(sources):
            own = {each.index: out.add_stream_from_template(each) for each in source.streams}
            latest = dict.fromkeys(own, -1e9)
            for packet in source.demux():
                index = packet.stream.index
                if packet.size and change(number, packet.stream, packet):
                    time = packet.pts if packet.dts is None else packet.dts
                    if time is not None:  # else as the one before
                        latest[index] = max(latest[index], float(time * packet.time_base))
                    packet.stream = own[index]
                    packets.append((latest[index], packet))
        for _, packet in sorted(packets, key=itemgetter(0)):
            out.mux(packet)
    for source in sources:
        source.close()
    return str(target)


def shifted(seconds: float, only: str = ""):
    def change(_, stream, packet):
        if stream.type == only or not only:
            off = round(seconds / packet.time_base)
            packet.pts = None if packet.pts is None else packet.pts + off
            packet.dts = None if packet.dts is None else packet.dts + off
        return True

    return change


def lasting(path: str, target, seconds: float) -> str:
    """Let the last frame of a file without reordering stay."""
    with av.open(path) as source:
        count = sum(packet.size > 0 for packet in source.demux(video=0))

    def change(number, packet):
        if number == count - 1:
            packet.duration = round(seconds / packet.time_base)
        return packet

    return remux(path, target, change)


def twins(path: str, target) -> str:
    """Three frames share the time of the first of them."""

    def change(number, packet):
        if number in (7, 8):
            packet.pts = packet.dts = round(6 * 40 / 1000 / packet.time_base)
        return packet

    return remux(path, target, change)


def thumbnail_first(d) -> str:
    with av.open(str(d / "a.mkv"), "w") as out:
        still = out.add_stream("mjpeg", rate=25)
        still.height = 32
        still.width = 48
        still.pix_fmt = "yuvj420p"
        video = out.add_stream("libx264", rate=25)
        video.height = 48
        video.width = 64
        video.pix_fmt = "yuv420p"
        still.disposition = Disposition(0)
        video.disposition = Disposition.default
        frame = av.VideoFrame.from_ndarray(picture(0, 32, 48), format="rgb24").reformat(
            format="yuvj420p"
        )
        frame.pts, frame.time_base = 0, Fraction(1, 25)
        out.mux(still.encode(frame))
        for i in range(30):
            out.mux(video.encode(av.VideoFrame.from_ndarray(picture(i), format="rgb24")))
        out.mux(video.encode())
        out.mux(still.encode())
    return str(d / "a.mkv")


def animation(path) -> str:
    from PIL import Image

    first, *others = (Image.fromarray(picture(i)) for i in range(6))
    first.save(path, save_all=True, append_images=others, duration=100)
    return str(path)


def patched_tags(source: str, target) -> str:
    content = Path(source).read_bytes()
    found = re.search(rb"Lavf\d\d", content)
    target.write_bytes(content[: found.start()] + b"\xe9" + content[found.start() + 1 :])
    return str(target)


VFR_MS = [0, 40, 80, 120, 1000, 1040, 5000, 9000, 9040, 9080, 20000, 20040]
REFRESH = "intra-refresh=1:scenecut=0:bframes=0"

# What makes a file, and the times of its frames.
KINDS = {
    "intra refresh": (
        lambda d: encode(d / "a.mp4", n=60, gop=15, bframes=0, x264=REFRESH),
        constant(60),
    ),
    "intra refresh, cut": (
        lambda d: remux(
            encode(d / "b.mp4", n=60, gop=15, bframes=0, x264=REFRESH),
            d / "a.mkv",
            lambda i, p: p if i > 20 else None,
        ),
        None,
    ),
    "fields in mkv": (lambda d: field_stream.write(d / "a.mkv", late=True), constant(12)),
    "fields in mp4": (
        lambda d: field_stream.write(d / "a.mp4", late=True, scaling=True),
        constant(12),
    ),
    "fields in ts": (lambda d: field_stream.write(d / "a.ts", late=True), constant(12)),
    "intra refresh in ts": (
        lambda d: encode(d / "a.ts", n=90, gop=20, bframes=0, x264=REFRESH),
        constant(90),
    ),
    "fields behind frames": (
        lambda d: field_stream.write(d / "a.mkv", frames=(0, 1, 2, 7)),
        constant(12),
    ),
    "fields and frames": (
        lambda d: field_stream.write(d / "a.mkv", frames=(2, 3, 7)),
        constant(12),
    ),
    "both fields in a packet": (  # of which FFmpeg does not give out the last
        lambda d: field_stream.write(d / "a.mp4", together=True),
        constant(11),
    ),
    "HEVC without a sync table": (
        lambda d: renamed_boxes(encode(d / "b.mp4", n=60, **X265), d / "a.mp4", b"stss"),
        constant(60),
    ),
    "MPEG-4 without a sync table": (
        lambda d: renamed_boxes(
            encode(d / "b.mp4", n=40, codec="mpeg4", gop=12, bframes=0), d / "a.mp4", b"stss"
        ),
        constant(40),
    ),
    "twins": (
        lambda d: twins(encode(d / "b.webm", n=30, codec="libvpx", bframes=None), d / "a.mkv"),
        np.sort([*constant(30)[:7], 0.24, 0.24, *constant(30)[9:]]),
    ),
    "times at a variable rate": (
        lambda d: encode(d / "a.mp4", n=12, pts=VFR_MS),
        np.array(VFR_MS) / 1000,
    ),
    "negative times": (
        lambda d: streams(
            d / "a.mkv",
            shifted(-1.5),
            encode(d / "b.mkv", n=60),
            options={"avoid_negative_ts": "disabled"},
        ),
        constant(60),
    ),
    "last frame stays": (
        lambda d: lasting(encode(d / "b.mp4", n=30, bframes=0), d / "a.mp4", 16),
        constant(30),
    ),
    "picture first": (thumbnail_first, constant(30)),
    "two recordings": (
        lambda d: joined(d / "a.ts", encode(d / "b.ts", n=20), encode(d / "c.ts", n=60)),
        constant(80),
    ),
    "size grows": (
        lambda d: joined(
            d / "a.ts", encode(d / "b.ts", n=20), encode(d / "c.ts", n=20, size=(96, 128))
        ),
        constant(40),
    ),
    "tags in Latin-1": (
        lambda d: patched_tags(encode(d / "b.mkv", n=20), d / "a.mkv"),
        constant(20),
    ),
    "a colon in the name": (lambda d: encode(d / "12:30.mp4", n=20), constant(20)),
    "GIF": (lambda d: animation(d / "a.gif"), constant(6, 10)),
    "animated PNG": (lambda d: animation(d / "a.png"), constant(6, 10)),
}
if "webp_anim" in av.formats_available:
    KINDS["animated WebP"] = (lambda d: animation(d / "a.webp"), constant(6, 10))
