"""Opens media files with FFmpeg, for frames and for sound alike, and chooses their track."""

import os
from pathlib import Path
from typing import Any, Literal, overload

import av
from av.stream import Disposition

from ...compat.versions import release

# Nothing but media: FFmpeg would render text as the video of a terminal, and playlists name others.
_FORMATS = (
    "mov,mp4,matroska,webm,avi,mpegts,flv,mpeg,mpegvideo,asf,ogg,gif,apng,webp_anim,nut,ivf,obu,h264,hevc,m4v,mxf,"
    "dv,aac,ac3,aiff,amr,ape,au,caf,dts,eac3,flac,mp2,mp3,tta,w64,wav,wv"
)
# The two lists keep FFmpeg from following an address in the file.
_OPTIONS = {"protocol_whitelist": "file", "format_whitelist": _FORMATS}
# PyAV 18 raises an error for tags that are not UTF-8, unless told not to; later versions read any.
_ANY_TAGS: dict[str, Any] = {"metadata_errors": "ignore"} if release("av") < (19, 0) else {}


def open_media(path: str | Path, error_type: type[ValueError]) -> "av.container.InputContainer":
    """Open a local media file, whatever its name looks like and however its tags are encoded.

    Raises:
        error_type: the file is missing, not a regular file, not readable, or not of a known format;
            the message names it.
    """
    failure = "the audio cannot be decoded"
    if "Video" in error_type.__name__:
        failure = "cannot be read as a video"
    if not os.path.exists(path):
        raise error_type(f"{path}: no such file")
    if not os.path.isfile(path):
        raise error_type(f"{path}: {failure} (it is not a regular file)")
    try:
        # Without the prefix, FFmpeg takes what precedes a colon for a protocol.
        return av.open(f"file:{path}", options=dict(_OPTIONS), **_ANY_TAGS)
    except (av.error.FFmpegError, OSError) as error:
        reason = error.strerror
        if _is_webp(path):
            reason = "a WebP picture, or an animation that this FFmpeg cannot decode"
        raise error_type(f"{path}: {failure} ({reason})") from error


def _is_webp(path: str | Path) -> bool:
    if not os.access(path, os.R_OK):
        return False
    with open(path, "rb") as file:
        start = file.read(12)
    return start[:4] == b"RIFF" and start[8:] == b"WEBP"


@overload
def best_stream(
    container: "av.container.InputContainer", kind: Literal["video"]
) -> av.VideoStream | None: ...


@overload
def best_stream(
    container: "av.container.InputContainer", kind: Literal["audio"]
) -> av.AudioStream | None: ...


def best_stream(
    container: "av.container.InputContainer", kind: Literal["video", "audio"]
) -> av.VideoStream | av.AudioStream | None:
    """Return FFmpeg's choice among the streams that can be decoded; None if there are none.

    Attached pictures are left out.

    Args:
        kind: ``"video"`` or ``"audio"``.
    """
    streams: list[Any] = [  # which take up attributes of their codec
        stream
        for stream in getattr(container.streams, kind)
        if stream.codec_context is not None and not stream.disposition & Disposition.attached_pic
    ]
    if not streams:
        return None
    best: Any = container.streams.best(kind)
    if best in streams:
        return best

    # FFmpeg's own order, which it does not apply to a part of the streams.
    def rank(stream: Any) -> tuple[bool, int]:
        is_default = bool(stream.disposition & Disposition.default)
        return is_default, stream.bit_rate or 0

    return max(streams, key=rank)
