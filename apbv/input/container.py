"""Opens media files with FFmpeg."""

from pathlib import Path

import av

from ..versions import release

# PyAV 18 raises an error for tags that are not UTF-8, unless told not to; later versions read any.
_ANY_TAGS = {"metadata_errors": "ignore"} if release("av") < (19, 0) else {}


def open_media(path: str | Path, options: dict[str, str] | None = None) -> "av.container.InputContainer":
    """Open a local file, whatever its name looks like and however its tags are encoded.

    Args:
        options: FFmpeg's, for the demuxer and the protocol.

    Raises:
        OSError: the file cannot be read; also FFmpeg's own errors.
    """
    # Without the prefix, FFmpeg takes what precedes a colon for a protocol.
    return av.open(f"file:{path}", options=options or {}, **_ANY_TAGS)
