"""Opens media files with FFmpeg, for frames and for sound alike, and chooses their track."""

import os
from pathlib import Path

import av
from av.stream import Disposition

from ..versions import release

# Nothing but media: FFmpeg would render text as the video of a terminal, and playlists name others.
_FORMATS = (
    "mov,mp4,matroska,webm,avi,mpegts,flv,mpeg,mpegvideo,asf,ogg,gif,apng,webp_anim,nut,ivf,obu,h264,hevc,m4v,mxf,"
    "dv,aac,ac3,aiff,amr,ape,au,caf,dts,eac3,flac,mp2,mp3,tta,w64,wav,wv"
)
# The two lists keep FFmpeg from following an address in the file.
_OPTIONS = {"protocol_whitelist": "file", "format_whitelist": _FORMATS}
# PyAV 18 raises an error for tags that are not UTF-8, unless told not to; later versions read any.
_ANY_TAGS = {"metadata_errors": "ignore"} if release("av") < (19, 0) else {}


def open_media(path: str | Path, error_type: type[ValueError]) -> "av.container.InputContainer":
    """Open a local media file, whatever its name looks like and however its tags are encoded.

    Raises:
        error_type: the file is missing, not a regular file, not readable, or not of a known format;
            the message names it.
    """
    is_video = "Video" in error_type.__name__
    refused = (
        f"{path}: {'cannot be read as a video' if is_video else 'the audio cannot be decoded'}"
    )
    if not os.path.exists(path):
        raise error_type(f"{path}: no such file")
    if not os.path.isfile(path):
        raise error_type(f"{refused} (it is not a regular file)")
    try:
        # Without the prefix, FFmpeg takes what precedes a colon for a protocol.
        return av.open(f"file:{path}", options=dict(_OPTIONS), **_ANY_TAGS)
    except (av.error.FFmpegError, OSError) as error:
        with open(path, "rb") if os.access(path, os.R_OK) else open(os.devnull, "rb") as file:
            start = file.read(12)
        is_webp = start[:4] == b"RIFF" and start[8:] == b"WEBP"
        reason = (
            "a WebP picture, or an animation that this FFmpeg cannot decode"
            if is_webp
            else error.strerror
        )
        raise error_type(f"{refused} ({reason})") from error


def best_stream(container: "av.container.InputContainer", kind: str) -> "av.stream.Stream | None":
    """Return FFmpeg's choice among the streams that can be decoded, attached pictures left out;
    None without any.

    Args:
        kind: ``"video"`` or ``"audio"``.
    """
    streams = [
        stream
        for stream in getattr(container.streams, kind)
        if stream.codec_context is not None and not stream.disposition & Disposition.attached_pic
    ]
    best = container.streams.best(kind)
    if best in streams or not streams:
        return best if streams else None
    # FFmpeg's own order, which it does not tell of a part of the streams.
    return max(
        streams,
        key=lambda stream: (bool(stream.disposition & Disposition.default), stream.bit_rate or 0),
    )
