"""Audio files, and videos with sound, made here with PyAV."""

from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np

from apbv_tests.video_files import picture

RATE = 16000
# Audio is given to encoders in pieces of so many samples.
_PIECE = 1024


def tune(start: float, stop: float, rate: int = RATE) -> np.ndarray:
    """float32 ``[samples]``: a tone that becomes louder every tenth of a second; no two moments are
    alike."""
    t = np.arange(round(start * rate), round(stop * rate)) / rate
    return (np.sin(2 * np.pi * 440 * t) * (1 + np.floor(10 * t)) / 100).astype(np.float32)


def write(
    path,
    parts: Sequence[tuple[float, float]],
    codec: str = "pcm_s16le",
    rate: int = 44100,
    channels: Sequence[float] = (1.0,),
    video: tuple[float, float] | None = None,
    size: tuple[int, int] = (48, 64),
    fps: int = 25,
) -> str:
    """Write the tune, and with it a video.

    Args:
        parts: from when to when it sounds, in seconds; none: the file has an audio track without
            samples.
        channels: how loud it is in each.
        video: from when to when there are frames; None: an audio file.
        size: height and width of the frames.
    """
    layout = {1: "mono", 2: "stereo"}[len(channels)]
    with av.open(str(path), "w") as out:
        if video is not None:
            frames = out.add_stream("libx264", rate=fps)
            frames.height, frames.width, frames.pix_fmt = *size, "yuv420p"
            frames.codec_context.gop_size = 10
            # With its assembly, x264 does not always write the same file.
            frames.options = {"x264-params": "asm=0"}
        track = out.add_stream(codec, rate=rate, layout=layout)
        if not parts:
            out.start_encoding()
        if video is not None:
            for i in range(round((video[1] - video[0]) * fps)):
                frame = av.VideoFrame.from_ndarray(picture(i, *size), format="rgb24").reformat(
                    format="yuv420p"
                )
                frame.pts, frame.time_base = i + round(video[0] * fps), Fraction(1, fps)
                out.mux(frames.encode(frame))
            out.mux(frames.encode())
        for start, stop in parts:
            samples = tune(start, stop, rate)
            first = round(start * rate)
            for i in range(0, len(samples), _PIECE):
                planes = np.stack([samples[i : i + _PIECE] * loud for loud in channels])
                frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout=layout)
                frame.sample_rate, frame.pts, frame.time_base = rate, first + i, Fraction(1, rate)
                converter = av.AudioResampler(track.codec_context.format.name, layout, rate)
                for converted in converter.resample(frame):
                    out.mux(track.encode(converted))
        out.mux(track.encode())
    return str(path)
