"""An H.264 stream whose fields are pictures of their own, as broadcasters write and x264 does not.

Every macroblock holds its samples as they are (I_PCM), so that the encoder is no more than a writer
of bits.
"""

from fractions import Fraction

import av
import numpy as np

from apbv_tests.video_files import picture

WIDTH = 64
HEIGHT = 64


class _Bits:
    def __init__(self):
        self.text = ""

    def u(self, count: int, value: int) -> "_Bits":
        self.text += f"{value:0{count}b}"
        return self

    def ue(self, *values: int) -> "_Bits":
        for value in values:
            code = f"{value + 1:b}"
            self.text += "0" * (len(code) - 1) + code
        return self

    def aligned(self) -> "_Bits":
        self.text += "0" * (-len(self.text) % 8)
        return self

    def unit(self, header: int) -> bytes:
        """With a stop bit, and what keeps data from looking like a start code."""
        self.u(1, 1).aligned()
        data = int(self.text, 2).to_bytes(len(self.text) // 8, "big")
        safe = bytearray()
        zeros = 0
        for byte in data:
            if zeros >= 2 and byte < 4:
                safe.append(3)
                zeros = 0
            safe.append(byte)
            zeros = zeros + 1 if byte == 0 else 0
        return b"\0\0\0\1" + bytes([header]) + bytes(safe)


def _parameters(scaling: bool) -> bytes:
    """Sequence and picture parameter sets: High profile, frame numbers of 4 bits, picture order of
    4."""
    sps = _Bits().u(8, 100).u(8, 0).u(8, 40).ue(0, 1, 0, 0).u(1, 0).u(1, scaling)
    if scaling:  # eight lists, of which two are written
        sps.u(1, 1)
        for step in range(16):
            sps.ue(1 if step else 15)  # +1 each, from 8 + 8
        sps.u(1, 1).ue(16).u(6, 0)  # -8: the second is the default one
    # Fields or frames, no MBAFF.
    sps.ue(0, 0, 0, 1).u(1, 0).ue(WIDTH // 16 - 1, HEIGHT // 32 - 1).u(1, 0).u(1, 0)
    sps.u(1, 1).u(1, 0).u(1, 0)
    pps = (
        _Bits()
        .ue(0, 0)
        .u(1, 0)
        .u(1, 0)
        .ue(0, 0, 0)
        .u(1, 0)
        .u(2, 0)
        .ue(0, 0, 0)
        .u(1, 1)
        .u(1, 0)
        .u(1, 0)
    )
    return sps.unit(0x67) + pps.unit(0x68)


def _picture(
    planes: list[np.ndarray], number: int, bottom: int | None, idr: bool, idr_id: int
) -> bytes:
    """One slice: a field, or a frame where `bottom` is None."""
    bits = _Bits().ue(0, 7, 0).u(4, number % 16).u(1, bottom is not None)
    if bottom is not None:
        bits.u(1, bottom)
    if idr:
        bits.ue(idr_id)
    bits.u(4, 2 * number + (bottom or 0))
    bits.u(2 if idr else 1, 0)
    bits.ue(0).ue(1)  # the quantizer's change; no deblocking
    luma, blue, red = planes
    for y in range(luma.shape[0] // 16):
        for x in range(luma.shape[1] // 16):
            bits.ue(25).aligned()
            cut = [luma[16 * y :][:16, 16 * x :][:, :16]]
            cut += [each[8 * y :][:8, 8 * x :][:, :8] for each in (blue, red)]
            data = b"".join(np.clip(each, 1, 254).astype(np.uint8).tobytes() for each in cut)
            bits.text += f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}"
    return bits.unit(0x65 if idr else 0x61)


def write(
    path,
    n: int = 12,
    frames: tuple[int, ...] = (),
    scaling: bool = False,
    late: bool = False,
    together: bool = False,
) -> str:
    """Write n frames of 25 a second, each as two packets, or with both fields together in one.

    Args:
        frames: the numbers of those that are coded as whole frames.
        scaling: whether the header has scaling lists.
        late: whether the second field has the time at which it is shown, else that of its frame.
    """
    pieces = []
    for i in range(n):
        frame = av.VideoFrame.from_ndarray(picture(i, HEIGHT, WIDTH), format="rgb24").reformat(
            format="yuv420p"
        )
        whole = frame.to_ndarray()
        planes = [whole[:HEIGHT], *whole[HEIGHT:].reshape(2, HEIGHT // 2, WIDTH // 2)]
        number = i % 6  # an IDR picture every six
        if i in frames:
            pieces.append((i, 0, _picture(planes, number, None, number == 0, i % 2)))
            continue
        for parity in (0, 1):
            field = [plane[parity::2] for plane in planes]
            data = _picture(field, number, parity, number == parity == 0, i % 2)
            if together and parity:
                pieces[-1] = (i, 0, pieces[-1][2] + data)
            else:
                pieces.append((i, parity, data))
    raw = path.with_suffix(".raw.h264")
    raw.write_bytes(_parameters(scaling) + b"".join(data for *_, data in pieces))
    with av.open(str(raw)) as source, av.open(str(path), "w") as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        stream.time_base = Fraction(1, 90000)
        for i, parity, data in pieces:
            packet = av.Packet((_parameters(scaling) if (i, parity) == (0, 0) else b"") + data)
            packet.stream, packet.time_base, packet.is_keyframe = (
                stream,
                Fraction(1, 90000),
                i % 6 == parity == 0,
            )
            packet.pts = packet.dts = 3600 * i + 1800 * parity * late
            out.mux(packet)
    return str(path)
