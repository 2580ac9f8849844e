"""Which codecs' decoders may leave out frames that no other frame refers to."""

from av.video.codeccontext import VideoCodecContext

# In these a picture says of itself that no other refers to it (h264), or those of one type never are (B). Not in
# VP8 and VP9, where such a picture may still carry probabilities or segments that the next one starts from.
_CAN_SKIP = {"h264", "mpeg1video", "mpeg2video", "mpeg4"}
_START_OF_HEVC_VPS = b"\0\0\1\x40\1"


def can_skip(codec: VideoCodecContext) -> bool:
    """Return whether ffmpeg's ``skip_frame = NONREF`` leaves all other frames as they are, to the bit."""
    if codec.name == "hevc":
        return _num_temporal_layers(bytes(codec.extradata or b"")) == 1
    return codec.name in _CAN_SKIP


def _num_temporal_layers(extradata: bytes) -> int:
    """Return how many temporal sub-layers an HEVC stream has by its headers; 0 if unknown.

    What ffmpeg takes for a frame that is not referred to is a *sub-layer non-reference picture* (H.265, 7.4.2.2):
    frames of higher sub-layers may refer to it.
    """
    if len(extradata) > 22 and extradata[0] == 1:  # hvcC (ISO/IEC 14496-15, 8.3.3.1.2): numTemporalLayers
        return extradata[21] >> 3 & 7
    vps = extradata.find(_START_OF_HEVC_VPS) + len(_START_OF_HEVC_VPS)
    if vps < len(_START_OF_HEVC_VPS) or len(extradata) < vps + 2:
        return 0
    return (extradata[vps + 1] >> 1 & 7) + 1  # vps_max_sub_layers_minus1 (H.265, 7.3.2.1)
