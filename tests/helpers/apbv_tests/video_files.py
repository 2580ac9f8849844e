"""Video files of many kinds, made here with PyAV, and PyAV's plain decoding of them."""

import itertools
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

OPEN_GOP = "open-gop=1:b-pyramid=normal:b-adapt=0:scenecut=0:bframes=3"


def picture(i, height=48, width=64):
    """uint8 [height, width, 3], different for every i, without symmetry."""
    y, x = np.mgrid[:height, :width]
    image = np.stack(
        [(3 * x + 5 * i) % 256, (4 * y + 3 * i) % 256, np.full_like(x, 7 * i % 256)], axis=-1
    )
    image[4:12, 2 * i % (width - 8) :][:, :8] = 255
    return image.astype(np.uint8)


def encode(
    path,
    n=50,
    codec="libx264",
    gop=10,
    bframes=2,
    x264=None,
    pts=None,
    rotate=None,
    draw=picture,
    pixels="yuv420p",
    size=(48, 64),
    container=None,
):
    """Write n frames at 25 fps, or with times `pts` in ms. `rotate`: arguments of
    set_display_rotation.

    x264 does not write the same bytes every time, so no two encodings of the same frames can be
    compared.
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
            frame = av.VideoFrame.from_ndarray(draw(i, *size), format="rgb24").reformat(
                format=pixels
            )
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
    """Replace the only entry of an mp4's edit list by (ms, frames skipped at the start) for each
    segment."""
    content = bytearray(Path(source).read_bytes())
    at = content.index(b"elst") + 12
    _, start = struct.unpack_from(">Ii", content, at)
    entries = [struct.pack(">IiI", ms, start + 512 * skip, 0x10000) for ms, skip in segments]
    struct.pack_into(">I", content, at - 4, len(entries))
    content[at : at + 12] = b"".join(entries)
    for box in (b"elst", b"edts", b"trak", b"moov"):
        size_at = content.index(box) - 4
        struct.pack_into(
            ">I",
            content,
            size_at,
            struct.unpack_from(">I", content, size_at)[0] + 12 * len(entries) - 12,
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
    "mp4 fragments": lambda d: encode(
        d / "a.mp4", container={"movflags": "frag_keyframe+empty_moov"}
    ),
    "mp4 late, variable rate": lambda d: encode(d / "a.mp4", pts=VFR, gop=9, x264=OPEN_GOP),
    "mp4 edit list": lambda d: edit_list(encode(d / "b.mp4"), d / "a.mp4", [(1000, 15)]),
    "mp4 edit lists": lambda d: edit_list(
        encode(d / "b.mp4"), d / "a.mp4", [(600, 5), (800, 23), (400, 5)]
    ),
    "mp4 dts for pts": lambda d: remux(encode(d / "b.mp4"), d / "a.mp4", dts_for_pts),
    "mp4 hevc open gop": lambda d: encode(
        d / "a.mp4", codec="libx265", bframes=None, gop=7, x264="open-gop=1:bframes=3:scenecut=0"
    ),
    "mkv late, variable rate": lambda d: encode(d / "a.mkv", pts=VFR, gop=9, x264=OPEN_GOP),
    "webm vp9": lambda d: encode(d / "a.webm", codec="libvpx-vp9", bframes=None),
    "ts": lambda d: encode(d / "a.ts", gop=7, x264=OPEN_GOP),
    "flv": lambda d: encode(d / "a.flv"),
    "avi mpeg4": lambda d: encode(d / "a.avi", codec="mpeg4"),
    "avi h264": lambda d: encode(d / "a.avi"),
    "avi mjpeg": lambda d: encode(d / "a.avi", codec="mjpeg", bframes=None, pixels="yuvj420p"),
    "mpg": lambda d: encode(d / "a.mpg", codec="mpeg2video"),
    "h264": lambda d: encode(d / "a.h264"),
}
