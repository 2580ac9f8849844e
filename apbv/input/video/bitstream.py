"""Reads in packets of H.264 and H.265 what containers do not tell: where decoding may start, and
what is a field.

The syntax is that of ITU-T H.264, 7.3 and D.1.8, and of ITU-T H.265, 7.3.1.2.
"""

from collections.abc import Iterator

# Profiles whose sequence parameter sets name the chroma format.
_WITH_CHROMA = {100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135}
_SLICE = 1
_IDR = 5
_SEI = 6
_SPS = 7
_PPS = 8
_RECOVERY_POINT = 6
# Of a slice no more than its header is read.
_HEADER_BYTES = 64


class PacketReader:
    """Reads packets of one stream, from the first on in any order that decoders take.

    Packets of other codecs than H.264 and H.265 are as their container says.

    Args:
        codec: FFmpeg's name.
        extradata: the header of the stream.

    Attributes:
        refreshes: whether a picture was refreshed part by part ("intra refresh") in the packets
            that were read.
        has_fields: whether packets may hold only one field of a frame.
        most_pixels: of the largest picture that the headers of H.264, VP8 and VP9 announced so far;
            else 0.
    """

    def __init__(self, codec: str, extradata: bytes | None):
        self._codec, self.most_pixels, data = codec, 0, bytes(extradata or b"")
        self.refreshes = self.has_fields = False
        # By sequence parameter set: see _read_sps.
        self._frame_nums: dict[int, tuple[int, bool, bool]] = {}
        self._sets: dict[int, int] = {}  # of each picture parameter set its sequence parameter set
        self._field: tuple[int, int] | None = (
            None  # number and parity of the field that waits for its second
        )
        self._length_bytes = 0  # 0: start codes separate the units
        is_header = len(data) > 6 and data[0] == 1  # avcC or hvcC
        if codec == "hevc" and is_header and len(data) > 22:
            self._length_bytes = (data[21] & 3) + 1
        elif codec == "h264":
            self._length_bytes = (data[4] & 3) + 1 if is_header else 0
            try:
                for unit in _sets_of(data) if is_header else self._units(data):
                    self._read_set(unit)
            except (ValueError, IndexError):
                pass  # what is damaged, the decoder will say

    def restart(self) -> None:
        """Forget the packet before, as after a seek."""
        self._field = None

    def read(self, packet, is_key: bool) -> tuple[bool, bool]:
        """Return whether decoding may start with a packet, and whether it is the second field of
        the frame before.

        Args:
            is_key: what the container says.
        """
        if is_key and self._codec in ("vp8", "vp9"):
            self.most_pixels = max(
                self.most_pixels, _pixels_of(self._codec, bytes(packet)[:_HEADER_BYTES])
            )
        if self._codec not in ("h264", "hevc") or not (is_key or self.has_fields):
            return is_key, False
        try:
            units = list(filter(None, self._units(bytes(packet))))
            if self._codec == "hevc":
                first = next((kind for unit in units if (kind := unit[0] >> 1 & 63) < 32), None)
                return is_key and (first is None or 16 <= first < 24), False
            return self._read_h264(units, is_key)
        except (ValueError, IndexError):
            return is_key, False

    def _read_h264(self, units: list[bytes], is_key: bool) -> tuple[bool, bool]:
        kinds = [unit[0] & 31 for unit in units]
        for unit, kind in zip(units, kinds, strict=True):
            self._read_set(unit)
            if kind == _SEI and is_key and _IDR not in kinds and _frames_to_recovery(unit):
                self.refreshes = True
                is_key = False
        slices = [unit for unit, kind in zip(units, kinds, strict=True) if kind in (_SLICE, _IDR)]
        fields = (
            {self._field_of(unit) for unit in slices[:1] + slices[-1:]}
            if self.has_fields
            else {None}
        )
        waiting = self._field
        self._field = None
        field = fields.pop()
        if fields or field is None:  # both fields, or a frame
            return is_key, False
        number, parity = field
        if waiting == (number, 1 - parity):
            return False, True
        self._field = field
        return is_key, False

    def _units(self, data: bytes) -> Iterator[bytes]:
        """Split into NAL units."""
        if not self._length_bytes:
            yield from data.split(b"\0\0\1")[1:]
            return
        at = 0
        while at < len(data):
            end = at + self._length_bytes
            at = end + int.from_bytes(data[at:end], "big")
            start = end
            yield data[start:at]

    def _read_set(self, unit: bytes) -> None:
        if unit[0] & 31 == _SPS:
            number, pixels, *values = _read_sps(unit)
            self._frame_nums[number], self.most_pixels = (
                tuple(values),
                max(self.most_pixels, pixels),
            )
            self.has_fields |= values[1]
        elif unit[0] & 31 == _PPS:
            bits = _Bits(unit[1:_HEADER_BYTES])
            self._sets[bits.ue()] = bits.ue()

    def _field_of(self, unit: bytes) -> tuple[int, int] | None:
        """Return the frame number and the parity of a slice that is of a field; of a frame None."""
        bits = _Bits(unit[1:_HEADER_BYTES])
        bits.ue(), bits.ue()
        length, has_fields, has_planes = self._frame_nums[self._sets[bits.ue()]]
        bits.u(2 * has_planes)
        number = bits.u(length)
        return (number, bits.u(1)) if has_fields and bits.u(1) else None


def _sets_of(header: bytes) -> Iterator[bytes]:
    """Yield the parameter sets in avcC (ISO/IEC 14496-15)."""
    at = 5
    for mask in (31, 255):
        count = header[at] & mask
        at = at + 1
        for _ in range(count):
            length = int.from_bytes(header[at : at + 2], "big")
            yield header[at + 2 : at + 2 + length]
            at += 2 + length


def _pixels_of(codec: str, data: bytes) -> int:
    """Return the size of a keyframe of VP8 (RFC 6386, 9.1) or VP9 (bitstream specification, 6.2); 0
    if damaged."""
    if codec == "vp8":
        width = int.from_bytes(data[6:8], "little") & 0x3FFF
        height = int.from_bytes(data[8:10], "little") & 0x3FFF
        return width * height
    bits = _Bits(data, is_escaped=False)
    try:
        bits.u(2)
        profile = bits.u(1) + 2 * bits.u(1)
        # The frame's header up to its color space: a reserved bit, a start code, a bit depth.
        if profile == 3:
            bits.u(1)
        bits.u(4 + 24)
        if profile > 1:
            bits.u(1)
        is_rgb = bits.u(3) == 7
        # The color range; with other subsamplings than 4:2:0 these, and a reserved bit.
        if not is_rgb:
            bits.u(1)
        if profile % 2:
            bits.u(1 if is_rgb else 3)
        return (bits.u(16) + 1) * (bits.u(16) + 1)
    except ValueError:
        return 0


def _read_sps(unit: bytes) -> tuple[int, int, int, bool, bool]:
    """Return a parameter set's number, pixels, a frame number's bits, and whether fields and planes
    may be."""
    bits = _Bits(unit[1:])
    has_planes = False
    chroma = 1
    profile = bits.u(24) >> 16
    number = bits.ue()
    if profile in _WITH_CHROMA:
        chroma = bits.ue()
        has_planes = chroma == 3 and bits.u(1) == 1
        bits.ue(), bits.ue(), bits.u(1)
        if bits.u(1):
            for matrix in range(12 if chroma == 3 else 8):
                if bits.u(1):
                    bits.skip_scaling(16 if matrix < 6 else 64)
    length = bits.ue() + 4
    order = bits.ue()
    if order == 0:
        bits.ue()
    elif order == 1:
        bits.u(1), bits.ue(), bits.ue()
        for _ in range(bits.ue()):
            bits.ue()
    bits.ue(), bits.u(1)
    width = 16 * (bits.ue() + 1)
    height = 16 * (bits.ue() + 1)
    has_fields = not bits.u(1)
    height *= 1 + has_fields
    bits.u(1 + has_fields)
    if bits.u(1):  # what is cut off: left, right, top, bottom
        width -= (bits.ue() + bits.ue()) * (1 if chroma in (0, 3) else 2)
        height -= (bits.ue() + bits.ue()) * (2 if chroma == 1 else 1) * (1 + has_fields)
    return number, width * height, length, has_fields, has_planes


def _frames_to_recovery(unit: bytes) -> int:
    """Return after how many frames a recovery point's pictures are whole; 0 if the unit has
    none."""
    data = unit[1:].replace(b"\0\0\3", b"\0\0")
    at = 0
    while at + 2 < len(data):
        numbers = []
        for _ in range(2):  # type and size
            first = at
            while data[at] == 255:
                at += 1
            numbers.append(255 * (at - first) + data[at])
            at += 1
        if numbers[0] == _RECOVERY_POINT:
            return _Bits(data[at:], is_escaped=False).ue()
        at += numbers[1]
    return 0


class _Bits:
    """Bits of a NAL unit, without what keeps them from looking like a start code."""

    def __init__(self, data: bytes, is_escaped: bool = True):
        data = data.replace(b"\0\0\3", b"\0\0") if is_escaped else data
        self._value, self._left = int.from_bytes(data, "big"), 8 * len(data)

    def u(self, count: int) -> int:
        """Read an unsigned number of ``count`` bits."""
        self._left -= count
        if self._left < 0:
            raise ValueError("the unit is too short")
        return self._value >> self._left & (1 << count) - 1

    def ue(self) -> int:
        """Read an Exp-Golomb code."""
        zeros = 0
        while not self.u(1):
            zeros += 1
        return (1 << zeros) - 1 + self.u(zeros)

    def skip_scaling(self, size: int) -> None:
        """Read over a scaling list, which ends early where a step leads to 0."""
        last = 8
        for _ in range(size):
            code = self.ue()
            last = (last + (code + 1 >> 1) * (1 if code % 2 else -1)) % 256
            if not last:
                return
