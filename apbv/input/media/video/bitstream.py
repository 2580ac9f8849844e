"""Reads packets of H.264 and H.265 for what containers lack: starts of decoding, and fields.

The syntax is in ITU-T H.264, 7.3 and D.1.8, and ITU-T H.265, 7.3.1.2.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _SequenceSet:
    """Sequence parameter set of H.264.

    Attributes:
        number: by which picture parameter sets refer to it.
        num_pixels: of a frame.
        frame_num_bits: the length of the field frame_num in the header of a slice.
        has_fields: whether pictures may be fields.
        has_planes: whether color planes are coded by themselves.
    """

    number: int
    num_pixels: int
    frame_num_bits: int
    has_fields: bool
    has_planes: bool


class PacketReader:
    """Reads packets of one stream, from the first on in any order that decoders take.

    For other codecs than H.264 and H.265 the container is trusted.

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
        self.refreshes = False
        self.has_fields = False
        self.most_pixels = 0
        self._codec = codec
        self._sequence_sets: dict[int, _SequenceSet] = {}  # by their numbers
        # Of each picture parameter set, the number of its sequence parameter set.
        self._sequence_of_picture: dict[int, int] = {}
        # Number and parity of the field that waits for its second.
        self._field: tuple[int, int] | None = None
        self._length_bytes = 0  # 0: start codes separate the units
        data = bytes(extradata or b"")
        is_header = len(data) > 6 and data[0] == 1  # avcC or hvcC
        if codec == "hevc" and is_header and len(data) > 22:
            self._length_bytes = (data[21] & 3) + 1
        elif codec == "h264":
            units = self._units(data)
            if is_header:
                units = _sets_of(data)
                self._length_bytes = (data[4] & 3) + 1
            try:
                for unit in units:
                    self._read_set(unit)
            except (ValueError, IndexError):
                pass  # it is damaged, and the decoder will report it

    def restart(self) -> None:
        """Forget the packet before, as after a seek."""
        self._field = None

    def read(self, packet, is_key: bool) -> tuple[bool, bool]:
        """Return whether decoding may start with a packet, and whether it is a second field.

        A second field completes the frame of the packet before.

        Args:
            is_key: what the container says.
        """
        if is_key and self._codec in ("vp8", "vp9"):
            num_pixels = _pixels_of(self._codec, bytes(packet)[:_HEADER_BYTES])
            self.most_pixels = max(self.most_pixels, num_pixels)
        if self._codec not in ("h264", "hevc") or not (is_key or self.has_fields):
            return is_key, False
        try:
            units = [unit for unit in self._units(bytes(packet)) if unit]
            if self._codec == "hevc":
                return is_key and _starts_hevc(units), False
            return self._read_h264(units, is_key)
        except (ValueError, IndexError):
            return is_key, False

    def _read_h264(self, units: list[bytes], is_key: bool) -> tuple[bool, bool]:
        # Read parameter sets and recovery points.
        kinds = [unit[0] & 31 for unit in units]
        slices = []
        for unit, kind in zip(units, kinds, strict=True):
            self._read_set(unit)
            if kind == _SEI and is_key and _IDR not in kinds and _frames_to_recovery(unit):
                self.refreshes = True
                is_key = False
            if kind in (_SLICE, _IDR):
                slices.append(unit)

        # Is it a field? If one waits, this packet completes it, or none does.
        first_field = None
        last_field = None
        if self.has_fields and slices:
            first_field = self._field_of(slices[0])
            last_field = self._field_of(slices[-1])
        waiting = self._field
        self._field = None
        if first_field is None or first_field != last_field:
            return is_key, False  # a frame, or both fields
        number, parity = first_field
        if waiting == (number, 1 - parity):
            return False, True
        self._field = first_field
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
        kind = unit[0] & 31
        if kind == _SPS:
            sequence = _read_sps(unit)
            self._sequence_sets[sequence.number] = sequence
            self.most_pixels = max(self.most_pixels, sequence.num_pixels)
            self.has_fields = self.has_fields or sequence.has_fields
        elif kind == _PPS:
            bits = _Bits(unit[1:_HEADER_BYTES])
            picture = bits.ue()
            sequence_number = bits.ue()
            self._sequence_of_picture[picture] = sequence_number

    def _field_of(self, unit: bytes) -> tuple[int, int] | None:
        """Return the frame number and the parity of a slice of a field; of a frame None."""
        bits = _Bits(unit[1:_HEADER_BYTES])
        bits.ue()  # first_mb_in_slice
        bits.ue()  # slice_type
        picture = bits.ue()
        sequence = self._sequence_sets[self._sequence_of_picture[picture]]
        if sequence.has_planes:
            bits.u(2)
        number = bits.u(sequence.frame_num_bits)
        is_field = sequence.has_fields and bits.u(1)
        if not is_field:
            return None
        parity = bits.u(1)
        return number, parity


def _starts_hevc(units: list[bytes]) -> bool:
    """Return whether the first picture of a packet of H.265 is one where decoding may start."""
    for unit in units:
        kind = unit[0] >> 1 & 63
        if kind < 32:  # of a picture, and not a parameter set or the like
            return 16 <= kind < 24
    return True


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
    """Return the pixels of a keyframe of VP8 or VP9; 0 if it is damaged.

    The headers are in RFC 6386, 9.1, and in VP9's bitstream specification, 6.2.
    """
    if codec == "vp8":
        width = int.from_bytes(data[6:8], "little") & 0x3FFF
        height = int.from_bytes(data[8:10], "little") & 0x3FFF
        return width * height
    bits = _Bits(data, is_escaped=False)
    try:
        bits.u(2)
        low_bit = bits.u(1)
        high_bit = bits.u(1)
        profile = low_bit + 2 * high_bit
        # The frame's header up to its color space: a reserved bit, a start code, a bit depth.
        if profile == 3:
            bits.u(1)
        bits.u(4 + 24)
        if profile > 1:
            bits.u(1)
        is_rgb = bits.u(3) == 7
        # The color range; in profiles with other subsamplings than 4:2:0 the subsampling, and a
        # reserved bit.
        if not is_rgb:
            bits.u(1)
        if profile % 2:
            bits.u(1 if is_rgb else 3)
        width = bits.u(16) + 1
        height = bits.u(16) + 1
        return width * height
    except ValueError:
        return 0


def _read_sps(unit: bytes) -> _SequenceSet:
    """Read a sequence parameter set (H.264, 7.3.2.1.1)."""
    bits = _Bits(unit[1:])
    profile = bits.u(24) >> 16
    number = bits.ue()

    # Colors.
    has_planes = False
    chroma = 1
    if profile in _WITH_CHROMA:
        chroma = bits.ue()
        if chroma == 3:
            has_planes = bits.u(1) == 1
        bits.ue()  # bit_depth_luma_minus8
        bits.ue()  # bit_depth_chroma_minus8
        bits.u(1)  # qpprime_y_zero_transform_bypass_flag
        has_scaling_lists = bits.u(1)
        if has_scaling_lists:
            for matrix in range(12 if chroma == 3 else 8):
                if bits.u(1):
                    bits.skip_scaling(16 if matrix < 6 else 64)

    # Numbers of frames.
    frame_num_bits = bits.ue() + 4
    order_type = bits.ue()
    if order_type == 0:
        bits.ue()  # log2_max_pic_order_cnt_lsb_minus4
    elif order_type == 1:
        bits.u(1)  # delta_pic_order_always_zero_flag
        bits.ue()  # offset_for_non_ref_pic
        bits.ue()  # offset_for_top_to_bottom_field
        num_offsets = bits.ue()
        for _ in range(num_offsets):
            bits.ue()
    bits.ue()  # max_num_ref_frames
    bits.u(1)  # gaps_in_frame_num_value_allowed_flag

    # Size; with fields, the height is that of a field.
    width = 16 * (bits.ue() + 1)
    height = 16 * (bits.ue() + 1)
    has_fields = not bits.u(1)
    fields_per_frame = 2 if has_fields else 1
    height *= fields_per_frame
    if has_fields:
        bits.u(1)  # mb_adaptive_frame_field_flag
    bits.u(1)  # direct_8x8_inference_flag
    is_cropped = bits.u(1)
    if is_cropped:
        left = bits.ue()
        right = bits.ue()
        top = bits.ue()
        bottom = bits.ue()
        width -= (left + right) * (1 if chroma in (0, 3) else 2)
        height -= (top + bottom) * (2 if chroma == 1 else 1) * fields_per_frame
    return _SequenceSet(number, width * height, frame_num_bits, has_fields, has_planes)


def _frames_to_recovery(unit: bytes) -> int:
    """Return after how many frames a recovery point's pictures are whole; 0: there is none."""
    data = unit[1:].replace(b"\0\0\3", b"\0\0")
    at = 0
    while at + 2 < len(data):
        message_type, at = _read_long(data, at)
        size, at = _read_long(data, at)
        if message_type == _RECOVERY_POINT:
            return _Bits(data[at:], is_escaped=False).ue()
        at += size
    return 0


def _read_long(data: bytes, at: int) -> tuple[int, int]:
    """Read a number of bytes that are added up, of which all but the last are 255.

    Returns:
        The number, and the place after it.
    """
    number = 0
    while data[at] == 255:
        number += 255
        at += 1
    return number + data[at], at + 1


class _Bits:
    """Bits of a NAL unit, without what keeps them from looking like a start code."""

    def __init__(self, data: bytes, is_escaped: bool = True):
        if is_escaped:
            data = data.replace(b"\0\0\3", b"\0\0")
        self._value = int.from_bytes(data, "big")
        self._num_left = 8 * len(data)

    def u(self, count: int) -> int:
        """Read an unsigned number of ``count`` bits."""
        self._num_left -= count
        if self._num_left < 0:
            raise ValueError("the unit is too short")
        mask = (1 << count) - 1
        return (self._value >> self._num_left) & mask

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
            step = (code + 1) // 2
            if code % 2 == 0:
                step = -step
            last = (last + step) % 256
            if last == 0:
                return
